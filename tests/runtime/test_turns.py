"""Long work on the loop: whatever else is ready goes on between its steps."""

import asyncio

import pytest

from mesh.runtime import turns
from mesh.runtime.turns import Steps, in_turns


async def test_others_go_on_between_the_steps_of_long_work(monkeypatch: pytest.MonkeyPatch) -> None:
    def work() -> Steps[list[int]]:
        seen = []
        for _ in range(3):
            seen.append(len(ticks))
            yield
        return seen

    async def tick() -> None:
        while True:
            ticks.append(None)
            await asyncio.sleep(0)

    for turn_s, seen in ((60.0, [0, 0, 0]), (0.0, [0, 1, 2])):
        monkeypatch.setattr(turns, "TURN_S", turn_s)
        ticks: list[None] = []
        ticking = asyncio.create_task(tick())
        assert await in_turns(work()) == seen
        ticking.cancel()
