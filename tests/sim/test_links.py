"""Links that break, fall silent and are late: order is kept, and each end hears of its end once."""

from dataclasses import dataclass, field

import pytest

from mesh.domain.events import ControllerEvent, NodeConnected, NodeDisconnected, NodeReported
from mesh.domain.ids import InstanceId, NodeId
from mesh.domain.messages import Heartbeat, NodeCommand, NodeHello, UnloadInstance
from mesh.domain.node_rule import NodeRule
from mesh.domain.reasons import DeviceKind
from mesh.sim.clock import HeapClock
from mesh.sim.links import VirtualLinks

DELAY_S = 0.125
HELLO = NodeHello(
    node_id=NodeId("n"),
    run_id="run",
    device=DeviceKind.CPU,
    hardware="none",
    cores=1,
    engine="none",
    memory_bytes=1,
)


@dataclass
class Ends:
    """Both ends of a link, and what each heard, when."""

    clock: HeapClock = field(default_factory=HeapClock)
    node_id: NodeId = HELLO.node_id
    at_node: list[tuple[float, str]] = field(default_factory=list)
    at_controller: list[tuple[float, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.links = VirtualLinks(self.clock, DELAY_S)
        self.links.tell = self.told
        self.link_id = self.dial()
        self.clock.run_until(1.0)
        self.at_controller.clear()

    def dial(self) -> int:
        link_id = self.links.dial(self, HELLO)
        assert link_id is not None
        return link_id

    def told(self, event: ControllerEvent) -> None:
        match event:
            case NodeReported(report=Heartbeat() as beat):
                self.at_controller.append((self.clock.now_s(), str(beat.rss_bytes)))
            case NodeConnected() | NodeDisconnected():
                self.at_controller.append((self.clock.now_s(), type(event).__name__))
            case _:
                raise AssertionError(event)

    def accepted(self, link_id: int, rule: NodeRule) -> None:
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
    ends.links.hang_up("it was killed")
    assert ends.links.dial(ends, HELLO) is None
    assert ends.heard() == ([], ["1", "Unavailable"])
    ends.links.tell = ends.told
    ends.link_id = ends.dial()
    ends.say(2)
    assert ends.heard() == (["NodeConnected", "2"], ["1", "Unavailable", "2"])
