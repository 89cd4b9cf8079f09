"""Surveys that nobody asked for: what is timed while a node rests, and who goes first."""

from dataclasses import replace

import pytest

from mesh.compute.refining import LOOK_S
from mesh.compute.times import Times
from mesh.core.node.core import NodeCore
from mesh.core.node.measuring import PIECE_S_MAX, REST_S
from mesh.core.node.priming import to_prime
from mesh.domain.actions import NodeAction, StartMeasure, StartStep
from mesh.domain.ids import InstanceId
from mesh.domain.limits import NodeLimits
from mesh.domain.messages import ProfileRefined, UseProfile
from mesh.domain.node_events import HeartbeatDue, LinkOpened, MeasureFinished
from mesh.domain.profile import IterationShape, Profile
from mesh.domain.reasons import FinishReason, ProfileSource
from tests.core.cells import FOOTPRINT, of_kind, only
from tests.core.nodes import NodeUnderTest, load_command, reports, token
from tests.support.profiles import PROFILE, profile

I1 = InstanceId("i1")
BEAT = HeartbeatDue(rss_bytes=0)
ESTIMATE = profile(scaled_from="another")
SLOWER = 1.6
"""What iterations take, over what the estimate says."""


def resting_node(known: Profile = ESTIMATE) -> NodeUnderTest:
    """It has an instance, and has computed the few sizes that it primes."""
    node = NodeUnderTest()
    node.core = NodeCore(limits=NodeLimits(primed_tokens_max=4))
    node.tell(LinkOpened())
    node.load("i1", command=replace(load_command("i1"), profile=known))
    return node


def took_s(shape: IterationShape, machine: Profile = PROFILE) -> float:
    return Times(machine, SLOWER).iteration_s(shape)


def rest(
    node: NodeUnderTest, seconds: float, machine: Profile = PROFILE, beat: HeartbeatDue = BEAT
) -> tuple[list[IterationShape], list[NodeAction]]:
    """What is timed in so long a rest, a heartbeat a second, and all that the node does."""
    shapes: list[IterationShape] = []
    done: list[NodeAction] = []
    until_s = node.now_s + seconds
    while node.now_s < until_s:
        actions = node.tell(beat)
        done += actions
        while found := of_kind(actions, StartMeasure):
            shapes.append(found[0].shape)
            elapsed_s = took_s(found[0].shape, machine)
            node.now_s += elapsed_s
            instance_id = found[0].instance_id
            actions = node.tell(MeasureFinished(instance_id=instance_id, elapsed_s=elapsed_s))
            done += actions
        node.now_s += 1.0
    return shapes, done


def refined(actions: list[NodeAction]) -> list[ProfileRefined]:
    return of_kind(reports(actions), ProfileRefined)


def told(actions: list[NodeAction]) -> list[Profile]:
    return [each.profile for each in refined(actions)]


def timed(actions: list[NodeAction], instance_id: InstanceId) -> list[StartMeasure]:
    return [each for each in of_kind(actions, StartMeasure) if each.instance_id == instance_id]


def test_an_estimate_is_measured_after_the_load_and_whole_in_a_rest() -> None:
    _, done = rest(node := resting_node(), REST_S - 1.0)
    (primed,) = told(done)
    assert (primed.source, primed.measured) == (ProfileSource.PRIMING, True)
    shape = IterationShape(decode_batch=4, decode_context_tokens=100)
    assert Times(primed).iteration_s(shape) / took_s(shape) < 1.2
    _, done = rest(node, 60.0)
    (rested,) = told(done)
    assert rested.source is ProfileSource.REST
    assert abs(Times(rested).iteration_s(shape) / took_s(shape) - 1.0) < 0.05
    assert rest(node, 60.0)[0] == [], "there is nothing left to find out"


def test_a_surveyed_profile_is_never_surveyed_in_a_rest() -> None:
    node = resting_node(PROFILE)
    shapes, done = rest(node, 120.0)
    assert len(shapes) == 4 + 1, "batches, and a prefill, that are primed"
    assert told(done) == []


def test_a_request_goes_before_the_next_piece_and_ends_the_rest() -> None:
    node = resting_node()
    rest(node, REST_S - 1.0)
    node.now_s += REST_S
    assert of_kind(node.tell(BEAT), StartMeasure)
    node.submit("a", "i1")
    actions = node.tell(MeasureFinished(instance_id=I1, elapsed_s=0.01))
    assert only(actions, StartStep).instance_id == "i1"
    assert not of_kind(actions, StartMeasure)
    ended = node.step("i1", token("a", 0, finish=FinishReason.STOP))
    assert not of_kind([*ended, *node.tell(BEAT)], StartMeasure), "the rest has just begun"


