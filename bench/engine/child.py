"""A contender in a process of its own, which waits on a pipe, idle, until it is asked.

The child's own output goes to a log file: engines write freely, and the last line of ours is for
programs. Every wait of the parent is bounded.
"""

import multiprocessing
import os
import time
import traceback
from multiprocessing.connection import Connection
from pathlib import Path

import psutil

from bench.engine.contenders import ENTRIES, Entry
from bench.engine.models import Models
from bench.engine.workload import OUTPUT_TOKENS, Prompts

START_S_MAX = 180.0
"""To build an engine and load the model."""
RUN_S_MAX = 300.0
"""For the largest measurement: 1024 tokens at less than 4 a second is not worth a comparison."""
STOP_S_MAX = 10.0
LOG_LINES_SHOWN = 5


class Broken(Exception):
    """A contender failed or took too long; the text says which and shows the end of its log."""


class Child:
    def __init__(self, entry: Entry, models: Models, log: Path) -> None:
        """Starts it; `wait_ready` must follow."""
        self.name = entry.name
        self._log = log
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(
            target=_serve, args=(theirs, entry.name, models, log), daemon=True, name=entry.name
        )
        self._process.start()
        theirs.close()

    def __enter__(self) -> "Child":
        return self

    def __exit__(self, *ended: object) -> None:
        self._connection.close()
        self._process.join(STOP_S_MAX)
        if self._process.is_alive():
            self._process.kill()
            self._process.join(STOP_S_MAX)

    def wait_ready(self) -> None:
        self._receive(START_S_MAX, "ready")

    def generate(self, prompts: Prompts) -> float:
        """Seconds from the first submission to the last token of all."""
        self._connection.send(prompts)
        seconds = self._receive(RUN_S_MAX, "done")
        assert isinstance(seconds, float)
        return seconds

    def cpu_s(self) -> float:
        """CPU seconds that the process has used so far."""
        times = psutil.Process(self._process.pid).cpu_times()
        return float(times.user + times.system)

    def _receive(self, seconds_max: float, what: str) -> object:
        try:
            if not self._connection.poll(seconds_max):
                raise Broken(f"{self.name} was not {what} within {seconds_max:.0f} s{self._tail()}")
            answer = self._connection.recv()
        except (EOFError, ConnectionError) as error:
            raise Broken(f"{self.name} ended before it was {what}{self._tail()}") from error
        if isinstance(answer, str):
            raise Broken(f"{self.name}: {answer}{self._tail()}")
        return answer

    def _tail(self) -> str:
        lines = self._log.read_text(errors="replace").splitlines() if self._log.exists() else []
        return "".join(f"\n    {line}" for line in lines[-LOG_LINES_SHOWN:])


def _serve(connection: Connection, name: str, models: Models, log: Path) -> None:
    """The child: build the contender, then answer each batch of prompts with its seconds."""
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    try:
        (entry,) = (entry for entry in ENTRIES if entry.name == name)
        contender = entry.build(models)
        connection.send(0.0)
        while True:
            prompts = connection.recv()
            start_s = time.perf_counter()
            made = contender.generate(prompts)
            taken_s = time.perf_counter() - start_s
            if made != len(prompts) * OUTPUT_TOKENS:
                connection.send(f"made {made} tokens of {len(prompts) * OUTPUT_TOKENS}")
                return
            connection.send(taken_s)
    except EOFError:
        return  # the parent has what it wants
    except Exception as error:
        traceback.print_exc()
        connection.send(f"{type(error).__name__}: {error}".splitlines()[0])
