"""The controller core takes into its books what nodes say they have, and no more than that."""

from dataclasses import replace

import pytest

from mesh.core.controller.state.instance import InstanceEntry
from mesh.domain.actions import ControllerAction, RefuseRequest, SetTimer
from mesh.domain.events import (
    CancelRequested,
    DeploymentStored,
    DrainRequested,
    KeepAliveExpired,
    LoadExpired,
    OperationCancelled,
    ProfileRequested,
    RetryLoadDue,
    ScaleRequested,
)
from mesh.domain.ids import DeploymentName, InstanceId, NodeId, OperationId, RequestId
from mesh.domain.lifecycle import InstanceState
from mesh.domain.limits import CellLimits
from mesh.domain.messages import (
    AbortRequest,
    Heartbeat,
    InstanceGone,
    InstanceLoaded,
    InstanceReport,
    LoadFailed,
    LoadInstance,
    ProfileInstance,
    RequestReturned,
    ResizeKv,
    SubmitRequest,
    UnloadInstance,
    UseProfile,
)
from mesh.domain.model import Footprint
from mesh.domain.reasons import FinishReason
from tests.core.cells import (
    FOOTPRINT,
    MIB,
    CellUnderTest,
    commands,
    deployment,
    hello,
    instance_report,
    of_kind,
    one_node,
    request,
)
from tests.core.controller.instances.test_kv_cache import (
    LIMITS,
    PATIENT,
    MemoryCell,
    heard,
    only_one,
    with_one,
)

OTHER = Footprint(weights_bytes=50 * MIB, kv_block_bytes=2 * MIB, block_tokens=16)


def reported(
    name: str = "a-0-1", of: str = "a", *, context: int = 512, kv_blocks: int = 9
) -> InstanceReport:
    return instance_report(
        instance_id=InstanceId(name),
        deployment=DeploymentName(of),
        kv_blocks=kv_blocks,
        context_tokens_max=context,
    )


def entry(cell: CellUnderTest, name: str = "a-0-1") -> InstanceEntry:
    return cell.core.cell.instances[InstanceId(name)]


def test_a_context_counts_for_instances_that_have_it_alone() -> None:
    """What an instance of one shape has shown holds for another context without its tables."""
    stated = replace(FOOTPRINT, context_token_bytes=MIB, shared_bytes=80 * MIB)
    long, short = (
        replace(deployment(name), context_tokens_max=tokens, footprints=(("scripted", stated),))
        for name, tokens in (("long", 512), ("short", 32))
    )
    cell, link = one_node(long, short, node=hello(memory_bytes=800 * MIB))
    (load,) = commands(cell.invoke(request("r1", of="long")), LoadInstance)
    node = cell.core.cell.nodes[NodeId("n1")]
    assert node.station.promised_bytes == (100 + 512 + load.kv_blocks) * MIB
    said = InstanceLoaded(
        instance_id=load.instance_id,
        footprint=replace(stated, weights_bytes=110 * MIB).at_context(512),
        kv_blocks=load.kv_blocks,
        elapsed_s=0.5,
    )
    cell.report(link, said)
    assert node.station.promised_bytes == (110 + 512 + load.kv_blocks) * MIB
    found = node.footprint_of(short)
    assert (found.weights_bytes, found.shared_bytes) == (142 * MIB, 112 * MIB)
    (load,) = commands(cell.invoke(request("r2", of="short")), LoadInstance)
    assert load.context_tokens_max == 32


@pytest.mark.parametrize(("base", "capacity"), [(0, 300), (100, 200), (400, 0)])
def test_what_an_agent_takes_before_any_instance_is_not_for_instances(
    base: int, capacity: int
) -> None:
    cell = CellUnderTest(deployment("a"))
    cell.join(replace(hello(memory_bytes=300 * MIB), base_bytes=base * MIB))
    assert cell.core.cell.nodes[NodeId("n1")].capacity_bytes == capacity * MIB


def test_what_a_process_turns_out_to_hold_by_itself_is_not_for_instances_either() -> None:
    cell, link = one_node(
        deployment("a"), node=replace(hello(memory_bytes=300 * MIB), base_bytes=100 * MIB)
    )
    known = cell.core.cell.nodes[NodeId("n1")]
    for said, capacity in ((0, 200), (90, 200), (120, 180), (110, 180), (400, 0)):
        cell.report(link, Heartbeat(rss_bytes=1, base_bytes=said * MIB))
        assert known.capacity_bytes == capacity * MIB
        assert known.base_bytes == max(said, 100, 300 - capacity) * MIB


