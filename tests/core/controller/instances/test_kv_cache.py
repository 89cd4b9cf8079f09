"""The controller core on memory: who gets how much KV cache, what waits for what, who gives way."""

from collections.abc import Sequence
from dataclasses import replace
from typing import TypeVar

import pytest

from mesh.core.controller.state.instance import InstanceEntry
from mesh.domain.actions import (
    ControllerAction,
    DeliverTokens,
    RefuseRequest,
    SendCommand,
    SetTimer,
    StoreDeployment,
    StoreHistory,
)
from mesh.domain.events import DeploymentStored, KeepAliveExpired, LoadExpired, ScaleRequested
from mesh.domain.history import OutputHistory
from mesh.domain.ids import DeploymentName, InstanceId, NodeId, OperationId, RequestId
from mesh.domain.lifecycle import InstanceState
from mesh.domain.limits import CellLimits
from mesh.domain.messages import (
    AbortRequest,
    Heartbeat,
    InstanceGone,
    InstanceLoaded,
    InstanceReport,
    KvResized,
    LoadFailed,
    LoadInstance,
    ResizeKv,
    SubmitRequest,
    TokensReport,
    UnloadInstance,
)
from mesh.domain.reasons import FinishReason, RefusalReason
from mesh.domain.slo import Slo
from mesh.memory.station import ReservationStation
from mesh.policy.interface import Policy
from mesh.policy.llm_mesh import LLM_MESH, LlmMesh
from mesh.policy.views import CellView, InstanceView, RequestView
from tests.core import admission
from tests.core.cells import (
    FOOTPRINT,
    MIB,
    CellUnderTest,
    commands,
    deployment,
    hello,
    instance_report,
    of_kind,
    only,
    request,
)

A = TypeVar("A")
PATIENT = Slo(ttft_s=60.0)
LIMITS = CellLimits(delivery_s_max=0.02, kv_tokens_least=64)
"""Two blocks at least, so that requests make the difference."""


class MemoryCell(CellUnderTest):
    """Patient deployments on one node with room for so many KV blocks beside weights of 100 MiB."""

    def __init__(
        self,
        *names: str,
        kv_blocks: int,
        weights: int = 1,
        of: CellLimits = LIMITS,
        rule: Policy = LLM_MESH,
    ) -> None:
        wanted = [deployment(name, slo=PATIENT) for name in names]
        super().__init__(*wanted, limits=of, rule=rule)
        size_bytes = (100 * weights + kv_blocks) * MIB
        self.link, _ = self.join(hello(memory_bytes=size_bytes))

    @property
    def station(self) -> ReservationStation:
        return self.core.cell.nodes[NodeId("n1")].station

    def ask(self, name: str, of: str, prompt: int = 3) -> list[ControllerAction]:
        """For an answer of unknown length, up to the context's end."""
        return self.invoke(request(name, of=of, prompt=[1] * prompt, max_tokens=500))

    def load(self, of: str, prompt: int = 3) -> InstanceEntry:
        """By a first request, `<of>1`, which is submitted then."""
        load = only_one(self.ask(f"{of}1", of, prompt), LoadInstance)
        self.loaded(self.link, load.instance_id)
        return self.core.cell.instances[load.instance_id]

    def resized(
        self, instance: InstanceEntry, kv_blocks: int, error: str = ""
    ) -> list[ControllerAction]:
        said = KvResized(
            instance_id=instance.instance_id, kv_blocks=kv_blocks, elapsed_s=0.001, error=error
        )
        return self.report(self.link, said)

    def finish(self, name: str) -> list[ControllerAction]:
        return self.tokens(self.link, name, [7], finish=FinishReason.STOP)

    def idle(self, name: str) -> None:
        """The request has ended, and the cache has become smaller if it was to."""
        self.finish(name)
        for reservation in self.station.running_reservations():
            instance = self.core.cell.instances[reservation.instance_id]
            self.resized(instance, instance.promised_blocks)

    def starved(self, instance: InstanceEntry, *names: str) -> list[ControllerAction]:
        starved = tuple(RequestId(name) for name in names)
        report = TokensReport(instance_id=instance.instance_id, outputs=(), starved=starved)
        return self.report(self.link, report)

    def gone(self, instance: InstanceEntry) -> list[ControllerAction]:
        return self.report(self.link, InstanceGone(instance_id=instance.instance_id))

    def park(self, instance: InstanceEntry) -> list[ControllerAction]:
        """Its keep-alive has passed."""
        timer = KeepAliveExpired(
            instance_id=instance.instance_id, idle_since_s=instance.idle_since_s
        )
        return self.tell(timer)


