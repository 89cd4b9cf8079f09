"""Runs simulations of an evaluation side by side, each in a process, and shows how far it is.

A run shares nothing with another and follows from its job alone, so that the order in which they
end does not matter. Before: `mesh bench paper`, `mesh bench polyserve`. After: the cells of either.
"""

import os
import signal
import sys
import time
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing
from multiprocessing import active_children, get_context
from typing import Any, Generic, Protocol, TypeVar

from mesh.domain.errors import MeshError
from mesh.domain.values import dataclass
from mesh_loader.bounded_child import die_with_parent

Report = Callable[[str, float], None]
"""A phase in words, and the share that is done."""


class Job(Protocol):
    """A run to be made; it is pickled."""

    @property
    def name(self) -> str:
        """For whoever watches."""
        ...

    @property
    def weight(self) -> float:
        """The runs with the most begin first."""
        ...

    def compute(self) -> Any: ...


J = TypeVar("J", bound=Job)


@dataclass(frozen=True, slots=True, kw_only=True)
class Done(Generic[J]):
    job: J
    run: Any
    """What the job has computed."""
    seconds: float
    """The wall time that the run took."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed(Generic[J]):
    job: J
    why: str


def run_all(jobs: Sequence[J], processes: int, show: Report) -> list[Done[J] | Failed[J]]:
    """In the order of the jobs. A run that fails leaves the others alone; one that is the only one
    raises what it raises.
    """
    found: dict[int, Done[J] | Failed[J]] = {}
    show(f"runs: {len(jobs)}, {min(processes, len(jobs))} at a time", 0.0)
    with closing(_ended(jobs, processes)) as ends:
        for number, end in ends:
            found[number] = end
            name = end.job.name
            took = f"took {end.seconds:.0f} s" if isinstance(end, Done) else "failed"
            show(f"{len(found)} of {len(jobs)} runs, {name} {took}", len(found) / len(jobs))
    return [found[number] for number in range(len(jobs))]


def _ended(jobs: Sequence[J], processes: int) -> Generator[tuple[int, Done[J] | Failed[J]]]:
    """Jobs by number as they end."""
    order = sorted(range(len(jobs)), key=lambda n: (-jobs[n].weight, n))
    if len(jobs) == 1:
        yield 0, _run(jobs[0])
        return
    if processes == 1:
        for number in order:
            yield number, _try(jobs[number])
        return
    # A fresh interpreter each: a fork would copy the thread that draws the bar.
    with ProcessPoolExecutor(
        min(processes, len(jobs)),
        mp_context=get_context("spawn"),
        initializer=_begin,
        initargs=(os.getpid(),),
    ) as pool:
        number_of = {pool.submit(_try, jobs[number]): number for number in order}
        try:
            for future in as_completed(number_of):
                yield number_of[future], future.result()
        except BrokenProcessPool as error:
            raise MeshError(
                "a process of the evaluation ended before its run did",
                hint="it may have been short of memory: try again with fewer --jobs",
            ) from error
        except BaseException:
            # Ctrl-C: the pool waits for its processes, and nobody for what they compute.
            for process in active_children():
                process.terminate()
            raise
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def _begin(parent_pid: int) -> None:
    """A process of the pool: Ctrl-C is for the parent to hear, and without it nothing goes on."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if sys.platform == "linux":
        die_with_parent(parent_pid)


def _try(job: J) -> Done[J] | Failed[J]:
    try:
        return _run(job)
    except MeshError as error:
        return Failed(job=job, why=error.message)
    except Exception as error:
        return Failed(job=job, why=f"{type(error).__name__}: {error}")


def _run(job: J) -> Done[J]:
    began_s = time.perf_counter()
    made = job.compute()
    return Done(job=job, run=made, seconds=time.perf_counter() - began_s)
