"""The virtual lanes: what a call takes passes on its lane before its outcome is known."""

from collections.abc import Callable

import pytest

from mesh.domain.errors import EngineError, MeshError
from mesh.domain.ids import InstanceId, RequestId
from mesh.domain.messages import InstanceGone
from mesh.domain.node_events import NodeEvent, SubmitBroke
from mesh.runtime.node_actions import Lane
from mesh.sim.clock import HeapClock
from mesh.sim.lanes import VirtualLanes


class Watched:
    """Lanes, and when what was posted."""

    def __init__(self) -> None:
        self.clock = HeapClock()
        self.lanes = VirtualLanes(self.clock)
        self.lanes.post = lambda event: self.posted.append((self.clock.now_s(), event))
        self.posted: list[tuple[float, NodeEvent]] = []

    def run(self, lane: Lane, name: str, seconds: float) -> None:
        self.lanes.run(
            lane,
            lambda: self.lanes.spend(seconds),
            lambda _: InstanceGone(instance_id=InstanceId(name)),
        )

    def finish(self) -> list[tuple[float, str]]:
        while self.clock.step():
            pass
        assert all(isinstance(event, InstanceGone) for _, event in self.posted)
        return [(at, e.instance_id) for at, e in self.posted if isinstance(e, InstanceGone)]


@pytest.fixture
def watched() -> Watched:
    return Watched()


def test_calls_of_a_lane_follow_each_other_and_lanes_go_beside_each_other(watched: Watched) -> None:
    watched.run(Lane.COMPUTE, "a", 1.0)
    watched.run(Lane.COMPUTE, "b", 0.0)
    watched.run(Lane.COMPUTE, "c", 2.0)
    watched.run(Lane.LOADING, "load", 1.5)
    assert watched.finish() == [(1.0, "a"), (1.0, "b"), (1.5, "load"), (3.0, "c")]
    busy_s = watched.lanes.busy_s
    assert (busy_s[Lane.COMPUTE], busy_s[Lane.LOADING]) == (3.0, 1.5)


def test_what_is_posted_beside_calls_is_posted_at_once(watched: Watched) -> None:
    watched.run(Lane.COMPUTE, "a", 1.0)
    watched.clock.call_at(
        0.5, lambda: watched.lanes.post_soon(InstanceGone(instance_id=InstanceId("lost")))
    )
    assert watched.finish() == [(0.5, "lost"), (1.0, "a")]


def test_many_calls_without_cost_wait_for_the_one_before_them(watched: Watched) -> None:
    """More than Python would nest."""
    watched.run(Lane.COMPUTE, "step", 1.0)
    for _ in range(3000):
        watched.run(Lane.COMPUTE, "submit", 0.0)
    assert watched.posted == []
    ends = watched.finish()
    assert ends == [(1.0, "step")] + [(1.0, "submit")] * 3000


def test_an_error_is_an_outcome_like_any_other(watched: Watched) -> None:
    def fail() -> None:
        watched.lanes.spend(0.5)
        raise EngineError("as told")

    def done(result: MeshError | None) -> NodeEvent:
        assert isinstance(result, EngineError)
        return SubmitBroke(request_id=RequestId("r"), attempt=1, error="E", message=result.message)

    call: Callable[[], None] = fail
    watched.lanes.run(Lane.COMPUTE, call, done)
    assert watched.posted == []
    watched.clock.step()
    assert [(at, type(event)) for at, event in watched.posted] == [(0.5, SubmitBroke)]
    watched.run(Lane.COMPUTE, "next", 0.0)
    assert len(watched.posted) == 2, "the lane is free again"


def test_progress_is_told_when_the_call_has_come_that_far(watched: Watched) -> None:
    def load() -> None:
        watched.lanes.spend(0.25)
        watched.lanes.post_soon(InstanceGone(instance_id=InstanceId("part")))
        watched.lanes.spend(0.25)

    watched.lanes.run(Lane.LOADING, load, lambda _: InstanceGone(instance_id=InstanceId("whole")))
    assert watched.finish() == [(0.25, "part"), (0.5, "whole")]
