"""Nodes with stores of their own: a load brings in what the node lacks, and only that."""

import shutil
from pathlib import Path

import pytest

from mesh.domain.errors import Refused
from mesh.domain.reasons import RefusalReason
from mesh.domain.slo import Slo
from tests.e2e.live_cell import WAIT_S_MAX, LiveCell
from tests.support.tiny_model import write_tiny_llama


def test_a_node_whose_store_lacks_the_model_imports_it_for_the_load(
    cell: LiveCell, tiny_model: Path, tmp_path: Path
) -> None:
    first = cell.start("n1")
    cell.deploy("chat", tiny_model)
    first.kill()
    cell.start_node("n2", home=tmp_path / "other home")
    assert cell.invoke("chat", "fetched here", max_tokens=5).finished().output_tokens == 5
    assert len(list((tmp_path / "other home" / "store" / "models").iterdir())) == 1


def test_a_source_that_changed_is_not_served(cell: LiveCell, tmp_path: Path) -> None:
    source = write_tiny_llama(tmp_path / "mine", seed=5)
    first = cell.start("n1")
    # Time enough for the import to say why it fails.
    cell.deploy("chat", source, slo=Slo(ttft_s=30.0))
    first.kill()
    shutil.rmtree(source)
    write_tiny_llama(source, seed=6)
    cell.start_node("n2", home=tmp_path / "other")
    answer = cell.invoke("chat", "which model?", max_tokens=5)
    assert answer.ended.wait(WAIT_S_MAX)
    with pytest.raises(Refused, match="has changed since it was deployed") as raised:
        answer.finished()
    assert raised.value.reason is RefusalReason.LOAD_FAILED
    assert "deploy chat again" in raised.value.hint