def with_one(kv_blocks: int) -> tuple[MemoryCell, InstanceEntry]:
    """A cell with one deployment, `a`, and its instance, which computes `a1`."""
    cell = MemoryCell("a", kv_blocks=kv_blocks)
    return cell, cell.load("a")


def heard(*instances: InstanceEntry) -> tuple[InstanceReport, ...]:
    """What the node says of instances that are as the books have them."""
    return tuple(
        instance_report(
            instance_id=i.instance_id,
            deployment=i.deployment,
            model_id=i.model_id,
            footprint=i.footprint,
            kv_blocks=i.kv_blocks,
            context_tokens_max=i.context_tokens_max,
            batch_max=i.batch_max,
            batch=i.batch,
        )
        for i in instances
    )


def only_one(actions: Sequence[object], kind: type[A]) -> A:
    """The one command of this kind."""
    return only(commands(actions, kind), kind)


@pytest.mark.parametrize(
    ("kv_blocks", "expected"),
    [(100, 18), (17, 17), (14, 14)],
    ids=["recommended", "what fits", "required"],
)
def test_a_new_cache_has_what_is_recommended_for_those_who_wait_or_what_fits(
    kv_blocks: int, expected: int
) -> None:
    """A prompt of 300 tokens and 128 expected ones make 14 blocks; a quarter more are 18."""
    cell = MemoryCell("a", kv_blocks=kv_blocks)
    assert only_one(cell.ask("a1", "a", 300), LoadInstance).kv_blocks == expected


def test_a_cache_grows_to_the_watermark_before_a_request_is_submitted_that_needs_it() -> None:
    """The first took 5 blocks, for which 7 were given; both together take 10."""
    cell, instance = with_one(100)
    assert instance.kv_blocks == 7
    actions = cell.ask("a2", "a")
    resize, submit = only_one(actions, ResizeKv), only_one(actions, SubmitRequest)
    assert resize.kv_blocks == 13
    order = [action.command for action in of_kind(actions, SendCommand)]
    assert order.index(resize) < order.index(submit), "the link and the node keep the order"
    assert instance.kv_blocks == 7, "until the node says so"
    cell.resized(instance, 13)
    assert (instance.kv_blocks, cell.station.tracked_bytes) == (13, 113 * MIB)


def test_where_the_recommended_does_not_fit_the_required_will_do() -> None:
    cell = MemoryCell("a", kv_blocks=11)
    cell.load("a")
    assert only_one(cell.ask("a2", "a"), ResizeKv).kv_blocks == 10


def test_a_request_that_no_cache_has_room_for_waits_and_says_so_in_the_end() -> None:
    cell = MemoryCell("a", kv_blocks=9)
    cell.load("a")
    actions = cell.ask("a2", "a")
    assert not commands(actions, SubmitRequest)
    assert not commands(actions, ResizeKv)
    cell.now_s += LIMITS.queue_wait_s_max
    refused = only(cell.retry(), RefuseRequest)
    assert refused.reason is RefusalReason.MEMORY_FULL
    assert "KV cache" in refused.message


def test_a_request_that_turns_out_longer_than_expected_has_its_cache_grow() -> None:
    """By 157 tokens, 3 of them prompt, its five blocks are full."""
    cell, instance = with_one(100)
    cell.resized(instance, 5)
    assert not commands(cell.tokens(cell.link, "a1", range(156)), ResizeKv)
    grown = cell.tokens(cell.link, "a1", [5], first=156)
    assert only_one(grown, ResizeKv).kv_blocks == 8


