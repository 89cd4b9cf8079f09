"""The controller core on administrative calls: each is answered once; failures leave nothing."""

from dataclasses import replace
from typing import Any

import pytest

from mesh.core.controller.snapshot import cell_snapshot
from mesh.domain.actions import (
    RefuseRequest,
    RemoveDeployment,
    ReplyDone,
    ReplyError,
    ReplyProgress,
    SendCommand,
    SetTimer,
    StoreDeployment,
)
from mesh.domain.deployment import Deployment
from mesh.domain.events import (
    DeleteRequested,
    DeploymentStored,
    DeployRequested,
    KeepAliveExpired,
    LoadRequested,
    NodeDisconnected,
    OperationCancelled,
    OperationExpired,
    ScaleRequested,
    StoreFailed,
    UnloadRequested,
)
from mesh.domain.ids import DeploymentName, ModelId, OperationId
from mesh.domain.lifecycle import DeploymentState, InstanceState
from mesh.domain.limits import CellLimits
from mesh.domain.messages import (
    AbortRequest,
    CancelImport,
    ImportDone,
    ImportFailed,
    ImportModel,
    ImportProgress,
    InstanceGone,
    LoadInstance,
    UnloadInstance,
)
from mesh.domain.model import ComputePrecision, Task, WeightPrecision, imported_id
from mesh.domain.reasons import FinishReason, RefusalReason
from mesh.domain.text import TextAssets
from tests.core.cells import (
    FOOTPRINT,
    MIB,
    MODEL,
    CellUnderTest,
    commands,
    deployment,
    hello,
    of_kind,
    one_node,
    only,
    request,
)

OP = OperationId("op-1")
TEXT = TextAssets(tokenizer_json=b"{}")
DONE = ImportDone(operation_id=OP, model=MODEL, footprint=FOOTPRINT, text=TEXT)
CHAT = DeploymentName("chat")


def importing_cell() -> tuple[CellUnderTest, int]:
    cell, link = one_node()
    actions = cell.tell(DeployRequested(operation_id=OP, spec=deployment().spec))
    assert commands(actions, ImportModel) == [ImportModel(operation_id=OP, source=MODEL.source)]
    return cell, link


def test_a_deployment_is_acknowledged_only_after_it_is_durable() -> None:
    cell, link = importing_cell()
    progress = cell.report(link, ImportProgress(operation_id=OP, phase="read", share=0.5))
    assert only(progress, ReplyProgress).share == 0.5
    (shown,) = cell_snapshot(cell.core.cell, cell.now_s).deployments
    assert (shown.state, shown.phase, shown.share) == (DeploymentState.IMPORTING, "read", 0.5)
    store = cell.report(link, DONE)
    assert only(store, StoreDeployment).text == TEXT
    assert of_kind(store, ReplyDone) == []
    assert cell.core.deployment(CHAT) is None
    assert only(cell.tell(DeploymentStored(operation_id=OP)), ReplyDone).operation_id == OP
    assert cell.core.deployment(CHAT) is not None


@pytest.mark.parametrize("known", [(), (deployment(),)])
def test_a_model_larger_than_any_node_is_deployed_and_said_to_be_so(
    known: tuple[Deployment, ...],
) -> None:
    cell, link = one_node(*known, node=hello(memory_bytes=64 * MIB))
    spec = replace(deployment().spec, source="file:///larger")
    cell.tell(DeployRequested(operation_id=OP, spec=spec))
    cell.report(link, DONE)
    done = only(cell.tell(DeploymentStored(operation_id=OP)), ReplyDone)
    assert ";" not in done.message
    assert done.amiss == (
        "an instance of 'chat' takes 101 MiB; the largest of 1 nodes has 64.0 MiB: calls are "
        "refused until a larger one joins"
    )


def test_a_precision_that_is_asked_for_makes_another_model_of_the_imported_one() -> None:
    cell, link = one_node()
    spec = replace(deployment().spec, precision=ComputePrecision.BF16)
    cell.tell(DeployRequested(operation_id=OP, spec=spec))
    model = only(cell.report(link, DONE), StoreDeployment).deployment.model
    assert model.precision is ComputePrecision.BF16
    assert model.model_id != MODEL.model_id == imported_id(model.model_id)
    assert model.shape != MODEL.shape


