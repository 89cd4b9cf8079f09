"""A controller from its start to its end: what it starts with, keeps and leaves, and its policy."""

import asyncio
from pathlib import Path

import pytest

from mesh.controller.registry import SqliteRegistry, history_stored
from mesh.controller.server import ControllerConfig, serve
from mesh.core.controller.core import ControllerCore
from mesh.domain.errors import MeshError, Unavailable
from mesh.domain.history import OutputHistory
from mesh.domain.limits import CellLimits
from mesh.domain.messages import LoadInstance, SubmitRequest
from mesh.runtime.journal import ControllerStart, read_journal
from tests.controller.live import SPEC, LiveCell, asking, live_cell

POLICY = Path(__file__).parents[2] / "examples" / "policies" / "lru_swap.py"
AT_ONCE = CellLimits(history_store_s=0.0, kv_tokens_least=32, node_lease_s=600.0)


@pytest.fixture(autouse=True)
def broken_for_good(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients whose stream breaks ask again for a moment only."""
    monkeypatch.setattr("mesh.wire.resuming.RESUME_S_MAX", 0.1)


async def test_nothing_is_left_running(tmp_path: Path) -> None:
    before = asyncio.all_tasks()
    async with live_cell(tmp_path) as cell:
        node = await cell.deployed(held=True)
        open_call = asyncio.create_task(cell.answer(), name="open")
        await node.told(SubmitRequest)
        cell.stop.set()
        await cell.serving
        with pytest.raises(Exception, match="stopping"):
            await open_call
    await asyncio.sleep(0)
    assert asyncio.all_tasks() - before == set()


async def test_a_core_that_fails_ends_the_controller_with_its_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is in no known state; started again, it has what was acknowledged."""

    def fail(self: object, event: object, now_s: float) -> list[object]:
        raise ZeroDivisionError("a fault")

    async def break_it() -> None:
        async with live_cell(tmp_path) as cell:
            await cell.deployed()
            monkeypatch.setattr(ControllerCore, "handle", fail)
            with pytest.raises(MeshError):
                await cell.answer()

    with pytest.raises(ZeroDivisionError):
        await break_it()
    monkeypatch.undo()
    async with live_cell(tmp_path) as cell:
        assert len(await cell.ask(cell.client.list)) == 1


async def test_starting_without_a_port_leaves_nothing(cell: LiveCell, tmp_path: Path) -> None:
    config = ControllerConfig(listen=cell.address, home=tmp_path / "other")
    with pytest.raises(Unavailable, match="is in use"):
        await serve(config, None, asyncio.Event())
    assert not (tmp_path / "other").exists()


async def test_what_was_learned_is_in_the_registry(tmp_path: Path) -> None:
    async with live_cell(tmp_path, limits=AT_ONCE) as cell:
        await cell.deployed()
        await cell.answer(asking(max_tokens=4))
    registry = SqliteRegistry(tmp_path / "controller")
    assert registry.histories() == {SPEC.name: OutputHistory().after(4)}
    registry.close()


async def _blocks_of_first_load(home: Path) -> int:
    """KV blocks of the instance that a request of few tokens and a high limit has loaded."""
    async with live_cell(home, limits=AT_ONCE) as cell:
        node = await cell.node()
        if not await cell.ask(cell.client.list):
            await cell.ask(cell.client.deploy, SPEC)
        node.loading = False
        call = cell.client.invoke(asking(max_tokens=500))
        load = await node.told(LoadInstance)
        call.close()
        return load.kv_blocks


async def test_a_controller_starts_with_what_an_earlier_one_learned(tmp_path: Path) -> None:
    """A deployment of long answers gets a larger cache."""
    unknown = await _blocks_of_first_load(tmp_path)
    registry = SqliteRegistry(tmp_path / "controller")
    registry.apply(history_stored(SPEC.name, OutputHistory(mean_tokens=400.0, count=200)))
    registry.close()
    assert await _blocks_of_first_load(tmp_path) > 2 * unknown


async def test_a_live_cell_is_run_by_a_policy_file(tmp_path: Path) -> None:
    """And its journal names the file."""
    journal = tmp_path / "journal"
    async with live_cell(tmp_path, policy=str(POLICY), journal=journal) as cell:
        await cell.deployed()
        assert await cell.answer(asking(max_tokens=4))
    start, decisions = read_journal(journal)
    assert isinstance(start, ControllerStart)
    assert start.policy == str(POLICY)
    assert list(decisions)