def test_a_load_waits_until_the_idle_instance_that_gives_way_has_gone() -> None:
    """The node is told to unload at once, and to load only when there is memory for it."""
    cell = MemoryCell("a", "b", kv_blocks=20)
    first = cell.load("a")
    cell.idle("a1")
    asked = cell.ask("b1", "b")
    assert [u.instance_id for u in commands(asked, UnloadInstance)] == [first.instance_id]
    assert commands(asked, LoadInstance) == []
    assert [i.state for i in cell.core.cell.instances.values()] == ["unloading", "loading"]
    assert cell.station.tracked_bytes <= cell.station.capacity_bytes
    assert [load.deployment for load in commands(cell.gone(first), LoadInstance)] == ["b"]


def test_a_cache_grows_in_the_place_of_an_idle_instance() -> None:
    """Its request is submitted meanwhile: it begins with the blocks that there are."""
    cell = MemoryCell("a", "b", kv_blocks=12, weights=2)
    idle = cell.load("b")
    cell.idle("b1")
    busy = cell.load("a")
    asked = cell.ask("a2", "a", prompt=60)
    assert [u.instance_id for u in commands(asked, UnloadInstance)] == [idle.instance_id]
    assert commands(asked, ResizeKv) == []
    assert len(commands(asked, SubmitRequest)) == 1
    assert not commands(cell.starved(busy, "a2"), AbortRequest), "more is on its way"
    (resize,) = commands(cell.gone(idle), ResizeKv)
    assert resize.kv_blocks == busy.required_blocks == 11


def test_a_load_that_waits_for_memory_and_takes_too_long_is_given_up_without_a_word() -> None:
    cell = MemoryCell("a", "b", kv_blocks=20)
    first = cell.load("a")
    cell.idle("a1")
    cell.ask("b1", "b")
    (waiting,) = [i for i in cell.core.cell.instances.values() if i.deployment == "b"]
    given_up = cell.tell(LoadExpired(instance_id=waiting.instance_id))
    assert commands(given_up, UnloadInstance) == []
    assert waiting.instance_id not in cell.core.cell.instances
    assert commands(cell.gone(first), LoadInstance) == []
    assert cell.station.promised_bytes == cell.station.tracked_bytes == 0


def test_a_load_that_fails_gives_back_what_it_was_promised() -> None:
    cell = MemoryCell("a", kv_blocks=20)
    (load,) = commands(cell.ask("a1", "a"), LoadInstance)
    failed = LoadFailed(instance_id=load.instance_id, error="TornModel", message="torn")
    cell.report(cell.link, failed)
    assert cell.station.promised_bytes == cell.station.tracked_bytes == 0


def test_a_resize_that_fails_gives_back_what_it_was_promised() -> None:
    cell, instance = with_one(100)
    cell.ask("a2", "a")
    assert cell.station.promised_bytes == 113 * MIB
    cell.resized(instance, 7, error="OutOfMemory")
    assert cell.station.promised_bytes == cell.station.tracked_bytes == 107 * MIB


def test_a_cache_that_could_not_grow_is_left_alone_for_a_while_and_somebody_gives_way() -> None:
    """Else it would be asked after each iteration, for ever, and nobody would get a token."""
    cell, instance = with_one(100)
    cell.ask("a2", "a")
    cell.resized(instance, 7, error="OutOfMemory")
    evicted = cell.starved(instance, "a2")
    (abort,) = commands(evicted, AbortRequest)
    assert not commands(evicted, ResizeKv)
    assert not commands(evicted, SubmitRequest)
    cell.now_s += LIMITS.grow_retry_s
    again = cell.retry()
    assert only_one(again, ResizeKv).kv_blocks == 13
    assert only_one(again, SubmitRequest).order.request.request_id == abort.request_id


