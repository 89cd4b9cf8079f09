"""The virtual clock, links and lanes: order, ties, and what is on its way."""

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from mesh.domain.errors import EngineError, MeshError
from mesh.domain.events import ControllerEvent, NodeConnected, NodeDisconnected, NodeReported
from mesh.domain.ids import InstanceId, NodeId, RequestId
from mesh.domain.messages import Heartbeat, InstanceGone, NodeCommand, UnloadInstance
from mesh.domain.node_events import NodeEvent, SubmitBroke
from mesh.domain.node_rule import NodeRule
from mesh.runtime.link_life import NO_EPOCH, CellEpoch
from mesh.runtime.node_actions import Lane
from mesh.sim.clock import HeapClock
from mesh.sim.lanes import VirtualLanes
from mesh.sim.links import VirtualLinks
from tests.core.cells import hello

DELAY_S = 0.125
HELLO = hello("n", memory_bytes=1)


@dataclass
class Ends:
    """Both ends of a link, and what each heard, when."""

    clock: HeapClock = field(default_factory=HeapClock)
    node_id: NodeId = HELLO.node_id
    at = 0
    cell_epoch = NO_EPOCH
    is_frozen = False
    at_node: list[tuple[float, str]] = field(default_factory=list)
    at_controller: list[tuple[float, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.links = VirtualLinks(self.clock, DELAY_S)
        self.links.open(self)
        self.link_id = self.dial()
        self.clock.run_until(1.0)
        self.at_controller.clear()

    def dial(self) -> int:
        link_id = self.links.dial(self, HELLO)
        assert link_id is not None
        return link_id

    def takes(self, obeyed: CellEpoch) -> bool:
        return True

    def tell(self, event: ControllerEvent) -> None:
        match event:
            case NodeReported(report=Heartbeat() as beat):
                self.at_controller.append((self.clock.now_s(), str(beat.rss_bytes)))
            case NodeConnected() | NodeDisconnected():
                self.at_controller.append((self.clock.now_s(), type(event).__name__))
            case _:
                raise AssertionError(event)

    def accepted(self, link_id: int, rule: NodeRule, epoch: CellEpoch) -> None:
        self.at_node.append((self.clock.now_s(), "accepted"))

    def commanded(self, link_id: int, command: NodeCommand) -> None:
        assert isinstance(command, UnloadInstance)
        self.at_node.append((self.clock.now_s(), command.instance_id))

    def closed(self, link_id: int, error: str, reason: str) -> None:
        self.at_node.append((self.clock.now_s(), error))

    def say(self, number: int) -> None:
        """Both ways."""
        self.links.report(self.link_id, Heartbeat(rss_bytes=number))
        self.links.send(self.link_id, UnloadInstance(instance_id=InstanceId(str(number))))

    def heard(self) -> tuple[list[str], list[str]]:
        self.clock.run_until(self.clock.now_s() + 100.0)
        return [said for _, said in self.at_controller], [said for _, said in self.at_node]


@pytest.fixture
def ends() -> Ends:
    return Ends()


def test_what_is_said_later_never_comes_earlier_although_the_delay_falls(ends: Ends) -> None:
    ends.links.delay(ends.node_id, 3.0)
    ends.say(1)
    ends.links.delay(ends.node_id, 0.0)
    ends.say(2)
    assert ends.heard() == (["1", "2"], ["1", "2"])
    assert [at for at, _ in ends.at_node] == [1.0 + DELAY_S + 3.0] * 2


def test_a_broken_link_loses_what_is_on_its_way_and_each_end_hears_of_it_once(ends: Ends) -> None:
    ends.say(1)
    ends.links.break_link(ends.link_id, node_s=0.5, controller_s=0.25)
    ends.say(2)
    assert ends.heard() == (["NodeDisconnected"], ["Unavailable"])
    assert ends.at_controller == [(1.25, "NodeDisconnected")]
    assert ends.at_node == [(1.5, "Unavailable")]
    ends.say(3)
    assert ends.heard() == (["NodeDisconnected"], ["Unavailable"])


def test_nobody_is_told_of_a_silent_link_until_the_node_finds_out(ends: Ends) -> None:
    ends.say(1)
    ends.links.silence(ends.link_id, up=True, down=False, node_s=6.0)
    ends.say(2)
    assert not ends.links.is_whole(ends.link_id)
    assert ends.heard() == ([], ["1", "2", "Unavailable"])
    assert ends.at_node[-1] == (7.0, "Unavailable")
    ends.links.close(ends.link_id, error="Unavailable", message="its lease ran out", hint="")
    assert ends.heard() == ([], ["1", "2", "Unavailable"]), "it was told already"


def test_a_node_that_dies_is_heard_to_the_end_unless_its_machine_goes_with_it(ends: Ends) -> None:
    ends.say(1)
    ends.links.leave(ends.link_id)
    assert ends.heard() == (["1", "NodeDisconnected"], [])
    gone = Ends()
    gone.say(1)
    gone.links.leave(gone.link_id, silently=True)
    assert gone.heard() == ([], [])


def test_a_controller_that_ends_is_heard_to_the_end_and_answers_nobody(ends: Ends) -> None:
    ends.say(1)
    ends.links.hang_up(ends, "it was killed")
    assert ends.links.dial(ends, HELLO) is None
    assert ends.heard() == ([], ["1", "Unavailable"])
    ends.links.open(ends)
    ends.link_id = ends.dial()
    ends.say(2)
    assert ends.heard() == (["NodeConnected", "2"], ["1", "Unavailable", "2"])


def test_calls_are_made_in_the_order_of_their_times_and_ties_as_they_were_asked() -> None:
    clock = HeapClock()
    made: list[tuple[str, float]] = []
    for name, at_s in (("c", 2.0), ("a", 1.0), ("b", 1.0)):
        clock.call_at(at_s, lambda name=name: made.append((name, clock.now_s())))  # type: ignore[misc]
    while clock.step():
        pass
    assert made == [("a", 1.0), ("b", 1.0), ("c", 2.0)]


def test_time_never_goes_back() -> None:
    clock = HeapClock()
    seen: list[float] = []
    clock.call_at(5.0, lambda: clock.call_at(1.0, lambda: seen.append(clock.now_s())))
    while clock.step():
        pass
    assert seen == [5.0]


def test_run_until_leaves_later_calls_and_stands_at_its_time() -> None:
    clock = HeapClock()
    made: list[float] = []
    clock.call_at(1.0, lambda: made.append(1.0))
    clock.call_at(3.0, lambda: made.append(3.0))
    clock.run_until(2.0)
    assert (made, clock.now_s()) == ([1.0], 2.0)


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
