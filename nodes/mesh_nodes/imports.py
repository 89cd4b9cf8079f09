"""Imports that several wait for: each source is imported once at a time, few sources at once.

A deployment's import, a second one of the same source, and a load that finds the store empty join
the same job; it stops when the last of them has left. Owns the import threads; the import itself
runs in a child process (mesh_loader). `models` comes before it on the path.
"""

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import field
from pathlib import Path
from typing import Protocol

from mesh.domain.errors import Cancelled, MeshError, ModelError, Unavailable
from mesh.domain.ids import ModelId
from mesh.domain.model import ModelInfo, WeightPrecision
from mesh.domain.text import TextAssets
from mesh.domain.values import dataclass
from mesh.runtime.engine import Progress, same_phase
from mesh.text.assets import read_assets
from mesh.text.pool import Owner, TextPool, codec_key

IMPORTS_AT_ONCE_MAX = 2
"""Each takes a core and the memory of its largest tensors."""
IMPORTS_WAITING_MAX = 32
TRIED_MAX = 4096
"""Models whose texts are known to have passed their trial."""
STOP_POLL_S = 0.05
PROGRESS_EVERY_S = 1.0
"""Within one phase, the listeners are told no more often: it all goes to the journal."""

log = logging.getLogger(__name__)


class Stored(Protocol):
    """A model in the store: its folder, and what it is."""

    @property
    def path(self) -> Path: ...

    @property
    def info(self) -> ModelInfo: ...


ImportSource = Callable[[str, Progress, threading.Event, WeightPrecision | None], Stored]
"""Import a source, to be held so; blocking. Ends soon, with Cancelled, once the event is set."""


class TriedImports:
    """An ImportSource, of another one: a model is refused whose tokenizer or chat template goes
    beyond its limits when it is tried, in a process of its own. Owns what is known to have passed.
    """

    def __init__(self, import_source: ImportSource) -> None:
        self._import_source = import_source
        self._passed: dict[ModelId, None] = {}

    def __call__(
        self,
        source: str,
        progress: Progress,
        stop: threading.Event,
        weights: WeightPrecision | None = None,
    ) -> Stored:
        """Raises UnsupportedModel where a trial fails, and what the import raises."""
        stored = self._import_source(source, progress, stop, weights)
        model_id = stored.info.model_id
        if model_id not in self._passed:
            assets = read_assets(stored.path)
            # With Jinja, which takes 30 ms of CPU; a node that imports nothing needs none.
            from mesh.text.recognised import is_harmless

            if not is_harmless(assets):
                progress("trying its texts", 0.0)
                asyncio.run(_try(source, assets, stop))
            self._passed[model_id] = None
            while len(self._passed) > TRIED_MAX:
                del self._passed[next(iter(self._passed))]
        return stored


async def _try(source: str, assets: TextAssets, stop: threading.Event) -> None:
    pool = TextPool(children_max=0)
    owner = Owner(
        tenant="",
        name=source,
        key=codec_key(assets),
        tokenizer_bytes=len(assets.tokenizer_json),
    )
    trial = asyncio.create_task(pool.tried(owner, assets))
    try:
        while not (await asyncio.wait([trial], timeout=STOP_POLL_S))[0]:
            if stop.is_set():
                raise Cancelled(f"the import of {source} was stopped")
        await trial
    finally:
        await pool.close()
        await asyncio.gather(trial, return_exceptions=True)


@dataclass(eq=False, slots=True)
class Ticket:
    """One party's interest in an import."""

    progress: Progress
    job: "_Job"

    @property
    def outcome(self) -> "Future[Stored]":
        """The model in the store, or the MeshError that the import ended with."""
        return self.job.outcome


@dataclass(eq=False, slots=True)
class _Job:
    source: str
    weights: WeightPrecision | None = None
    outcome: "Future[Stored]" = field(default_factory=Future)
    stop: threading.Event = field(default_factory=threading.Event)
    tickets: list[Ticket] = field(default_factory=list)
    told_s: float = 0.0
    told_phase: str = ""


