"""What a node or an instance has refused is kept, and forgotten when that may have changed."""

from dataclasses import replace

from mesh.core.controller.instances.pricing import Price
from mesh.core.controller.requests.search import Search, StartNodes
from mesh.core.controller.state.context import EventContext
from mesh.core.controller.state.request import RequestEntry
from mesh.domain.events import (
    CancelRequested,
    DeploymentStored,
    KeepAliveExpired,
    NodeDisconnected,
    ProfileRequested,
    ScaleRequested,
)
from mesh.domain.ids import DeploymentName, InstanceId, NodeId, OperationId, RequestId
from mesh.domain.lifecycle import InstanceState
from mesh.domain.limits import CellLimits
from mesh.domain.messages import InstanceLoaded, LoadInstance, ProfileDone
from mesh.domain.reasons import DeviceKind, Verdict
from mesh.domain.slo import Slo
from mesh.policy.guarded import Guarded
from mesh.policy.registry import policy
from tests.core.admission import SLOW, BusyCell, instance, node, submitted
from tests.core.cells import (
    FOOTPRINT,
    MIB,
    CellUnderTest,
    commands,
    deployment,
    hello,
    one_node,
    request,
)
from tests.support.profiles import PROFILE

A, B, C = DeploymentName("a"), DeploymentName("b"), DeploymentName("c")


def full() -> tuple[CellUnderTest, int, InstanceId]:
    """A node whose memory goes to the instance of `a` that loads; `b` waits for the rest."""
    cell, link = one_node(deployment("a"), deployment("b"), node=hello(memory_bytes=200 * MIB))
    (load,) = commands(cell.invoke(request("a1", of="a")), LoadInstance)
    assert not commands(cell.invoke(request("b1", of="b")), LoadInstance)
    return cell, link, load.instance_id


def test_memory_that_a_load_did_not_take_goes_to_who_waits() -> None:
    cell, link, instance_id = full()
    less = replace(FOOTPRINT, weights_bytes=60 * MIB)
    said = InstanceLoaded(instance_id=instance_id, footprint=less, kv_blocks=20, elapsed_s=0.5)
    (load,) = commands(cell.report(link, said), LoadInstance)
    assert load.deployment == "b"


def test_a_node_that_comes_back_is_asked_again() -> None:
    cell, link, _ = full()
    cell.tell(CancelRequested(request_id=RequestId("a1")))
    cell.tell(NodeDisconnected(link_id=link, reason="test"))
    (load,) = commands(cell.join(hello(memory_bytes=200 * MIB))[1], LoadInstance)
    assert load.deployment == "b"


def test_a_quicker_node_that_joins_gives_those_who_wait_more_time() -> None:
    cell = BusyCell(deployment("a"), deployment("b"), deployment("c"))
    for name, of in (("r1", "a"), ("r2", "b"), ("r3", "c")):
        cell.ask(name, of, max_tokens=4)
    (waiting,) = cell.core.cell.deployments[C].queue
    before = waiting.latest_start
    cell.core.cell.expectations.learn_profile(replace(PROFILE, fingerprint="quick"))
    cell.join(hello("n2", run_id="n2", memory_bytes=MIB, fingerprint="quick"))
    now = waiting.latest_start
    assert before is not None
    assert now is not None
    assert now > before


def test_a_better_profile_lets_in_who_was_refused_for_lack_of_time() -> None:
    limits = CellLimits(delivery_s_max=0.02, kv_tokens_profiled=512)
    cell = CellUnderTest(*(deployment(of) for of in "abc"), limits=limits, profiles=(SLOW,))
    link, _ = cell.join(node("n1", *(replace(instance(of, of), kv_blocks=20) for of in "abc")))
    operation_id = OperationId("op-1")
    cell.tell(ProfileRequested(operation_id=operation_id, name=A, node_id=NodeId("n1")))
    for of in "ab":
        assert submitted(cell.invoke(request(f"{of}1", of=of))) == [(f"{of}1", of)]
    assert submitted(cell.invoke(request("c1", of="c"))) == []
    done = ProfileDone(operation_id=operation_id, profile=PROFILE)
    assert submitted(cell.report(link, done)) == [("c1", "c")]


def scale(cell: CellUnderTest, least: int) -> None:
    operation_id = OperationId(f"scale-{least}")
    cell.tell(ScaleRequested(operation_id=operation_id, name=A, replicas_min=least))
    cell.tell(DeploymentStored(operation_id=operation_id))


