"""The controller core on `mesh profile`: loaded, measured, stored, used; answered exactly once."""

from dataclasses import replace

from mesh.core.controller.state.expectations import Expectations
from mesh.domain.actions import (
    ControllerAction,
    ReplyDone,
    ReplyError,
    ReplyProgress,
    SetTimer,
    StoreProfile,
)
from mesh.domain.events import (
    DeleteRequested,
    DeploymentStored,
    DeployRequested,
    KeepAliveExpired,
    NodeDisconnected,
    OperationCancelled,
    OperationExpired,
    ProfileRequested,
    StoreFailed,
)
from mesh.domain.ids import DeploymentName, InstanceId, ModelId, NodeId, OperationId
from mesh.domain.lifecycle import InstanceState
from mesh.domain.limits import CellLimits
from mesh.domain.messages import (
    CancelProfile,
    InstanceGone,
    LoadFailed,
    LoadInstance,
    ProfileDone,
    ProfileFailed,
    ProfileInstance,
    ProfileProgress,
    ProfileRefined,
    UnloadInstance,
    UseProfile,
)
from mesh.domain.profile import Profile
from mesh.domain.reasons import ProfileSource
from tests.core.admission import instance, node, submitted
from tests.core.cells import (
    FOOTPRINT,
    MIB,
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
from tests.support.profiles import PROFILE, profile

OP, OP2 = OperationId("op-1"), OperationId("op-2")
CHAT = DeploymentName("chat")
LIMITS = CellLimits(delivery_s_max=0.02, kv_tokens_profiled=512)
MEASURED = profile(measured_s=42.0)
DONE = ProfileDone(operation_id=OP, profile=MEASURED)


def ask(
    cell: CellUnderTest, on: str | None = None, of: str = "chat", operation_id: OperationId = OP
) -> list[ControllerAction]:
    return cell.tell(
        ProfileRequested(
            operation_id=operation_id,
            name=DeploymentName(of),
            node_id=None if on is None else NodeId(on),
        )
    )


def unmeasured_cell(*names: str) -> CellUnderTest:
    deployments = (deployment(name) for name in names or ("chat",))
    return CellUnderTest(*deployments, profiles=(), limits=LIMITS)


def measuring_cell() -> tuple[CellUnderTest, int, InstanceId]:
    """An instance of `chat` has been loaded for its profile, and is being measured."""
    cell = unmeasured_cell()
    link, _ = cell.join()
    (load,) = commands(ask(cell), LoadInstance)
    (sent,) = commands(cell.loaded(link, load.instance_id), ProfileInstance)
    assert (sent.operation_id, sent.instance_id) == (OP, load.instance_id)
    return cell, link, load.instance_id


def keep_alive(actions: list[ControllerAction]) -> KeepAliveExpired:
    timers = [set_timer.timer for set_timer in of_kind(actions, SetTimer)]
    return only(timers, KeepAliveExpired)


def test_an_instance_that_is_up_is_measured_at_once() -> None:
    cell = unmeasured_cell()
    cell.join(node("n1", instance("i1", "chat")))
    asked = ask(cell)
    assert [c.instance_id for c in commands(asked, ProfileInstance)] == ["i1"]
    assert commands(asked, LoadInstance) == []


def test_operators_are_counted_by_as_many_cores_as_the_caller_wants_and_the_node_has() -> None:
    cell = unmeasured_cell()
    cell.join(node("n1", instance("i1", "chat")))
    asked = ProfileRequested(operation_id=OP, name=CHAT, operators=True, cores=(1, 2))
    (refused,) = of_kind(cell.tell(replace(asked, cores=(1, 3))), ReplyError)
    assert refused.error == "InvalidInput"
    assert refused.message == "n1 is to count with 1, 3 cores, of which it has 2"
    told = commands(cell.tell(asked), ProfileInstance)
    assert [(command.operators, command.cores) for command in told] == [(True, (1, 2))]


def test_where_none_is_up_one_is_loaded_and_kept_until_it_is_measured() -> None:
    cell = unmeasured_cell("chat", "other")
    link, _ = cell.join(hello(memory_bytes=150 * MIB))
    (load,) = commands(ask(cell), LoadInstance)
    up = cell.loaded(link, load.instance_id)
    cell.now_s += 600.0
    assert commands(cell.tell(keep_alive(up)), UnloadInstance) == []
    assert commands(cell.invoke(request(of="other")), UnloadInstance) == [], "nor for its memory"
    done = cell.report(link, DONE)
    assert [u.instance_id for u in commands(done, UnloadInstance)] == [load.instance_id]


def test_an_instance_that_was_measured_idles_by_its_keep_alive_again() -> None:
    cell, link, instance_id = measuring_cell()
    expired = keep_alive(cell.report(link, DONE))
    cell.now_s += 1.0
    cell.tell(expired)
    assert cell.core.cell.instances[instance_id].state is InstanceState.PARKED


def test_a_profile_is_answered_when_it_has_been_stored() -> None:
    cell, link, _ = measuring_cell()
    progress = ProfileProgress(operation_id=OP, phase="warm up", share=0.25)
    assert only(cell.report(link, progress), ReplyProgress).share == 0.25
    done = cell.report(link, DONE)
    assert only(done, StoreProfile).profile == MEASURED
    assert of_kind(done, ReplyDone) == []
    assert only(cell.tell(DeploymentStored(operation_id=OP)), ReplyDone).operation_id == OP
    assert cell.tell(DeploymentStored(operation_id=OP)) == []
    assert cell.core.cell.operations == {}


def test_a_profile_holds_at_once_on_all_nodes_that_are_equal_and_on_no_other() -> None:
    cell, link, instance_id = measuring_cell()
    cell.join(node("n2", instance("i2", "chat")))
    cell.join(replace(node("n3", instance("i3", "chat")), fingerprint="test/8"))
    done = cell.report(link, DONE)
    assert {c.instance_id for c in commands(done, UseProfile)} == {instance_id, "i2"}
    assert {c.profile.measured_s for c in commands(done, UseProfile)} == {42.0}
    entries = cell.core.cell.instances
    assert entries[InstanceId("i2")].profile == MEASURED
    estimate = entries[InstanceId("i3")].profile
    assert estimate is not None
    assert not estimate.measured


def test_a_new_instance_is_loaded_with_the_profile_that_was_measured() -> None:
    cell, link, instance_id = measuring_cell()
    cell.report(link, DONE)
    cell.report(link, InstanceGone(instance_id=instance_id))
    (load,) = commands(cell.invoke(), LoadInstance)
    assert load.profile == MEASURED


def test_profiles_are_shown_by_fingerprint_with_the_nodes_that_they_hold_for() -> None:
    elsewhere = profile(fingerprint="a/64")
    cell = CellUnderTest(deployment(), profiles=(PROFILE, elsewhere), limits=LIMITS)
    cell.join(hello("n2", run_id="2"))
    cell.join(hello("n1", run_id="1"))
    cell.join(hello("n3", run_id="3", fingerprint="z/4"))
    views = cell.core.profiles(CHAT)
    assert views is not None
    assert [(v.profile.fingerprint, v.profile.measured, v.nodes) for v in views] == [
        ("a/64", True, ()),
        ("test/2", True, ("n1", "n2")),
        ("z/4", False, ("n3",)),
    ]
    assert cell.core.profiles(DeploymentName("nope")) is None


def test_without_a_deployment_or_a_node_there_is_nothing_to_measure() -> None:
    cell = unmeasured_cell()
    assert only(ask(cell, of="nope"), ReplyError).error == "NotFound"
    assert only(ask(cell), ReplyError).error == "Unavailable"
    cell.join()
    unknown = only(ask(cell, on="n9"), ReplyError)
    assert (unknown.error, unknown.hint) == ("NotFound", "nodes: n1")
    assert cell.core.cell.operations == {}


def test_it_is_measured_where_it_was_asked_for() -> None:
    cell = unmeasured_cell()
    cell.join(node("n1", instance("i1", "chat")))
    cell.join(node("n2"))
    (load,) = commands(ask(cell, on="n2"), LoadInstance)
    assert cell.core.cell.instances[load.instance_id].node.node_id == "n2"


def test_of_several_nodes_one_with_room_is_taken() -> None:
    """The fullest comes first, but 110 MiB are too few."""
    cell = unmeasured_cell()
    cell.join(hello("full", run_id="1", memory_bytes=110 * MIB))
    cell.join(hello("roomy", run_id="2", memory_bytes=200 * MIB))
    (load,) = commands(ask(cell), LoadInstance)
    assert cell.core.cell.instances[load.instance_id].node.node_id == "roomy"


def test_a_node_without_room_is_said_at_once() -> None:
    cell = unmeasured_cell("chat", "other")
    cell.join(node("n1", instance("i1", "other"), memory_bytes=350 * MIB))
    cell.invoke(request(of="other"))
    reply = only(ask(cell), ReplyError)
    assert (reply.error, "n1" in reply.message) == ("Unavailable", True)


def test_an_idle_instance_makes_room_for_one_to_measure() -> None:
    cell = unmeasured_cell("chat", "other")
    link, _ = cell.join(node("n1", instance("i1", "other"), memory_bytes=350 * MIB))
    assert [u.instance_id for u in commands(ask(cell), UnloadInstance)] == ["i1"]
    gone = cell.report(link, InstanceGone(instance_id=InstanceId("i1")))
    assert [load.deployment for load in commands(gone, LoadInstance)] == ["chat"]


def test_a_profile_loads_no_more_instances_than_a_deployment_may_have() -> None:
    cell = CellUnderTest(deployment(replicas_max=1), profiles=(), limits=LIMITS)
    cell.join(node("n1", instance("i1", "chat")))
    cell.join(node("n2"))
    reply = only(ask(cell, on="n2"), ReplyError)
    assert (reply.error, "`mesh scale`" in reply.hint) == ("Unavailable", True)


def test_a_measurement_that_fails_is_answered_once_and_lets_its_instance_go() -> None:
    cell, link, instance_id = measuring_cell()
    failed = ProfileFailed(operation_id=OP, error="Unavailable", message="no", hint="h")
    actions = cell.report(link, failed)
    reply = only(actions, ReplyError)
    assert (reply.error, reply.message, reply.hint) == ("Unavailable", "no", "h")
    assert keep_alive(actions).instance_id == instance_id
    assert of_kind(cell.report(link, failed), ReplyError) == []
    assert of_kind(cell.report(link, DONE), StoreProfile) == []


def test_a_caller_that_goes_away_ends_the_measurement() -> None:
    cell, link, instance_id = measuring_cell()
    actions = cell.tell(OperationCancelled(operation_id=OP))
    assert commands(actions, CancelProfile) == [CancelProfile(operation_id=OP)]
    assert not cell.core.cell.instances[instance_id].profiling
    assert of_kind(cell.report(link, DONE), StoreProfile) == [], "it comes too late"


def test_a_measurement_has_a_bound() -> None:
    cell, _, _ = measuring_cell()
    assert only(cell.tell(OperationExpired(operation_id=OP)), ReplyError).error == "Unavailable"
    assert cell.tell(OperationExpired(operation_id=OP)) == []


def test_a_node_that_is_lost_fails_its_measurement_once() -> None:
    cell, link, _ = measuring_cell()
    lost = cell.tell(NodeDisconnected(link_id=link, reason="reset"))
    assert only(lost, ReplyError).error == "Unavailable"
    assert cell.tell(OperationExpired(operation_id=OP)) == []


def test_a_node_that_is_lost_after_it_has_measured_fails_nothing() -> None:
    cell, link, _ = measuring_cell()
    cell.report(link, DONE)
    lost = cell.tell(NodeDisconnected(link_id=link, reason="reset"))
    assert of_kind(lost, ReplyError) == []
    only(cell.tell(DeploymentStored(operation_id=OP)), ReplyDone)


def test_a_load_that_fails_fails_the_measurement_with_the_cause() -> None:
    cell = unmeasured_cell()
    link, _ = cell.join()
    (load,) = commands(ask(cell), LoadInstance)
    failed = LoadFailed(instance_id=load.instance_id, error="TornModel", message="torn")
    assert "torn" in only(cell.report(link, failed), ReplyError).message


def test_a_registry_that_cannot_write_fails_the_call() -> None:
    cell, link, _ = measuring_cell()
    cell.report(link, DONE)
    reply = only(cell.tell(StoreFailed(operation_id=OP, message="disk full")), ReplyError)
    assert reply.error == "StorageError"


def test_a_profile_of_another_model_or_device_is_not_taken() -> None:
    cell, link, _ = measuring_cell()
    wrong = ProfileDone(operation_id=OP, profile=profile(fingerprint="other"))
    actions = cell.report(link, wrong)
    assert of_kind(actions, StoreProfile) == []
    assert only(actions, ReplyError).error == "Unavailable"


def test_a_second_call_that_the_node_turns_down_does_not_end_the_first() -> None:
    """Its instance stays, too."""
    cell, link, instance_id = measuring_cell()
    assert len(commands(ask(cell, operation_id=OP2), ProfileInstance)) == 1
    busy = ProfileFailed(operation_id=OP2, error="Unavailable", message="busy")
    assert only(cell.report(link, busy), ReplyError).operation_id == OP2
    assert cell.core.cell.instances[instance_id].profiling
    assert only(cell.report(link, DONE), StoreProfile).operation_id == OP


def test_a_deployment_that_is_deleted_and_made_anew_is_not_measured_for_the_old_call() -> None:
    cell = unmeasured_cell()
    link, _ = cell.join()
    (load,) = commands(ask(cell), LoadInstance)
    cell.tell(DeleteRequested(operation_id=OP2, name=CHAT))
    stored = cell.tell(DeploymentStored(operation_id=OP2))
    again = DeployRequested(operation_id=OperationId("op-3"), spec=deployment().spec)
    answers = [*stored, *cell.tell(again)]
    answers += cell.report(link, InstanceGone(instance_id=load.instance_id))
    assert [(r.operation_id, r.error) for r in of_kind(answers, ReplyError)] == [(OP, "NotFound")]


def test_requests_are_served_by_an_instance_that_is_being_measured() -> None:
    cell, _, instance_id = measuring_cell()
    assert submitted(cell.invoke()) == [("r1", instance_id)]


def test_a_refined_profile_holds_for_its_instance_and_what_is_loaded_later_and_is_kept() -> None:
    """What is running elsewhere learns by itself."""
    cell, link, instance_id = measuring_cell()
    cell.report(link, DONE)
    cell.tell(DeploymentStored(operation_id=OP))
    known = cell.core.cell.expectations
    other = replace(MODEL, model_id=ModelId("sha256-ffff"))
    estimate = known.profile(other, FOOTPRINT, hello())
    known.learn_estimate(estimate, 2.0)
    tried = known.profile(other, FOOTPRINT, hello())
    assert tried != estimate
    better = profile(measured_s=42.0, decode=replace(MEASURED.decode, rows=(1, 31)))
    said = ProfileRefined(
        instance_id=instance_id, profile=better, correction=1.1, correction_planned=1.3
    )
    actions = cell.report(link, said)
    stored = only(actions, StoreProfile)
    assert (stored.operation_id, stored.profile) == (None, better)
    assert commands(actions, UseProfile) == []
    instance = cell.core.cell.instances[instance_id]
    assert instance.profile == better
    assert instance.correction.factor(cell.now_s) == 1.1, "with what is left to correct of it"
    assert instance.correction.planned(cell.now_s) == 1.3
    assert known.measured(better.model_id) == [better]
    assert known.profile(other, FOOTPRINT, hello()) == tried, "what others have shown holds"


def test_a_refined_profile_of_a_node_that_tells_no_factors_leaves_those_that_are_known() -> None:
    cell, link, instance_id = measuring_cell()
    cell.report(link, DONE)
    said = ProfileRefined(
        instance_id=instance_id, profile=MEASURED, correction=1.1, correction_planned=1.3
    )
    cell.report(link, said)
    cell.report(link, ProfileRefined(instance_id=instance_id, profile=MEASURED))
    correction = cell.core.cell.instances[instance_id].correction
    assert (correction.factor(cell.now_s), correction.planned(cell.now_s)) == (1.1, 1.3)


def test_what_nodes_alike_tell_of_a_profile_is_kept_beside_each_other() -> None:
    """Each goes on by its own; where both have told of a point, the last one's holds."""
    cell = CellUnderTest(deployment(), limits=LIMITS)
    links = [cell.join(node(f"n{i}", instance(f"i{i}", "chat")))[0] for i in (1, 2)]

    def tells(of: int, told: Profile) -> Profile:
        said = ProfileRefined(instance_id=InstanceId(f"i{of}"), profile=told)
        return only(cell.report(links[of - 1], said), StoreProfile).profile

    (first_s, second_s), (third_s, fourth_s) = PROFILE.decode.seconds
    longer = replace(PROFILE.decode, seconds=((2 * first_s, second_s), (third_s, fourth_s)))
    quicker = replace(PROFILE.prefill, seconds=((0.001, 0.0011), (0.01, 0.015)))
    both = replace(PROFILE, decode=longer, prefill=quicker)
    assert tells(1, replace(PROFILE, decode=longer)) == replace(PROFILE, decode=longer)
    hardly = replace(PROFILE.decode, seconds=((1.03 * first_s, second_s), (third_s, fourth_s)))
    assert tells(2, replace(PROFILE, decode=hardly, prefill=quicker)) == both
    slowest = replace(hardly, seconds=((3 * first_s, 3 * first_s), (third_s, fourth_s)))
    kept = tells(2, replace(PROFILE, decode=slowest, prefill=quicker))
    assert (kept.decode, kept.prefill) == (slowest, quicker)
    assert cell.core.cell.expectations.measured(PROFILE.model_id) == [kept]
    own = cell.core.cell.instances[InstanceId("i1")].profile
    assert own == replace(PROFILE, decode=longer)


def test_a_refined_profile_of_something_else_is_not_taken() -> None:
    cell, link, instance_id = measuring_cell()
    unasked = ProfileRefined(instance_id=instance_id, profile=MEASURED)
    assert of_kind(cell.report(link, unasked), StoreProfile) == [], "it is an estimate here"
    cell.report(link, DONE)
    for wrong in (
        ProfileRefined(instance_id=instance_id, profile=profile(fingerprint="other")),
        ProfileRefined(instance_id=instance_id, profile=profile(measured_s=41.0)),
        ProfileRefined(instance_id=InstanceId("gone"), profile=MEASURED),
    ):
        assert of_kind(cell.report(link, wrong), StoreProfile) == []
    assert cell.core.cell.instances[instance_id].profile == MEASURED


def test_what_a_node_has_found_out_by_itself_holds_for_all_of_the_shape_and_is_kept() -> None:
    """A later deployment of that shape has it from its load on, and after a restart."""
    cell, link = one_node(
        deployment(), profiles=(), limits=LIMITS, node=node("n1", instance("i1", "chat"))
    )
    cell.join(node("n2", instance("i2", "chat")))
    estimate = cell.core.cell.instances[InstanceId("i1")].profile
    assert estimate is not None
    found = replace(estimate, scaled_from="", source=ProfileSource.PRIMING, measured_s=2.0)
    said = ProfileRefined(instance_id=InstanceId("i1"), profile=found, correction=1.0)
    actions = cell.report(link, said)
    assert only(actions, StoreProfile).profile == found
    (used,) = commands(actions, UseProfile)
    assert (used.instance_id, used.profile) == ("i2", found)
    assert cell.core.cell.instances[InstanceId("i1")].profile == found
    later = Expectations((found,)).profile(OTHER_MODEL, FOOTPRINT, hello())
    assert (later.measured, later.measured_as) == (True, found.model_id)
    assert (later.model_id, later.decode) == (OTHER_MODEL.model_id, found.decode)
    another = replace(OTHER_MODEL, layers=3)
    assert not Expectations((found,)).profile(another, FOOTPRINT, hello()).measured


def test_less_is_never_taken_for_more() -> None:
    """What iterations tell of an estimate comes too late where the model has been surveyed."""
    cell, link, instance_id = measuring_cell()
    cell.report(link, DONE)
    less = replace(PROFILE, source=ProfileSource.ITERATIONS)
    actions = cell.report(link, ProfileRefined(instance_id=instance_id, profile=less))
    assert of_kind(actions, StoreProfile) == []
    assert cell.core.cell.instances[instance_id].profile == MEASURED
