"""The baselines of ServerlessLLM: an instance has its partition of a node for itself."""

from dataclasses import replace

from mesh.domain.actions import RefuseRequest, ReplyError
from mesh.domain.events import KeepAliveExpired, ProfileRequested
from mesh.domain.ids import DeploymentName, InstanceId, NodeId, OperationId
from mesh.domain.lifecycle import InstanceState
from mesh.domain.messages import InstanceLoaded, LoadInstance, SubmitRequest, UnloadInstance
from mesh.domain.profile import Grid
from mesh.domain.reasons import DeviceKind, FinishReason
from tests.core.admission import instance, node
from tests.core.cells import (
    FOOTPRINT,
    MIB,
    CellUnderTest,
    commands,
    deployment,
    hello,
    of_kind,
    only,
    request,
)
from tests.support.profiles import profile

SLOW = profile(decode=Grid(rows=(1, 101), columns=(0,), seconds=((0.1,), (10.1,))))
"""A decode takes 0.1 s for each request: two keep a TPOT SLO of 0.25 s, one on half a node."""


def baseline(rule: str = "sllm+cpu") -> tuple[CellUnderTest, int]:
    cell = CellUnderTest(deployment("a"), deployment("b"), profiles=(SLOW,), rule=rule)
    return cell, cell.join()[0]


def load_of(cell: CellUnderTest, link: int, of: str) -> LoadInstance:
    """For a request; it is done at once."""
    return cell.bring_up(link, request(f"r-{of}", of=of))


def test_an_instance_gets_the_whole_node_and_the_next_waits_for_another() -> None:
    cell, _ = baseline()
    load = only(commands(cell.invoke(request("r1", of="a")), LoadInstance), LoadInstance)
    assert (load.kv_blocks, load.batch_max) == (924, 2)
    assert not commands(cell.invoke(request("r2", of="b")), LoadInstance)
    cell.join(hello("n2"))
    first = cell.core.cell.instances[load.instance_id].node.node_id
    others = [i.node.node_id for i in cell.core.cell.instances.values() if i.deployment == "b"]
    assert (first, others) == ("n1", ["n2"])


def test_a_partition_is_what_the_node_s_own_footprint_leaves_of_it() -> None:
    """One of two equal nodes has seen instances take less than is stated."""
    cell, link = baseline()
    load = only(commands(cell.invoke(request("r1", of="a")), LoadInstance), LoadInstance)
    less = replace(FOOTPRINT, weights_bytes=FOOTPRINT.weights_bytes - 20 * MIB)
    cell.report(
        link,
        InstanceLoaded(
            instance_id=load.instance_id,
            footprint=less,
            kv_blocks=load.kv_blocks,
            elapsed_s=0.5,
        ),
    )
    cell.join(hello("n2"))
    (other,) = commands(cell.invoke(request("r2", of="b")), LoadInstance)
    assert other.kv_blocks == 924


def test_it_takes_no_more_requests_than_its_node_can_serve_and_more_go_to_another_node() -> None:
    cell, link = baseline()
    cell.join(hello("n2"))
    cell.bring_up(link, request("r1", of="a"))
    assert commands(cell.invoke(request("r2", of="a")), SubmitRequest)
    third = cell.invoke(request("r3", of="a"))
    assert not commands(third, SubmitRequest)
    assert len(commands(third, LoadInstance)) == 1


def test_two_halves_of_a_node_hold_two_deployments() -> None:
    cell, link = baseline("sllm+cpu+share")
    loads = [load_of(cell, link, of) for of in "ab"]
    assert [(load.kv_blocks, load.batch_max) for load in loads] == [(412, 1), (412, 1)]


def test_an_idle_instance_goes_after_its_keep_alive_and_is_not_parked() -> None:
    cell, link = baseline()
    load = cell.bring_up(link, request("r1", of="a"))
    done = cell.tokens(link, "r1", [7], finish=FinishReason.STOP)
    assert not commands(done, UnloadInstance)
    idle = cell.core.cell.instances[load.instance_id]
    expired = KeepAliveExpired(instance_id=idle.instance_id, idle_since_s=idle.idle_since_s)
    cell.now_s += 1.0
    assert only(commands(cell.tell(expired), UnloadInstance), UnloadInstance)
    assert idle.state is InstanceState.UNLOADING


def test_a_request_that_finds_no_place_is_refused_when_its_first_token_would_be_late() -> None:
    cell, _ = baseline()
    cell.invoke(request("r1", of="a"))
    cell.invoke(request("r2", of="b"))
    cell.now_s += 1.0
    assert not of_kind(cell.retry(), RefuseRequest)
    cell.now_s += 1.0
    assert only(cell.retry(), RefuseRequest).request_id == "r2"


def test_without_cpu_nodes_there_is_no_node_for_it() -> None:
    cell, _ = baseline("sllm")
    assert only(cell.invoke(request("r1", of="a")), RefuseRequest).reason == "no_node"
    spec = cell.core.cell.deployments[request(of="a").deployment].spec
    cell.core.cell.deployments[spec.name].spec = replace(spec, devices=(DeviceKind.GPU,))
    cell.join(replace(hello("g1", memory_bytes=1024 * MIB), device=DeviceKind.GPU))
    assert len(commands(cell.invoke(request("r2", of="a")), LoadInstance)) == 1


def test_nodes_of_the_same_memory_are_cut_by_what_each_can_compute() -> None:
    """n2 takes ten times as long, so that half of it would not do for a request."""
    slower = Grid(rows=(1, 101), columns=(0,), seconds=((0.2,), (20.2,)))
    slow = profile(fingerprint="slow", decode=slower)
    cell = CellUnderTest(
        *(deployment(name) for name in "abc"), profiles=(SLOW, slow), rule="sllm+cpu+share"
    )
    link, _ = cell.join()
    cell.join(hello("n2", run_id="n2", fingerprint="slow"))
    loads = [load_of(cell, link, of) for of in "abc"]
    assert [load.kv_blocks for load in loads] == [412, 412, 924]


def test_an_instance_that_a_node_brings_along_takes_no_more_than_its_part_can_serve() -> None:
    cell = CellUnderTest(deployment("a"), profiles=(SLOW,), rule="sllm+cpu")
    cell.join(node("n1", instance("a", "a"), memory_bytes=1024 * MIB))
    assert cell.core.cell.instances[InstanceId("a")].batch_max == 2


def test_nodes_that_a_policy_does_not_use_keep_no_instance_and_measure_nothing() -> None:
    cell = CellUnderTest(deployment("a"), profiles=(SLOW,), rule="sllm")
    _, joined = cell.join(node("n1", instance("a", "a")))
    assert only(commands(joined, UnloadInstance), UnloadInstance).instance_id == "a"
    for on in (None, NodeId("n1")):
        asked = ProfileRequested(
            operation_id=OperationId("op-1"), name=DeploymentName("a"), node_id=on
        )
        message = only(cell.tell(asked), ReplyError).message
        assert "room" not in message
