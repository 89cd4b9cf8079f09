"""Times the decisions of a cell in overload: its nodes are full, many deployments wait for a load.

A round is what such a cell meets all the time: a request comes and is placed, one ends, one comes
to a deployment that waits, and all that wait are tried again. Each counts as a decision.
"""

import gc
import time
from collections.abc import Callable, Sequence
from itertools import cycle, islice

from bench.admission.cell import NOW_S, PaperCell, placement
from bench.admission.deciding import WARM_UP, Times
from bench.admission.setting import DEPLOYMENTS
from mesh.domain.actions import ControllerAction
from mesh.domain.events import (
    CancelRequested,
    ControllerEvent,
    InvokeRequested,
    PlaceRetryDue,
)
from mesh.domain.request import Request

ROUND = 4
"""Decisions of it."""


class Overload:
    """A cell whose `unloaded` deployments have a request each in their queues."""

    def __init__(self, *, nodes: int, unloaded: int, seed: int) -> None:
        self.cell = PaperCell(nodes=nodes, unloaded=unloaded, seed=seed)
        self._waiting: dict[int, Request] = {}
        for number in range(DEPLOYMENTS, DEPLOYMENTS + unloaded):
            self._let_wait(number, Times())

    def check(self) -> None:
        """Raises SystemExit when anything but these requests waits, or one of them does not."""
        deployments = self.cell.core.cell.deployments.values()
        queues = [len(entry.queue) for entry in deployments if entry.queue]
        if queues != [1] * len(self._waiting):
            raise SystemExit(f"error: {len(self._waiting)} deployments are to wait, not {queues}")

    def decide(self, rounds: int, times: Times) -> None:
        """So many rounds, over all that wait in turn. Raises SystemExit if none is placed."""
        core = self.cell.core
        for number in islice(cycle(list(self._waiting)), rounds):
            request = self.cell.request()
            placed = placement(request, self._handle(InvokeRequested(request=request), times))
            if placed is None:
                raise SystemExit("error: a loaded deployment does not take its request")
            self._handle(self.cell.last_token(placed), times)
            gone = self._waiting[number].request_id
            core.handle(CancelRequested(request_id=gone), NOW_S)
            self._let_wait(number, times)
            self._handle(PlaceRetryDue(), times)

    def _let_wait(self, number: int, times: Times) -> None:
        request = self._waiting[number] = self.cell.request(of=number)
        self._handle(InvokeRequested(request=request), times)

    def _handle(self, event: ControllerEvent, times: Times) -> Sequence[ControllerAction]:
        clock_ns, cpu_ns = time.perf_counter_ns, time.thread_time_ns
        began_ns, start_ns = cpu_ns(), clock_ns()
        actions = self.cell.core.handle(event, NOW_S)
        times.taken_ns.append(clock_ns() - start_ns)
        times.computed_ns += cpu_ns() - began_ns
        return actions


def measure_overload(
    nodes: int, unloaded: int, decisions: int, cells: int, seed: int, note: Callable[[str], None]
) -> Times:
    """Over several cells, with other requests on them each time."""
    times = Times()
    for number in range(cells):
        note(f"{nodes} nodes, {unloaded} deployments wait: cell {number + 1} of {cells}")
        overload = Overload(nodes=nodes, unloaded=unloaded, seed=seed + number)
        overload.check()
        gc.collect()
        gc.freeze()
        overload.decide(WARM_UP // ROUND, Times())
        overload.decide(-(-decisions // cells // ROUND), times)
        overload.check()
        gc.unfreeze()
    return times