def test_the_next_load_of_a_shape_is_booked_by_what_the_last_one_said() -> None:
    """Also of another deployment, whose engine has stated more."""
    cell = MemoryCell("a", "b", kv_blocks=100, weights=2)
    load = only_one(cell.ask("a1", "a"), LoadInstance)
    less = replace(FOOTPRINT, weights_bytes=FOOTPRINT.weights_bytes - 2 * MIB)
    said = InstanceLoaded(instance_id=load.instance_id, footprint=less, kv_blocks=6, elapsed_s=0.1)
    cell.report(cell.link, said)
    before_bytes = cell.station.promised_bytes
    other = only_one(cell.ask("b1", "b"), LoadInstance)
    added_bytes = cell.station.promised_bytes - before_bytes
    assert added_bytes == less.instance_bytes(other.kv_blocks)


def test_an_instance_is_booked_as_large_as_its_engine_says() -> None:
    cell = MemoryCell("a", kv_blocks=100)
    load = only_one(cell.ask("a1", "a"), LoadInstance)
    cell.tell(CancelRequested(request_id=RequestId("a1")))
    said = InstanceLoaded(instance_id=load.instance_id, footprint=OTHER, kv_blocks=6, elapsed_s=0.1)
    cell.report(cell.link, said)
    instance = cell.core.cell.instances[load.instance_id]
    assert (instance.footprint, instance.kv_blocks) == (OTHER, 6)
    assert cell.station.tracked_bytes == (50 + 6 * 2) * MIB


def test_an_instance_that_nobody_awaits_any_more_is_unloaded() -> None:
    cell = MemoryCell("a", kv_blocks=100)
    said = InstanceLoaded(
        instance_id=InstanceId("a-0-9"), footprint=FOOTPRINT, kv_blocks=6, elapsed_s=0.1
    )
    assert only_one(cell.report(cell.link, said), UnloadInstance).instance_id == "a-0-9"


def test_an_instance_whose_request_went_away_while_it_loaded_is_idle_from_the_start() -> None:
    cell = MemoryCell("a", kv_blocks=100)
    load = only_one(cell.ask("a1", "a"), LoadInstance)
    cell.tell(CancelRequested(request_id=RequestId("a1")))
    timers = of_kind(cell.loaded(cell.link, load.instance_id), SetTimer)
    assert [t.timer for t in timers if isinstance(t.timer, KeepAliveExpired)]


def test_a_load_has_a_time_limit_and_its_late_failure_is_not_another_one() -> None:
    cell = MemoryCell("a", kv_blocks=100)
    asked = cell.ask("a1", "a")
    load = only_one(asked, LoadInstance)
    limit = LoadExpired(instance_id=load.instance_id)
    assert [t.at_s for t in of_kind(asked, SetTimer) if t.timer == limit] == [
        cell.now_s + LIMITS.load_s_max
    ]
    cell.tell(limit)
    late = LoadFailed(instance_id=load.instance_id, error="OutOfMemory", message="no room")
    cell.report(cell.link, late)
    assert cell.core.cell.deployments[DeploymentName("a")].load_failures == 1
    assert cell.station.promised_bytes == 0


def test_a_load_on_a_node_that_is_drained_is_given_up_and_one_that_goes_is_told_once() -> None:
    cell = MemoryCell("a", kv_blocks=100)
    load = only_one(cell.ask("a1", "a"), LoadInstance)
    drain = DrainRequested(operation_id=OperationId("op"), node_id=NodeId("n1"))
    assert only_one(cell.tell(drain), UnloadInstance).instance_id == load.instance_id
    assert commands(cell.tell(LoadExpired(instance_id=load.instance_id)), UnloadInstance) == []
    assert commands(cell.tell(drain), UnloadInstance) == []