def test_out_of_blocks_the_longest_headroom_gives_way_and_continues_with_its_tokens() -> None:
    """Two requests of five blocks each in ten; one of them becomes longer than expected."""
    cell, instance = with_one(10)
    cell.now_s += 1.0
    cell.ask("a2", "a")
    cell.resized(instance, 10)
    cell.tokens(cell.link, "a2", [5, 6])
    cell.tokens(cell.link, "a1", range(158))
    evicted = cell.starved(instance, "a1")
    (abort,) = commands(evicted, AbortRequest)
    assert abort.request_id == "a1", "158 tokens ahead of its deadline"
    assert not of_kind(evicted, RefuseRequest)
    assert not commands(evicted, SubmitRequest), "there is no place for it yet"
    (submit,) = commands(
        cell.tokens(cell.link, "a2", [7], first=2, finish=FinishReason.STOP), SubmitRequest
    )
    assert (submit.order.request.request_id, submit.order.attempt) == ("a1", 2)
    assert submit.order.output_tokens == tuple(range(158))
    late = cell.tokens(cell.link, "a1", [158], first=158)
    assert not of_kind(late, DeliverTokens), "a token of the first attempt is nobody's"
    more = cell.tokens(cell.link, "a1", [158], first=158, attempt=2)
    assert only(more, DeliverTokens).outputs.first_index == 158


class Latest(LlmMesh):
    """It evicts whoever came last."""

    def evict(self, instance: InstanceView, cell: CellView) -> RequestView:
        return max(cell.requests(instance), key=lambda request: request.arrival_s)


def test_a_policy_says_whose_cache_goes() -> None:
    cell = MemoryCell("a", kv_blocks=10, rule=Latest())
    instance = cell.load("a")
    cell.now_s += 1.0
    cell.ask("a2", "a")
    cell.resized(instance, 10)
    cell.tokens(cell.link, "a2", [5, 6])
    cell.tokens(cell.link, "a1", range(158))
    (abort,) = commands(cell.starved(instance, "a1"), AbortRequest)
    assert abort.request_id == "a2"


def test_evictions_do_not_use_up_a_requests_attempts_but_have_a_bound_of_their_own() -> None:
    limits = CellLimits(delivery_s_max=0.02, kv_tokens_least=64, attempts_max=1, evictions_max=2)
    cell = MemoryCell("a", kv_blocks=5, of=limits)
    instance = cell.load("a")
    held = cell.core.cell.requests[RequestId("a1")]
    for attempt in (1, 2, 3):
        assert (held.attempt, held.instance) == (attempt, instance)
        instance.kv_blocks, instance.required_blocks = 5, 6
        held.required_blocks = 6
        actions = cell.starved(instance, "a1")
    assert only(actions, RefuseRequest).reason is RefusalReason.MEMORY_FULL


def test_starvation_that_the_books_do_not_show_evicts_nobody() -> None:
    """What the controller has taken back may still be on the node for an iteration."""
    cell, instance = with_one(20)
    actions = cell.starved(instance, "a1")
    assert not commands(actions, AbortRequest)
    assert not commands(actions, ResizeKv)


def test_a_cache_shrinks_late() -> None:
    """The instance needs 16 of its 20 blocks for the longer request, and 4 when that has ended."""
    cell = MemoryCell("a", kv_blocks=100)
    instance = cell.load("a", prompt=400)
    cell.invoke(request("a2", of="a", max_tokens=100))
    assert not commands(cell.finish("a2"), ResizeKv)
    assert (instance.required_blocks, instance.promised_blocks) == (16, 20)
    cell.ask("a3", "a")
    resize = only_one(cell.finish("a1"), ResizeKv)
    assert resize.kv_blocks == 5
    assert cell.station.tracked_bytes == 120 * MIB, "until it is done"
    assert cell.station.promised_bytes == 105 * MIB


def test_after_its_keep_alive_an_instance_keeps_its_weights_alone() -> None:
    cell, instance = with_one(100)
    cell.idle("a1")
    parked = cell.park(instance)
    assert only_one(parked, ResizeKv).kv_blocks == 1
    assert instance.state is InstanceState.PARKED
    assert only(parked, SetTimer).at_s == cell.now_s + LIMITS.parked_s_max


def test_a_parked_instance_takes_a_request_by_growing() -> None:
    cell, instance = with_one(100)
    cell.idle("a1")
    cell.park(instance)
    cell.resized(instance, 1)
    actions = cell.ask("a2", "a")
    assert not commands(actions, LoadInstance)
    assert only_one(actions, ResizeKv).kv_blocks == 5
    assert only_one(actions, SubmitRequest).instance_id == instance.instance_id
    assert instance.state is InstanceState.READY