def test_a_parked_instance_goes_as_soon_as_a_lower_minimum_lets_it() -> None:
    cell = CellUnderTest(deployment("a"), deployment("b"))
    cell.join(node("n1", replace(instance("a1", "a"), kv_blocks=20), memory_bytes=200 * MIB))
    tiny = replace(FOOTPRINT, weights_bytes=MIB)
    on_n2 = replace(instance("a2", "a"), footprint=tiny, kv_blocks=16)
    cell.join(node("n2", on_n2, memory_bytes=20 * MIB))
    cell.now_s += 1.0
    cell.tell(KeepAliveExpired(instance_id=InstanceId("a1"), idle_since_s=cell.now_s - 1.0))
    scale(cell, 2)
    assert not commands(cell.invoke(request("b1", of="b")), LoadInstance)
    scale(cell, 0)
    assert cell.core.cell.instances[InstanceId("a1")].state is InstanceState.UNLOADING
    assert cell.core.cell.deployments[B].replicas() == 1


def test_an_instance_that_a_minimum_kept_goes_when_another_one_comes() -> None:
    """`a` may be on GPU nodes as well, `b` may not."""
    either = deployment("a", replicas_min=1)
    devices = (DeviceKind.CPU, DeviceKind.GPU)
    either = replace(either, spec=replace(either.spec, devices=devices))
    cell = CellUnderTest(either, deployment("b"))
    cell.join(node("n1", replace(instance("a1", "a"), kv_blocks=20), memory_bytes=200 * MIB))
    cell.join(replace(node("n2"), device=DeviceKind.GPU))
    assert not commands(cell.invoke(request("b1", of="b")), LoadInstance)
    operation_id = OperationId("op-1")
    cell.tell(ProfileRequested(operation_id=operation_id, name=A, node_id=NodeId("n2")))
    cell.retry()
    assert cell.core.cell.instances[InstanceId("a1")].state is InstanceState.UNLOADING


def test_an_event_validates_so_often_and_the_next_one_goes_on_there() -> None:
    """Two nodes have no time for `a`, the third has; that takes three validations."""
    limits = CellLimits(delivery_s_max=0.02, validations_max=2)
    names = "abcde"
    cell = CellUnderTest(*(deployment(of) for of in names), limits=limits, profiles=(SLOW,))
    cell.join(node("n1", instance("a1", "a"), instance("b", "b"), instance("c", "c")))
    cell.join(node("n2", instance("a2", "a"), instance("d", "d"), instance("e", "e")))
    cell.join(node("n3", instance("a3", "a")))
    for of in names[1:]:
        assert submitted(cell.invoke(request(of, of=of))) == [(of, of)]
    assert submitted(cell.invoke(request("r", of="a"))) == []
    assert submitted(cell.retry()) == [("r", "a3")]


def test_what_was_refused_is_kept_for_one_that_waits_and_not_for_one_that_would_move() -> None:
    """It saves the validations of all later looks, until the version of the node changes."""
    cell = CellUnderTest(*(deployment(name) for name in "abc"), profiles=(SLOW,))
    cell.join(node("n1", instance("a", "a"), instance("b", "b")))
    for name in "ab":
        cell.invoke(request(f"{name}1", of=name))
    known, entry = cell.core.cell, cell.core.cell.deployments[C]
    nodes = list(known.nodes.values())
    waiting, moved = (
        RequestEntry(original=request(name, of="c"), slo=Slo(), arrival_s=cell.now_s)
        for name in ("waiting", "moved")
    )

    def validations(by: RequestEntry, before: tuple[Price, ...] | None = None) -> int:
        ctx = EventContext(
            cell=known,
            epoch=1,
            limits=CellLimits(),
            policy=Guarded(policy("llm-mesh"), CellLimits()),
            now_s=cell.now_s,
            validations_left=9,
        )
        by.refusals.try_again()
        Search(
            ctx=ctx, entry=entry, request=by, before=before, start_nodes=StartNodes(lambda: nodes)
        ).first()
        assert by.refusals.verdict is Verdict.TPOT_EXCEEDED
        return 9 - ctx.validations_left

    assert [validations(moved, ()) for _ in range(2)] == [1, 1]
    assert [validations(waiting) for _ in range(3)] == [1, 0, 0]
    nodes[0].touch()
    assert [validations(waiting) for _ in range(2)] == [1, 0]
