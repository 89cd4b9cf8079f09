"""Plans for the nodes of a live cell: beside what a profile says, and what they refuse."""

import math
from dataclasses import replace
from unittest.mock import Mock

import pytest

from mesh.compute.times import Times
from mesh.domain.energy import Power
from mesh.domain.errors import InvalidInput
from mesh.domain.ids import NodeId
from mesh.domain.profile import Grid
from mesh.domain.slo import Slo
from mesh.domain.views import Arrivals, InstancePlan
from mesh.plan import live
from mesh.plan.live import USED_MAX, Host, plan
from tests.support.profiles import profile

PREFILL = Grid(rows=(1, 256), columns=(0, 1024), seconds=((0.05, 0.05), (0.1, 0.12)))
DECODE = Grid(rows=(1, 32), columns=(32, 2048), seconds=((0.05, 0.05), (0.08, 0.12)))
HOST = Host(
    node_id=NodeId("n1"),
    profile=profile(prefill=PREFILL, decode=DECODE),
    batch_max=32,
    power=Power(idle_watts=60.0, busy_watts=200.0),
)
HOSTS = [replace(HOST, node_id=NodeId(f"n{n}")) for n in range(1, 9)]
CALLS = Arrivals(rate_per_s=1.0, prompts=(256,), answer_tokens=64.0)
SLO = Slo(ttft_s=2.0, tpot_s=0.25)


def planned(calls: Arrivals = CALLS, slo: Slo = SLO, hosts: list[Host] = HOSTS) -> InstancePlan:
    return plan(hosts, calls, slo, replicas_max=8, chunk_tokens=256)


def test_a_call_now_and_then_takes_what_the_profile_says() -> None:
    made = planned(replace(CALLS, rate_per_s=1e-6))
    assert (made.replicas, made.nodes) == (1, (NodeId("n1"),))
    assert made.ttft_s == pytest.approx(PREFILL.at(256, 0), rel=1e-3)
    assert made.tpot_s == pytest.approx(DECODE.at(1, 288), rel=1e-3)
    assert made.watts == pytest.approx(60.0, rel=1e-3)


def test_beside_others_tokens_come_in_what_they_leave_and_who_cannot_keep_up_says_so() -> None:
    beside = [replace(HOST, left_share=0.5)]
    made = planned(hosts=beside)
    slower = planned(hosts=[replace(HOST, factor=2.0)])
    of_half, of_all = ((each.watts or 0.0) - 60.0 for each in (made, slower))
    assert of_half == pytest.approx(0.5 * of_all) != 0.0, "half of its time"
    assert made.ttft_s == pytest.approx(0.5 * slower.ttft_s), "prompts have the whole node"
    as_slow = replace(made, ttft_s=slower.ttft_s, watts=slower.watts)
    assert replace(as_slow, j_per_token=slower.j_per_token) == slower
    assert made.ttft_s > planned(hosts=[HOST]).ttft_s
    lacking = planned(slo=replace(SLO, tpot_s=0.06), hosts=beside)
    assert lacking.replicas == 0
    assert "are the least unloaded beside other deployments; the SLO asks" in lacking.lacks
    lacking = planned(replace(CALLS, rate_per_s=1000.0), hosts=beside)
    assert "that 1 instances carry beside other deployments at 80% of use" in lacking.lacks


def test_a_prompt_waits_for_turns_of_others_and_between_its_chunks_and_then_has_the_node() -> None:
    seldom, slo = replace(CALLS, rate_per_s=1e-6, prompts=(2048,)), replace(SLO, tpot_s=0.5)
    beside = replace(HOST, left_share=0.2, turn_of_others_s=0.05)
    made, alone = (planned(seldom, slo, [host]) for host in (beside, HOST))
    assert not made.lacks, "at a fifth of the speed it would take longer than the SLO allows"
    assert 5 * alone.ttft_s > slo.ttft_limit_s(2048)
    turns = 0.8 * (0.5 / 0.2 + 7)
    # Answers gain 63 times what 0.5 s leave of a TPOT, so that in the mean so many come first:
    due = 0.5 / (63 * (0.5 - made.tpot_s) / 4.0) * 4.0 / 0.5
    came_s = alone.ttft_s + (turns + 0.8 * due) * 0.05
    assert made.ttft_s == pytest.approx(came_s, rel=1e-3)
    beside = replace(beside, turn_of_others_s=1.0)
    assert f"a TTFT of {alone.ttft_s + turns:.3g} s" in planned(seldom, slo, [beside]).lacks


def test_more_and_longer_calls_need_no_fewer_instances_and_none_is_used_beyond_the_bound() -> None:
    rates = [0.5 * 1.5**n for n in range(9)]
    plans = [planned(replace(CALLS, rate_per_s=rate)) for rate in rates]
    counts = [made.replicas for made in plans if not made.lacks]
    assert counts == sorted(counts)
    assert counts[0] == 1 < counts[-1]
    for made in plans:
        assert made.lacks or made.utilisation <= USED_MAX
        assert made.lacks or (made.ttft_s <= SLO.ttft_s and made.tpot_s <= SLO.tpot_s)
    assert planned().replicas < planned(replace(CALLS, prompts=(2048,))).replicas


