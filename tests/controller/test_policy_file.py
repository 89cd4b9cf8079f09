"""A live controller decides by a policy from outside, and its journal names the file."""

from pathlib import Path

from mesh.runtime.journal import ControllerStart, read_journal
from tests.controller.live import asking, live_cell

POLICY = Path(__file__).parents[2] / "examples" / "policies" / "lru_swap.py"


async def test_a_live_cell_is_run_by_a_policy_file(tmp_path: Path) -> None:
    journal = tmp_path / "journal"
    async with live_cell(tmp_path, policy=str(POLICY), journal=journal) as cell:
        await cell.deployed()
        assert await cell.ask(lambda: list(cell.client.invoke(asking(max_tokens=4))))
    start, decisions = read_journal(journal)
    assert isinstance(start, ControllerStart)
    assert start.policy == str(POLICY)
    assert list(decisions)