def test_what_is_held_as_its_file_has_it_takes_what_no_other_file_takes() -> None:
    other = replace(MODEL, model_id=ModelId("sha256-other"))
    for weights, alike in ((WeightPrecision.I4, True), (WeightPrecision.FILE, False)):
        held, others = MODEL.held_as(weights), other.held_as(weights)
        assert (held.shape == others.shape) is alike
        assert (held.widths is not None) is alike


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"weights": WeightPrecision.I4}, "weights: i4"),
        ({"precision": ComputePrecision.BF16}, "precision: bf16"),
    ],
)
def test_a_precision_that_no_node_serves_is_refused_before_the_import(
    asked: dict[str, Any], said: str
) -> None:
    cell = CellUnderTest()
    cell.join(replace(hello(), as_published=True, engine="vllm"))
    spec = replace(deployment().spec, **asked)
    actions = cell.tell(DeployRequested(operation_id=OP, spec=spec))
    reply = only(actions, ReplyError)
    assert reply.error == "InvalidInput"
    assert f"serves it in {said}: n1 (vllm) computes with weights as they" in reply.message
    assert commands(actions, ImportModel) == []
    assert cell.core.cell.deployments == {}
    plain = cell.tell(DeployRequested(operation_id=OperationId("op-2"), spec=deployment().spec))
    assert len(commands(plain, ImportModel)) == 1


def test_a_precision_that_one_of_the_nodes_serves_is_deployed() -> None:
    cell = CellUnderTest()
    cell.join(replace(hello(), as_published=True, engine="vllm"))
    cell.join(hello("n2"))
    spec = replace(deployment().spec, weights=WeightPrecision.I4)
    actions = cell.tell(DeployRequested(operation_id=OP, spec=spec))
    assert len(commands(actions, ImportModel)) == 1


def test_a_failed_import_frees_the_name() -> None:
    cell, link = importing_cell()
    failed = ImportFailed(operation_id=OP, error="TornModel", message="torn", hint="fetch again")
    reply = only(cell.report(link, failed), ReplyError)
    assert (reply.error, reply.message, reply.hint) == ("TornModel", "torn", "fetch again")
    again = cell.tell(DeployRequested(operation_id=OperationId("op-2"), spec=deployment().spec))
    assert len(commands(again, ImportModel)) == 1


def test_a_registry_that_cannot_write_fails_the_call_and_frees_the_name() -> None:
    cell, link = importing_cell()
    cell.report(link, DONE)
    reply = only(cell.tell(StoreFailed(operation_id=OP, message="disk full")), ReplyError)
    assert reply.error == "StorageError"
    assert cell.core.cell.deployments == {}


def test_a_context_beyond_the_models_is_refused_with_both_numbers() -> None:
    cell, link = one_node()
    spec = replace(deployment().spec, context_tokens_max=4096)
    cell.tell(DeployRequested(operation_id=OP, spec=spec))
    reply = only(cell.report(link, DONE), ReplyError)
    assert reply.error == "InvalidInput"
    assert "4096" in reply.message
    assert "512" in reply.message


def test_a_task_needs_a_node_that_computes_it_and_gives_the_model_a_name_of_its_own() -> None:
    cell = CellUnderTest()
    cell.join()
    spec = replace(deployment().spec, task=Task.EMBED)
    asked = DeployRequested(operation_id=OP, spec=spec)
    reply = only(cell.tell(asked), ReplyError)
    assert reply.error == "Unavailable"
    assert "has task embed; no node that is up computes it" in reply.message
    link, _ = cell.join(replace(hello("n2", run_id="run-2"), embeds=True))
    actions = of_kind(cell.tell(asked), SendCommand)
    (sent,) = [one for one in actions if isinstance(one.command, ImportModel)]
    assert sent.link_id == link
    model = only(cell.report(link, DONE), StoreDeployment).deployment.model
    assert (model.task, model.model_id) == (Task.EMBED, f"{MODEL.model_id}+for-embed")
    assert imported_id(model.model_id) == MODEL.model_id


