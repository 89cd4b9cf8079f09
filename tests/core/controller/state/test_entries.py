"""What a method of an entry changes together: sums, states, who is woken, a node's version."""

from collections.abc import Callable
from dataclasses import replace
from math import inf

import pytest

from mesh.core.controller.state.context import REQUESTS_OF_ONE
from mesh.core.controller.state.node import NodeEntry
from mesh.core.controller.state.operation import OperationEntry
from mesh.domain.ids import DeploymentName, InstanceId, ModelId, OperationId
from mesh.domain.lifecycle import InstanceState, NodeState, RequestState
from mesh.domain.messages import Heartbeat
from mesh.domain.model import ComputePrecision, Size
from mesh.domain.reasons import OperationKind
from mesh.domain.steps import HeldModel, LoadTier
from mesh.memory.station import ReservationKind
from tests.core.cells import MODEL, deployment, hello
from tests.core.controller.state.entries import A, Entries, submit
from tests.support.profiles import PROFILE


def test_an_instance_loses_with_a_request_what_came_with_it() -> None:
    known = Entries()
    instance, first, second = known.instance, known.a_request("r1"), known.a_request("r2")
    for entry in (first, second):
        submit(instance, entry)
    assert (instance.tokens, instance.required_blocks) == (6, 4)
    instance.note_tokens(first, (7, 8), 5.5)
    instance.note_demand(first, 5)
    assert (instance.tokens, instance.required_blocks) == (8, 7)
    assert (first.tokens, first.output_tokens, first.required_blocks) == (5, [7, 8], 5)
    assert (first.prefill_left, second.prefill_left) == (0, 3)
    instance.remove(first)
    assert (instance.tokens, instance.required_blocks) == (3, 2)
    assert list(instance.requests.values()) == [second]


def test_a_request_waits_again_when_it_has_left_its_instance() -> None:
    known = Entries()
    entry = known.a_request()
    submit(known.instance, entry)
    assert (entry.state, entry.instance) == (RequestState.RUNNING, known.instance)
    assert (entry.attempt, entry.due_s, entry.grace_s, entry.submitted_s) == (1, 2.0, 0.0, 5.0)
    known.instance.remove(entry)
    assert (entry.state, entry.instance) == (RequestState.QUEUED, None)
    assert entry.required_blocks == 0
    submit(known.instance, entry)
    assert entry.attempt == 2


def test_a_request_that_is_over_stays_so_when_it_leaves() -> None:
    known = Entries()
    entry = known.a_request()
    submit(known.instance, entry)
    known.cell.remove_request(entry)
    known.instance.remove(entry)
    assert entry.state is RequestState.ENDED
    assert known.cell.requests == {}


def test_those_who_are_refused_are_told_to_come_one_after_another_and_within_bounds() -> None:
    """When an overload is over, nothing is left of it."""
    entry = Entries().deployment

    def told(at_s: float, *, now_s: float) -> float:
        return entry.note_return_at(at_s, 0.5, now_s=now_s, wait_s_max=60.0)

    assert [told(12.0, now_s=10.0) for _ in range(3)] == [12.0, 12.5, 13.0]
    assert [told(inf, now_s=10.0) for _ in range(2)] == [13.5, 14.0], "nobody knows of a place"
    assert [told(12.0, now_s=10.0) for _ in range(1000)][-1] == 70.0
    assert told(102.0, now_s=100.0) == 102.0
    assert told(inf, now_s=200.0) == 200.0


def test_an_iteration_is_under_way_from_the_first_request_to_the_last() -> None:
    known = Entries()
    first, second = known.a_request("r1"), known.a_request("r2")
    submit(known.instance, first, now_s=5.0)
    submit(known.instance, second, now_s=6.0)
    assert known.node.iteration_started_s == 5.0
    known.node.note_iteration(7.0)
    known.instance.remove(first)
    assert known.node.iteration_started_s == 7.0
    known.instance.remove(second)
    assert known.node.iteration_started_s is None


