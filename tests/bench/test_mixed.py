"""How large a burst is, which SLO it meets, and which tokens count as in time."""

import random
from dataclasses import replace

import pytest

from bench.judging import Judged, Judgement, judged
from bench.mixed import (
    BURST,
    BURST_S,
    FIRST_BATCH,
    QUIET_AFTER,
    QUIET_BEFORE,
    QUIET_GAP_S,
    Requests,
    Run,
    burst,
    quiet,
    rows,
    sizes,
)
from mesh.domain.errors import InvalidInput
from mesh.domain.ids import DeploymentName
from mesh.domain.node_rule import DEFAULT_RULE
from mesh.domain.profile import Grid
from mesh.domain.slo import Slo
from mesh.evaluation.load_client import Answer, Call
from tests.support.profiles import profile

REQUESTS = Requests(prompt_tokens=64, served_s=9.6, ttft_s=10.0)


def decodes(one_s: float, further_s: float) -> Grid:
    """A decode of a batch takes so long for its first request, and for each further one."""
    rows = (1, 32)
    return Grid(rows=rows, columns=(256,), seconds=((one_s,), (one_s + 31 * further_s,)))


FIRST = profile(decode=decodes(0.010, 0.010))
SECOND = profile(decode=decodes(0.020, 0.020))
SLO = Slo(ttft_s=1.0, tpot_s=0.1)
CALL = Call(
    at_s=0.0,
    deployment=DeploymentName("chat"),
    slo=SLO,
    prompt_tokens=(7,) * 64,
    output_tokens=3,
)


def call(*tokens_s: float, node: str = "", refused: str = "") -> Judged:
    answer = Answer(
        ended_s=2.0,
        tokens_s=tokens_s,
        refused=refused,
        finishes=0 if refused else 1,
        node_id=node,
    )
    return judged(CALL, answer)


def test_the_slo_is_what_the_first_node_keeps_for_a_batch_and_a_burst_is_twice_that() -> None:
    found = sizes(FIRST, SECOND, REQUESTS)
    assert found.slo.tpot_s == pytest.approx(FIRST_BATCH * 0.010 * DEFAULT_RULE.overestimate)
    assert found.slo.ttft_s == 10.0
    assert (found.first_batch, found.second_batch) == (FIRST_BATCH, FIRST_BATCH // 2)
    assert found.burst == 2 * FIRST_BATCH


def test_the_slo_is_one_that_the_second_node_can_keep_at_half_its_speed() -> None:
    found = sizes(FIRST, profile(decode=decodes(0.090, 0.020)), REQUESTS)
    assert found.slo.tpot_s == pytest.approx(2 * 0.090 * DEFAULT_RULE.overestimate)
    assert (found.first_batch, found.burst) == (18, 36)


def test_answers_are_so_long_that_the_first_node_is_busy_while_the_second_loads() -> None:
    """A decode of twelve takes 0.12 s."""
    assert sizes(FIRST, SECOND, REQUESTS).output_tokens == 80
    assert sizes(FIRST, SECOND, replace(REQUESTS, served_s=0.1)).output_tokens == 64
    assert sizes(FIRST, SECOND, replace(REQUESTS, served_s=100.0)).output_tokens == 112


def test_a_first_node_that_nothing_is_too_much_for_is_an_error() -> None:
    with pytest.raises(InvalidInput, match="256 requests"):
        sizes(FIRST, profile(decode=decodes(2.0, 0.020)), REQUESTS)


def test_quiet_requests_come_one_by_one_and_a_burst_at_once() -> None:
    sized = sizes(FIRST, SECOND, REQUESTS)
    alone = quiet(DeploymentName("chat"), sized, 3, random.Random(1))
    assert [call.at_s for call in alone] == [0.0, QUIET_GAP_S, 2 * QUIET_GAP_S]
    together = burst(DeploymentName("chat"), sized, random.Random(1))
    assert together == burst(DeploymentName("chat"), sized, random.Random(1)), "drawn from the seed"
    times_s = [call.at_s for call in together]
    assert (times_s, len(times_s)) == (sorted(times_s), 24)
    assert 0.0 <= times_s[0] <= times_s[-1] <= BURST_S
    assert {(len(c.prompt_tokens), c.output_tokens) for c in together} == {(64, 80)}


def test_a_row_for_each_phase_and_node() -> None:
    nothing = Judgement(())
    burst_calls = (
        call(0.1, 0.2, 0.3, node="b"),
        call(0.3, 0.5, 1.3, node="a"),
        call(refused="tpot_exceeded"),
        call(0.5, 0.7, 0.9, node="a"),
    )
    phases = {
        QUIET_BEFORE: Judgement((call(0.1, 0.2, 0.3, node="a"),)),
        BURST: Judgement(burst_calls),
        QUIET_AFTER: nothing,
    }
    made = Run(sizes=sizes(FIRST, SECOND, REQUESTS), phases=phases)
    shown = rows(made)
    assert [row[:3] for row in shown] == [
        (QUIET_BEFORE, "a", "1"),
        (BURST, "a", "2"),
        (BURST, "b", "1"),
        (BURST, "refused", "1"),
    ]
    tokens, in_time, ttft_s_p50, tokens_per_s = shown[1][3:]
    assert (tokens, in_time) == ("6", "83.3%")
    assert (ttft_s_p50, tokens_per_s) == ("0.40", "3.5")
    assert made.judged.requests == 5
    assert made.phases[BURST].served_by("a") == 2
