"""The controller core on changed deployments: the next revision takes over when it is ready, and
nobody who was there before loses an answer.
"""

from dataclasses import replace
from pathlib import Path

from mesh.core.controller.snapshot import cell_snapshot
from mesh.domain.actions import (
    DeliverTokens,
    RefuseRequest,
    ReplyDone,
    ReplyError,
    StoreDeployment,
    StoreRevisions,
)
from mesh.domain.deployment import DeploymentSpec
from mesh.domain.events import (
    DeleteRequested,
    DeploymentStored,
    DeployRequested,
    LeaseCheckDue,
    NodeDisconnected,
    OperationCancelled,
    RetryLoadDue,
    ScaleRequested,
    UndoRequested,
)
from mesh.domain.ids import DeploymentName, InstanceId, OperationId
from mesh.domain.limits import CellLimits
from mesh.domain.messages import (
    ImportDone,
    ImportFailed,
    ImportModel,
    InstanceGone,
    LoadFailed,
    LoadInstance,
    SubmitRequest,
    UnloadInstance,
)
from mesh.domain.reasons import FinishReason, RefusalReason
from mesh.domain.revision import REVISIONS_MAX, Revision, Revisions, RevisionState
from mesh.domain.slo import Slo
from mesh.domain.text import TextAssets
from mesh.domain.views import DeploymentSnapshot
from mesh.runtime.journal import ControllerStart, open_journal, read_journal, replay
from mesh.runtime.starting import controller_core
from tests.core.cells import (
    FOOTPRINT,
    MODEL,
    OTHER_MODEL,
    CellUnderTest,
    commands,
    deployment,
    hello,
    of_kind,
    one_node,
    only,
    request,
)
from tests.support.profiles import PROFILE

OP = OperationId("op-1")
CHAT, SECOND = DeploymentName("chat"), DeploymentName("chat@2")
TEXT = TextAssets(tokenizer_json=b"{}")
OTHER = OTHER_MODEL
CHANGED: DeploymentSpec = replace(deployment().spec, source=OTHER.source)


def shown(cell: CellUnderTest) -> DeploymentSnapshot:
    (one,) = cell_snapshot(cell.core.cell, cell.now_s).deployments
    return one


def states(cell: CellUnderTest) -> list[tuple[int, str]]:
    return [(view.number, view.state.value) for view in shown(cell).revisions]


def imported(cell: CellUnderTest, link: int, spec: DeploymentSpec = CHANGED) -> list[LoadInstance]:
    """A revision of another model is deployed and stored: the loads that this begins."""
    asked = cell.tell(DeployRequested(operation_id=OP, spec=spec))
    assert commands(asked, ImportModel) == [ImportModel(operation_id=OP, source=spec.source)]
    done = ImportDone(operation_id=OP, model=OTHER, footprint=FOOTPRINT, text=TEXT)
    store = only(cell.report(link, done), StoreDeployment)
    assert store.text == TEXT
    assert store.deployment.spec.name == CHAT, "the old one serves until the new one is ready"
    return commands(cell.tell(DeploymentStored(operation_id=OP)), LoadInstance)


def serving_cell() -> tuple[CellUnderTest, int, InstanceId]:
    """One that answers r1."""
    cell, link = one_node(deployment())
    return cell, link, cell.bring_up(link).instance_id


def test_a_deploy_of_another_tenant_is_no_revision() -> None:
    cell, _, _ = serving_cell()
    asked = DeployRequested(operation_id=OP, spec=replace(CHANGED, tenant="b"))
    assert only(cell.tell(asked), ReplyError).error == "AlreadyExists"


def test_a_changed_model_serves_once_it_is_loaded_and_the_old_one_answers_to_the_end() -> None:
    cell, link, old = serving_cell()
    (load,) = imported(cell, link)
    assert (load.deployment, load.model) == (SECOND, OTHER)
    assert states(cell) == [(1, "serving"), (2, "starting")]
    early = commands(cell.invoke(request("r2")), SubmitRequest)
    assert [s.instance_id for s in early] == [old], "traffic stays until it is ready"

    switched = cell.loaded(link, load.instance_id)
    stored = only(switched, StoreRevisions)
    assert (stored.deployment.spec.name, stored.deployment.revision) == (SECOND, 2)
    assert states(cell) == [(1, "retiring"), (2, "serving")]
    late = commands(cell.invoke(request("r3")), SubmitRequest)
    assert [s.instance_id for s in late] == [load.instance_id]
    assert commands(switched, UnloadInstance) == []

    delivered = cell.tokens(link, "r1", [1], finish=FinishReason.STOP)
    assert only(delivered, DeliverTokens)
    gone = cell.tokens(link, "r2", [1], finish=FinishReason.STOP)
    assert [u.instance_id for u in commands(gone, UnloadInstance)] == [old]
    cell.report(link, InstanceGone(instance_id=old))
    cell.tell(LeaseCheckDue())
    assert states(cell) == [(1, "past"), (2, "serving")]
    assert list(cell.core.cell.deployments) == [SECOND]
    assert (shown(cell).spec, shown(cell).served) == (CHANGED, 2), "callers know one name"
    assert cell.core.deployment(CHAT) is not None
    assert cell.core.deployment(SECOND) is None


