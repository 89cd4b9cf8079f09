"""Profiling on a node: one shape at a time, only when there is nothing else to compute."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from mesh.compute.refining import LOOK_S
from mesh.domain.actions import NodeAction, StartMeasure, StartStep
from mesh.domain.ids import InstanceId, OperationId
from mesh.domain.messages import (
    CancelProfile,
    InstanceGone,
    LoadFailed,
    ProfileDone,
    ProfileFailed,
    ProfileInstance,
    ProfileProgress,
    ProfileRefined,
    TokensReport,
    UnloadInstance,
    UseProfile,
)
from mesh.domain.node_events import (
    HeartbeatDue,
    MeasureBroke,
    MeasureFinished,
)
from mesh.domain.operators import Role
from mesh.domain.profile import REST, IterationShape
from mesh.domain.reasons import FinishReason
from tests.core.cells import of_kind, only
from tests.core.nodes import NodeUnderTest, load_command, reports, token
from tests.support.profiles import MODEL, PROFILE, profile

OP = OperationId("op-1")
I1 = InstanceId("i1")
ENOUGH_S = 0.2
"""Each time of a shape takes this long: three such times are enough."""


def profile_command(name: str = "i1", operation_id: OperationId = OP) -> ProfileInstance:
    return ProfileInstance(operation_id=operation_id, instance_id=InstanceId(name))


def measuring_node() -> tuple[NodeUnderTest, IterationShape]:
    """Its first shape is being timed."""
    node = NodeUnderTest("i1")
    return node, only(node.command(profile_command()), StartMeasure).shape


def finish(node: NodeUnderTest, elapsed_s: float = ENOUGH_S) -> list[NodeAction]:
    return node.tell(MeasureFinished(instance_id=I1, elapsed_s=elapsed_s))


def finish_all(node: NodeUnderTest) -> list[NodeAction]:
    """All that the node said, until it measures no more."""
    said: list[NodeAction] = []
    for _ in range(1000):
        actions = finish(node)
        said += actions
        if not of_kind(actions, StartMeasure):
            return said
    raise AssertionError("a survey without end")


def failures(actions: Sequence[NodeAction]) -> list[ProfileFailed]:
    return of_kind(reports(actions), ProfileFailed)


def test_one_shape_after_another_is_timed_and_a_measured_profile_comes_of_it() -> None:
    node, first = measuring_node()
    second = only(finish(node), StartMeasure)
    assert (second.instance_id, second.shape == first) == (I1, False)
    said = finish_all(node)
    done = only(reports(said), ProfileDone)
    assert done.operation_id == OP
    assert done.profile.measured
    assert (done.profile.model_id, done.profile.fingerprint) == (
        PROFILE.model_id,
        PROFILE.fingerprint,
    )
    assert {time_s for row in done.profile.decode.seconds for time_s in row} == {ENOUGH_S}
    assert done.profile.measured_s > ENOUGH_S * 10
    shares = [report.share for report in of_kind(reports(said), ProfileProgress)]
    assert shares == sorted(shares)
    assert len(shares) <= 100
    assert finish(node) == [], "it is over"


def test_where_operators_are_wanted_they_are_counted_before_the_survey() -> None:
    """On each number of cores that was asked for, and then on all of them."""
    node = NodeUnderTest("i1")
    command = replace(profile_command(), operators=True, cores=(1,))
    asked = only(node.command(command), StartMeasure)
    said: list[NodeAction] = []
    by_cores = []
    while asked.counted:
        by_cores.append(asked.cores)
        elapsed_s = 2 * ENOUGH_S if asked.cores else ENOUGH_S
        counted = MeasureFinished(
            instance_id=I1, elapsed_s=elapsed_s, operators=((Role.DOWN, 0.75 * elapsed_s),)
        )
        actions = node.tell(counted)
        said += actions
        asked = only(actions, StartMeasure)
    said += finish_all(node)
    done = only(reports(said), ProfileDone).profile
    assert by_cores == [1] * (len(by_cores) // 2) + [None] * (len(by_cores) // 2)
    (alone,) = done.by_cores
    assert alone.cores == 1
    assert alone.decode.at(1, 128) == pytest.approx(2 * ENOUGH_S)
    assert [each.name for each in alone.operators] == [Role.DOWN, REST]
    down, rest = done.operators
    assert done.widths == MODEL.widths is not None
    assert (down.name, rest.name) == (Role.DOWN, REST)
    assert down.decode.at(1, 128) == pytest.approx(0.75 * ENOUGH_S)
    assert rest.prefill.at(1, 0) == pytest.approx(0.25 * ENOUGH_S)
    shares = [report.share for report in of_kind(reports(said), ProfileProgress)]
    assert shares == sorted(shares)


def test_an_engine_that_counts_no_operators_says_so_before_anything_is_timed() -> None:
    node = NodeUnderTest("i1")
    node.command(replace(profile_command(), operators=True))
    broke = MeasureBroke(instance_id=I1, error="EngineError", message="no counters", hint="none")
    actions = node.tell(broke)
    assert failures(actions) == [
        ProfileFailed(operation_id=OP, error="EngineError", message="no counters", hint="none")
    ]
    assert not of_kind(actions, StartMeasure)


def test_a_size_that_cannot_be_counted_is_left_out() -> None:
    node = NodeUnderTest("i1")
    asked = only(node.command(replace(profile_command(), operators=True)), StartMeasure)
    done = MeasureFinished(instance_id=I1, elapsed_s=ENOUGH_S, operators=((Role.DOWN, 0.1),))
    node.tell(done)
    broke = MeasureBroke(instance_id=I1, error="OutOfMemory", message="too few blocks")
    after = only(node.tell(broke), StartMeasure)
    assert after.counted
    assert after.shape != asked.shape


def test_what_was_measured_is_used_at_once() -> None:
    """By the profile that was measured an iteration takes 0.2 s, and so it does."""
    node, _ = measuring_node()
    finish_all(node)
    node.submit("a")
    node.now_s += ENOUGH_S
    said = only(reports(node.step("i1", token("a", 0))), TokensReport)
    assert 0.99 < said.correction < 1.01


def test_requests_go_first_and_wait_for_one_shape_at_most() -> None:
    node, _ = measuring_node()
    waiting = node.submit("a")
    assert not of_kind(waiting, StartStep)
    assert not of_kind(waiting, StartMeasure)
    after = finish(node)
    assert only(after, StartStep).instance_id == I1
    assert of_kind(after, StartMeasure) == []
    for index in range(3):
        assert of_kind(node.step("i1", token("a", index)), StartMeasure) == []
    last = node.step("i1", token("a", 3, finish=FinishReason.STOP))
    only(last, StartMeasure)


def test_nothing_is_timed_beside_a_load() -> None:
    node, shape = measuring_node()
    node.command(load_command("i2"))
    assert of_kind(finish(node), StartMeasure) == []
    broke = LoadFailed(instance_id=InstanceId("i2"), error="OutOfMemory", message="no", hint="")
    assert only(node.tell(broke), StartMeasure).shape != shape


def test_a_shape_that_cannot_be_computed_is_skipped() -> None:
    node, shape = measuring_node()
    broke = MeasureBroke(instance_id=I1, error="OutOfMemory", message="too large")
    said = node.tell(broke)
    shapes = [only(said, StartMeasure).shape]
    for _ in range(1000):
        more = of_kind(finish(node), StartMeasure)
        if not more:
            break
        shapes.append(more[0].shape)
    assert shape not in shapes


def test_when_no_shape_can_be_computed_the_profile_fails() -> None:
    node, _ = measuring_node()
    said: list[NodeAction] = []
    while not failures(said):
        said = node.tell(MeasureBroke(instance_id=I1, error="EngineError", message="no"))
        assert bool(of_kind(said, StartMeasure)) != bool(failures(said))
    assert "could be measured" in failures(said)[0].message


def test_a_profile_that_was_cancelled_is_measured_no_further() -> None:
    node, first = measuring_node()
    assert node.command(CancelProfile(operation_id=OperationId("another"))) == []
    assert node.command(CancelProfile(operation_id=OP)) == []
    assert finish(node) == []
    assert only(node.command(profile_command()), StartMeasure).shape == first, "from the start"


def test_the_time_of_a_cancelled_profile_does_not_count_for_the_next() -> None:
    node, first = measuring_node()
    node.command(CancelProfile(operation_id=OP))
    said = node.command(profile_command(operation_id=OperationId("op-2")))
    assert not of_kind(said, StartMeasure), "one is under way"
    assert only(finish(node), StartMeasure).shape == first


def test_an_instance_that_is_unloaded_fails_its_profile() -> None:
    node, _ = measuring_node()
    (failed,) = failures(node.command(UnloadInstance(instance_id=I1)))
    assert (failed.operation_id, failed.message) == (OP, "i1 was unloaded")
    assert failed.hint == "measure again: what serves then is measured"
    assert failures(finish(node)) == []
    assert failures(node.tell(InstanceGone(instance_id=I1))) == []


def test_a_lost_link_ends_a_profile_for_which_nobody_waits() -> None:
    node, first = measuring_node()
    node.reconnect()
    assert finish(node) == []
    assert only(node.command(profile_command()), StartMeasure).shape == first


def test_a_node_measures_one_instance_at_a_time() -> None:
    node, _ = measuring_node()
    node.load("i2")
    (failed,) = failures(node.command(profile_command("i2", OperationId("op-2"))))
    assert failed.operation_id == "op-2"
    assert "i1" in failed.message
    assert only(reports(finish_all(node)), ProfileDone).operation_id == OP


def test_an_instance_that_is_not_ready_cannot_be_measured() -> None:
    node = NodeUnderTest()
    assert "i1" in failures(node.command(profile_command()))[0].message
    node.command(load_command())
    assert "i1" in failures(node.command(profile_command()))[0].message


def test_a_better_profile_starts_without_what_was_learned_about_the_old_one() -> None:
    node = NodeUnderTest("i1")
    node.submit("a")
    for index in range(100):
        node.now_s += 0.004
        node.step("i1", token("a", index))
    learned = node.core.instances()[0].correction
    assert learned > 1.1
    node.command(UseProfile(instance_id=I1, profile=PROFILE))
    assert node.core.instances()[0].correction == learned, "the same profile says nothing new"
    node.command(UseProfile(instance_id=I1, profile=profile(measured_s=9.0)))
    assert node.core.instances()[0].correction == 1.0


def refined(node: NodeUnderTest) -> list[ProfileRefined]:
    told = reports(node.tell(HeartbeatDue(rss_bytes=300, engine_bytes=200)))
    return [report for report in told if isinstance(report, ProfileRefined)]


def prompt_and_decodes(node: NodeUnderTest) -> None:
    """A chunk that takes half as long again as its profile says, and decodes that take as long."""
    node.now_s += 0.03
    node.step("i1", prefill_tokens=256)
    for _ in range(20):
        node.now_s += 0.001
        node.step("i1", token("a", 0))


def test_iterations_refine_a_measured_profile_for_node_and_cell_now_and_then() -> None:
    node = NodeUnderTest("i1")
    node.submit("a")
    assert refined(node) == []
    for _ in range(100):
        prompt_and_decodes(node)
    assert refined(node) == [], "not yet"
    node.now_s += 60.0
    (told,) = refined(node)
    assert told.instance_id == I1
    prefill, decode = told.profile.prefill, told.profile.decode
    assert prefill.at(256, 0) / decode.at(1, 32) > 1.05 * PROFILE.prefill.at(256, 0) / 0.001
    kept = node.core.instances()[0].correction
    assert kept != 1.0, "what neighbours do is another matter"
    node.command(UseProfile(instance_id=I1, profile=told.profile))
    assert node.core.instances()[0].correction == kept, "it predicts by that already"
    node.now_s += 60.0
    assert refined(node) == [], "nothing was computed since"


def test_what_a_refined_profile_takes_up_is_not_planned_for_again() -> None:
    """It is told with what is left to correct of it, and the node goes on with the same."""
    node = NodeUnderTest("i1")
    node.submit("a")
    refined(node)
    until_s = node.now_s + LOOK_S
    while node.now_s < until_s:
        prompt_and_decodes(node)
    before = node.core.instances()[0]
    (told,) = refined(node)
    after = node.core.instances()[0]
    assert told.correction == after.correction
    assert told.correction_planned == after.correction_planned
    longer = told.profile.prefill.at(256, 0) / PROFILE.prefill.at(256, 0)
    shorter = told.profile.decode.at(1, 32) / PROFILE.decode.at(1, 32)
    assert longer / shorter > 1.1
    both = (0.02 * longer + 0.02 * shorter) / 0.04
    assert after.correction * both == pytest.approx(before.correction, rel=0.02)
    assert after.correction_planned * both == pytest.approx(before.correction_planned, rel=0.02)


def test_estimates_and_iterations_of_both_kinds_refine_nothing() -> None:
    node = NodeUnderTest()
    node.load(command=replace(load_command(), profile=profile(scaled_from="another")))
    node.load("i2")
    node.submit("a", "i2")
    for index in range(100):
        for name, outputs in (("i1", ()), ("i2", (token("a", index),))):
            node.now_s += 0.09
            node.step(name, *outputs, prefill_tokens=256)
    node.now_s += 60.0
    assert refined(node) == []
