"""The steps of an import, by the phases that it tells of."""

from pathlib import Path

import pytest

from bench.importing import CACHED, PREPARE, STORED, Mark, measured, seconds_by_step, served
from mesh.domain.errors import NotFound
from mesh_nodes.engines.openvino.engine import OpenVinoEngine
from tests.loader.tiny_gguf import write_tiny_gguf


def test_a_phase_lasts_until_another_one() -> None:
    phases = ["download m.gguf, 1 B of 9 B", "download m.gguf, 9 B of 9 B", "hash", "done"]
    marks = [Mark(at_s=float(number), phase=phase) for number, phase in enumerate(phases)]
    assert seconds_by_step(marks, 3.5) == {"download": 2.0, "hash": 1.0, "done": 0.5}


def test_a_model_is_fetched_imported_prepared_and_checked(tmp_path: Path) -> None:
    (tmp_path / "from").mkdir()
    write_tiny_gguf(tmp_path / "from" / "m.gguf")
    with served(tmp_path / "from") as address:
        found = measured(f"{address}/m.gguf", tmp_path / "store", OpenVinoEngine(threads=1))
    steps = {"download", "hash", "convert weights", "write digests", PREPARE, CACHED, STORED}
    assert steps <= set(found)
    assert all(seconds >= 0.0 for seconds in found.values())


def test_what_is_not_served_is_an_error(tmp_path: Path) -> None:
    with served(tmp_path) as address, pytest.raises(NotFound, match="is not at its URL"):
        measured(f"{address}/m.gguf", tmp_path / "store", OpenVinoEngine(threads=1))
