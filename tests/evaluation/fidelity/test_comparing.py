"""What a comparison says of two sets of outcomes."""

from collections.abc import Sequence
from math import inf

import pytest

from mesh.domain.errors import InvalidInput
from mesh.domain.ids import DeploymentName, RequestId
from mesh.domain.outcome import Outcome
from mesh.domain.reasons import FinishReason, RefusalReason
from mesh.domain.slo import Slo
from mesh.evaluation.fidelity.comparing import Pair, compare


def outcome(
    at_s: float = 0.0, ttft_s: float = 0.5, tpot_s: float = 0.1, tokens: int = 11
) -> Outcome:
    tokens_s = tuple(at_s + ttft_s + n * tpot_s for n in range(tokens))
    return Outcome(
        request_id=RequestId("r"),
        deployment=DeploymentName("chat"),
        slo=Slo(ttft_s=0.55, tpot_s=0.11),
        arrival_s=at_s,
        input_tokens=10,
        tokens_s=tokens_s,
        ended_s=tokens_s[-1] if tokens_s else at_s + 0.1,
        end=FinishReason.LENGTH if tokens else RefusalReason.TPOT_EXCEEDED,
    )


def refused(at_s: float = 0.0) -> Outcome:
    return outcome(at_s, tokens=0)


def test_latencies_are_compared_over_those_that_finished_on_both_sides() -> None:
    live = [outcome(), outcome(), refused(), outcome(tpot_s=9.0)]
    simulated = [outcome(tpot_s=0.12), outcome(tpot_s=0.10), outcome(tpot_s=5.0), refused()]
    found = compare(live, [simulated])
    assert (found.requests, found.finished_in_both, found.same_end) == (4, 2, 2)
    assert found.tpot_s.error == pytest.approx(0.10)
    assert found.e2e_s.live == pytest.approx(1.5)
    assert found.e2e_s.simulated == pytest.approx(1.6)
    assert found.ttft_s_p95.error == 0.0
    assert (found.refused.live, found.refused.simulated, found.refused_share_error) == (1, 1, 0.0)
    assert (found.met.live, found.met.simulated) == (2, 1)


def test_what_was_sent_before_is_left_out() -> None:
    live = [outcome(at_s=9.0, tpot_s=1.0), outcome(at_s=10.0), outcome(at_s=11.0)]
    found = compare(live, [[outcome(), outcome(), outcome()]], from_s=10.0)
    assert found.requests == 2
    assert found.tpot_s.error == pytest.approx(0.0)


@pytest.mark.parametrize(
    ("simulated", "within"),
    [
        ([outcome(), outcome(), refused()], True),
        ([outcome(tpot_s=0.102), outcome(tpot_s=0.102), refused()], True),
        ([outcome(tpot_s=0.104), outcome(tpot_s=0.104), refused()], False),
        ([outcome(ttft_s=0.56), outcome(ttft_s=0.56), refused()], False),
        ([outcome(), outcome(), outcome()], False),
    ],
)
def test_all_targets_have_to_be_kept(simulated: Sequence[Outcome], within: bool) -> None:
    assert compare([outcome(), outcome(), refused()], [simulated]).within_targets is within


def test_an_error_without_anything_live_is_infinite_unless_nothing_was_simulated() -> None:
    assert Pair(live=0, simulated=0).error == 0.0
    assert Pair(live=0, simulated=1).error == inf
    assert Pair(live=4, simulated=3).error == 0.25


def test_too_little_in_common_is_no_comparison() -> None:
    with pytest.raises(InvalidInput, match="too few"):
        compare([outcome(), refused()], [[outcome(), outcome()]])


def test_several_simulations_count_together() -> None:
    live = [outcome(), outcome(), refused()]
    found = compare(
        live,
        [
            [outcome(tpot_s=0.12), outcome(tpot_s=0.12), refused()],
            [outcome(tpot_s=0.08), refused(), refused()],
            [outcome(tpot_s=0.10), outcome(tpot_s=0.10), outcome()],
        ],
    )
    assert (found.simulations, found.requests) == (3, 3)
    assert found.finished_in_both == pytest.approx(5 / 3)
    assert found.tpot_s.simulated == pytest.approx((2 * 0.12 + 0.08 + 2 * 0.10) / 5)
    assert (found.refused.live, found.refused.simulated) == (1, 1)
    assert found.same_end == pytest.approx(7 / 3)