def test_a_node_where_the_last_load_failed_comes_after_those_that_have_room() -> None:
    cell = CellUnderTest(deployment("a", slo=PATIENT), limits=LIMITS)
    links = {name: cell.join(hello(name))[0] for name in ("n1", "n2")}
    cell.invoke(request("a1", of="a"))
    (instance,) = cell.core.cell.instances.values()
    failed = LoadFailed(instance_id=instance.instance_id, error="TornModel", message="torn")
    cell.report(links[instance.node.node_id], failed)
    cell.now_s += LIMITS.load_retry_s
    cell.tell(RetryLoadDue(name=DeploymentName("a")))
    (again,) = cell.core.cell.instances.values()
    assert again.node is not instance.node


def test_a_reported_instance_is_booked_with_its_cache_and_becomes_idle() -> None:
    cell = CellUnderTest(deployment("a"), limits=LIMITS)
    _, actions = cell.join(replace(hello(), instances=(reported(kv_blocks=9),)))
    assert (entry(cell).kv_blocks, entry(cell).promised_blocks) == (9, 9)
    assert len(commands(actions, UseProfile)) == 1
    assert [t for t in of_kind(actions, SetTimer) if isinstance(t.timer, KeepAliveExpired)]


def test_an_instance_of_another_context_length_is_unloaded() -> None:
    cell = CellUnderTest(deployment("a"), limits=LIMITS)
    _, actions = cell.join(replace(hello(), instances=(reported(context=256),)))
    assert only_one(actions, UnloadInstance).instance_id == "a-0-1"


def test_of_two_instances_of_a_deployment_on_a_node_one_stays() -> None:
    cell = CellUnderTest(deployment("a"), limits=LIMITS)
    both = (reported("a-0-1"), reported("a-0-2"))
    _, actions = cell.join(replace(hello(), instances=both))
    assert only_one(actions, UnloadInstance).instance_id == "a-0-2"


def test_an_instance_that_another_node_has_as_well_is_unloaded_there() -> None:
    cell = CellUnderTest(deployment("a"), limits=LIMITS)
    cell.join(replace(hello("n1"), instances=(reported(),)))
    _, actions = cell.join(replace(hello("n2"), instances=(reported(),)))
    assert only_one(actions, UnloadInstance).instance_id == "a-0-1"
    assert entry(cell).node.node_id == "n1"


def test_a_draining_instance_that_its_node_does_not_list_any_more_is_given_up() -> None:
    cell, instance = with_one(100)
    instance.state = InstanceState.DRAINING
    said = Heartbeat(rss_bytes=1, engine_bytes=1, instances=())
    assert only_one(cell.report(cell.link, said), UnloadInstance)


def test_a_draining_instance_goes_with_its_last_request_and_not_before() -> None:
    cell, instance = with_one(100)
    cell.ask("a2", "a")
    cell.resized(instance, instance.promised_blocks)
    instance.state = InstanceState.DRAINING
    assert commands(cell.finish("a1"), UnloadInstance) == []
    assert only_one(cell.finish("a2"), UnloadInstance)


def test_beyond_the_maximum_the_smaller_instance_goes_once_its_request_has_ended() -> None:
    cell = CellUnderTest(deployment("a", slo=PATIENT), limits=replace(LIMITS, batch_max=2))
    links = {name: cell.join(hello(name))[0] for name in ("n1", "n2")}
    for name in ("a1", "a2", "a3"):
        cell.invoke(request(name, of="a"))
    for instance in list(cell.core.cell.instances.values()):
        cell.loaded(links[instance.node.node_id], instance.instance_id)
    small = min(cell.core.cell.instances.values(), key=lambda i: i.batch)
    (held,) = small.requests
    asked = ScaleRequested(
        operation_id=OperationId("op"), name=DeploymentName("a"), replicas_min=0, replicas_max=1
    )
    cell.tell(asked)
    stored = cell.tell(DeploymentStored(operation_id=OperationId("op")))
    assert commands(stored, UnloadInstance) == []
    link = links[small.node.node_id]
    ended = cell.tokens(link, held, [7], finish=FinishReason.STOP)
    assert only_one(ended, UnloadInstance).instance_id == small.instance_id


def test_a_request_that_has_gone_does_not_make_a_cache_grow_by_starving() -> None:
    cell, instance = with_one(100)
    cell.ask("a2", "a")
    cell.resized(instance, 7, error="OutOfMemory")
    cell.now_s += LIMITS.grow_retry_s
    assert commands(cell.starved(instance, "a9"), ResizeKv) == []
    assert commands(cell.starved(instance, "a2"), ResizeKv)


