"""The keeper of a device, without Ray: one agent, whoever dies."""

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from mesh_fleet.agent_process import AgentProcess, folder_of
from mesh_fleet.keeper import Keeper
from tests.support.waiting import until

ARGUMENTS = ("--join", "127.0.0.1:1", "--memory", "400MiB")
"""It tries to join for ever."""


@pytest.fixture
def keeper(tmp_path: Path) -> Iterator[Callable[..., Keeper]]:
    """Makes keepers of one device; its agent is gone when the test ends."""
    made: list[Keeper] = []

    def make(*arguments: str) -> Keeper:
        made.append(Keeper(str(tmp_path), "cpu0", arguments or ARGUMENTS))
        return made[-1]

    yield make
    for each in made:
        each.drain()
    process = AgentProcess(folder_of(str(tmp_path)), "cpu0")
    until(lambda: process.pid is None)


def running(keeper: Keeper) -> int:
    until(lambda: keeper.seen().pid is not None)
    pid = keeper.seen().pid
    assert pid is not None
    return pid


def test_an_agent_is_found_again_and_never_started_twice(keeper: Callable[..., Keeper]) -> None:
    first = keeper()
    pid = running(first)
    second = keeper()
    assert second.seen().pid == pid
    assert (first.seen().starts, second.seen().starts) == (1, 0)


def test_an_agent_that_was_killed_is_started_again(keeper: Callable[..., Keeper]) -> None:
    kept = keeper()
    pid = running(kept)
    os.kill(pid, signal.SIGKILL)
    until(lambda: kept.seen().pid not in (None, pid))
    assert (kept.seen().starts, kept.seen().failure) == (2, "it was killed, or asked to end")


def test_an_agent_that_drains_is_not_started_again(keeper: Callable[..., Keeper]) -> None:
    kept = keeper()
    running(kept)
    kept.drain()
    until(lambda: kept.seen().pid is None)
    assert kept.seen().leaving
    assert kept.seen().starts == 1


def test_why_an_agent_cannot_start_is_told_and_it_pauses(keeper: Callable[..., Keeper]) -> None:
    kept = keeper("--join", "127.0.0.1:1", "--memory", "no size")
    until(lambda: "no size" in kept.seen().failure)
    until(lambda: kept.seen().starts == 3)
    assert kept._pause_s >= 2.0
