"""A contender in a process of its own, which waits on a pipe, idle, until it is asked.

What it writes goes to a log: engines write freely, and a benchmark's last line is for programs.
Every wait of the parent is bounded.
"""

import multiprocessing
import os
import tempfile
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeVar

import psutil

from mesh.domain.errors import Unavailable

T = TypeVar("T")
START_S_MAX = 180.0
"""To build an engine and load the model."""
RUN_S_MAX = 300.0
"""For one answer."""
STOP_S_MAX = 10.0
LOG_LINES_SHOWN = 5

Build = Callable[..., Callable[[Any], object]]
"""In the new process: from its arguments, which can be pickled, to what answers a question."""


class Peer:
    """Starts at once; `wait_ready` says when it can be asked. Its methods raise
    Unavailable, with the end of its log, when it failed or took too long.
    """

    def __init__(
        self, name: str, build: Build, *arguments: object, environment: Mapping[str, str] = {}
    ) -> None:
        self.name = name
        descriptor, log = tempfile.mkstemp(prefix="peer-", suffix=".log")
        os.close(descriptor)
        self._log = Path(log)
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        told = (theirs, self._log, dict(environment), build, arguments)
        self._process = context.Process(target=_serve, args=told, name=name)
        self._process.start()
        theirs.close()

    def __enter__(self) -> "Peer":
        return self

    def __exit__(self, *ended: object) -> None:
        self._connection.close()
        self._process.join(STOP_S_MAX)
        if self._process.is_alive():
            self._process.kill()
            self._process.join(STOP_S_MAX)
        self._log.unlink()

    def wait_ready(self) -> None:
        self._receive(START_S_MAX, "ready")

    def ask(self, question: object = None, s_max: float = RUN_S_MAX) -> Any:
        # One that has ended is told by what it leaves unanswered.
        with suppress(ConnectionError):
            self._connection.send(question)
        return self._receive(s_max, "done")

    def cpu_s(self) -> float:
        """CPU seconds that the process has used so far."""
        times = psutil.Process(self._process.pid).cpu_times()
        return float(times.user + times.system)

    def _receive(self, seconds_max: float, what: str) -> object:
        try:
            if not self._connection.poll(seconds_max):
                raise Unavailable(
                    f"{self.name} was not {what} within {seconds_max:.0f} s{self._tail()}"
                )
            failed, answer = self._connection.recv()
        except (EOFError, ConnectionError) as error:
            raise Unavailable(f"{self.name} ended before it was {what}{self._tail()}") from error
        if failed:
            raise Unavailable(f"{self.name}: {failed}{self._tail()}")
        return answer

    def _tail(self) -> str:
        lines = self._log.read_text(errors="replace").splitlines()
        return "".join(f"\n    {line}" for line in lines[-LOG_LINES_SHOWN:])


def in_own_process(
    name: str, function: Callable[..., T], *arguments: object, s_max: float = RUN_S_MAX
) -> T:
    """What the function returns in a process that does nothing else. Raises Unavailable."""
    with Peer(name, _alone, function, arguments) as peer:
        peer.wait_ready()
        found: T = peer.ask(None, s_max)
        return found


def _alone(function: Callable[..., T], arguments: tuple[object, ...]) -> Callable[[object], T]:
    return lambda _: function(*arguments)


def llama_server(
    gguf: Path, *, slots: int, context_tokens: int, threads: int, embeds: bool = False
) -> Any:
    """llama.cpp's server without its HTTP, in this process; it keeps no prompts. One that `embeds`
    takes the last token.
    """
    import xllamacpp  # which the tests do without

    parameters = xllamacpp.CommonParams()
    parameters.model.path = str(gguf)
    parameters.n_parallel = slots
    parameters.n_ctx = slots * context_tokens
    parameters.cpuparams.n_threads = threads
    parameters.cpuparams_batch.n_threads = threads
    parameters.cache_ram_mib = 0
    if embeds:
        parameters.embedding = True
        parameters.pooling_type = xllamacpp.llama_pooling_type.LLAMA_POOLING_TYPE_LAST
    return xllamacpp.Server(parameters)


def _serve(
    connection: Connection,
    log: Path,
    environment: Mapping[str, str],
    build: Build,
    arguments: tuple[object, ...],
) -> None:
    """The peer's side: what failed, or an answer to each question."""
    descriptor = os.open(log, os.O_WRONLY | os.O_TRUNC)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.environ.update(environment)
    try:
        answer = build(*arguments)
        connection.send(("", None))
        while True:
            connection.send(("", answer(connection.recv())))
    except EOFError:
        return  # the parent has what it wants
    except Exception as error:
        traceback.print_exc()
        connection.send((f"{type(error).__name__}: {error}".splitlines()[0], None))