def test_of_those_with_the_same_headroom_the_last_name_gives_way() -> None:
    cell, instance = with_one(100)
    cell.ask("a2", "a")
    cell.resized(instance, 7, error="OutOfMemory")
    first, second = instance.requests.values()
    assert first.due_s == second.due_s
    assert only_one(cell.starved(instance, "a1"), AbortRequest).request_id == "a2"


def test_what_a_node_gives_back_of_an_earlier_attempt_changes_nothing() -> None:
    cell, instance = with_one(100)
    held = instance.requests[RequestId("a1")]
    returned = RequestReturned(request_id=RequestId("a1"), attempt=1, error="E", message="broke")
    assert commands(cell.report(cell.link, returned), SubmitRequest)
    assert held.attempt == 2
    assert cell.report(cell.link, returned) == []
    assert held.instance is instance


def test_who_waits_for_a_full_instance_is_not_refused_for_a_node_that_is_too_small() -> None:
    limits = replace(LIMITS, batch_max=1)
    cell, link = one_node(deployment("a", slo=PATIENT), limits=limits, node=hello("n1"))
    cell.invoke(request("a1", of="a"))
    (instance,) = cell.core.cell.instances
    cell.loaded(link, instance)
    cell.join(hello("n2", memory_bytes=50 * MIB))
    assert not of_kind(cell.invoke(request("a2", of="a")), RefuseRequest)
    assert len(cell.core.cell.deployments[DeploymentName("a")].queue) == 1


def test_where_nothing_is_parked_an_instance_goes_after_its_keep_alive() -> None:
    cell = MemoryCell("a", kv_blocks=100, of=replace(LIMITS, parked_s_max=0.0))
    instance = cell.load("a")
    cell.idle("a1")
    assert only_one(cell.park(instance), UnloadInstance)


def waits_for_room(kv_blocks: int) -> tuple[MemoryCell, InstanceEntry]:
    """`a` is to grow from 7 blocks to 13, and so `b` has no room for 5 beside it."""
    cell = MemoryCell("a", "b", kv_blocks=kv_blocks, weights=2)
    instance = cell.load("a")
    cell.ask("a2", "a")
    cell.ask("b1", "b")
    assert len(cell.core.cell.instances) == 1
    return cell, instance


def test_what_a_growth_that_failed_gives_back_is_given_away_at_once() -> None:
    cell, instance = waits_for_room(16)
    failed = cell.resized(instance, 7, error="OutOfMemory")
    assert only_one(failed, LoadInstance).deployment == "b"


def test_a_heartbeat_says_nothing_of_a_resize_that_is_under_way() -> None:
    cell, instance = waits_for_room(16)
    ahead = replace(heard(instance)[0], kv_blocks=13)
    cell.report(cell.link, Heartbeat(rss_bytes=1, engine_bytes=1, instances=(ahead,)))
    assert instance.kv_blocks == 7


def test_what_a_heartbeat_says_is_free_is_given_away_at_once() -> None:
    cell, instance = waits_for_room(16)
    cell.resized(instance, 13)
    smaller = replace(heard(instance)[0], kv_blocks=10)
    said = Heartbeat(rss_bytes=1, engine_bytes=1, instances=(smaller,))
    assert only_one(cell.report(cell.link, said), LoadInstance).deployment == "b"


def overpromised(cell: MemoryCell) -> None:
    """`a` should have shrunk from 20 blocks to 3; it could not, and now it needs them again."""
    a = next(i for i in cell.core.cell.instances.values() if i.deployment == "a")
    cell.resized(a, 20, error="OutOfMemory")
    cell.ask("a2", "a", 400)
    assert a.requests
    assert cell.station.free_bytes < 0


def test_growth_into_memory_that_never_came_is_taken_back_and_somebody_gives_way() -> None:
    cell = MemoryCell("a", "b", kv_blocks=30, weights=2)
    b = cell.load("b")
    cell.idle("b1")
    cell.load("a", prompt=400)
    cell.finish("a1")
    cell.ask("b2", "b", 300)
    overpromised(cell)
    cell.report(
        cell.link,
        Heartbeat(rss_bytes=1, engine_bytes=1, instances=heard(*cell.core.cell.instances.values())),
    )
    assert (b.promised_blocks, cell.station.waiting()) == (3, ())
    assert only_one(cell.starved(b, "b2"), AbortRequest).request_id == "b2"


