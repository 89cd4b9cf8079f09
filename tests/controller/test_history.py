"""How long answers turn out outlives the controller that learned it."""

from pathlib import Path

from mesh.controller.registry import SqliteRegistry
from mesh.domain.history import OutputHistory
from mesh.domain.limits import CellLimits
from mesh.domain.messages import LoadInstance
from tests.controller.live import SPEC, asking, live_cell

AT_ONCE = CellLimits(history_store_s=0.0, kv_tokens_least=32)


async def test_what_was_learned_is_in_the_registry(tmp_path: Path) -> None:
    async with live_cell(tmp_path, limits=AT_ONCE) as cell:
        await cell.deployed()
        await cell.ask(lambda: list(cell.client.invoke(asking(max_tokens=4))))
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
    registry.store_history(SPEC.name, OutputHistory(mean_tokens=400.0, count=200))
    registry.close()
    assert await _blocks_of_first_load(tmp_path) > 2 * unknown
