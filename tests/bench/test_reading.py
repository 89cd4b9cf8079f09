"""The benchmark of readers: every reader brings the same bytes, and the last line has its keys."""

import json
from pathlib import Path

import pytest

from bench.__main__ import main
from bench.reading import LIMITS, READERS, SAFETENSORS, TENSOR_BYTES, write_files


def test_the_last_line_says_how_the_ways_compare(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = ["--folder", str(tmp_path)]
    assert main(["load", "--sizes", "0.03", "--rounds", "1", "--no-peers", *folder]) == 0
    told = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert told["size_gb"] == pytest.approx(TENSOR_BYTES / 1e9, rel=0.01)
    assert told["ssd_ratio_to_fio"] > 0.0
    assert told["memory_ratio_to_memcpy"] > 0.0
    assert told["digest_cost_share"] > -1.0
    assert told["ratio_to_torch"] is None, "which was left out"
    assert not list(tmp_path.iterdir())


def test_all_of_the_file_is_read(tmp_path: Path) -> None:
    write_files(tmp_path, 1, torch=False)
    path = tmp_path / SAFETENSORS
    assert {limit(tmp_path) for limit in LIMITS.values()} == {path.stat().st_size}
    arrays = READERS["safetensors"](tmp_path)
    assert isinstance(arrays, list)
    assert sum(array.nbytes for array in arrays) == TENSOR_BYTES