def test_a_parked_instance_goes_when_it_has_been_parked_for_long() -> None:
    cell, instance = with_one(100)
    cell.idle("a1")
    timer = only(cell.park(instance), SetTimer).timer
    cell.resized(instance, 1)
    assert [u.instance_id for u in commands(cell.tell(timer), UnloadInstance)] == [
        instance.instance_id
    ]


def test_the_least_recently_used_gives_way_first() -> None:
    cell = MemoryCell("a", "b", "c", kv_blocks=20, weights=2)
    first, second = cell.load("a"), cell.load("b")
    for instance, name in ((second, "b1"), (first, "a1")):
        cell.now_s += 1.0
        cell.idle(name)
        cell.park(instance)
        cell.resized(instance, 1)
    asked = cell.ask("c1", "c")
    assert [u.instance_id for u in commands(asked, UnloadInstance)] == [second.instance_id]


def test_output_lengths_are_learned_kept_and_stored_now_and_then() -> None:
    cell = MemoryCell("a", kv_blocks=100)
    cell.load("a")
    stored = only(cell.finish("a1"), StoreHistory)
    assert stored == StoreHistory(name=DeploymentName("a"), history=OutputHistory().after(1))
    cell.ask("a2", "a")
    assert not of_kind(cell.finish("a2"), StoreHistory)
    history = cell.core.cell.deployments[DeploymentName("a")].history
    assert history == stored.history.called(0.0).after(1)
    cell.now_s += LIMITS.history_store_s
    cell.ask("a3", "a")
    assert of_kind(cell.finish("a3"), StoreHistory)


def test_when_a_shrink_fails_what_was_promised_of_it_is_taken_back_at_the_next_heartbeat() -> None:
    """The two caches have 7 blocks each: `a` is to give 4 up, and `b` waits for 3 of them."""
    cell = MemoryCell("a", "b", kv_blocks=15, weights=2)
    first, second = cell.load("a"), cell.load("b")
    assert (first.kv_blocks, second.kv_blocks) == (7, 7)
    cell.finish("a1")
    assert first.promised_blocks == 3
    cell.ask("b2", "b")
    assert second.promised_blocks == 10
    assert [o.kind for o in cell.station.waiting()] == ["resize"]
    cell.resized(first, 7, error="EngineError")
    assert cell.station.free_bytes == -2 * MIB
    assert commands(cell.starved(second, "b2"), AbortRequest) == [], "it has to wait"
    restored = cell.report(cell.link, Heartbeat(rss_bytes=1, instances=heard(first, second)))
    assert only_one(restored, ResizeKv) == ResizeKv(instance_id=first.instance_id, kv_blocks=3)
    cell.resized(first, 7, error="EngineError")
    again = cell.report(cell.link, Heartbeat(rss_bytes=1, instances=heard(first, second)))
    assert only_one(again, ResizeKv).instance_id == first.instance_id
    assert only_one(cell.resized(first, 3), ResizeKv).instance_id == second.instance_id


def test_a_heartbeat_tells_of_a_size_that_nobody_here_asked_for() -> None:
    cell, instance = with_one(100)
    (report,) = heard(instance)
    cell.report(cell.link, Heartbeat(rss_bytes=1, instances=(replace(report, kv_blocks=9),)))
    assert instance.kv_blocks == instance.promised_blocks == 9
    cell.ask("a2", "a")
    cell.report(cell.link, Heartbeat(rss_bytes=1, instances=(replace(report, kv_blocks=9),)))
    assert instance.promised_blocks == 13, "what is under way answers for itself"


def heartbeat(cell: MemoryCell) -> list[ControllerAction]:
    """The node lists what it has, as it was last told to be."""
    instances = heard(*cell.core.cell.instances.values())
    return cell.report(cell.link, Heartbeat(rss_bytes=1, engine_bytes=1, instances=instances))


