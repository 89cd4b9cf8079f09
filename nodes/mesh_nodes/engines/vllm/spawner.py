"""The agent's end of the forkserver: starts it, asks it for engine processes, learns of their ends.

It owns the forkserver's process, and knows which engine processes of any forkserver have not ended.
It is started with the engine, so that its imports run while the node finds its cell, and again with
the next load if it died meanwhile. Before: `engine`, at a load. After: `remote`, which talks to the
process that came of it.
"""

import logging
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from multiprocessing.connection import Connection

from mesh.domain.errors import EngineError
from mesh_nodes.engines.vllm.environment import ENVIRONMENT, gpu_environment
from mesh_nodes.engines.vllm.forkserver import FAILED, MESSAGE_BYTES_MAX, READY
from mesh_nodes.engines.vllm.releases import found_release
from mesh_nodes.gpus import Gpus

START_S_MAX = 180.0
"""For the imports, on a cold disk beside other work."""
COMMAND_S_MAX = 20.0
"""For a fork: it copies page tables. A reap is asked for once the process has ended."""
REAP_WAIT_S_MAX = 1.0
"""How long it waits for others' forks: what it asks is only for the log."""
END_S_MAX = 5.0
"""For the forkserver to end, and for all that it has forked."""
_POLL_S = 0.01
_MODULE = "mesh_nodes.engines.vllm.forkserver"

log = logging.getLogger(__name__)


def start_spawner(threads: int | None = None, gpu_index: int | None = None) -> "Spawner":
    """What starts engine processes that compute on so many cores, all usable ones unless given; and
    on that GPU, in the order of the PCI bus: the first one unless given, if vLLM is built for CUDA.

    Raises Unavailable, InvalidInput where there is no such GPU.
    """
    threads = threads or len(os.sched_getaffinity(0))
    environment = {**ENVIRONMENT, "OMP_NUM_THREADS": str(threads)}
    if gpu_index is not None or not found_release().computes_on_cpu:
        environment |= gpu_environment(Gpus().gpu(gpu_index or 0))
    return Spawner(environment)


def ends_within(pidfd: int, timeout_s: float) -> bool:
    """Whether that process does, whoever its parent is."""
    waiting = select.poll()
    waiting.register(pidfd, select.POLLIN)
    return bool(waiting.poll(1e3 * timeout_s))


class Spawner:
    """May be called from any thread."""

    def __init__(self, environment: Mapping[str, str], module: str = _MODULE) -> None:
        """`environment` comes on top of this process's own; `module` is the forkserver's."""
        self._module = module
        self._environment = {**os.environ, **environment}
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._commands: socket.socket | None = None
        self._table = threading.Lock()
        """Guards what follows, never a call."""
        self._forked = dict[int, int]()
        """By process, a pidfd that says when it has ended."""
        self._ready = False
        self._closed = False
        with self._lock:
            self._start()

    @property
    def pid(self) -> int | None:
        """The forkserver's, while there is one."""
        process = self._process
        return None if process is None else process.pid

    def pids(self) -> tuple[int, ...]:
        """Engine processes that have not ended, those of a forkserver that has among them."""
        with self._table:
            for pid, pidfd in list(self._forked.items()):
                if ends_within(pidfd, 0.0):
                    os.close(self._forked.pop(pid))
            return tuple(self._forked)

    def await_ready(self) -> None:
        """Until the forkserver can fork. Raises EngineError when it cannot."""
        with self._lock:
            self._bring_up()

    def spawn(self, pool: int | None = None) -> tuple[int, Connection]:
        """A new engine process: its id, and the socket to talk to it with. `pool`: the descriptor
        of the host's memory for weights, which it gets as well.

        Raises EngineError when the forkserver does not come up, or does not answer.
        """
        with self._lock:
            self._bring_up()
            ours, theirs = socket.socketpair()
            with ours, theirs:
                pid = int(self._command(b"fork", theirs.fileno(), pool))
                # None of that number, which one may have had that has ended.
                self.pids()
                with self._table, suppress(ProcessLookupError):
                    self._forked[pid] = os.pidfd_open(pid)
                return pid, Connection(ours.detach())

    def reap(self, pid: int) -> int | None:
        """How an engine process that has ended did so: its exit code, a signal as its negative.

        None when nobody knows any more: the forkserver ended, too.
        """
        if not self._lock.acquire(timeout=REAP_WAIT_S_MAX):
            return None
        try:
            if not self._ready:
                return None
            return int(self._command(b"reap %d" % pid))
        except EngineError:
            return None
        finally:
            self._lock.release()

    def close(self) -> None:
        """End the forkserver, and with it every engine process that is left."""
        with self._lock:
            self._closed = True
            self._stop()

    def _start(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            # A session of its own: Ctrl-C in the agent's terminal is for the agent to handle.
            self._process = subprocess.Popen(
                [sys.executable, "-W", "ignore", "-m", self._module, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                env=self._environment,
            )
        self._commands = ours
        self._ready = False

    def _bring_up(self) -> None:
        """A forkserver that can fork, another one if need be."""
        if self._closed:
            raise EngineError("the vLLM engine is closed and starts no process any more")
        if self._process is None or self._process.poll() is not None:
            self._stop()
            self._start()
        if self._ready:
            return
        answer = self._receive(START_S_MAX)
        if answer != READY:
            self._stop()
            words = answer.removeprefix(FAILED).decode(errors="replace")
            raise EngineError(
                f"vLLM cannot be imported: {words}",
                hint="see what the node wrote before; `python -c 'import vllm'` shows it, too",
            )
        self._ready = True

    def _command(self, words: bytes, *descriptors: int | None) -> bytes:
        assert self._commands is not None
        beside = [descriptor for descriptor in descriptors if descriptor is not None]
        try:
            socket.send_fds(self._commands, [words], beside)
        except OSError as error:
            self._stop()
            raise EngineError(f"the process that starts vLLM's is gone: {error}") from error
        return self._receive(COMMAND_S_MAX)

    def _receive(self, timeout_s: float) -> bytes:
        """Raises EngineError, and ends the forkserver, when it ended or takes too long."""
        assert self._commands is not None
        self._commands.settimeout(timeout_s)
        try:
            answer = self._commands.recv(MESSAGE_BYTES_MAX)
        except OSError as error:
            answer, reason = b"", f"it did not answer within {timeout_s:.0f} s ({error})"
        else:
            reason = "it ended"
        if not answer:
            self._stop()
            raise EngineError(f"the process that starts vLLM's is gone: {reason}")
        return answer

    def _stop(self) -> None:
        self._ready = False
        if self._commands is not None:
            self._commands.close()
            self._commands = None
        if self._process is not None:
            # It has nothing to lose, and may be amid its imports.
            self._process.kill()
            try:
                self._process.wait(END_S_MAX)
            except subprocess.TimeoutExpired:
                # Amid a call that no signal ends; nobody speaks to it any more.
                log.warning("process %d, which started vLLM's, outlives its kill", self.pid)
            self._process = None
            self._end_forked()

    def _end_forked(self) -> None:
        """As the kernel does with their forkserver. Those that it does not let go of stay known."""
        with self._table:
            for pidfd in self._forked.values():
                with suppress(ProcessLookupError):
                    signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        until_s = time.monotonic() + END_S_MAX
        while self.pids() and time.monotonic() < until_s:
            time.sleep(_POLL_S)
