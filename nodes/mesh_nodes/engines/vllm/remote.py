"""An instance as the agent sees it: its engine process, the calls to it, its books as last told.

Decides when a process counts as gone: when it ends, when it breaks, when a call takes too long.
Whatever the reason, it is then killed and its memory is the system's again before the call fails,
unless the kernel does not let go of it: then it is called no more and holds what it holds.
Before: `engine`. After: `process`, at the other end of the socket.
"""

import contextlib
import logging
import os
import signal
import threading
import weakref
from multiprocessing.connection import Connection

from mesh.domain import errors
from mesh.domain.errors import EngineError, MeshError
from mesh.domain.ids import InstanceId
from mesh.domain.steps import InstanceMemory
from mesh.runtime.engine import Progress
from mesh_nodes.engines.vllm.messages import Answer, Call, Failure, Progressed, Verb
from mesh_nodes.engines.vllm.spawner import Spawner, ends_within

CALL_S_MAX = 120.0
"""For an iteration or anything smaller: far beyond the slowest that has been measured. A turn of
several may take longer; its process says in between that it lives."""
LOAD_S_MAX = 600.0
"""As long as a controller waits for a load."""
END_S_MAX = 10.0
"""For the kernel to take an address space down."""

log = logging.getLogger(__name__)


class Remote:
    """Calls come one after the other; all else is for any thread."""

    def __init__(self, instance_id: InstanceId, spawner: Spawner, pool: int | None = None) -> None:
        """`pool`: see `Spawner.spawn`. Raises EngineError when no process can be started."""
        self.instance_id = instance_id
        self._spawner = spawner
        self._connection: Connection
        self.pid, self._connection = spawner.spawn(pool)
        try:
            self.pidfd = os.pidfd_open(self.pid)
        except OSError as error:
            raise EngineError(f"the engine process of {instance_id} ended at once") from error
        # Not by `end`: another thread may be looking at it, or waiting at the socket.
        weakref.finalize(self, os.close, self.pidfd)
        self._books: InstanceMemory | None = None
        self._calling = threading.Lock()
        self._ending = threading.Lock()
        self._ended = False
        self._exit_code: int | None = None
        self._cause = ""
        """What it said before it ended of itself."""
        self.killed = False
        """By others, amid a call: what it was asked for is no reason."""

    @property
    def books(self) -> InstanceMemory | None:
        """As of the last call; nothing before the load, and once the process is gone."""
        return self._books if self.alive else None

    @property
    def alive(self) -> bool:
        """It can be called."""
        return not self._ended and not self.gone

    @property
    def gone(self) -> bool:
        """It has ended, and its memory is the system's. One that was killed amid a call of the
        kernel's, of its driver, say, may hold it for longer.
        """
        return ends_within(self.pidfd, 0.0)

    def call(
        self,
        verb: Verb,
        *arguments: object,
        timeout_s: float | None = None,
        progress: Progress | None = None,
    ) -> object:
        """What the process answers, within CALL_S_MAX of the last that it said unless given. Raises
        what it refused with; EngineError when it is gone, and then everything of it is.
        """
        with self._calling:
            return self._call(verb, arguments, timeout_s or CALL_S_MAX, progress)

    def end(self) -> None:
        """Kill the process if need be, and wait until its memory is the system's, but no longer
        than END_S_MAX. Idempotent.
        """
        with self._ending:
            if self._ended:
                return
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)
            if ends_within(self.pidfd, END_S_MAX):
                self._exit_code = self._spawner.reap(self.pid)
            else:
                # Not reaped: the forkserver would wait for it, and could fork nothing.
                log.error(
                    "engine process %d of %s does not end %.0f s after it was killed: "
                    "its memory stays taken",
                    *(self.pid, self.instance_id, END_S_MAX),
                )
            self._ended = True

    def why_gone(self) -> EngineError:
        """The error of a process that has ended. A call that it left unanswered may know why."""
        with self._calling:
            return self._gone_error("has ended")

    def _call(
        self, verb: Verb, arguments: tuple[object, ...], timeout_s: float, progress: Progress | None
    ) -> object:
        if self._ended:
            raise self._gone_error("has ended")
        try:
            self._connection.send(Call(verb, arguments))
            while True:
                if not self._connection.poll(timeout_s):
                    raise self._gone_error(f"did not answer a {verb} within {timeout_s:.0f} s")
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
            error = self._gone_error(f"ended amid a {verb}")
            self.killed = self._exit_code in (None, -signal.SIGKILL)
            raise error from None
        except MeshError:
            raise
        except BaseException:
            # A progress call that stops the load, or whatever else leaves an answer unread.
            self.end()
            raise

    def _failed(self, failure: Failure) -> MeshError:
        if failure.fatal:
            self._cause = f": {failure.message}"
            self.end()
        kind = getattr(errors, failure.error)
        assert issubclass(kind, MeshError), failure
        error: MeshError = kind(failure.message, hint=failure.hint)
        return error

    def _gone_error(self, what: str) -> EngineError:
        self.end()
        code = self._exit_code
        how = "" if code is None else f" (signal {-code})" if code < 0 else f" (exit code {code})"
        return EngineError(
            f"the engine process of {self.instance_id} {what}{how}{self._cause}",
            hint="the instance is gone and its requests go elsewhere; the node's log may say why",
        )