def test_who_waits_for_the_old_revision_is_answered_by_its_model() -> None:
    """Its tokens are those of another tokenizer."""
    cell, link = one_node(deployment(), limits=CellLimits(batch_max=1, attempts_max=3))
    load = cell.bring_up(link)
    (new,) = imported(cell, link)
    cell.invoke(request("r2"))
    switched = cell.loaded(link, new.instance_id)
    assert of_kind(switched, RefuseRequest) == []
    ended = cell.tokens(link, "r1", [1], finish=FinishReason.STOP)
    sent = commands(ended, SubmitRequest)
    assert [(s.instance_id, s.order.request.request_id) for s in sent] == [(load.instance_id, "r2")]


def test_a_lost_node_sends_the_old_revisions_requests_to_its_own_model() -> None:
    cell, link, _ = serving_cell()
    (new,) = imported(cell, link)
    cell.loaded(link, new.instance_id)
    cell.join(hello("n2", run_id="run-2"))
    lost = cell.tell(NodeDisconnected(link_id=link, reason="reset"))
    assert of_kind(lost, RefuseRequest) == []
    assert {load.model.model_id for load in commands(lost, LoadInstance)} >= {MODEL.model_id}


def test_a_revision_that_cannot_load_leaves_the_old_one_and_says_why() -> None:
    cell, link, old = serving_cell()
    (load,) = imported(cell, link)
    torn = LoadFailed(instance_id=load.instance_id, error="TornModel", message="torn")
    cell.report(link, torn)
    assert states(cell) == [(1, "serving"), (2, "starting")], "a first failure is tried again"
    cell.now_s = cell.core.cell.deployments[SECOND].paused_until_s
    (load,) = commands(cell.tell(RetryLoadDue(name=SECOND)), LoadInstance)
    actions = cell.report(link, replace(torn, instance_id=load.instance_id))
    stored = only(actions, StoreRevisions)
    assert (stored.deployment.revision, stored.deployment.spec.name) == (1, CHAT)
    (kept,) = stored.revisions
    assert (kept.state, "torn" in kept.message) == (RevisionState.FAILED, True)
    assert SECOND not in cell.core.cell.deployments
    (view,) = [v for v in shown(cell).revisions if v.number == 2]
    assert (view.state, "torn" in view.message) == (RevisionState.FAILED, True)
    sent = commands(cell.invoke(request("r2")), SubmitRequest)
    assert [s.instance_id for s in sent] == [old]


def test_a_revision_for_which_there_is_no_room_is_given_up_in_time() -> None:
    cell, link = one_node(
        deployment(replicas_min=1),
        limits=CellLimits(rollout_s_max=30.0),
        node=hello(memory_bytes=FOOTPRINT.instance_bytes(40)),
    )
    (old,) = cell.core.cell.instances
    cell.loaded(link, old)
    assert imported(cell, link) == []
    cell.now_s += 5.0
    cell.tell(LeaseCheckDue())
    assert states(cell) == [(1, "serving"), (2, "starting")]
    cell.report(link, only_heartbeat())
    cell.now_s += 26.0
    cell.report(link, only_heartbeat())
    (view,) = [v for v in shown(cell).revisions if v.number == 2]
    assert view.state is RevisionState.FAILED
    assert "room" in view.message
    assert "30 s" in view.message


def only_heartbeat() -> ImportFailed:
    """Whatever a node says keeps its lease."""
    return ImportFailed(operation_id=OperationId("of nobody"), error="NotFound", message="")


