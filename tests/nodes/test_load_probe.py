"""What is measured of a node's disk and memory before its first load."""

import time
from pathlib import Path

import pytest

from mesh_nodes.load_probe import CHUNK_BYTES, WRITTEN_BYTES, measured_rate

PHYSICAL = (1e6, 1e11)
"""Bytes per second that any machine lies between."""


def test_a_store_without_models_is_measured_by_a_file_that_is_gone_afterwards(
    tmp_path: Path,
) -> None:
    rate = measured_rate(tmp_path, lambda: 0.25)
    assert rate.fixed_s == 0.25
    assert PHYSICAL[0] < rate.bytes_per_s < PHYSICAL[1]
    assert list(tmp_path.iterdir()) == []


def test_a_store_with_models_is_read_and_not_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mesh_nodes.load_probe.tempfile", None)
    weights = tmp_path / "models" / "sha256-0" / "model.safetensors"
    weights.parent.mkdir(parents=True)
    weights.write_bytes(b"\1" * (WRITTEN_BYTES + CHUNK_BYTES // 2))
    assert PHYSICAL[0] < measured_rate(tmp_path, lambda: 0.0).bytes_per_s < PHYSICAL[1]


def test_a_slow_disk_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def slow(descriptor: int, buffers: list[bytes], offset: int) -> int:
        time.sleep(0.2)
        return CHUNK_BYTES

    monkeypatch.setattr("mesh_nodes.load_probe.os.preadv", slow)
    rate = measured_rate(tmp_path, lambda: 0.0)
    assert rate.bytes_per_s < CHUNK_BYTES / 0.2
