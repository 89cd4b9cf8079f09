"""Models that sleep on nodes: what the controller makes of them when it starts an instance."""

from dataclasses import replace

import pytest

from mesh.core.node.state import LOAD_SLOWDOWN
from mesh.domain.actions import ControllerAction
from mesh.domain.ids import InstanceId
from mesh.domain.lifecycle import InstanceState
from mesh.domain.messages import Heartbeat, InstanceLoaded, LoadInstance
from mesh.domain.node_events import HeartbeatDue, LinkClosed, LinkOpened
from mesh.domain.slo import Slo
from mesh.domain.steps import HeldModel, LoadTier
from tests.core.admission import SLOW, instance, node
from tests.core.cells import (
    FOOTPRINT,
    MODEL,
    CellUnderTest,
    commands,
    deployment,
    hello,
    one_node,
    request,
)
from tests.core.nodes import NodeUnderTest, reports

STORED = HeldModel(model_id=MODEL.model_id, tier=LoadTier.DISK)
SLEEPS = HeldModel(model_id=MODEL.model_id, tier=LoadTier.HOST, context_tokens_max=512)
OTHER_CONTEXT = replace(SLEEPS, context_tokens_max=256)


def beat(*asleep: HeldModel) -> Heartbeat:
    return Heartbeat(rss_bytes=1, models=(STORED, *asleep))


def loads(actions: list[ControllerAction]) -> list[LoadInstance]:
    return commands(actions, LoadInstance)


def test_an_instance_starts_where_its_model_sleeps() -> None:
    cell = CellUnderTest(deployment())
    links = [cell.join(hello(name))[0] for name in ("n1", "n2", "n3")]
    cell.report(links[0], beat(OTHER_CONTEXT))
    cell.report(links[1], beat(SLEEPS))
    (load,) = loads(cell.invoke())
    instance = cell.core.cell.instances[load.instance_id]
    assert instance.node.node_id == "n2"


def test_a_wake_is_expected_to_take_what_wakes_took() -> None:
    cell, link = one_node(deployment())
    expectations = cell.core.cell.expectations
    expectations.learn_load(hello(), FOOTPRINT.weights_bytes, 9.0)
    expectations.learn_load(hello(), FOOTPRINT.weights_bytes, 0.125, LoadTier.HOST)
    cell.report(link, beat(SLEEPS))
    (load,) = loads(cell.invoke())
    assert cell.core.cell.instances[load.instance_id].load_s == pytest.approx(0.125)


@pytest.mark.parametrize(("asleep", "started"), [((), 0), ((SLEEPS,), 1)])
def test_a_neighbour_that_a_load_would_make_late_bears_a_wake(
    asleep: tuple[HeldModel, ...], started: int
) -> None:
    """A decode of `b` takes 0.11 s of the 0.25 that it may; 2.5 times that beside a load, which
    takes 5 s, and beside a wake, which takes a tenth of one.
    """
    tight = deployment("b", slo=Slo(ttft_s=0.3, tpot_s=0.25))
    cell = CellUnderTest(deployment("a"), tight, profiles=(SLOW,))
    expectations = cell.core.cell.expectations
    expectations.learn_load(hello(), FOOTPRINT.weights_bytes, 5.0)
    expectations.learn_load(hello(), FOOTPRINT.weights_bytes, 0.1, LoadTier.HOST)
    link, _ = cell.join(node("n1", instance("b1", "b")))
    said = Heartbeat(
        rss_bytes=1, instances=(instance("b1", "b"),), load_slowdown=2.5, models=(STORED, *asleep)
    )
    cell.report(link, said)
    cell.invoke(request("r1", of="b"))
    cell.tokens(link, "r1", [7])
    assert len(loads(cell.invoke(request("r2", of="a")))) == started


