"""Runs cells of the evaluation side by side, each in a process of its own, and shows how far it is.

A run shares nothing with another and follows from its load alone, so that the order in which they
end does not matter. Before: `mesh bench paper`. After: `cells`.
"""

import os
import signal
import sys
import time
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing
from dataclasses import dataclass
from multiprocessing import active_children, get_context

from mesh.domain.errors import MeshError
from mesh.evaluation.paper.cells import PaperCase, PaperRun, run
from mesh.sim.cell_costs import MEASURED, CellCosts
from mesh.sim.costs import Resizing
from mesh_loader.bounded_child import die_with_parent
from mesh_workloads.trace import Trace

JOBS_MAX = 256
Report = Callable[[str, float], None]
"""A phase in words, and the share that is done."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    cell: PaperCase
    policy: str
    work: Trace
    costs: CellCosts = MEASURED
    resize: Resizing | None = None
    check_refusals: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    job: Job
    run: PaperRun
    seconds: float
    """The wall time that the run took."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    job: Job
    why: str


def run_all(jobs: Sequence[Job], processes: int, show: Report) -> list[Done | Failed]:
    """In the order of the jobs. A run that fails leaves the others alone; one that is the only one
    raises what it raises.
    """
    found: dict[int, Done | Failed] = {}
    show(f"runs: {len(jobs)}, {min(processes, len(jobs))} at a time", 0.0)
    with closing(_ended(jobs, processes)) as ends:
        for number, end in ends:
            found[number] = end
            name = f"{end.job.cell.name} {end.job.policy}"
            took = f"took {end.seconds:.0f} s" if isinstance(end, Done) else "failed"
            show(f"{len(found)} of {len(jobs)} runs, {name} {took}", len(found) / len(jobs))
    return [found[number] for number in range(len(jobs))]


def _ended(jobs: Sequence[Job], processes: int) -> Generator[tuple[int, Done | Failed]]:
    """Jobs by number as they end, the ones with most requests begun first."""
    order = sorted(range(len(jobs)), key=lambda n: (-len(jobs[n].work.arrivals), n))
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


def _try(job: Job) -> Done | Failed:
    try:
        return _run(job)
    except MeshError as error:
        return Failed(job=job, why=error.message)
    except Exception as error:
        return Failed(job=job, why=f"{type(error).__name__}: {error}")


def _run(job: Job) -> Done:
    began_s = time.perf_counter()
    made = run(
        job.cell,
        job.policy,
        job.work,
        costs=job.costs,
        resize=job.resize,
        check_refusals=job.check_refusals,
    )
    return Done(job=job, run=made, seconds=time.perf_counter() - began_s)
