"""A trace file of a given text."""

from collections.abc import Callable
from pathlib import Path

import pytest

WriteFile = Callable[[str], Path]


@pytest.fixture
def write_file(tmp_path: Path) -> WriteFile:
    """Writes `text` as the file `trace.csv` and returns its path."""

    def write(text: str) -> Path:
        path = tmp_path / "trace.csv"
        path.write_text(text, encoding="utf-8", newline="")
        return path

    return write
