"""An instance as the agent sees it: its engine process, the calls to it, its books as last told.

Decides when a process counts as gone: when it ends, when it breaks, when a call takes too long.
Whatever the reason, it is then killed and its memory is the system's again before the call fails.
Before: `engine`. After: `process`, at the other end of the socket.
"""

import contextlib
import logging
import os
import select
import signal
import threading
from multiprocessing.connection import Connection

from mesh.domain import errors
from mesh.domain.errors import EngineError, MeshError
from mesh.domain.ids import InstanceId
from mesh.domain.steps import InstanceMemory
from mesh.runtime.engine import Progress
from mesh_nodes.engines.vllm.messages import Answer, Call, Failure, Progressed, Verb
from mesh_nodes.engines.vllm.spawner import Spawner

CALL_S_MAX = 120.0
"""For an iteration or anything smaller: far beyond the slowest that has been measured."""
LOAD_S_MAX = 600.0
"""As long as a controller waits for a load."""
END_S_MAX = 10.0
"""For the kernel to take an address space down."""

log = logging.getLogger(__name__)


class Remote:
    """Calls come one after the other; `kill`, `books` and `alive` are for any thread."""

    def __init__(self, instance_id: InstanceId, spawner: Spawner) -> None:
        """Raises EngineError when no process can be started."""
        self.instance_id = instance_id
        self._spawner = spawner
        self._connection: Connection
        self.pid, self._connection = spawner.spawn()
        try:
            self._pidfd = os.pidfd_open(self.pid)
        except OSError as error:
            raise EngineError(f"the engine process of {instance_id} ended at once") from error
        self._books: InstanceMemory | None = None
        self._ending = threading.Lock()
        self._ended = False

    @property
    def books(self) -> InstanceMemory | None:
        """As of the last call; nothing before the load, and once the process is gone."""
        return self._books if self.alive else None

    @property
    def alive(self) -> bool:
        return not self._ended and not select.select([self._pidfd], [], [], 0)[0]

    def call(
        self,
        verb: Verb,
        *arguments: object,
        timeout_s: float = CALL_S_MAX,
        progress: Progress | None = None,
    ) -> object:
        """What the process answers. Raises what it refused with; EngineError when it is gone, and
        then everything of it is.
        """
        try:
            self._connection.send(Call(verb, arguments))
            while True:
                if not self._connection.poll(timeout_s):
                    raise self._gone(f"did not answer a {verb} within {timeout_s:.0f} s")
                match self._connection.recv():
                    case Answer(value, books):
                        self._books = books
                        return value
                    case Progressed(phase, share):
                        if progress is not None:
                            progress(phase, share)
                    case Failure() as failure:
                        raise self._failed(failure)
        except (EOFError, OSError):
            raise self._gone(f"ended amid a {verb}") from None
        except MeshError:
            raise
        except BaseException:
            # A progress call that stops the load, or whatever else leaves an answer unread.
            self.end()
            raise

    def end(self) -> None:
        """Kill the process if need be, and wait until its memory is the system's. Idempotent."""
        with self._ending:
            if self._ended:
                return
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
            if not select.select([self._pidfd], [], [], END_S_MAX)[0]:
                log.error("engine process %d does not end", self.pid)
            self._exit_code = self._spawner.reap(self.pid)
            self._ended = True
            os.close(self._pidfd)
            self._connection.close()

    def _failed(self, failure: Failure) -> MeshError:
        if failure.fatal:
            self.end()
        kind = getattr(errors, failure.error)
        assert issubclass(kind, MeshError), failure
        error: MeshError = kind(failure.message, hint=failure.hint)
        return error

    def _gone(self, what: str) -> EngineError:
        self.end()
        code = self._exit_code
        how = "" if code is None else f" (signal {-code})" if code < 0 else f" (exit code {code})"
        return EngineError(
            f"the engine process of {self.instance_id} {what}{how}",
            hint="the instance is gone and its requests go elsewhere; the node's log may say why",
        )