def test_a_deployment_is_left_what_others_did_not_take_of_the_last_minute() -> None:
    node, chat, code = Entries().node, DeploymentName("chat"), DeploymentName("code")
    for name, began_s, ended_s in ((code, 0.0, 5.0), (chat, 10.0, 20.0), (code, 30.0, 48.0)):
        node.iteration_started_s = began_s
        node.note_computed(name, ended_s)
    assert node.left_share(chat, 60.0) == 0.6, "23 s were the other's"
    assert node.left_share(code, 60.0) == 0.85
    assert node.turn_of_others_s(chat, 60.0) == (5.0**2 + 18.0**2) / 23.0
    assert node.left_share(chat, 90.0) == 0.7, "what was more than a minute ago is gone"
    assert node.left_share(chat, 120.0) == 1.0
    assert node.turn_of_others_s(chat, 120.0) == 0.0
    for n in range(100):
        node.iteration_started_s = 120.0 + n
        node.note_computed(DeploymentName(f"rare-{n % 9}") if n % 10 == 9 else code, 121.0 + n)
    assert node.left_share(chat, 220.0) == 0.45, "as much as the one that took most; rare ones less"
    assert len(node.computed) <= 13


def test_a_parked_instance_is_ready_again_with_its_first_request() -> None:
    known = Entries()
    known.instance.advance(InstanceState.PARKED)
    submit(known.instance, known.a_request())
    assert known.instance.state is InstanceState.READY


def changes(known: Entries) -> dict[str, Callable[[], object]]:
    """What may give the node less to compute or more memory."""
    heartbeat = Heartbeat(rss_bytes=1, engine_bytes=1, instances=())
    entry, instance = known.a_request(), known.instance
    submit(instance, entry)
    other, third = known.a_node("n2", 2), known.a_node("n3", 3)
    known.an_instance("a3", third)
    known.cell.turn_node(third, NodeState.DRAINING)
    return {
        "a request left": lambda: instance.remove(entry),
        "it is unloaded": instance.note_unloading,
        "it is gone": lambda: known.cell.remove_instance(instance),
        "its size is another": lambda: instance.note_size(8),
        "it idles": lambda: instance.note_idle(5.0),
        "its profile is better": lambda: instance.use_profile(PROFILE),
        "time has passed": lambda: known.node.note_heartbeat(heartbeat),
        "the node is drained": lambda: known.cell.turn_node(known.node, NodeState.DRAINING),
        "the minimum needs it no more": lambda: known.an_instance("a2", other),
        "another counts again": lambda: known.cell.turn_node(third, NodeState.READY),
        "the minimum is another": lambda: known.deployment.use(deployment(A, replicas_min=1)),
    }


@pytest.mark.parametrize("change", list(changes(Entries())))
def test_whatever_frees_time_or_memory_eases_the_node(change: str) -> None:
    known = Entries()
    apply = changes(known)[change]
    before = known.node.version
    apply()
    assert known.node.version > before


def test_what_is_known_of_a_node_holds_until_its_requests_change() -> None:
    known, asked = Entries(), []
    ctx, first, second = known.context(), known.a_request("r1"), known.a_request("r2")

    def work_out(node: NodeEntry, now_s: float) -> float:
        asked.append(now_s)
        return len(asked)

    submit(known.instance, first)
    assert [ctx.share_of(known.node, work_out) for _ in range(2)] == [1.0, 1.0]
    submit(known.instance, second)
    assert ctx.share_of(known.node, work_out) == 2.0
    known.instance.remove(first)
    assert ctx.share_of(known.node, work_out) == 3.0


def test_a_queue_is_looked_at_when_a_request_enters_it_and_when_one_leaves() -> None:
    known = Entries()
    ctx, first, second = known.context(), known.a_request("r1"), known.a_request("r2")
    for entry in (first, second):
        ctx.enqueue(known.deployment, entry)
    assert ctx.unsettled()
    assert ctx.take_woken() == [known.deployment]
    assert not ctx.unsettled()
    ctx.dequeue(known.deployment, first)
    assert ctx.take_woken() == [known.deployment]
    assert list(known.deployment.queue) == [second]