class Imports:
    """All methods may be called from any thread. Progress is told from the import's thread."""

    def __init__(self, import_source: ImportSource) -> None:
        self._import_source = import_source
        self._lock = threading.Lock()
        self._jobs: dict[tuple[str, WeightPrecision | None], _Job] = {}
        self._waiting: deque[_Job] = deque()
        self._threads: set[threading.Thread] = set()
        self._closed = False

    def join(
        self, source: str, progress: Progress, weights: WeightPrecision | None = None
    ) -> Ticket:
        """Take part in the import of `source`, to be held in `weights`, which begins unless it is
        under way. Where it is under way for others, the store has one wait for the other.

        Raises Unavailable when too many sources wait already, or the node stops.
        """
        with self._lock:
            if self._closed:
                raise Unavailable("the node is stopping and imports nothing any more")
            job = self._jobs.get((source, weights))
            if job is None:
                job = self._begin(source, weights)
            ticket = Ticket(progress=progress, job=job)
            job.tickets.append(ticket)
            return ticket

    def cancel(self, ticket: Ticket) -> None:
        """No interest any more; the last to leave stops the import. Leaving twice is harmless."""
        with self._lock:
            job = ticket.job
            if ticket in job.tickets:
                job.tickets.remove(ticket)
            unbegun = [] if job.tickets else self._stop([job])
        _end_unbegun(unbegun)

    def close(self, timeout_s: float) -> bool:
        """Stop all imports; False when one has not ended within `timeout_s`."""
        with self._lock:
            self._closed = True
            unbegun = self._stop(list(self._jobs.values()))
            threads = tuple(self._threads)
        _end_unbegun(unbegun)
        give_up_s = time.monotonic() + timeout_s
        for thread in threads:
            thread.join(max(0.0, give_up_s - time.monotonic()))
        return not any(thread.is_alive() for thread in threads)

    def _begin(self, source: str, weights: WeightPrecision | None) -> _Job:
        if len(self._waiting) >= IMPORTS_WAITING_MAX:
            raise Unavailable(
                f"{source} cannot be imported now: {len(self._waiting)} imports wait already, "
                f"the limit is {IMPORTS_WAITING_MAX}",
                hint="try again when some of them have ended",
            )
        job = self._jobs[source, weights] = _Job(source, weights)
        if len(self._threads) < IMPORTS_AT_ONCE_MAX:
            thread = threading.Thread(
                target=self._work_off, args=(job,), name="mesh-import", daemon=True
            )
            self._threads.add(thread)
            thread.start()
        else:
            self._waiting.append(job)
        return job

    def _stop(self, jobs: list[_Job]) -> list[_Job]:
        """With the lock held. Returns those that no thread has begun, and so none will end."""
        unbegun = [job for job in jobs if job in self._waiting]
        for job in jobs:
            job.stop.set()
            self._forget(job)
        for job in unbegun:
            self._waiting.remove(job)
        return unbegun

    def _forget(self, job: _Job) -> None:
        """With the lock held."""
        if self._jobs.get((job.source, job.weights)) is job:
            del self._jobs[job.source, job.weights]

    def _work_off(self, job: _Job | None) -> None:
        """An import thread: this job, then those that wait."""
        while job is not None:
            result = self._outcome(job)
            with self._lock:
                self._forget(job)
                follower = self._waiting.popleft() if self._waiting else None
                if follower is None:
                    self._threads.discard(threading.current_thread())
            if isinstance(result, MeshError):
                job.outcome.set_exception(result)
            else:
                job.outcome.set_result(result)
            job = follower

    def _outcome(self, job: _Job) -> Stored | MeshError:
        try:
            return self._import_source(
                job.source,
                lambda phase, share: self._tell(job, phase, share),
                job.stop,
                job.weights,
            )
        except MeshError as error:
            return error
        except BaseException as error:  # a library's panic is no Exception
            log.exception("the import of %s failed unexpectedly", job.source)
            return ModelError(f"the import of {job.source} failed: {type(error).__name__}: {error}")

    def _tell(self, job: _Job, phase: str, share: float) -> None:
        if job.stop.is_set():
            raise _stopped(job)
        now_s = time.monotonic()
        on_time = share < 1.0 and now_s < job.told_s + PROGRESS_EVERY_S
        if on_time and same_phase(phase, job.told_phase):
            return
        job.told_phase, job.told_s = phase, now_s
        with self._lock:
            tickets = tuple(job.tickets)
        for ticket in tickets:
            ticket.progress(phase, share)


def _end_unbegun(jobs: list[_Job]) -> None:
    """Without the lock: whoever waits for the outcome may come back into this object."""
    for job in jobs:
        job.outcome.set_exception(_stopped(job))


def _stopped(job: _Job) -> Cancelled:
    return Cancelled(f"the import of {job.source} was stopped")
