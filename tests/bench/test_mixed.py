"""How large a burst is, which SLO it meets, and which tokens count as in time."""

import random
from dataclasses import replace

import pytest

from bench.mixed.judging import Judgement, Outcome
from bench.mixed.workload import (
    BURST_S,
    FIRST_BATCH,
    QUIET_GAP_S,
    CannotSpill,
    Requests,
    burst,
    quiet,
    sizes,
)
from mesh.domain.ids import DeploymentName
from mesh.domain.profile import Grid
from mesh.domain.slo import Slo
from mesh.evaluation.load_client import Answer, Call
from mesh.request.shadow import OVERESTIMATE
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


def outcome(
    *tokens_s: float,
    node: str = "",
    refused: str = "",
    grace_s: float = 0.0,
    phase: str = "burst",
) -> Outcome:
    answer = Answer(
        ended_s=tokens_s[-1] if tokens_s else 0.5,
        tokens_s=tokens_s,
        refused=refused,
        finishes=0 if refused else 1,
        grace_s=grace_s,
        node_id=node,
    )
    return Outcome(phase=phase, call=CALL, slo=SLO, answer=answer)


def test_the_slo_is_what_the_first_node_keeps_for_a_batch_and_a_burst_is_twice_that() -> None:
    found = sizes(FIRST, SECOND, REQUESTS)
    assert found.slo.tpot_s == pytest.approx(FIRST_BATCH * 0.010 * OVERESTIMATE)
    assert found.slo.ttft_s == 10.0
    assert (found.first_batch, found.second_batch) == (FIRST_BATCH, FIRST_BATCH // 2)
    assert found.burst == 2 * FIRST_BATCH


def test_the_slo_is_one_that_the_second_node_can_keep_at_half_its_speed() -> None:
    found = sizes(FIRST, profile(decode=decodes(0.090, 0.020)), REQUESTS)
    assert found.slo.tpot_s == pytest.approx(2 * 0.090 * OVERESTIMATE)
    assert (found.first_batch, found.burst) == (18, 36)


def test_answers_are_so_long_that_the_first_node_is_busy_while_the_second_loads() -> None:
    """A decode of twelve takes 0.12 s."""
    assert sizes(FIRST, SECOND, REQUESTS).output_tokens == 80
    assert sizes(FIRST, SECOND, replace(REQUESTS, served_s=0.1)).output_tokens == 64
    assert sizes(FIRST, SECOND, replace(REQUESTS, served_s=100.0)).output_tokens == 112


def test_a_first_node_that_nothing_is_too_much_for_is_an_error() -> None:
    with pytest.raises(CannotSpill, match="32 requests"):
        sizes(FIRST, profile(decode=decodes(0.500, 0.020)), REQUESTS)


def test_quiet_requests_come_one_by_one_and_a_burst_at_once() -> None:
    sized = sizes(FIRST, SECOND, REQUESTS)
    alone = quiet("chat", sized, 3, random.Random(1))
    assert [call.at_s for call in alone] == [0.0, QUIET_GAP_S, 2 * QUIET_GAP_S]
    together = burst("chat", sized, random.Random(1))
    assert together == burst("chat", sized, random.Random(1)), "drawn from the seed"
    times_s = [call.at_s for call in together]
    assert (times_s, len(times_s)) == (sorted(times_s), 24)
    assert 0.0 <= times_s[0] <= times_s[-1] <= BURST_S
    assert {(len(c.prompt_tokens), c.output_tokens) for c in together} == {(64, 80)}


def test_each_token_has_a_deadline_of_its_own_and_the_load_is_granted() -> None:
    assert outcome(1.0, 1.1, 1.2).met_tokens == 3
    assert outcome(1.05, 1.06, 1.07).met_tokens == 2
    assert outcome(1.55, 1.56, 1.57, grace_s=0.6).met_tokens == 3
    assert outcome(0.9, 0.95, 1.0).spares_s == pytest.approx((0.1, 0.15, 0.2))


def test_tokens_that_never_came_are_late() -> None:
    torn = outcome(0.1, 0.2)
    judged = Judgement(outcomes=(torn, outcome(0.1, 0.2, 0.3)))
    assert judged.met_share == pytest.approx(5 / 6)
    assert judged.torn == (torn,)


def test_refused_requests_count_as_refused_and_not_as_late() -> None:
    judged = Judgement(
        outcomes=(outcome(0.1, 0.2, 0.3), outcome(refused="tpot_exceeded"), outcome(refused="x"))
    )
    assert (judged.requests, len(judged.admitted), len(judged.refused)) == (3, 1, 2)
    assert judged.refused_by_reason == {"tpot_exceeded": 1, "x": 1}
    assert judged.met_share == 1.0
    assert not judged.torn


def test_a_request_that_is_given_up_after_its_first_token_was_admitted() -> None:
    assert outcome(0.1, refused="node_lost").admitted


def test_a_row_for_each_phase_and_node() -> None:
    judged = Judgement(
        outcomes=(
            outcome(0.1, 0.2, 0.3, node="a", phase="quiet"),
            outcome(0.1, 0.2, 0.3, node="b"),
            outcome(0.3, 0.5, 1.3, node="a"),
            outcome(refused="tpot_exceeded"),
            outcome(0.5, 0.7, 0.9, node="a"),
        )
    )
    rows = judged.rows()
    assert [(row.phase, row.node_id, row.requests) for row in rows] == [
        ("quiet", "a", 1),
        ("burst", "a", 2),
        ("burst", "b", 1),
        ("burst", "", 1),
    ]
    assert (rows[1].tokens, rows[1].met_tokens) == (6, 5)
    assert rows[1].ttft_s_p50 == pytest.approx(0.4)
    assert rows[1].tokens_per_s == pytest.approx(3.5)
    assert judged.of("burst").served_by("a") == 2