def test_no_piece_takes_long() -> None:
    """A prompt of 256 tokens would take more than a second: it is left to those who ask for it."""
    slow = profile(
        scaled_from="another",
        prefill=replace(PROFILE.prefill, seconds=((0.02, 0.02), (1.5, 1.6))),
    )
    node = resting_node(slow)
    shapes, done = rest(node, 60.0, slow)
    assert told(done)
    assert shapes
    assert max(took_s(shape, slow) for shape in shapes) <= PIECE_S_MAX * SLOWER


SLOW_PROMPTS = profile(
    scaled_from="another",
    prefill=replace(PROFILE.prefill, seconds=((0.02, 0.02), (0.12, 0.12))),
)
"""A prompt of 256 tokens takes 0.19 s: a rest of 9.6 s is the shortest in which it is timed."""


def called_every(node: NodeUnderTest, seconds: float, times: int) -> list[NodeAction]:
    """All that the node does when i1 is called so often, each time after so long a rest."""
    done: list[NodeAction] = []
    for _ in range(times):
        done += rest(node, seconds, SLOW_PROMPTS)[1]
        node.submit("a", "i1")
        done += node.step("i1", token("a", 0, finish=FinishReason.STOP))
    return done


def test_a_survey_ends_though_no_rest_is_long_enough_for_its_longest_shape() -> None:
    node = resting_node(SLOW_PROMPTS)
    done = called_every(node, 8.0, 10)
    assert [each.source for each in told(done)] == [ProfileSource.PRIMING, ProfileSource.REST]


def test_a_survey_goes_on_where_it_was_left_for_an_instance_of_which_less_is_known() -> None:
    node, undisturbed = resting_node(SLOW_PROMPTS), resting_node(SLOW_PROMPTS)
    before = called_every(node, REST_S + 1.0, 1)
    node.load("i2", command=replace(load_command("i2"), profile=SLOW_PROMPTS))
    done = called_every(node, REST_S - 1.0, 1)
    assert [(each.instance_id, each.profile.source) for each in refined(done)] == [
        ("i2", ProfileSource.PRIMING)
    ]
    after = called_every(node, 8.0, 10)
    assert [each.instance_id for each in refined(after)] == ["i1", "i2"]
    alone = called_every(undisturbed, 8.0, 10)
    assert len(timed(alone, I1)) == len(timed([*before, *done, *after], I1))


@pytest.mark.parametrize(("cached", "left"), [(8, 8), (12, 4), (16, 4), (20, 4)])
def test_a_survey_takes_no_cached_blocks_but_up_to_a_quarter_of_the_cache(
    cached: int, left: int
) -> None:
    """The cache has 16 blocks; what is cached may be more than that."""
    node = resting_node()
    shapes, done = rest(node, 60.0, beat=replace(BEAT, kv_blocks_cached=((I1, cached),)))
    command = load_command("i1")
    primed = to_prime(
        batch_max=command.batch_max, context_tokens_max=command.context_tokens_max, tokens_max=4
    )
    blocks = [
        shape.decode_batch * FOOTPRINT.blocks_for(shape.decode_context_tokens)
        + FOOTPRINT.blocks_for(shape.prefill_past_tokens + shape.prefill_tokens)
        for shape in shapes[len(primed) :]
    ]
    assert max(blocks) == left
    assert [each.source for each in told(done)] == [ProfileSource.PRIMING, ProfileSource.REST]


def test_a_better_known_profile_ends_the_survey() -> None:
    node = resting_node()
    rest(node, 1.0)
    node.command(UseProfile(instance_id=I1, profile=PROFILE))
    assert rest(node, 60.0)[0] == []


def test_iterations_of_requests_make_a_measured_profile_of_an_estimate() -> None:
    node = NodeUnderTest()
    node.load("i1", command=replace(load_command("i1"), profile=ESTIMATE))
    node.submit("a")
    shape = IterationShape(decode_batch=1, decode_context_tokens=32)
    index, found = 0, list[Profile]()
    until_s = node.now_s + 4 * LOOK_S
    while node.now_s < until_s and not found:
        for _ in range(100):
            node.now_s += SLOWER * Times(ESTIMATE).decode_s(1, 0) + 0.1
            node.step("i1", token("a", index))
            index += 1
        found = told(node.tell(BEAT))
    (measured,) = found
    assert (measured.source, measured.measured) == (ProfileSource.ITERATIONS, True)
    assert Times(measured).iteration_s(shape) > Times(ESTIMATE).iteration_s(shape)
    report = node.heartbeat().instances[0]
    assert report.correction == 1.0, "the profile has taken it up"