def test_when_all_are_woken_those_with_a_queue_are_looked_at_once() -> None:
    known = Entries()
    ctx = known.context()
    ctx.enqueue(known.deployment, known.a_request())
    ctx.take_woken()
    ctx.wake_all()
    assert ctx.take_woken() == [known.deployment]
    assert not ctx.unsettled()
    ctx.note_released(known.instance)
    assert ctx.unsettled()
    assert ctx.take_released() == [known.instance]
    assert not ctx.unsettled()


def test_who_has_run_before_goes_ahead_of_those_that_came_later() -> None:
    known = Entries()
    late, early = known.a_request("late", arrival_s=2.0), known.a_request("early", arrival_s=1.0)
    for entry in (late, early):
        known.deployment.enqueue(entry, 3.0)
    assert list(known.deployment.queue) == [early, late]
    assert early.queued_at_s == 3.0


def test_an_instance_is_kept_until_the_last_operation_releases_it() -> None:
    known = Entries()
    first, second = (
        OperationEntry(operation_id=OperationId(name), kind=OperationKind.PROFILE, name=A)
        for name in ("op-1", "op-2")
    )
    for operation in (first, second, first):
        operation.keep(known.instance)
    assert first.release() is known.instance
    kept = [known.instance.profiling]
    second.release()
    kept.append(known.instance.profiling)
    assert kept == [True, False]
    assert second.release() is None


def test_an_instance_that_is_gone_is_in_no_book() -> None:
    known = Entries()
    known.cell.remove_instance(known.instance)
    books = (known.cell.instances, known.node.instances, known.deployment.instances)
    assert not any(books)
    assert len(known.deployment.candidates) == 0


def test_a_load_that_ended_well_forgives_its_node_and_uses_up_what_slept() -> None:
    known = Entries()
    node, model = (
        known.node,
        HeldModel(model_id=MODEL.model_id, tier=LoadTier.HOST, context_tokens_max=512),
    )
    known.deployment.note_load_failure(node.node_id, "broke", 5.0, known.context().limits)
    assert known.deployment.paused_until_s > 5.0
    known.deployment.note_loaded()
    assert (known.deployment.paused_until_s, known.deployment.avoided) == (0.0, {})
    stored = replace(model, tier=LoadTier.DISK, context_tokens_max=0)
    said = Heartbeat(rss_bytes=1, engine_bytes=1, instances=(), models=(stored, model))
    node.note_heartbeat(said)
    assert node.tier_of(deployment(A)) is LoadTier.HOST
    node.note_woken(model)
    assert node.tier_of(deployment(A)) is LoadTier.DISK


def test_a_model_comes_from_the_nearest_tier_that_its_node_has_told_of() -> None:
    known = Entries()
    node, wanted = known.a_node("n2", 2), deployment(A)
    stored = HeldModel(model_id=MODEL.model_id, tier=LoadTier.DISK)
    for_another = replace(stored, tier=LoadTier.PREPARED, context_tokens_max=256)
    for_it = replace(for_another, context_tokens_max=512)

    def tier(*models: HeldModel) -> LoadTier:
        node.note_heartbeat(Heartbeat(rss_bytes=1, models=models))
        return node.tier_of(wanted)

    assert node.tier_of(wanted) is LoadTier.DISK, "it has not said"
    assert tier() is LoadTier.REMOTE
    node.note_stored(MODEL.model_id)
    assert node.tier_of(wanted) is LoadTier.DISK
    assert tier(stored, for_another) is LoadTier.DISK
    assert tier(stored, for_another, for_it) is LoadTier.PREPARED
    node.note_heartbeat(Heartbeat(rss_bytes=1))
    assert node.tier_of(wanted) is LoadTier.PREPARED, "as it said"
    assert tier(for_it, stored) is LoadTier.PREPARED
    other = replace(stored, model_id=ModelId("other"))
    assert tier(other) is LoadTier.REMOTE


