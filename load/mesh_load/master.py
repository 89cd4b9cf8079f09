"""The run as a whole: who sends what, when all start, what has come, and when it is over.

It gives every worker its share, tells all the same start once all have theirs, and keeps every
answer; one process alone is master and worker. Before: `session`. After: `worker`, which it
speaks with by locust's messages; `ending`, which tells what has come.
"""

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from mesh.evaluation.load_client import CALL_S_MAX
from mesh.evaluation.replay.results import CallResult
from mesh_load.share import Share, plain_of, result_of

LEAD_S = 1.0
"""From the word to start to the moment that it names."""
READY_S_MAX = 60.0
"""Until every worker has its share; whoever has not by then takes no part."""
REPORTS_S_MAX = 15.0
"""After the last call may have ended, until its answer has been reported."""


class Word(StrEnum):
    """Locust's messages of a run."""

    SHARE = "mesh-share"
    """Master to worker: a piece."""
    READY = "mesh-ready"
    """Worker to master: it has all of them."""
    START = "mesh-start"
    STOP = "mesh-stop"
    REPORT = "mesh-report"
    """Worker to master, beside those that it makes every few seconds."""


Send = Callable[[str, dict[str, Any] | None, str], None]
"""A word, what belongs to it, and the worker that it is for."""


@dataclass(slots=True)
class Part:
    """One worker's, in the order in which shares were given."""

    worker: str
    calls: int
    ready: bool = False
    ended: bool = False
    stopped: bool = False
    """Before its end, by the master or by a signal to the worker itself."""


@dataclass(slots=True)
class Master:
    """The master of one process; `begin` starts a run anew."""

    share: Share
    """All calls."""
    send: Send
    parts: dict[str, Part] = field(default_factory=dict)
    results: dict[int, CallResult] = field(default_factory=dict)
    """By the call's number."""
    on_result: Callable[[CallResult], None] = lambda result: None
    start_s: float = 0.0
    """From which the calls' times count, on the machine's monotonic clock; 0 before it is known."""
    _begun_s: float = 0.0
    _stopped: bool = False

    def begin(self, workers: Sequence[str]) -> None:
        """Give each its share; calls of a run before are forgotten."""
        self.results, self.start_s, self._begun_s = {}, 0.0, time.monotonic()
        self._stopped = False
        shares = [self.share.of_worker(i, len(workers)) for i in range(len(workers))]
        pairs = list(zip(workers, shares, strict=True))
        self.parts = {worker: Part(worker, len(share.calls)) for worker, share in pairs}
        for worker, share in pairs:
            for piece in share.pieces():
                self.send(Word.SHARE, plain_of(piece), worker)

    def ready(self, worker: str) -> None:
        """Starts the run when it was the last; one that comes after the start takes no part."""
        if self.start_s or self._stopped:
            return
        if worker in self.parts:
            self.parts[worker].ready = True
        if all(part.ready for part in self.parts.values()):
            self._start()

    def _start(self) -> None:
        self.start_s = time.monotonic() + LEAD_S
        start = {"start_unix_s": time.time() + LEAD_S}
        for part in self.parts.values():
            if part.ready:
                self.send(Word.START, start, part.worker)

    def take(self, worker: str, report: dict[str, Any]) -> None:
        """A worker's report, or what is left of a run before."""
        part = self.parts.get(worker)
        if part is None or not self.start_s:
            return
        for plain in report["results"]:
            result = result_of(plain)
            self.results[result.call.number] = result
            self.on_result(result)
        part.ended, part.stopped = report["ended"], report["stopped"]

    @property
    def interrupted(self) -> bool:
        """Whether a worker's part ended before its last call."""
        return any(part.stopped for part in self.parts.values())

    def stop(self) -> None:
        self._stopped = True
        for part in self.parts.values():
            if not part.ended:
                self.send(Word.STOP, None, part.worker)

    def over(self, alive: Collection[str]) -> bool:
        """Whether nothing more will come: all have ended but those that are gone, the time that the
        last call may take has passed, or it was stopped before its start. Starts without those that
        have not got ready in time.
        """
        if not self.parts:
            return False
        if not self.start_s:
            if self._stopped:
                return True
            if time.monotonic() > self._begun_s + READY_S_MAX:
                self._start()
            return False
        last_s = self.share.calls[-1].at_s if self.share.calls else 0.0
        if time.monotonic() > self.start_s + last_s + CALL_S_MAX + REPORTS_S_MAX:
            return True
        parts = (part for part in self.parts.values() if part.ready and part.worker in alive)
        return all(part.ended for part in parts)
