"""What a node takes: no joule is lost or counted twice, whoever its iterations were for."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mesh.compute.times import Times
from mesh.core.node.energy import shares
from mesh.domain.energy import Energy, EnergyReading, EnergySource, Power
from mesh.domain.messages import Heartbeat, TokensReport
from mesh.domain.node_events import HeartbeatDue
from mesh.domain.reasons import FinishReason
from tests.core.cells import only, step_result
from tests.core.nodes import NodeUnderTest, reports, token
from tests.support.profiles import PROFILE

POWER = Power(idle_watts=10.0, busy_watts=50.0)
COUNTED = EnergySource.RAPL


def beat(node: NodeUnderTest, reading: EnergyReading | None = None) -> Energy | None:
    due = HeartbeatDue(rss_bytes=1, energy=reading or EnergyReading())
    return only(reports(node.tell(due)), Heartbeat).energy


@given(st.lists(st.tuples(st.sampled_from(("rest", "turn", "beat")), st.floats(0.001, 5.0))))
def test_reckoned_joules_are_those_of_the_watts_and_go_with_the_seconds_reported(
    steps: list[tuple[str, float]],
) -> None:
    node = NodeUnderTest("i1", power=POWER)
    assert beat(node) is None
    began_s, reported_s, all_told = node.now_s, 0.0, list[Energy]()

    def tell_beat() -> None:
        told = beat(node)
        if told is not None and told.busy_j is not None:
            assert told.source is EnergySource.WATTS
            all_told.append(told)

    for number, (kind, seconds) in enumerate(steps):
        if kind == "turn":
            node.submit(f"r{number}")
            # One heartbeat comes amid the turn.
            node.now_s += seconds / 2
            tell_beat()
            node.now_s += seconds / 2
            done = node.step("i1", token(f"r{number}", 0, finish=FinishReason.STOP))
            reported_s += sum(only(reports(done), TokensReport).busy_s)
        elif kind == "rest":
            node.now_s += seconds
        tell_beat()
    node.now_s += 0.001
    tell_beat()
    busy_j = sum(told.busy_j or 0.0 for told in all_told)
    idle_j = sum(told.idle_j or 0.0 for told in all_told)
    assert sum(told.busy_s for told in all_told) == pytest.approx(reported_s)
    assert busy_j == pytest.approx(50.0 * reported_s)
    assert idle_j + busy_j == pytest.approx(POWER.joules(node.now_s - began_s, reported_s))


def test_a_counters_joules_are_divided_by_what_the_node_drew_at_rest() -> None:
    node, joules = NodeUnderTest("i1"), 1000.0

    def read(more_j: float) -> Energy | None:
        nonlocal joules
        joules += more_j
        return beat(node, EnergyReading(source=COUNTED, joules=joules))

    assert read(0.0) is None
    node.now_s += 1.0
    assert read(8.0) == Energy(source=COUNTED, idle_j=8.0, busy_j=0.0)
    node.now_s += 0.5
    node.submit("a")
    node.now_s += 0.5
    node.step("i1", token("a", 0, finish=FinishReason.STOP))
    assert read(34.0) == Energy(source=COUNTED, idle_j=4.0, busy_j=30.0, busy_s=0.5)


def test_a_turns_joules_are_told_once_it_is_over() -> None:
    node = NodeUnderTest("i1", power=POWER)
    beat(node)
    node.submit("a")
    for _ in range(3):
        node.now_s += 1.0
        assert beat(node) == Energy(source=EnergySource.WATTS, idle_j=0.0, busy_j=0.0)
    done = node.step("i1", token("a", 0, finish=FinishReason.STOP))
    assert only(reports(done), TokensReport).busy_s == (3.0,)
    node.now_s += 1.0
    told = beat(node)
    assert told == Energy(source=EnergySource.WATTS, idle_j=10.0, busy_j=150.0, busy_s=3.0)


def test_a_counter_that_cannot_be_read_tells_why_and_no_0_and_watts_stand_in() -> None:
    reading = EnergyReading(reason="permission denied")
    node, given_watts = NodeUnderTest("i1"), NodeUnderTest("i1", power=POWER)
    for each in (node, given_watts):
        beat(each, reading)
        each.now_s += 1.0
    assert beat(node, reading) == Energy(reason="permission denied")
    node.submit("a")
    done = node.step("i1", token("a", 0))
    assert only(reports(done), TokensReport).busy_s == (), "nobody needs its seconds"
    told = beat(given_watts, reading)
    assert told == Energy(source=EnergySource.WATTS, idle_j=10.0, busy_j=0.0)


def test_an_iterations_time_goes_to_its_decodes_and_by_their_tokens_to_its_prompts() -> None:
    times = Times(PROFILE)
    mixed = step_result(prefill_tokens=30, decode_batch=2, context_tokens=64, elapsed_s=2.0)
    done, *decodes, chunk = shares(2.0, times, mixed, (10, 0, 0), (20,))
    assert done + sum(decodes) + chunk == pytest.approx(2.0)
    assert decodes[0] == decodes[1]
    assert chunk == pytest.approx(2 * done)
    whole_s, decode_s = times.iteration_s(mixed.shape), times.decode_s(2, 32)
    assert sum(decodes) == pytest.approx(2.0 * decode_s / whole_s)
    left = shares(2.0, times, mixed, (10, 0), (20,))
    assert sum(left) == pytest.approx(2.0 - decodes[0]), "of one that is gone: nobody's"
    alone = step_result(prefill_tokens=30, elapsed_s=1.0)
    assert shares(1.0, times, alone, (), (30, 0)) == pytest.approx((1.0, 0.0))
