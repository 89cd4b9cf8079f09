"""The controller core on its nodes: joining, names, leases, adoption after a restart, draining."""

from dataclasses import replace

from mesh.domain.actions import (
    AcceptLink,
    CloseLink,
    RefuseRequest,
    ReplyDone,
    ReplyError,
    SetTimer,
)
from mesh.domain.events import DeployRequested, DrainRequested, LeaseCheckDue, NodeDisconnected
from mesh.domain.ids import InstanceId, ModelId, NodeId, OperationId, RequestId
from mesh.domain.limits import CellLimits
from mesh.domain.messages import (
    Heartbeat,
    InstanceReport,
    NodeHello,
    RequestReturned,
    SubmitRequest,
    UnloadInstance,
)
from mesh.domain.node_rule import RuleName
from mesh.domain.reasons import FinishReason, RefusalReason
from mesh.policy.fcfs import FCFS
from mesh.policy.rules.first_come import FirstCome
from tests.core.cells import (
    FOOTPRINT,
    MODEL,
    CellUnderTest,
    commands,
    deployment,
    hello,
    instance_report,
    of_kind,
    one_node,
    only,
    request,
)

OP = OperationId("op-1")


class OwnRule(FirstCome):
    """As `mesh.runtime.policies` reads it from a file."""

    name = "own"
    digest = "abcd"


def report(instance_id: str = "chat-0-1", model_id: str = MODEL.model_id) -> InstanceReport:
    return instance_report(
        instance_id=InstanceId(instance_id), model_id=ModelId(model_id), kv_blocks=64
    )


def hello_with(*reports: InstanceReport) -> NodeHello:
    return replace(hello(), instances=reports)


def test_a_second_node_of_a_name_is_turned_away_and_the_first_stays() -> None:
    cell = CellUnderTest(deployment())
    first, accepted = cell.join()
    assert only(accepted, AcceptLink).link_id == first
    second, refused = cell.join(hello(run_id="another"))
    close = only(refused, CloseLink)
    assert (close.link_id, close.error) == (second, "AlreadyExists")
    assert cell.core.cell.nodes[NodeId("n1")].link_id == first


def test_a_node_that_dials_again_replaces_its_old_link() -> None:
    cell = CellUnderTest(deployment())
    cell.join()
    again, actions = cell.join()
    assert only(actions, AcceptLink).link_id == again
    assert cell.core.cell.nodes[NodeId("n1")].link_id == again


def test_a_node_whose_late_hello_takes_the_place_of_its_link_is_told() -> None:
    """It had given that dial up. Else it would live on a link on which nothing it says counts."""
    cell = CellUnderTest(deployment())
    alive, _ = cell.join()
    _, actions = cell.join()
    close = only(actions, CloseLink)
    assert (close.link_id, close.error) == (alive, "Unavailable")


def test_after_a_restart_loaded_instances_are_adopted_and_serve_at_once() -> None:
    cell = CellUnderTest(deployment())
    _, actions = cell.join(hello_with(report()))
    assert commands(actions, UnloadInstance) == []
    submit = commands(cell.invoke(), SubmitRequest)[0]
    assert submit.instance_id == "chat-0-1"
    node = cell.core.cell.nodes[NodeId("n1")]
    assert node.station.promised_bytes == FOOTPRINT.instance_bytes(64)


def test_an_instance_of_another_model_or_no_deployment_is_unloaded_but_booked_until_gone() -> None:
    cell = CellUnderTest(deployment())
    _, actions = cell.join(hello_with(report(model_id="sha256-ffff")))
    assert commands(actions, UnloadInstance)[0].instance_id == "chat-0-1"
    assert cell.core.cell.nodes[NodeId("n1")].station.tracked_bytes > 0
    assert commands(cell.invoke(), SubmitRequest) == []


def test_a_heartbeat_with_an_unknown_instance_gets_it_adopted() -> None:
    cell, link = one_node(deployment())
    cell.report(link, Heartbeat(rss_bytes=1, instances=(report(),)))
    assert commands(cell.invoke(), SubmitRequest)[0].instance_id == "chat-0-1"


def test_an_instance_that_the_node_does_not_list_any_more_gets_no_new_work() -> None:
    """It broke: what the node gives back from it must not come again before it is gone."""
    cell, link = one_node(deployment(), node=hello_with(report()))
    cell.invoke()
    unlisted = cell.report(link, Heartbeat(rss_bytes=1))
    assert [u.instance_id for u in commands(unlisted, UnloadInstance)] == ["chat-0-1"]
    back = RequestReturned(
        request_id=RequestId("r1"), attempt=1, error="EngineError", message="boom"
    )
    assert commands(cell.report(link, back), SubmitRequest) == []
    assert cell.core.cell.nodes[NodeId("n1")].station.tracked_bytes > 0, "until it is gone"


