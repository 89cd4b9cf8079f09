"""Package indexes for pip, on this machine: a folder of wheels, one that hangs, one that is not."""

import socket
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


def write_wheel(folder: Path, package: str, files: dict[str, bytes]) -> Path:
    """A wheel of version 1.0 with these files (paths from the wheel's root)."""
    folder.mkdir(exist_ok=True)
    path = folder / f"{package}-1.0-py3-none-any.whl"
    info = f"{package}-1.0.dist-info"
    with zipfile.ZipFile(path, "w") as wheel:
        for name, content in files.items():
            wheel.writestr(name, content)
        wheel.writestr(
            f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n"
        )
        wheel.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr(f"{info}/RECORD", "")
    return path


def _only(monkeypatch: pytest.MonkeyPatch, settings: dict[str, str]) -> None:
    """pip with these settings and no others, whatever this machine's are."""
    for name in ("PIP_FIND_LINKS", "PIP_EXTRA_INDEX_URL", "PIP_INDEX_URL", "PIP_NO_INDEX"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    for name, value in settings.items():
        monkeypatch.setenv(name, value)


def use_folder(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """pip finds what lies in the folder, and nothing else."""
    folder.mkdir(exist_ok=True)
    _only(monkeypatch, {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(folder)})


def use_no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """The index refuses every connection."""
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
    _only(monkeypatch, {"PIP_INDEX_URL": f"http://127.0.0.1:{port}/simple"})


@contextmanager
def hanging_index(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The index takes connections and never answers, so that pip waits."""
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen(8)
        port = silent.getsockname()[1]
        _only(monkeypatch, {"PIP_INDEX_URL": f"http://127.0.0.1:{port}/simple"})
        yield
