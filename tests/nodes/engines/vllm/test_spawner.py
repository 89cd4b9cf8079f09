"""A forkserver that cannot come up says why, and one that is gone is no trap."""

import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from mesh.domain.errors import EngineError
from mesh_nodes.engines.vllm import spawner as spawner_module
from mesh_nodes.engines.vllm.spawner import Spawner
from tests.support.waiting import alive, until

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
"""A forkserver without vLLM."""


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


def test_nobody_knows_how_a_process_ended_once_the_forkserver_is_gone(
    broken: dict[str, str],
) -> None:
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


@pytest.fixture
def spawner(tmp_path: Path) -> Iterator[Spawner]:
    (tmp_path / "forkserver_of_sleepers.py").write_text(SLEEPERS)
    spawner = Spawner({"PYTHONPATH": str(tmp_path)}, module="forkserver_of_sleepers")
    yield spawner
    spawner.close()


def kill_forkserver(spawner: Spawner) -> None:
    pid = spawner.pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    until(lambda: not alive(pid))


def test_processes_are_known_until_they_have_ended(spawner: Spawner) -> None:
    (one, _), (two, _) = spawner.spawn(), spawner.spawn()
    assert spawner.pids() == (one, two)
    os.kill(one, signal.SIGKILL)
    until(lambda: spawner.pids() == (two,))
    assert spawner.reap(one) == -signal.SIGKILL
    spawner.close()
    assert spawner.pids() == ()
    assert not alive(two)


def test_processes_of_a_forkserver_that_is_gone_have_ended_before_another_starts(
    spawner: Spawner,
) -> None:
    one, _ = spawner.spawn()
    kill_forkserver(spawner)
    two, _ = spawner.spawn()
    assert not alive(one)
    assert spawner.pids() == (two,)


def test_one_that_outlives_its_forkserver_stays_known_until_it_ends(
    spawner: Spawner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one amid a call of its driver's."""
    one, _ = spawner.spawn()
    kill_forkserver(spawner)
    with monkeypatch.context() as patched:
        patched.setattr(signal, "pidfd_send_signal", lambda pidfd, number: None)
        patched.setattr(spawner_module, "END_S_MAX", 0.2)
        two, _ = spawner.spawn()
    assert spawner.pids() == (one, two)
    os.kill(one, signal.SIGKILL)
    until(lambda: spawner.pids() == (two,))


@pytest.mark.filterwarnings("ignore:subprocess .* is still running:ResourceWarning")
def test_a_forkserver_that_outlives_its_kill_is_replaced(
    spawner: Spawner, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    one, _ = spawner.spawn()
    forkserver = spawner.pid
    assert forkserver is not None
    with monkeypatch.context() as patched:
        patched.setattr(subprocess.Popen, "kill", lambda process: None)
        patched.setattr(spawner_module, "END_S_MAX", 0.2)
        patched.setattr(spawner_module, "COMMAND_S_MAX", 0.2)
        os.kill(forkserver, signal.SIGSTOP)
        try:
            with pytest.raises(EngineError, match="did not answer"):
                spawner.spawn()
            assert f"process {forkserver}, which started vLLM's, outlives its kill" in caplog.text
        finally:
            os.kill(forkserver, signal.SIGKILL)
    two, _ = spawner.spawn()
    until(lambda: spawner.pids() == (two,))
    assert not alive(one)