def test_a_load_into_memory_that_never_came_is_taken_back_and_its_request_waits() -> None:
    cell = MemoryCell("a", "b", kv_blocks=23, weights=2)
    cell.load("a", prompt=400)
    cell.finish("a1")
    assert commands(cell.ask("b1", "b"), LoadInstance) == []
    (load,) = cell.station.waiting()
    overpromised(cell)
    listed = heard(*(i for i in cell.core.cell.instances.values() if i.deployment == "a"))
    cell.report(cell.link, Heartbeat(rss_bytes=1, engine_bytes=1, instances=listed))
    assert load.instance_id not in cell.core.cell.instances
    assert len(cell.core.cell.deployments[DeploymentName("b")].queue) == 1
    assert cell.station.promised_bytes <= cell.station.capacity_bytes


def test_the_room_of_a_load_that_never_began_is_given_away_at_once() -> None:
    """`b` waits for `a` to go, and `c` for room; `b` takes too long."""
    cell = MemoryCell("a", "b", "c", kv_blocks=20)
    first = cell.load("a")
    cell.idle("a1")
    cell.ask("b1", "b")
    cell.ask("c1", "c")
    (waiting,) = cell.station.waiting()
    cell.tell(LoadExpired(instance_id=waiting.instance_id))
    (waiting,) = cell.station.waiting()
    assert cell.core.cell.instances[waiting.instance_id].deployment == "c"
    gone = cell.report(cell.link, InstanceGone(instance_id=first.instance_id))
    assert only_one(gone, LoadInstance).deployment == "c"


LARGE = FOOTPRINT.blocks_for(LIMITS.kv_tokens_profiled)


def profile(cell: MemoryCell, operation: str) -> list[ControllerAction]:
    return cell.tell(
        ProfileRequested(
            operation_id=OperationId(operation), name=DeploymentName("a"), node_id=None
        )
    )


def idle_cell(*names: str, of: CellLimits = LIMITS) -> tuple[MemoryCell, InstanceEntry]:
    cell = MemoryCell("a", *names, kv_blocks=600, of=of)
    instance = cell.load("a")
    cell.idle("a1")
    return cell, instance


def test_an_instance_whose_cache_grows_for_a_profile_is_not_parked_meanwhile() -> None:
    cell, instance = idle_cell()
    assert only_one(profile(cell, "p1"), ResizeKv).kv_blocks == LARGE
    assert commands(cell.park(instance), ResizeKv) == []
    assert commands(cell.resized(instance, LARGE), ProfileInstance)


def test_it_gives_no_place_to_another_and_does_not_shrink_when_a_request_ends() -> None:
    cell, instance = idle_cell("b")
    profile(cell, "p1")
    cell.ask("a2", "a")
    assert commands(cell.finish("a2"), ResizeKv) == []
    assert commands(cell.ask("b1", "b"), UnloadInstance) == []
    resized = cell.resized(instance, LARGE)
    assert commands(resized, ProfileInstance)
    assert commands(resized, ResizeKv) == []


def test_a_profile_given_up_before_it_began_leaves_the_next_one_its_large_cache() -> None:
    cell, instance = idle_cell()
    profile(cell, "p1")
    cell.tell(OperationCancelled(operation_id=OperationId("p1")))
    assert not instance.profiling
    assert only_one(cell.resized(instance, LARGE), ResizeKv).kv_blocks == 3, "back to what it was"
    cell.resized(instance, 3)
    cell.park(instance)
    cell.resized(instance, 1)
    assert instance.state is InstanceState.PARKED
    assert only_one(profile(cell, "p2"), ResizeKv).kv_blocks == LARGE
    assert str(instance.state) == "ready", "not parked"
    assert commands(cell.resized(instance, LARGE), ProfileInstance)


def test_a_growth_that_fails_is_measured_with_what_there_is() -> None:
    cell, instance = idle_cell()
    profile(cell, "p1")
    failed = cell.resized(instance, 3, error="OutOfMemory")
    assert commands(failed, ProfileInstance)
    assert commands(failed, ResizeKv) == []


def test_no_more_is_asked_for_than_a_full_batch_can_use() -> None:
    cell, _ = idle_cell(of=replace(LIMITS, batch_max=2))
    assert only_one(profile(cell, "p1"), ResizeKv).kv_blocks == 32
