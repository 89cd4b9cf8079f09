"""What `mesh-slo` decides in a small cell: who is computed together and who apart, and who gives
way for a class that pays more; and what its turn rule computes.
"""

from hypothesis import given
from hypothesis import strategies as st

from mesh.domain.events import LeaseCheckDue
from mesh.domain.messages import SubmitRequest
from mesh.domain.reasons import FinishReason
from mesh.policy.rules.chunked import BY_DUE
from mesh.policy.rules.turns import next_turn
from tests.core.admission import submitted
from tests.core.cells import commands, only
from tests.policy.test_polyserve import Divided
from tests.request.schedules import queue, times


def _cell() -> Divided:
    """A decode takes 10 ms for each of the batch, so that a tier of 50 ms has room for four."""
    return Divided("mesh-slo")


def test_requests_of_a_tier_are_together_on_its_fullest_server() -> None:
    cell = _cell()
    went = [submitted(cell.ask(f"r{n}", prompt=3)) for n in range(5)]
    assert went == [[(f"r{n}", "n1" if n < 4 else "n2")] for n in range(5)]
    assert cell.labels() == ["tier 50 ms", "tier 50 ms", ""]


def test_a_prompt_is_computed_in_a_looser_tier_and_decodes_in_its_own() -> None:
    cell = _cell()
    assert submitted(cell.ask("r1", tpot_s=0.1)) == [("r1", "n1")]
    assert submitted(cell.ask("r2")) == [("r2", "n1")]
    cell.tell(LeaseCheckDue())
    assert cell.labels() == ["tier 100 ms", "", ""], "who passes through changes no tier"
    copy = only(commands(cell.tokens(cell.links["n1"], "r2", (7,)), SubmitRequest), SubmitRequest)
    assert (copy.instance_id, copy.order.paused, copy.order.kv is not None) == ("n2", True, True)
    assert cell.labels() == ["tier 100 ms", "tier 50 ms", ""]
    assert not commands(cell.tokens(cell.links["n1"], "r1", (7,)), SubmitRequest)


def test_a_first_token_that_would_be_too_late_for_a_hand_over_comes_from_the_pool() -> None:
    # Behind the first prompt it comes after 20 ms, and has to be 27 ms early: n1 has the second one
    # in time, and another server the third.
    for ttft_s, went in ((0.04, "n2"), (0.06, "n1")):
        cell = _cell()
        assert submitted(cell.ask("r1", tpot_s=0.1)) == [("r1", "n1")]
        assert submitted(cell.ask("r2", ttft_s=ttft_s)) == [("r2", went)]


def test_a_first_token_has_to_be_a_pace_earlier_where_decodes_take_longer_than_the_pace() -> None:
    for decodes, went in ((4, "n1"), (5, "n2")):
        cell = _cell()
        for n in range(decodes):
            assert submitted(cell.ask(f"a{n}", tpot_s=0.1, prompt=3)) == [(f"a{n}", "n1")]
        assert submitted(cell.ask("r1", ttft_s=0.09)) == [("r1", went)]


def test_no_prompt_is_computed_whose_decodes_would_have_no_place() -> None:
    cell = _cell()
    assert submitted(cell.ask("r1", tpot_s=0.1, prompt=3)) == [("r1", "n1")]
    went = [bool(submitted(cell.ask(f"a{n}", prompt=3, ttft_s=9.0))) for n in range(9)]
    assert went == [True] * 8 + [False], "two servers have room for four each"


def test_nobodys_first_token_is_late_for_a_nearer_deadline() -> None:
    cell = _cell()
    assert submitted(cell.ask("r1", prompt=200, ttft_s=0.05)) == [("r1", "n1")]
    assert submitted(cell.ask("r2", prompt=200, ttft_s=0.3)) == [("r2", "n1")]
    # Before the first it would make that late, behind it it would be late itself.
    assert submitted(cell.ask("r3", prompt=300, ttft_s=0.04)) == [("r3", "n2")]


def test_a_first_token_leaves_a_share_of_its_time_for_what_predictions_miss() -> None:
    # Behind the first prompt it comes after 49.9 ms, and 48.5 of 50 ms may be planned.
    for ttft_s, went in ((0.05, "n2"), (0.052, "n1")):
        cell = _cell()
        assert submitted(cell.ask("r1", prompt=200)) == [("r1", "n1")]
        assert submitted(cell.ask("r2", prompt=200, ttft_s=ttft_s)) == [("r2", went)]


def test_a_server_without_requests_is_of_the_pool_at_once() -> None:
    cell = _cell()
    assert submitted(cell.ask("r1", tpot_s=0.1, prompt=3)) == [("r1", "n1")]
    cell.tokens(cell.links["n1"], "r1", (7,), finish=FinishReason.LENGTH)
    assert submitted(cell.ask("r2", prompt=200, ttft_s=0.021)) == [("r2", "n1")]
    assert cell.labels() == ["tier 50 ms", "", ""]


def test_nobody_of_a_cheaper_class_takes_a_place_while_a_dearer_one_waits() -> None:
    for price, went in ((1.0, [("r5", "n3")]), (3.0, [])):
        cell = _cell()
        assert submitted(cell.ask("r1", tpot_s=0.02, prompt=3)) == [("r1", "n1")]
        assert submitted(cell.ask("r2", tpot_s=0.02, prompt=3)) == [("r2", "n2")]
        assert submitted(cell.ask("r3", prompt=3)) == [("r3", "n3")]
        assert submitted(cell.ask("r4", tpot_s=0.02, prompt=3, price=price)) == []
        assert submitted(cell.ask("r5", prompt=3)) == went


@given(st.floats(0.0, 0.4), st.integers(1, 3000), st.integers(1, 3000))
def test_prompts_go_by_deadline_beside_decodes_until_a_token_is_due(
    ahead_s: float, late: int, early: int
) -> None:
    model = times(decode_s=0.01, decode_more_s=0.001, prefill_token_s=0.00005)
    of = queue("a", 1.0, 1.0 + ahead_s, times=model, prompts=[(late, 9.0), (early, 5.0)])
    of.tpot_s = 0.05
    now_s = 1.0 - ahead_s
    grant = next_turn(BY_DUE, [of], now_s, prefill_tokens_max=8192)
    assert grant is not None
    assert grant.decode is None
    assert not isinstance(grant.prefill, int)
    assert grant.prefill[0][0] == of.prompts[1].request_id
    spare_s = max(0.05, 1.0 - now_s) - of.decode_s
    tokens = sum(count for _, count in grant.prefill)
    wanted = early if 2048 < early < 4096 else min(late + early, 2048)
    fits = [n for n in range(wanted + 1) if not n or model.chunk_s(n, 0, 2) <= spare_s][-1]
    assert tokens == max(fits, min(wanted, BY_DUE.chunk_tokens_min))