@pytest.mark.parametrize(
    ("task", "only_task", "said"),
    [
        (Task.RERANK, None, "no head for task rerank"),
        (None, Task.EMBED, "deploy it with spec.task embed"),
        (Task.EMBED, Task.RERANK, "task rerank is what it can do"),
    ],
)
def test_a_task_that_the_model_cannot_do_is_refused_with_what_it_can(
    task: Task | None, only_task: Task | None, said: str
) -> None:
    cell, link = one_node(node=replace(hello(), embeds=True))
    cell.tell(DeployRequested(operation_id=OP, spec=replace(deployment().spec, task=task)))
    done = replace(DONE, model=replace(MODEL, only_task=only_task))
    reply = only(cell.report(link, done), ReplyError)
    assert reply.error == "UnsupportedModel"
    assert said in reply.message
    assert cell.core.cell.deployments == {}


def test_the_same_deployment_again_changes_nothing() -> None:
    cell = CellUnderTest(deployment())
    same = cell.tell(DeployRequested(operation_id=OP, spec=deployment().spec))
    assert only(same, ReplyDone).message == "unchanged"


def test_without_a_node_nothing_can_be_deployed() -> None:
    reply = only(
        CellUnderTest().tell(DeployRequested(operation_id=OP, spec=deployment().spec)), ReplyError
    )
    assert reply.error == "Unavailable"
    assert "cpu" in reply.message


def test_a_node_lost_while_it_imports_fails_the_call() -> None:
    cell, link = importing_cell()
    reply = only(cell.tell(NodeDisconnected(link_id=link, reason="reset")), ReplyError)
    assert reply.error == "Unavailable"
    assert cell.core.cell.deployments == {}


def test_a_caller_that_goes_away_stops_the_import() -> None:
    cell, _ = importing_cell()
    actions = cell.tell(OperationCancelled(operation_id=OP))
    assert commands(actions, CancelImport) == [CancelImport(operation_id=OP)]


def test_an_import_has_a_bound() -> None:
    cell, _ = importing_cell()
    actions = cell.tell(OperationExpired(operation_id=OP))
    assert only(actions, ReplyError).error == "Unavailable"
    assert cell.tell(OperationExpired(operation_id=OP)) == [], "and is answered once"


def test_operations_under_way_are_bounded() -> None:
    cell = CellUnderTest(limits=CellLimits(operations_max=1))
    cell.join()
    cell.tell(DeployRequested(operation_id=OP, spec=deployment("a").spec))
    second = cell.tell(DeployRequested(operation_id=OperationId("op-2"), spec=deployment("b").spec))
    assert only(second, ReplyError).error == "Unavailable"
    assert "b" not in cell.core.cell.deployments


def test_deleting_ends_running_and_queued_requests_and_unloads() -> None:
    cell, link = one_node(deployment(), limits=CellLimits(batch_max=1))
    load = cell.bring_up(link)
    cell.invoke(request("r2"))
    assert (
        only(cell.tell(DeleteRequested(operation_id=OP, name=CHAT)), RemoveDeployment).name == CHAT
    )
    stored = cell.tell(DeploymentStored(operation_id=OP))
    reasons = {r.request_id: r.reason for r in of_kind(stored, RefuseRequest)}
    assert reasons == dict.fromkeys(["r1", "r2"], RefusalReason.DEPLOYMENT_DELETED)
    assert len(commands(stored, AbortRequest)) == 1
    assert commands(stored, UnloadInstance)[0].instance_id == load.instance_id
    cell.report(link, InstanceGone(instance_id=load.instance_id))
    assert cell.core.cell.instances == {}


def test_deleting_what_is_not_there_says_so() -> None:
    reply = only(CellUnderTest().tell(DeleteRequested(operation_id=OP, name=CHAT)), ReplyError)
    assert reply.error == "NotFound"


def test_a_minimum_of_replicas_is_loaded_at_once_and_kept() -> None:
    cell, link = one_node(deployment())
    cell.tell(ScaleRequested(operation_id=OP, name=CHAT, replicas_min=1))
    load = commands(cell.tell(DeploymentStored(operation_id=OP)), LoadInstance)[0]
    cell.loaded(link, load.instance_id)
    gone = cell.report(link, InstanceGone(instance_id=load.instance_id, message="boom"))
    assert len(commands(gone, LoadInstance)) == 1