def test_what_is_learned_and_shown_is_from_where_the_load_came() -> None:
    cell, link = one_node(deployment())
    cell.report(link, beat(OTHER_CONTEXT, SLEEPS))
    (load,) = loads(cell.invoke())
    instance = cell.core.cell.instances[load.instance_id]
    assert (instance.state, instance.tier) == (InstanceState.LOADING, None)
    node = cell.core.cell.nodes[hello().node_id]
    assert len(node.asleep()) == 2
    cell.report(
        link,
        InstanceLoaded(
            instance_id=load.instance_id,
            footprint=FOOTPRINT,
            kv_blocks=load.kv_blocks,
            elapsed_s=0.25,
            tier=LoadTier.HOST,
        ),
    )
    assert instance.tier is LoadTier.HOST
    assert node.models == {MODEL.model_id: [STORED, OTHER_CONTEXT]}, "it does not sleep any more"
    shown = cell.core.snapshot(cell.now_s).nodes[0]
    assert shown.asleep == (MODEL.model_id,)
    assert shown.instances[0].tier is LoadTier.HOST
    known = cell.core.cell.expectations
    size = FOOTPRINT.weights_bytes
    assert known.load_s(hello(), size, LoadTier.HOST) == pytest.approx(0.25)
    assert known.load_s(hello(), size) > 0.25


def test_weights_in_a_pool_do_for_loads_of_any_context_and_for_more_than_one() -> None:
    pooled = replace(SLEEPS, context_tokens_max=0)
    cell = CellUnderTest(deployment())
    links = [cell.join(hello(name))[0] for name in ("n1", "n2")]
    cell.report(links[0], beat())
    cell.report(links[1], beat(pooled))
    (load,) = loads(cell.invoke())
    entry = cell.core.cell.instances[load.instance_id]
    assert entry.node.node_id == "n2"
    assert entry.node.asleep() == (), "an instance of it is there"
    cell.report(
        links[1],
        InstanceLoaded(
            instance_id=load.instance_id,
            footprint=FOOTPRINT,
            kv_blocks=load.kv_blocks,
            elapsed_s=0.25,
            tier=LoadTier.HOST,
        ),
    )
    assert entry.node.models == {MODEL.model_id: [STORED, pooled]}


def test_a_model_is_shown_as_asleep_once_whatever_else_the_host_has_of_it() -> None:
    pooled = replace(SLEEPS, context_tokens_max=0)
    cell, link = one_node(deployment())
    node = cell.core.cell.nodes[hello().node_id]
    shown = []
    for held in ((pooled,), (SLEEPS, pooled), (OTHER_CONTEXT, SLEEPS, pooled), ()):
        cell.report(link, beat(*held))
        shown.append(len(node.asleep()))
    assert shown == [1, 1, 2, 0]


def test_a_node_tells_what_it_has_at_hand_when_that_changes_and_on_a_new_link() -> None:
    node = NodeUnderTest()
    (told,) = reports(node.tell(HeartbeatDue(rss_bytes=1, models=(STORED, SLEEPS))))
    assert told == replace(beat(SLEEPS), load_slowdown=LOAD_SLOWDOWN)
    node.tell(LinkClosed(reason="lost"))
    (told,) = reports(node.tell(LinkOpened()))
    assert isinstance(told, Heartbeat)
    assert told.models == (STORED, SLEEPS), "a new link's controller knows nothing"
    (told,) = reports(node.tell(HeartbeatDue(rss_bytes=1)))
    assert isinstance(told, Heartbeat)
    assert told.models is None, "as it said"


def test_a_node_tells_again_of_what_it_has_after_a_wake() -> None:
    """What was woken may sleep again before anybody looks, and then nothing seems to have changed;
    but the controller has struck it off its list.
    """
    node = NodeUnderTest()
    node.tell(HeartbeatDue(rss_bytes=1, models=(STORED, SLEEPS)))
    told = []
    for tier in (LoadTier.DISK, LoadTier.HOST):
        node.load(f"i-{tier}", tier)
        for _ in range(2):
            (said,) = reports(node.tell(HeartbeatDue(rss_bytes=1)))
            assert isinstance(said, Heartbeat)
            told.append(said.models)
    assert told == [None, None, (STORED, SLEEPS), None]


def test_a_node_says_from_where_a_load_came() -> None:
    node = NodeUnderTest()
    for name, tier in (("i1", LoadTier.DISK), ("i2", LoadTier.HOST)):
        (loaded,) = reports(node.load(name, tier))
        assert isinstance(loaded, InstanceLoaded)
        assert (loaded.instance_id, loaded.tier) == (InstanceId(name), tier)
