"""`serve` cleans up after itself, and ends when its core fails."""

import asyncio
from pathlib import Path

import pytest

from mesh.controller.server import ControllerConfig, serve
from mesh.core.controller.core import ControllerCore
from mesh.domain.errors import MeshError, Unavailable
from mesh.domain.messages import SubmitRequest
from tests.controller.live import LiveCell, asking, live_cell


async def test_nothing_is_left_running(tmp_path: Path) -> None:
    before = asyncio.all_tasks()
    async with live_cell(tmp_path) as cell:
        node = await cell.deployed()
        node.held = True
        open_call = asyncio.create_task(
            cell.ask(lambda: list(cell.client.invoke(asking()))), name="open"
        )
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
                await cell.ask(lambda: list(cell.client.invoke(asking())))

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