def test_a_model_that_cannot_be_imported_leaves_no_trace() -> None:
    cell, link, _ = serving_cell()
    cell.tell(DeployRequested(operation_id=OP, spec=CHANGED))
    assert states(cell) == [(1, "serving"), (2, "importing")]
    second = cell.tell(DeployRequested(operation_id=OperationId("op-2"), spec=CHANGED))
    assert only(second, ReplyError).error == "AlreadyExists"
    failed = ImportFailed(operation_id=OP, error="TornModel", message="torn")
    assert only(cell.report(link, failed), ReplyError).error == "TornModel"
    assert states(cell) == [(1, "serving")]
    assert list(cell.core.cell.deployments) == [CHAT]


def test_what_needs_no_other_instance_is_changed_in_place() -> None:
    cell, _, old = serving_cell()
    spec = replace(deployment(replicas_max=2).spec, slo=Slo(ttft_s=9.0))
    store = only(cell.tell(DeployRequested(operation_id=OP, spec=spec)), StoreDeployment)
    assert (store.deployment.revision, store.deployment.spec) == (2, spec)
    assert store.revisions is not None
    assert [(r.number, r.state) for r in store.revisions] == [(1, RevisionState.PAST)]
    done = cell.tell(DeploymentStored(operation_id=OP))
    assert only(done, ReplyDone).message == "revision 2 serves"
    assert list(cell.core.cell.instances) == [old]
    assert (shown(cell).spec.slo.ttft_s, shown(cell).revision) == (9.0, 2)
    undone = cell.tell(UndoRequested(operation_id=OP, name=CHAT))
    assert only(undone, StoreDeployment).deployment.spec == deployment().spec
    cell.tell(DeploymentStored(operation_id=OP))
    assert (shown(cell).spec, shown(cell).revision) == (deployment().spec, 3)


def test_a_scaled_deployment_can_be_deployed_again() -> None:
    cell, _, _ = serving_cell()
    cell.tell(ScaleRequested(operation_id=OP, name=CHAT, replicas_max=1))
    cell.tell(DeploymentStored(operation_id=OP))
    again = cell.tell(DeployRequested(operation_id=OP, spec=deployment().spec))
    assert only(again, StoreDeployment).deployment.spec == deployment().spec


def test_undo_goes_back_to_the_model_that_was_without_importing_it() -> None:
    cell, link, old = serving_cell()
    (new,) = imported(cell, link)
    cell.loaded(link, new.instance_id)
    cell.tokens(link, "r1", [1], finish=FinishReason.STOP)
    cell.report(link, InstanceGone(instance_id=old))
    undone = cell.tell(UndoRequested(operation_id=OP, name=CHAT))
    assert commands(undone, ImportModel) == []
    (load,) = commands(cell.tell(DeploymentStored(operation_id=OP)), LoadInstance)
    assert (load.deployment, load.model) == ("chat@3", MODEL)
    cell.loaded(link, load.instance_id)
    assert (shown(cell).spec, shown(cell).revision) == (deployment().spec, 3)


def test_undo_gives_up_a_revision_that_has_not_taken_over() -> None:
    cell, link, old = serving_cell()
    (new,) = imported(cell, link)
    cell.tell(UndoRequested(operation_id=OP, name=CHAT))
    done = cell.tell(DeploymentStored(operation_id=OP))
    assert only(done, ReplyDone).message == "given up"
    assert [u.instance_id for u in commands(done, UnloadInstance)] == [new.instance_id]
    assert states(cell) == [(1, "serving"), (2, "failed")]
    cell.tell(DeployRequested(operation_id=OP, spec=replace(CHANGED, source="file:///c")))
    cell.tell(UndoRequested(operation_id=OperationId("op-2"), name=CHAT))
    assert states(cell) == [(1, "serving"), (2, "failed")], "an import is stopped at once"
    assert old in cell.core.cell.instances


def test_undo_without_an_earlier_revision_says_so() -> None:
    cell, _, _ = serving_cell()
    reply = only(cell.tell(UndoRequested(operation_id=OP, name=CHAT)), ReplyError)
    assert reply.error == "NotFound"
    nowhere = cell.tell(UndoRequested(operation_id=OP, name=DeploymentName("nowhere")))
    assert only(nowhere, ReplyError).error == "NotFound"
    internal = cell.tell(UndoRequested(operation_id=OP, name=SECOND))
    assert only(internal, ReplyError).error == "NotFound"


