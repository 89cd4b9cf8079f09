"""A nursery that cannot come up says why, and one that is gone is no trap."""

import os
import signal
from pathlib import Path

import pytest

from mesh.domain.errors import EngineError
from mesh_nodes.engines.vllm.spawner import Spawner

SLEEPERS = """
import os, socket, sys
commands = socket.socket(fileno=int(sys.argv[1]))
commands.send(b"ready")
while words := commands.recv(4096):
    if words == b"fork":
        pid = os.fork()
        if pid == 0:
            os.execvp("sleep", ["sleep", "60"])
        commands.send(b"%d" % pid)
    else:
        _, status = os.waitpid(int(words.split()[1]), 0)
        commands.send(b"%d" % os.waitstatus_to_exitcode(status))
"""
"""A nursery without vLLM."""


@pytest.fixture
def broken(tmp_path: Path) -> dict[str, str]:
    """An environment in which torch, which vLLM imports, cannot be imported."""
    (tmp_path / "torch.py").write_text("raise ImportError('libcudart.so.13: no such file')\n")
    return {"PYTHONPATH": str(tmp_path)}


def test_an_import_that_fails_is_told_with_its_cause(broken: dict[str, str]) -> None:
    spawner = Spawner(broken)
    for _ in range(2):
        with pytest.raises(EngineError, match=r"cannot be imported: ImportError: libcudart\.so"):
            spawner.spawn()
    spawner.close()


def test_nobody_knows_how_a_process_ended_once_the_nursery_is_gone(broken: dict[str, str]) -> None:
    spawner = Spawner(broken)
    assert spawner.reap(1) is None
    spawner.close()
    assert spawner.reap(1) is None
    assert spawner.pid is None


def test_a_closed_spawner_starts_nothing(broken: dict[str, str]) -> None:
    spawner = Spawner(broken)
    spawner.close()
    spawner.close()
    with pytest.raises(EngineError, match="closed"):
        spawner.spawn()
    with pytest.raises(EngineError, match="closed"):
        spawner.await_ready()


def test_processes_are_known_until_they_are_reaped(tmp_path: Path) -> None:
    (tmp_path / "nursery_of_sleepers.py").write_text(SLEEPERS)
    spawner = Spawner({"PYTHONPATH": str(tmp_path)}, module="nursery_of_sleepers")
    (one, _), (two, _) = spawner.spawn(), spawner.spawn()
    assert spawner.pids() == (one, two)
    for pid in (one, two):
        os.kill(pid, signal.SIGKILL)
    assert spawner.reap(one) == -signal.SIGKILL
    assert spawner.pids() == (two,)
    spawner.close()
    assert spawner.pids() == ()