def test_what_a_model_is_computed_in_changes_nothing_of_what_the_store_has() -> None:
    """But a compiled graph is for the precision that it was compiled in."""
    node, wanted = Entries().node, deployment(A)
    wanted = replace(wanted, model=MODEL.computed_in(ComputePrecision.BF16))
    stored = HeldModel(model_id=MODEL.model_id, tier=LoadTier.DISK)
    for_it = replace(stored, tier=LoadTier.PREPARED, context_tokens_max=512)
    node.note_heartbeat(Heartbeat(rss_bytes=1, models=(stored, for_it)))
    assert node.tier_of(wanted) is LoadTier.DISK
    node.note_heartbeat(Heartbeat(rss_bytes=1, models=()))
    assert node.tier_of(wanted) is LoadTier.REMOTE


def test_a_node_says_what_it_has_when_it_joins() -> None:
    stored = HeldModel(model_id=MODEL.model_id, tier=LoadTier.DISK)
    joins = replace(Entries().node, hello=replace(hello(), models=(stored,)))
    assert joins.tier_of(deployment(A)) is LoadTier.DISK
    without = replace(Entries().node, hello=replace(hello(), models=()))
    assert without.tier_of(deployment(A)) is LoadTier.REMOTE


@pytest.mark.parametrize(
    ("state", "tier"),
    [
        (InstanceState.READY, LoadTier.HOST),
        (InstanceState.PARKED, LoadTier.HOST),
        (InstanceState.UNLOADING, LoadTier.DISK),
    ],
)
def test_a_load_shares_with_an_instance_of_its_kind_that_is_loaded_and_stays(
    state: InstanceState, tier: LoadTier
) -> None:
    known = Entries()
    node, instance = known.node, known.instance
    instance.state = state
    assert node.tier_of(deployment(A)) is LoadTier.DISK, "an engine that does not share"
    node.hello = replace(node.hello, shares_weights=True)
    assert node.tier_of(deployment(A)) is tier
    instance.context_tokens_max = 256
    assert node.tier_of(deployment(A)) is LoadTier.DISK


def test_a_load_shares_with_one_that_runs_or_has_just_ended_and_not_with_one_that_waits() -> None:
    known = Entries()
    node, instance = known.node, known.instance
    node.hello = replace(node.hello, shares_weights=True)
    instance.state = InstanceState.LOADING
    assert node.tier_of(deployment(A)) is LoadTier.HOST, "its end is being told"
    ahead, name = InstanceId("ahead"), instance.instance_id
    assert node.tier_of(deployment(A), without=(name,)) is LoadTier.DISK, "it is that load itself"
    assert node.station.issue(ReservationKind.LOAD, ahead, Size(1), 1.0)
    assert not node.station.issue(ReservationKind.LOAD, name, Size(1), 1.0)
    assert node.tier_of(deployment(A)) is LoadTier.DISK
    assert node.station.done(ahead, Size(1))
    assert node.tier_of(deployment(A)) is LoadTier.HOST


def test_the_pause_after_failed_loads_doubles_up_to_a_bound() -> None:
    known = Entries()
    limits = replace(known.context().limits, load_retry_s=1.0, load_retry_doublings_max=2)
    pauses_s = []
    for _ in range(4):
        known.deployment.note_load_failure(known.node.node_id, "broke", 5.0, limits)
        pauses_s.append(known.deployment.paused_until_s - 5.0)
    assert pauses_s == [1.0, 2.0, 4.0, 4.0]
    known.cell.note_served(known.deployment, 3)
    assert known.deployment.load_failures == 0


def test_a_validation_of_a_node_with_many_requests_counts_as_several_and_none_is_owed() -> None:
    known, other = Entries(), Entries().node
    for n in range(2 * REQUESTS_OF_ONE):
        submit(known.instance, known.a_request(f"r{n}"))
    ctx = known.context()
    ctx.note_validation(other)
    assert ctx.validations_left == 8
    ctx.note_validation(known.node)
    assert ctx.validations_left == 5
    ctx.note_validations(6)
    assert ctx.validations_left == 0