def test_deleting_takes_every_revision_with_it() -> None:
    cell, link, _ = serving_cell()
    (new,) = imported(cell, link)
    cell.loaded(link, new.instance_id)
    cell.invoke(request("r2"))
    cell.tell(DeleteRequested(operation_id=OP, name=CHAT))
    gone = cell.tell(DeploymentStored(operation_id=OP))
    reasons = {r.request_id: r.reason for r in of_kind(gone, RefuseRequest)}
    assert reasons == dict.fromkeys(["r1", "r2"], RefusalReason.DEPLOYMENT_DELETED)
    assert cell.core.cell.deployments == {}
    assert cell.core.cell.rollouts == {}


def test_a_restarted_controller_goes_on_with_a_rollout() -> None:
    second = replace(deployment(), spec=replace(CHANGED, name=SECOND), model=OTHER, revision=2)
    revisions: Revisions = (Revision(deployment=second, state=RevisionState.STARTING),)
    cell = CellUnderTest(deployment(), revisions={CHAT: revisions})
    link, actions = cell.join()
    loads = commands(actions, LoadInstance) or commands(cell.tell(LeaseCheckDue()), LoadInstance)
    assert [load.deployment for load in loads] == [SECOND]
    cell.loaded(link, loads[0].instance_id)
    assert states(cell) == [(1, "past"), (2, "serving")]


def test_history_is_bounded() -> None:
    cell, _, _ = serving_cell()
    for n in range(REVISIONS_MAX + 5):
        spec = replace(deployment().spec, slo=Slo(ttft_s=3.0 + n))
        store = only(cell.tell(DeployRequested(operation_id=OP, spec=spec)), StoreDeployment)
        cell.tell(DeploymentStored(operation_id=OP))
    assert store.revisions is not None
    assert len(store.revisions) == REVISIONS_MAX
    assert shown(cell).revision == REVISIONS_MAX + 6


def test_a_journal_with_a_rollout_replays_to_the_letter(tmp_path: Path) -> None:
    """Across a restart, with what the registry had then."""
    second = replace(deployment(), spec=replace(CHANGED, name=SECOND), model=OTHER, revision=2)
    start = ControllerStart(
        version="test",
        epoch=1,
        policy="llm-mesh",
        limits=CellLimits(delivery_s_max=0.02),
        deployments=(deployment(),),
        profiles=(PROFILE,),
        revisions={CHAT: (Revision(deployment=second, state=RevisionState.STARTING),)},
    )
    path = tmp_path / "journal"
    journal = open_journal(path, start)
    cell = CellUnderTest(deployment(), revisions=start.revisions, recorder=journal.record)
    link, actions = cell.join()
    loads = commands(actions, LoadInstance) or commands(cell.tell(LeaseCheckDue()), LoadInstance)
    cell.loaded(link, loads[0].instance_id)
    cell.tell(UndoRequested(operation_id=OP, name=CHAT))
    (back,) = commands(cell.tell(DeploymentStored(operation_id=OP)), LoadInstance)
    cell.loaded(link, back.instance_id)
    journal.close()
    assert shown(cell).revision == 3
    read, decisions = read_journal(path)
    assert read == start
    assert replay(controller_core(start), decisions) is None


def test_while_a_change_is_written_no_other_one_is_decided() -> None:
    """The database may take its time, and what it writes can no longer be taken back."""
    cell, link, _ = serving_cell()
    (new,) = imported(cell, link)
    scaling = ScaleRequested(operation_id=OP, name=CHAT, keep_alive_s=9.0)
    assert only(cell.tell(scaling), StoreDeployment).deployment.spec.scaling.keep_alive_s == 9.0
    second = OperationId("op-2")
    for asked in (
        replace(scaling, operation_id=second),
        DeployRequested(operation_id=second, spec=replace(CHANGED, source="file:///c")),
        UndoRequested(operation_id=second, name=CHAT),
        DeleteRequested(operation_id=second, name=CHAT),
    ):
        refused = only(cell.tell(asked), ReplyError)
        assert (refused.error, refused.message) == (
            "Unavailable",
            "another change of 'chat' is being written",
        )
    assert cell.tell(OperationCancelled(operation_id=OP)) == []
    cell.loaded(link, new.instance_id)
    assert states(cell) == [(1, "serving"), (2, "starting")], "it takes over after the write"
    cell.tell(DeploymentStored(operation_id=OP))
    assert states(cell)[-1] == (2, "serving")


def test_a_removal_that_is_written_is_not_taken_back_by_its_caller() -> None:
    cell, _, _ = serving_cell()
    cell.tell(DeleteRequested(operation_id=OP, name=CHAT))
    assert cell.tell(OperationCancelled(operation_id=OP)) == []
    cell.tell(DeploymentStored(operation_id=OP))
    assert not cell.core.cell.deployments