def overpromised() -> tuple[MemoryCell, InstanceEntry, InstanceEntry]:
    """`a` is idle and should have shrunk from 20 blocks to 3; `b` waits to grow into its place."""
    cell = MemoryCell("a", "b", kv_blocks=30, weights=2)
    b = cell.load("b")
    cell.idle("b1")
    a = cell.load("a", prompt=400)
    assert (a.promised_blocks, b.promised_blocks) == (20, 3)
    assert only_one(cell.finish("a1"), ResizeKv).kv_blocks == 3
    assert commands(cell.ask("b2", "b", 300), ResizeKv) == []
    assert cell.resized(a, 20, error="OutOfMemory") == []
    assert cell.station.free_bytes < 0
    return cell, a, b


def test_a_shrink_that_failed_is_tried_again_while_others_wait_for_its_memory() -> None:
    cell, a, b = overpromised()
    assert cell.starved(b, "b2") == [], "more is on its way"
    again = only_one(heartbeat(cell), ResizeKv)
    assert (again.instance_id, again.kv_blocks) == (a.instance_id, 3)
    assert commands(heartbeat(cell), ResizeKv) == [], "it is under way"
    grown = only_one(cell.resized(a, 3), ResizeKv)
    assert (grown.instance_id, grown.kv_blocks) == (b.instance_id, b.promised_blocks)
    assert cell.station.tracked_bytes <= cell.station.capacity_bytes


def test_a_parked_instance_that_could_not_shrink_is_asked_again() -> None:
    cell, a, _ = overpromised()
    assert only_one(cell.park(a), ResizeKv).kv_blocks == 1
    cell.resized(a, 20, error="OutOfMemory")
    assert only_one(heartbeat(cell), ResizeKv).kv_blocks == 1


def test_where_nobody_waits_a_failed_shrink_stays_as_it_is() -> None:
    """It will shrink, or go, when its memory is wanted."""
    cell = MemoryCell("a", kv_blocks=30)
    a = cell.load("a", prompt=400)
    cell.finish("a1")
    cell.resized(a, 20, error="OutOfMemory")
    assert cell.station.promised_bytes == 120 * MIB
    assert commands(heartbeat(cell), ResizeKv) == []


def scale(cell: CellUnderTest, replicas_min: int) -> list[ControllerAction]:
    asked = ScaleRequested(
        operation_id=OperationId(f"to-{replicas_min}"),
        name=DeploymentName("a"),
        replicas_min=replicas_min,
        replicas_max=None,
        keep_alive_s=None,
    )
    store = only(cell.tell(asked), StoreDeployment)
    return cell.tell(DeploymentStored(operation_id=store.operation_id))


def keep_alive_over(cell: CellUnderTest, instance: InstanceEntry) -> list[ControllerAction]:
    cell.now_s += 2.0
    return cell.tell(
        KeepAliveExpired(instance_id=instance.instance_id, idle_since_s=instance.idle_since_s)
    )


def test_a_parked_instance_that_a_minimum_kept_goes_when_nothing_wants_it_any_more() -> None:
    """Its time is over while the minimum holds it; the timer must not be the last one."""
    cell, instance = with_one(100)
    cell.idle("a1")
    timer = only(cell.park(instance), SetTimer)
    cell.resized(instance, 1)
    scale(cell, 1)
    cell.now_s = timer.at_s
    again = only(cell.tell(timer.timer), SetTimer)
    assert instance.state is InstanceState.PARKED
    scale(cell, 0)
    cell.now_s = again.at_s
    assert len(commands(cell.tell(again.timer), UnloadInstance)) == 1


def test_no_more_are_parked_than_the_minimum_can_spare() -> None:
    cell = CellUnderTest(deployment("a", slo=PATIENT, replicas_min=2), limits=LIMITS)
    for name in ("n1", "n2"):
        link, joined = cell.join(hello(name, memory_bytes=200 * MIB))
        cell.loaded(link, only(commands(joined, LoadInstance), LoadInstance).instance_id)
    scale(cell, 1)
    first, second = cell.core.cell.instances.values()
    keep_alive_over(cell, first)
    assert first.state is InstanceState.PARKED
    again = only(keep_alive_over(cell, second), SetTimer)
    assert second.state is InstanceState.READY
    first.unpark()
    cell.now_s = again.at_s
    cell.tell(again.timer)
    assert second.is_parked, "the other is the minimum now"