def test_a_rate_beyond_all_capacity_has_every_instance_and_says_what_they_carry() -> None:
    made = planned(replace(CALLS, rate_per_s=1000.0))
    assert made.replicas == len(HOSTS)
    assert "1e+03 calls a second are above the" in made.lacks
    carried = float(made.lacks.split("above the ")[1].split()[0])
    assert not planned(replace(CALLS, rate_per_s=0.99 * carried)).lacks
    few = plan(HOSTS, replace(CALLS, rate_per_s=1000.0), SLO, replicas_max=2, chunk_tokens=256)
    assert few.replicas == 2
    assert few.hint == "raise replicas_max"


@pytest.mark.parametrize("slo", [Slo(ttft_s=0.01, ttft_tokens_per_s=1e6), Slo(tpot_s=0.01)])
@pytest.mark.parametrize("others_s", [0.0, 0.05])
def test_an_slo_that_no_host_keeps_unloaded_is_answered_with_one_that_is_feasible(
    slo: Slo, others_s: float
) -> None:
    beside = replace(HOST, left_share=0.5, turn_of_others_s=others_s)
    hosts = [beside] if others_s else HOSTS
    made = planned(CALLS, slo, hosts)
    assert made.replicas == 0
    assert "are the least unloaded" in made.lacks
    words = made.hint.replace(",", "").split()
    ttft_s, tpot_s = (float(words[words.index(name) + 1]) for name in ("ttft_s:", "tpot_s:"))
    feasible = Slo(ttft_s=ttft_s, ttft_tokens_per_s=1e6, tpot_s=tpot_s)
    assert not planned(replace(CALLS, rate_per_s=1e-6), feasible, hosts).lacks


def test_where_more_instances_keep_no_slo_the_fewest_that_carry_the_rate_are_planned() -> None:
    made = planned(slo=replace(SLO, ttft_s=0.101, ttft_tokens_per_s=1e6))
    assert "are the least on 8 instances" in made.lacks
    assert made.replicas == len(made.nodes) < len(HOSTS)
    assert made.utilisation <= USED_MAX


def test_instances_are_filled_one_after_the_other_and_admission_holds_them_to_the_slo() -> None:
    alone = planned(replace(CALLS, rate_per_s=1.0))
    several = planned(replace(CALLS, rate_per_s=1.2 / alone.utilisation))
    assert (alone.replicas, several.replicas) == (1, 2)
    assert alone.tpot_s < several.tpot_s <= SLO.tpot_s


def test_the_error_of_predictions_makes_calls_later_where_it_is_known_of_every_instance() -> None:
    assert planned().ttft_most_s is None
    made = planned(hosts=[replace(host, error=0.2) for host in HOSTS])
    assert made.error == 0.2
    assert (made.ttft_most_s or 0.0) > 1.2 * made.ttft_s * 0.999
    assert (made.tpot_most_s or 0.0) > 1.2 * made.tpot_s * 0.999


def test_watts_are_those_of_equation_9_and_unknown_where_a_node_does_not_know_them() -> None:
    made = planned()
    assert 60.0 < (made.watts or 0.0) < 200.0
    assert made.j_per_token == pytest.approx((made.watts or 0.0) / (1.0 * 64.0))
    assert planned(hosts=[replace(HOST, power=None)]).watts is None


@pytest.mark.parametrize(
    ("calls", "why"),
    [
        (replace(CALLS, rate_per_s=0.0), "the rate is 0 a second; it must be above 0"),
        (replace(CALLS, rate_per_s=math.nan), "the rate is nan"),
        (replace(CALLS, prompts=()), "the demand has no lengths"),
        (replace(CALLS, prompts=(0,)), "one below 1 token"),
        (replace(CALLS, answer_tokens=0.0), "answers have 0 tokens"),
    ],
)
def test_what_nothing_can_be_planned_for_is_refused(calls: Arrivals, why: str) -> None:
    with pytest.raises(InvalidInput, match=why):
        planned(calls)


def test_a_hundred_nodes_of_one_kind_cost_what_one_does(monkeypatch: pytest.MonkeyPatch) -> None:
    made = Mock(wraps=Times)
    monkeypatch.setattr(live, "Times", made)

    def factors(*hosts: Host) -> list[float]:
        made.reset_mock()
        plan(hosts, CALLS, SLO, replicas_max=len(hosts), chunk_tokens=256)
        return [factor for (_, factor), _ in made.call_args_list]

    assert factors(*[HOST] * 100) == factors(HOST) != []
    assert {1.0, 1.5} <= {*factors(HOST, replace(HOST, factor=1.5))}