def test_a_silent_node_is_lost_after_its_lease_and_heartbeats_keep_it() -> None:
    cell, link = one_node(deployment(), limits=CellLimits(node_lease_s=10.0))
    cell.now_s += 9.0
    cell.report(link, Heartbeat(rss_bytes=1))
    cell.now_s += 9.0
    kept = cell.tell(LeaseCheckDue())
    assert of_kind(kept, CloseLink) == []
    assert isinstance(only(kept, SetTimer).timer, LeaseCheckDue), "it looks again"
    cell.now_s += 2.0
    assert only(cell.tell(LeaseCheckDue()), CloseLink).link_id == link
    assert cell.core.cell.nodes == {}


def test_reports_on_an_old_link_mean_nothing() -> None:
    cell = CellUnderTest(deployment())
    old, _ = cell.join()
    cell.join()
    assert cell.report(old, Heartbeat(rss_bytes=1, instances=(report(),))) == []


def test_a_draining_node_gets_no_work_finishes_its_own_and_unloads() -> None:
    cell, link = one_node(deployment())
    load = cell.bring_up(link)
    done = cell.tell(DrainRequested(operation_id=OP, node_id=NodeId("n1")))
    assert only(done, ReplyDone).message == "draining"
    refused = only(cell.invoke(request("r2")), RefuseRequest)
    assert refused.reason is RefusalReason.NO_NODE
    assert refused.message == "no cpu node takes new work: 1 draining"
    assert "--undo" in refused.hint
    last = cell.tokens(link, "r1", [1], finish=FinishReason.STOP)
    assert commands(last, UnloadInstance)[0].instance_id == load.instance_id
    cell.tell(DrainRequested(operation_id=OP, node_id=NodeId("n1"), undo=True))
    assert of_kind(cell.invoke(request("r3")), RefuseRequest) == []


def test_a_deploy_is_told_whether_nodes_are_draining_or_not_there() -> None:
    cell = CellUnderTest()
    asked = DeployRequested(operation_id=OP, spec=deployment().spec)

    def told() -> tuple[str, str]:
        reply = only(cell.tell(asked), ReplyError)
        return reply.message, reply.hint

    message, first_hint = told()
    assert message.startswith("no cpu node is up to import ")
    assert message.endswith(": none has joined since the controller started")
    assert first_hint.startswith("one that runs, or that `mesh up` starts, joins within seconds")
    link, _ = cell.join()
    cell.tell(DrainRequested(operation_id=OP, node_id=NodeId("n1")))
    message, hint = told()
    assert message.startswith("no cpu node takes new work to import ")
    assert message.endswith(": 1 draining")
    assert "`mesh drain NODE --undo`" in hint
    cell.tell(NodeDisconnected(link_id=link, reason="it was killed"))
    assert told() == (f"no cpu node is up to import {asked.spec.source}", first_hint)


def test_draining_an_unknown_node_names_the_known_ones() -> None:
    cell = CellUnderTest(deployment())
    cell.join()
    reply = only(cell.tell(DrainRequested(operation_id=OP, node_id=NodeId("nope"))), ReplyError)
    assert reply.error == "NotFound"
    assert "n1" in reply.hint


def test_a_draining_node_stays_draining_when_it_dials_again() -> None:
    cell = CellUnderTest(deployment())
    cell.join()
    cell.tell(DrainRequested(operation_id=OP, node_id=NodeId("n1")))
    cell.join()
    assert cell.core.cell.nodes[NodeId("n1")].state == "draining"


def test_what_a_process_keeps_after_its_last_unload_is_unaccounted() -> None:
    cell, link = one_node(node=replace(hello(), base_bytes=10))
    assert cell.core.snapshot(cell.now_s).nodes[0].unaccounted_bytes == 0, "nothing told yet"
    for rss_bytes, engine_bytes in ((60, 30), (60, 0)):
        told = Heartbeat(rss_bytes=rss_bytes, engine_bytes=engine_bytes, instances=())
        cell.report(link, told)
        (seen,) = cell.core.snapshot(cell.now_s).nodes
        assert seen.unaccounted_bytes == 60 - 10 - engine_bytes


def test_a_node_without_the_policy_file_of_the_rule_is_refused() -> None:
    cell = CellUnderTest(rule=replace(FCFS, rule=OwnRule()))
    for digest, why in (("", "no policy file"), ("fedc", "the digest fedc")):
        _, refused = cell.join(replace(hello(), rule_digest=digest))
        told = only(refused, CloseLink)
        assert told.error == "InvalidInput"
        assert why in told.message
        assert "'own' of a policy file with the digest abcd" in told.message
        assert not cell.core.cell.nodes
    _, joined = cell.join(replace(hello(), rule_digest="abcd"))
    assert only(joined, AcceptLink).rule.turn == RuleName(name="own", digest="abcd")


def test_nodes_are_told_how_long_a_turn_may_be() -> None:
    cell = CellUnderTest(deployment(), limits=CellLimits(turn_s_max=0.25))
    _, joined = cell.join()
    assert only(joined, AcceptLink).rule.turn_s_max == 0.25