def test_an_instance_that_breaks_before_its_load_was_told_counts_as_a_failed_load() -> None:
    """The next one waits as after any other."""
    cell, link = one_node(deployment(replicas_min=1))
    (instance_id,) = cell.core.cell.instances
    broke = InstanceGone(instance_id=instance_id, error="EngineError", message="killed")
    gone = cell.report(link, broke)
    assert commands(gone, LoadInstance) == []
    assert cell.core.cell.deployments[CHAT].load_error == "killed"
    (due,) = of_kind(gone, SetTimer)
    cell.now_s = due.at_s
    assert len(commands(cell.tell(due.timer), LoadInstance)) == 1


def test_scaling_down_drains_the_smallest_batch_first() -> None:
    cell = CellUnderTest(deployment(), limits=CellLimits(batch_max=1))
    first_link, _ = cell.join()
    cell.bring_up(first_link)
    second_link, _ = cell.join(hello("n2", run_id="run-2"))
    second = cell.bring_up(second_link, request("r2"))
    cell.tokens(second_link, "r2", [1], finish=FinishReason.STOP)
    cell.tell(ScaleRequested(operation_id=OP, name=CHAT, replicas_max=1))
    stored = cell.tell(DeploymentStored(operation_id=OP))
    assert [u.instance_id for u in commands(stored, UnloadInstance)] == [second.instance_id]


def test_what_a_minimum_kept_goes_after_its_keep_alive_when_the_minimum_falls() -> None:
    cell, link = one_node(deployment(replicas_min=1))
    (instance_id,) = cell.core.cell.instances
    cell.loaded(link, instance_id)
    idle_since_s = cell.core.cell.instances[instance_id].idle_since_s
    cell.now_s += 5.0
    kept = KeepAliveExpired(instance_id=instance_id, idle_since_s=idle_since_s)
    assert commands(cell.tell(kept), UnloadInstance) == []
    cell.tell(ScaleRequested(operation_id=OP, name=CHAT, replicas_min=0))
    timers = of_kind(cell.tell(DeploymentStored(operation_id=OP)), SetTimer)
    (expired,) = [t.timer for t in timers if isinstance(t.timer, KeepAliveExpired)]
    cell.tell(expired)
    assert cell.core.cell.instances[instance_id].state is InstanceState.PARKED


def test_scaling_to_a_minimum_above_the_maximum_is_refused() -> None:
    cell = CellUnderTest(deployment(replicas_max=2))
    reply = only(cell.tell(ScaleRequested(operation_id=OP, name=CHAT, replicas_min=3)), ReplyError)
    assert reply.error == "InvalidInput"


def test_a_load_is_begun_once_and_kept_as_any_other() -> None:
    cell, link = one_node(deployment())
    begun = cell.tell(LoadRequested(operation_id=OP, name=CHAT))
    assert only(begun, ReplyDone).message == "loading"
    (load,) = commands(begun, LoadInstance)
    again = cell.tell(LoadRequested(operation_id=OP, name=CHAT))
    assert only(again, ReplyDone).message == "unchanged"
    assert commands(again, LoadInstance) == []
    timers = of_kind(cell.loaded(link, load.instance_id), SetTimer)
    assert any(isinstance(t.timer, KeepAliveExpired) for t in timers)


def test_a_load_without_room_is_told() -> None:
    cell = CellUnderTest(deployment())
    reply = only(cell.tell(LoadRequested(operation_id=OP, name=CHAT)), ReplyError)
    assert (reply.error, "none of 0 nodes" in reply.message) == ("Unavailable", True)
    unknown = cell.tell(LoadRequested(operation_id=OP, name=DeploymentName("none")))
    assert only(unknown, ReplyError).error == "NotFound"


def test_unloading_ends_idle_instances_at_once_and_busy_ones_with_their_last_request() -> None:
    cell, link = one_node(deployment())
    load = cell.bring_up(link)
    busy = cell.tell(UnloadRequested(operation_id=OP, name=CHAT))
    assert only(busy, ReplyDone).message == "unloading"
    assert commands(busy, UnloadInstance) == []
    ended = cell.tokens(link, "r1", [1], finish=FinishReason.STOP)
    assert [u.instance_id for u in commands(ended, UnloadInstance)] == [load.instance_id]


def test_what_a_minimum_keeps_is_not_unloaded() -> None:
    cell = CellUnderTest(deployment(replicas_min=1))
    cell.join()
    reply = only(cell.tell(UnloadRequested(operation_id=OP, name=CHAT)), ReplyError)
    assert (reply.error, "--min 0" in reply.hint) == ("InvalidInput", True)