def test_an_instance_that_a_request_can_have_at_last_is_not_parked_first() -> None:
    cell = CellUnderTest(deployment("a"))
    reported = replace(admission.instance("a", "a"), kv_blocks=3)
    cell.join(admission.node("n1", reported))
    idle = cell.core.cell.instances[InstanceId("a")]
    idle.grow_again_s = cell.now_s + 0.97
    assert not admission.submitted(cell.invoke(request("r1", of="a")))
    cell.now_s += 1.0
    expired = KeepAliveExpired(instance_id=InstanceId("a"), idle_since_s=idle.idle_since_s)
    decided = cell.tell(expired)
    assert only(commands(decided, ResizeKv), ResizeKv).kv_blocks == 20
    assert admission.submitted(decided) == [("r1", "a")]


HEAVY = replace(FOOTPRINT, weights_bytes=FOOTPRINT.weights_bytes + 30 * MIB)


def loaded_heavy(cell: MemoryCell, load: LoadInstance) -> InstanceEntry:
    """It takes 30 MiB more than it was promised."""
    said = InstanceLoaded(
        instance_id=load.instance_id, footprint=HEAVY, kv_blocks=load.kv_blocks, elapsed_s=0.5
    )
    cell.report(cell.link, said)
    return cell.core.cell.instances[load.instance_id]


def beat(cell: MemoryCell, *instances: InstanceEntry) -> None:
    cell.report(cell.link, Heartbeat(rss_bytes=1, instances=heard(*instances)))


def test_idle_instances_go_where_more_is_promised_than_there_is() -> None:
    cell = MemoryCell("a", "b", kv_blocks=20, weights=2)
    idle = cell.load("a")
    cell.idle("a1")
    cell.park(idle)
    cell.resized(idle, 1)
    heavy = loaded_heavy(cell, only_one(cell.ask("b1", "b"), LoadInstance))
    assert cell.station.free_bytes == -18 * MIB
    beat(cell, idle, heavy)
    assert idle.state is InstanceState.UNLOADING
    assert cell.station.free_bytes >= 0


def test_an_idle_instance_alone_on_its_node_stays() -> None:
    cell = MemoryCell("a", kv_blocks=20)
    heavy = loaded_heavy(cell, only_one(cell.ask("a1", "a"), LoadInstance))
    cell.idle("a1")
    beat(cell, heavy)
    assert cell.station.free_bytes < 0
    assert heavy.state is InstanceState.READY


@pytest.mark.breaks_invariants
def test_a_shrink_that_waits_is_not_taken_back() -> None:
    """It follows a grow that has not ended; without it more would be promised, not less. While both
    grow and load are under way, more is tracked than there is.
    """
    cell = MemoryCell("a", "b", kv_blocks=22, weights=2)
    shrinking = cell.load("a")
    cell.ask("a2", "a")
    heavy = loaded_heavy(cell, only_one(cell.ask("b1", "b"), LoadInstance))
    cell.finish("a1")
    (waiting,) = cell.station.waiting()
    assert [o.size_bytes - waiting.size_bytes for o in cell.station.running_reservations()] == [
        6 * MIB
    ]
    beat(cell, shrinking, heavy)
    assert cell.station.waiting() == (waiting,)


def test_a_load_for_a_minimum_that_is_taken_back_is_tried_again_when_room_appears() -> None:
    cell = MemoryCell("c", "b", "a", kv_blocks=20, weights=2)
    first = cell.load("c")
    cell.idle("c1")
    load = only_one(cell.ask("b1", "b"), LoadInstance)
    scale(cell, 1)
    assert [o.kind for o in cell.station.waiting()] == ["load"]
    heavy = loaded_heavy(cell, load)
    beat(cell, heavy)
    assert cell.station.waiting() == ()
    assert not commands(cell.finish("b1"), LoadInstance)
    assert "load" in [o.kind for o in cell.station.waiting()], "until both have gone"
    cell.gone(first)
    assert len(commands(cell.gone(heavy), LoadInstance)) == 1
