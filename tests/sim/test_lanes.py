"""Lanes under the virtual clock: how long a call takes, and what is left of it."""

import gc
import weakref

import pytest

from mesh.runtime.node_actions import Lane
from mesh.sim.clock import HeapClock
from mesh.sim.lanes import VirtualLanes


class Given:
    """What a call yields."""


@pytest.mark.parametrize(("lane", "late_s"), [(Lane.COMPUTE, 0.0), (Lane.LOADING, 0.5)])
def test_what_a_call_has_yielded_is_freed_without_the_collector(lane: Lane, late_s: float) -> None:
    clock = HeapClock()
    lanes, late = VirtualLanes(clock), iter((late_s, 0.0))
    lanes.more_load_s = lambda: next(late)
    made: list[weakref.ref[Given]] = []

    def call() -> Given:
        given = Given()
        made.append(weakref.ref(given))
        lanes.spend(1.0)
        return given

    gc.disable()
    try:
        lanes.run(lane, call, lambda given: None)
        clock.advance(0.9 + late_s)
        assert made[0]() is not None
        clock.advance(0.2)
        assert made[0]() is None
        assert lanes.busy_s[lane] == 1.0 + late_s
    finally:
        gc.enable()
