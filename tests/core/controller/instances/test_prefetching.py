"""What is fetched before anybody calls: which models, where, and what it gives way to."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import inf

import pytest

from mesh.core.controller.state.instance import InstanceEntry
from mesh.domain.actions import ControllerAction, NotePolicyFault
from mesh.domain.deployment import Deployment, Scaling
from mesh.domain.events import KeepAliveExpired, LeaseCheckDue, UnloadRequested
from mesh.domain.ids import (
    DeploymentName,
    InstanceId,
    ModelId,
    NodeId,
    OperationId,
    RequestId,
)
from mesh.domain.lifecycle import InstanceState
from mesh.domain.limits import CellLimits
from mesh.domain.messages import (
    CancelImport,
    Heartbeat,
    ImportDone,
    ImportFailed,
    ImportModel,
    InstanceGone,
    KvResized,
    LoadFailed,
    LoadInstance,
    ResizeKv,
    SubmitRequest,
    UnloadInstance,
)
from mesh.domain.reasons import DeviceKind, FinishReason
from mesh.domain.slo import Slo
from mesh.domain.steps import HeldModel, LoadRate, LoadTier
from mesh.domain.text import TextAssets
from mesh.domain.views import PrefetchView
from mesh.policy.interface import Policy
from mesh.policy.llm_mesh import LLM_MESH, LlmMesh
from mesh.policy.plans import Plan, Prefetch
from mesh.policy.room import LIKELIER
from mesh.policy.views import AheadView
from tests.core.cells import (
    FOOTPRINT,
    MIB,
    MODEL,
    CellUnderTest,
    commands,
    deployment,
    hello,
    of_kind,
    only,
    request,
)

PARKED_BYTES = FOOTPRINT.instance_bytes(1)
LIMITS = CellLimits(delivery_s_max=0.02, kv_tokens_least=64)


def model_of(name: str) -> Deployment:
    """A deployment with a model of its own."""
    of = replace(MODEL, model_id=ModelId(f"model-{name}"), source=f"file:///models/{name}")
    return replace(deployment(name, slo=Slo(ttft_s=60.0)), model=of)


class PrefetchCell(CellUnderTest):
    """Deployments with models of their own, on one node that has room for so many parked instances
    and the KV cache of one that serves.
    """

    def __init__(
        self,
        *names: str,
        room: int = 4,
        budget: int = 1,
        load_s: float = 0.5,
        held: Sequence[HeldModel] | None = None,
        rule: Policy = LLM_MESH,
    ) -> None:
        super().__init__(*map(model_of, names), limits=LIMITS, rule=rule)
        said = replace(
            hello(memory_bytes=room * PARKED_BYTES + 40 * MIB),
            prefetch_bytes=budget * PARKED_BYTES,
            load_rates=((LoadTier.DISK, LoadRate(fixed_s=load_s, bytes_per_s=inf)),),
            models=None if held is None else tuple(held),
        )
        self.link, _ = self.join(said)

    def look(self) -> list[ControllerAction]:
        self.now_s += 1.0
        return self.tell(LeaseCheckDue())

    def instance(self, of: str) -> InstanceEntry:
        entry = self.core.cell.deployments[DeploymentName(of)]
        return next(iter(entry.instances.values()))

    def serve(self, name: str, of: str) -> None:
        """A call from its start to its end; what it was served by is parked afterwards."""
        loads = commands(self.invoke(request(name, of=of)), LoadInstance)
        for load in loads:
            self.loaded(self.link, load.instance_id)
        instance = self.instance(of)
        self.settle(instance)
        self.tokens(self.link, name, [7], finish=FinishReason.STOP)
        self.park(instance)

    def called(self, of: str, times: int = 4) -> None:
        """It is called again and again, in vain."""
        for _ in range(times):
            self.core.cell.deployments[DeploymentName(of)].note_call(self.now_s)

    def park(self, instance: InstanceEntry) -> None:
        name, idle_s = instance.instance_id, instance.idle_since_s
        self.tell(KeepAliveExpired(instance_id=name, idle_since_s=idle_s))
        self.settle(instance)

    def settle(self, instance: InstanceEntry) -> None:
        """Its cache has the size that was promised."""
        if instance.node.station.running(instance.instance_id):
            name, blocks = instance.instance_id, instance.promised_blocks
            self.report(self.link, KvResized(instance_id=name, kv_blocks=blocks, elapsed_s=0.001))

    def lose(self, of: str) -> None:
        """Its instance has ended by itself."""
        self.report(self.link, InstanceGone(instance_id=self.instance(of).instance_id))

    def gone(self, *instance_ids: InstanceId) -> list[ControllerAction]:
        said = [InstanceGone(instance_id=instance_id) for instance_id in instance_ids]
        return [action for gone in said for action in self.report(self.link, gone)]

    @property
    def counts(self) -> PrefetchView:
        return self.core.snapshot(self.now_s).prefetches


def test_a_model_that_was_called_is_loaded_again_while_its_node_rests() -> None:
    cell = PrefetchCell("a", "b")
    cell.serve("a1", "a")
    cell.called("a")
    cell.lose("a")
    load = only(commands(cell.look(), LoadInstance), LoadInstance)
    assert (load.deployment, load.kv_blocks) == ("a", 1)
    assert not commands(cell.look(), LoadInstance), "one at a time"
    cell.loaded(cell.link, load.instance_id)
    assert not commands(cell.look(), LoadInstance), "nobody has called b"
    called = cell.invoke(request("a2", of="a"))
    assert not commands(called, LoadInstance)
    assert only(commands(called, SubmitRequest), SubmitRequest).instance_id == load.instance_id
    assert commands(called, ResizeKv), "it was loaded as a parked instance is"
    assert cell.counts == PrefetchView(begun=1, used=1, loads=2, felt=1)
    assert cell.counts.hit_rate == 0.5


def test_whoever_calls_while_it_is_loaded_waits_for_that_load() -> None:
    cell = PrefetchCell("a")
    cell.serve("a1", "a")
    cell.called("a")
    cell.lose("a")
    load = only(commands(cell.look(), LoadInstance), LoadInstance)
    assert not commands(cell.invoke(request("a2", of="a")), LoadInstance)
    assert cell.counts.used == 1
    assert commands(cell.loaded(cell.link, load.instance_id), SubmitRequest)


@pytest.mark.parametrize(
    "change",
    [
        {"budget": 0},
        {"load_s": 2.1},
        {"room": 0},
    ],
    ids=["no budget", "a load that would hold others up", "no room"],
)
def test_nothing_is_loaded_ahead(change: dict[str, float]) -> None:
    cell = PrefetchCell("a", **change)  # type: ignore[arg-type]
    cell.called("a")
    assert not commands(cell.look(), LoadInstance)


def test_nor_on_a_node_that_computes_or_where_somebody_waits_or_long_after_the_last_call() -> None:
    cell = PrefetchCell("a", "b")
    cell.serve("a1", "a")
    cell.serve("b1", "b")
    cell.lose("a")
    cell.invoke(request("b2", of="b"))
    assert not commands(cell.look(), LoadInstance), "it computes"
    cell.tokens(cell.link, "b2", [7], finish=FinishReason.STOP)
    cell.settle(cell.instance("b"))
    cell.now_s += LIMITS.parked_s_max
    assert not commands(cell.look(), LoadInstance), "it would have gone by itself by now"


@pytest.mark.parametrize(
    ("slowdown", "grows", "loads"),
    [(1.01, False, True), (2.0, False, False), (None, False, False), (1.01, True, False)],
    ids=["hardly slows", "slows", "nothing is known", "takes what the request grows into"],
)
def test_a_gpu_that_loads_hardly_slow_loads_ahead_while_it_computes(
    slowdown: float | None, *, grows: bool, loads: bool
) -> None:
    cell = PrefetchCell("a", "b")
    cell.serve("b1", "b")
    cell.invoke(request("b2", of="b"))
    cell.settle(cell.instance("b"))
    cell.called("a")
    node = cell.core.cell.nodes[NodeId("n1")]
    node.device = DeviceKind.GPU
    if slowdown is not None:
        node.note_heartbeat(Heartbeat(rss_bytes=1, load_slowdown=slowdown))
    if grows:
        runs, free_blocks = cell.instance("b"), (node.free_bytes - PARKED_BYTES) // MIB
        blocks = runs.promised_blocks + free_blocks + 1
        runs.note_demand(runs.requests[RequestId("b2")], blocks)
    entry = cell.core.cell.deployments[DeploymentName("a")]
    entry.spec = replace(entry.spec, devices=tuple(DeviceKind))
    assert bool(commands(cell.look(), LoadInstance)) == loads


def test_a_load_for_a_minimum_is_needed_and_felt_by_no_caller() -> None:
    cell = PrefetchCell("a", "b")
    entry = cell.core.cell.deployments[DeploymentName("a")]
    entry.spec = replace(entry.spec, scaling=Scaling(replicas_min=1))
    _, told = cell.join(hello("n2"))
    load = only(commands(told, LoadInstance), LoadInstance)
    assert (load.deployment, cell.counts) == ("a", PrefetchView())
    cell.invoke(request("b1", of="b"))
    assert cell.counts == PrefetchView(loads=1, felt=1)


def test_nor_what_an_operator_has_had_unloaded_until_somebody_calls_it() -> None:
    cell = PrefetchCell("a")
    cell.serve("a1", "a")
    cell.tell(UnloadRequested(operation_id=OperationId("op"), name=DeploymentName("a")))
    cell.lose("a")
    assert not commands(cell.look(), LoadInstance)
    cell.serve("a2", "a")
    cell.called("a")
    cell.lose("a")
    assert commands(cell.look(), LoadInstance)


def test_the_most_called_takes_the_place_of_one_that_is_called_far_less() -> None:
    """Room for one; `b` was called last, but `a` eight times before."""
    cell = PrefetchCell("a", "b", room=1)
    for number in range(8):
        cell.serve(f"a{number}", "a")
        cell.now_s += 1.0
    first = cell.instance("a").instance_id
    (load,) = [
        *commands(cell.invoke(request("b1", of="b")), LoadInstance),
        *commands(cell.gone(first), LoadInstance),
    ]
    cell.loaded(cell.link, load.instance_id)
    cell.settle(cell.instance("b"))
    cell.tokens(cell.link, "b1", [7], finish=FinishReason.STOP)
    assert not commands(cell.look(), UnloadInstance), "within its keep-alive it stays"
    cell.park(cell.instance("b"))
    assert only(commands(cell.look(), UnloadInstance), UnloadInstance).instance_id == (
        load.instance_id
    )
    again = only(commands(cell.gone(load.instance_id), LoadInstance), LoadInstance)
    cell.loaded(cell.link, again.instance_id)
    assert again.deployment == "a"
    assert not cell.look()[:-1], "and not back again"


def test_what_is_called_about_as_often_stays() -> None:
    cell = PrefetchCell("a", "b", room=1)
    cell.serve("a1", "a")
    cell.core.cell.deployments[DeploymentName("b")].note_call(cell.now_s + 30.0)
    assert not commands(cell.look(), UnloadInstance)


def test_the_budget_is_for_all_that_nobody_has_called_yet() -> None:
    """It holds one; `b` was called more, so that it is loaded first, and `a` not beside it."""
    cell = PrefetchCell("a", "b")
    cell.called("a", 3)
    cell.called("b", 4)
    load = only(commands(cell.look(), LoadInstance), LoadInstance)
    assert load.deployment == "b"
    cell.loaded(cell.link, load.instance_id)
    assert not commands(cell.look(), LoadInstance)
    cell.called("a", 20)
    told = cell.look()
    assert commands(told, UnloadInstance), "a is likelier by far"
    assert only(commands(told, LoadInstance), LoadInstance).deployment == "a"
    cell.gone(load.instance_id)
    assert cell.counts.wasted == 1


@pytest.mark.parametrize("loaded", [False, True])
def test_a_load_that_somebody_needs_takes_its_memory_at_once(loaded: bool) -> None:
    cell = PrefetchCell("a", "b", room=1)
    cell.called("a")
    ahead = only(commands(cell.look(), LoadInstance), LoadInstance).instance_id
    if loaded:
        cell.loaded(cell.link, ahead)
    asked = cell.invoke(request("b1", of="b"))
    assert cell.instance("b").state is InstanceState.LOADING
    told = asked if loaded else cell.loaded(cell.link, ahead)
    assert [unload.instance_id for unload in commands(told, UnloadInstance)] == [ahead]
    started = cell.gone(ahead)
    assert only(commands(started, LoadInstance), LoadInstance).deployment == "b"
    assert cell.counts == PrefetchView(begun=1, wasted=1, loads=1, felt=1)


def test_where_models_are_loaded_ahead_the_least_called_gives_way_first() -> None:
    cell = PrefetchCell("a", "b", "c", room=2)
    for name, of in (("a1", "a"), ("a2", "a"), ("b1", "b")):
        cell.serve(name, of)
        cell.now_s += 1.0
    asked = cell.invoke(request("c1", of="c"))
    given_up = [unload.instance_id for unload in commands(asked, UnloadInstance)]
    assert given_up == [cell.instance("b").instance_id], "though it was used last"


def test_a_load_ahead_that_fails_is_nobodys_failure_and_is_not_tried_for_ever() -> None:
    cell = PrefetchCell("a")
    entry = cell.core.cell.deployments[DeploymentName("a")]
    cell.called("a")
    for _ in range(2):
        load = only(commands(cell.look(), LoadInstance), LoadInstance)
        said = LoadFailed(instance_id=load.instance_id, error="EngineError", message="no")
        cell.report(cell.link, said)
    assert not commands(cell.look(), LoadInstance)
    assert (entry.load_failures, entry.paused_until_s) == (0, 0.0)
    assert cell.counts == PrefetchView(begun=2, wasted=2)


def imported(ahead: ImportModel, name: str) -> ImportDone:
    return ImportDone(
        operation_id=ahead.operation_id,
        model=model_of(name).model,
        footprint=FOOTPRINT,
        text=TextAssets(tokenizer_json=b"{}"),
    )


def test_a_model_that_no_store_has_is_imported_and_then_loaded() -> None:
    cell = PrefetchCell("a", held=())
    cell.called("a")
    ahead = only(commands(cell.look(), ImportModel), ImportModel)
    assert ahead.source == model_of("a").model.source
    assert not commands(cell.look(), ImportModel), "one at a time"
    cell.report(cell.link, imported(ahead, "a"))
    assert only(commands(cell.look(), LoadInstance), LoadInstance).deployment == "a"


def test_a_load_finds_what_was_imported_ahead() -> None:
    cell = PrefetchCell("a", held=(), budget=0)
    node = cell.core.cell.nodes[NodeId("n1")]
    node.hello = replace(node.hello, prefetch_bytes=1)  # too little to load anything ahead
    cell.called("a")
    ahead = only(commands(cell.look(), ImportModel), ImportModel)
    cell.report(cell.link, imported(ahead, "a"))
    assert not commands(cell.look(), LoadInstance)
    assert commands(cell.invoke(request("a1", of="a")), LoadInstance)
    assert cell.counts == PrefetchView(begun=1, used=1, loads=1, felt=1)


def test_no_node_imports_what_another_has() -> None:
    cell = PrefetchCell("a", held=())
    stored = HeldModel(model_id=model_of("a").model.model_id, tier=LoadTier.DISK)
    cell.join(replace(hello("n2"), models=(stored,)))
    cell.called("a")
    assert not commands(cell.look(), ImportModel)


@pytest.mark.parametrize(("of", "stopped"), [("b", True), ("a", False)])
def test_an_import_gives_way_to_the_load_of_another_model(of: str, stopped: bool) -> None:
    cell = PrefetchCell("a", "b", held=())
    cell.called("a")
    ahead = only(commands(cell.look(), ImportModel), ImportModel)
    asked = cell.invoke(request("r1", of=of))
    assert commands(asked, LoadInstance)
    told = [stop.operation_id for stop in commands(asked, CancelImport)]
    assert told == [ahead.operation_id] * stopped
    assert cell.counts.wasted == int(stopped)


def test_an_import_that_a_load_has_taken_over_is_stopped_by_nobody() -> None:
    cell = PrefetchCell("a", "b", held=())
    cell.called("a")
    ahead = only(commands(cell.look(), ImportModel), ImportModel)
    assert commands(cell.invoke(request("a1", of="a")), LoadInstance)
    assert not commands(cell.invoke(request("b1", of="b")), CancelImport)
    cell.now_s += LIMITS.prefetch_s_max
    cell.report(cell.link, Heartbeat(rss_bytes=1))
    assert not commands(cell.look(), CancelImport)
    cell.report(cell.link, imported(ahead, "a"))
    assert (cell.counts.begun, cell.counts.used, cell.counts.wasted) == (1, 1, 0)


@pytest.mark.parametrize("done", [False, True])
def test_an_import_is_in_vain_if_its_node_is_lost_before_a_load_takes_it(done: bool) -> None:
    cell = PrefetchCell("a", held=())
    cell.called("a")
    ahead = only(commands(cell.look(), ImportModel), ImportModel)
    if done:
        cell.report(cell.link, imported(ahead, "a"))
    cell.now_s += LIMITS.node_lease_s + 1.0
    cell.look()
    assert cell.counts == PrefetchView(begun=1, wasted=1)


def test_an_import_that_takes_too_long_is_given_up_and_tried_once_more() -> None:
    cell = PrefetchCell("a", held=())
    entry = cell.core.cell.deployments[DeploymentName("a")]
    seen = []
    for _ in range(3):
        entry.note_unloaded()  # so that no pause is known
        cell.called("a")
        seen += commands(cell.look(), ImportModel)
        cell.now_s += LIMITS.prefetch_s_max
        cell.report(cell.link, Heartbeat(rss_bytes=1))
    assert len(seen) == 2
    assert cell.counts == PrefetchView(begun=2, wasted=2)


def test_so_is_one_that_fails_or_brings_another_model() -> None:
    cell = PrefetchCell("a", held=())
    cell.called("a")
    first = only(commands(cell.look(), ImportModel), ImportModel)
    said = ImportFailed(operation_id=first.operation_id, error="ModelError", message="no")
    cell.report(cell.link, said)
    second = only(commands(cell.look(), ImportModel), ImportModel)
    cell.report(cell.link, imported(second, "other"))
    assert not commands(cell.look(), ImportModel)
    assert cell.counts == PrefetchView(begun=2, wasted=2)


@dataclass(frozen=True, kw_only=True)
class Fetching(LlmMesh):
    """It fetches `a`, whoever calls or computes, in the place of those that it names."""

    gone: str = ""

    def prefetch(self, cell: AheadView) -> Iterator[Plan]:
        gone = tuple(i for i in cell.instances() if i.deployment == self.gone)
        for node in cell.nodes():
            yield Prefetch(deployment=DeploymentName("a"), node=node, instead_of=gone)


def test_a_policy_fetches_what_nobody_has_called_while_its_node_computes() -> None:
    cell = PrefetchCell("a", "b", rule=Fetching())
    called = only(commands(cell.invoke(request("b1", of="b")), LoadInstance), LoadInstance)
    cell.loaded(cell.link, called.instance_id)
    assert only(commands(cell.look(), LoadInstance), LoadInstance).deployment == "a"
    assert cell.instance("a").prefetched


@pytest.mark.parametrize(
    "change", [{"budget": 0}, {"load_s": 2.1}], ids=["no budget", "a load that takes long"]
)
def test_what_a_node_does_not_allow_no_policy_fetches(change: dict[str, float]) -> None:
    cell = PrefetchCell("a", rule=Fetching(), **change)  # type: ignore[arg-type]
    assert not commands(cell.look(), LoadInstance)


def test_a_policy_says_whose_place_it_takes_if_that_may_go() -> None:
    cell = PrefetchCell("a", "b", room=1, rule=Fetching(gone="b"))
    cell.serve("b1", "b")
    there = cell.instance("b").instance_id
    cell.invoke(request("b2", of="b"))
    cell.settle(cell.instance("b"))
    told = cell.look()
    assert not commands(told, UnloadInstance)
    assert [fault.call for fault in of_kind(told, NotePolicyFault)] == ["Release"]
    cell.tokens(cell.link, "b2", [7], finish=FinishReason.STOP)
    cell.park(cell.instance("b"))
    told = cell.look()
    assert only(commands(told, UnloadInstance), UnloadInstance).instance_id == there
    assert only(commands(cell.gone(there), LoadInstance), LoadInstance).deployment == "a"


def test_calls_count_for_less_as_time_goes_by() -> None:
    """Two calls nearly five minutes ago weigh 0.79 of one now; with one more, 1.79."""
    cell = PrefetchCell("a", "b")
    often, once = (cell.core.cell.deployments[DeploymentName(n)] for n in ("a", "b"))
    often.note_call(0.0)
    often.note_call(0.0)
    once.note_call(280.0)
    assert often.calls_log < once.calls_log
    often.note_call(280.0)
    assert often.calls_log > once.calls_log


@pytest.mark.parametrize(("idle_s", "loads"), [(600.0, False), (1140.0, True)])
def test_a_timer_is_loaded_shortly_before_it_is_due(idle_s: float, loads: bool) -> None:
    """It calls every 20 minutes: how often it calls says nothing, the times between calls do."""
    cell = PrefetchCell("a")
    entry = cell.core.cell.deployments[DeploymentName("a")]
    for number in reversed(range(8)):
        entry.note_call(cell.now_s - idle_s - 1200.0 * number)
    assert (entry.call_chance(cell.now_s) > LIKELIER) == loads
    assert bool(commands(cell.look(), LoadInstance)) == loads


def test_a_revision_is_called_as_the_one_before_it() -> None:
    cell = PrefetchCell("a", "b")
    old, new = (cell.core.cell.deployments[DeploymentName(name)] for name in ("a", "b"))
    old.note_call(1.0)
    old.note_call(31.0)
    old.note_served(9)
    new.succeed(old)
    assert new.history == old.history
    new.note_served(30)
    old.note_call(61.0)
    mean_tokens = new.history.mean_tokens
    new.succeed(old)
    assert (new.history.mean_tokens, new.history.gaps) == (mean_tokens, old.history.gaps)
