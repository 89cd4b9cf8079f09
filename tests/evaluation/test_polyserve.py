"""The evaluation of PolyServe: its optimum, its search, and what its figures say."""

from collections.abc import Mapping

import pytest

from mesh.compute.times import Times
from mesh.domain.slo import Slo
from mesh.domain.values import replace
from mesh.evaluation.polyserve import (
    BATCH_MAX,
    TABLES_OFF,
    TTFTS_S,
    WORKLOADS,
    Attained,
    Figure,
    FigureJob,
    Goodput,
    Load,
    Optimum,
    Search,
    Untaught,
    attained,
    cost_record,
    cost_s,
    goodput,
    mean_answer_tokens,
    optimum,
    record,
    record_of_loads,
)
from mesh.sim.cluster import Arrival, VirtualCell
from mesh.sim.scenario import arrivals, plan
from mesh.sim.testbed import known_model

PROFILE = known_model("llama-3.1-8b").costs["h200"].profile
TIMES = Times(PROFILE)
SMALL = Load(workload="mooncake_toolagent", servers=2, counted_s=4.0)


def test_the_table_has_what_the_paper_tells_of_its_servers() -> None:
    """15 ms alone (§5.1); at contexts of 3,000 tokens 20 and 40 ms with 50 and 150 (§3.6)."""
    assert TIMES.decode_s(1, 1) == 0.015
    assert TIMES.decode_s(50, 3000) == pytest.approx(0.020, rel=0.02)
    assert TIMES.decode_s(150, 3000) == pytest.approx(0.040, rel=0.02)
    slope = TIMES.decode_s(256, 8192) - TIMES.decode_s(256, 4096)
    longer = TIMES.decode_s(256, 16384) - TIMES.decode_s(256, 12288)
    assert longer == pytest.approx(slope, rel=0.01)


def test_each_request_draws_an_slo_that_an_idle_server_keeps() -> None:
    drawn = list(arrivals(SMALL.scenario("polyserve-co", 60.0)))
    assert len({(a.slo.ttft_s, a.slo.tpot_s) for a in drawn if a.slo}) == 12
    assert {a.slo.ttft_s for a in drawn if a.slo} == set(TTFTS_S)
    assert all(a.slo and PROFILE.prefill.at(a.input_tokens, 0) <= a.slo.ttft_s for a in drawn)
    longest = max(a.input_tokens for a in drawn)
    assert PROFILE.prefill.at(longest, 0) > 0.9, "only what no TTFT fits is left out"


def test_a_tighter_pace_costs_more_and_the_optimum_is_servers_over_the_mean_cost() -> None:
    request = Arrival(0.0, "llama", 1000, 1000, Slo(tpot_s=0.02))
    loose = request._replace(slo=Slo(tpot_s=0.1))
    assert cost_s(TIMES, 845642, request) > 1.5 * cost_s(TIMES, 845642, loose)
    found = optimum(SMALL)
    assert found.rate_per_s == pytest.approx(SMALL.servers * 3.2, rel=0.1)
    assert found.offered_share == pytest.approx(0.9, abs=0.03)


def test_goodput_is_the_largest_share_at_which_nine_tenths_are_met() -> None:
    def at(percent: int) -> Attained:
        return Attained(overall=1.3 - percent / 200, by_class={"a": 1.1 - percent / 200})

    known = {percent: at(percent) for percent in range(131)}
    search = Search(policy="-", load=SMALL, rate_per_s=1.0, known=known)
    found = goodput([search])
    assert (found.percent, found.percent_each_class) == (80, 40)
    assert found.overload_share == pytest.approx(1.2 * 0.7)


def test_each_measure_has_its_own_best_setting() -> None:
    def search(overall: int, each: int, setting: float) -> Search:
        known = {
            percent: Attained(
                overall=float(percent <= overall), by_class={"a": float(percent <= each)}
            )
            for percent in range(131)
        }
        return Search(policy="-", load=SMALL, rate_per_s=1.0, known=known, setting=setting)

    found = goodput([search(60, 50, 256), search(60, 60, 512), search(80, 20, 1024)])
    assert (found.percent, found.percent_each_class, found.setting) == (80, 60, 1024)


def test_goodput_is_looked_for_down_to_five_per_cent() -> None:
    none = Attained(overall=0.5, by_class={"a": 0.5})
    known = dict.fromkeys(range(5, 131), none)
    found = goodput([Search(policy="-", load=SMALL, rate_per_s=0.01, known=known)])
    assert (found.percent, found.percent_each_class, found.attained) == (0, 0, none)


def _came_to(percent: int, each: int = 0) -> Goodput:
    return Goodput(
        percent=percent,
        percent_each_class=each,
        overload_share=0.9,
        overload_least=0.5,
        attained=Attained(overall=0.9, by_class={"a": 0.9}),
        setting=None,
    )


def test_gains_are_over_the_best_baseline_of_each_workload() -> None:
    found: Mapping[str, Mapping[str, Goodput]] = {
        "a": {
            "polyserve-co": _came_to(80, 60),
            "co-random": _came_to(50, 20),
            "co-minimal": _came_to(64, 30),
            "polyserve-co-no-promotion": _came_to(100, 90),
            "co-random-no-refusal": _came_to(90, 90),
            "polyserve-co-no-refusal": _came_to(45, 45),
            "llm-mesh": _came_to(100, 100),
        },
        "b": {"polyserve-co": _came_to(60, 60)},
        "c": {"polyserve-co": _came_to(10, 5), "co-random": _came_to(0, 0)},
    }
    optimal = Optimum(rate_per_s=10.0, offered_share=0.5)
    made = record({(name, "co"): optimal for name in found}, found)
    # In c the baseline comes to less than 5 %, as which it counts.
    assert (made["gain_co"], made["gain_each_class_co"]) == (1.625, 1.5)
    assert (made["optimal_share_co"], made["overload_share_co"]) == (0.5, 0.9)
    assert (made["gain_co_no_refusal"], made["gain_pd"]) == (0.5, None)
    assert "gain_pd_no_refusal" not in made


def test_the_gain_of_a_policy_of_either_kind_is_in_requests_a_second() -> None:
    found = {"a": {"mesh-slo": _came_to(110, 90), "pd-minimal": _came_to(100, 80)}}
    found["a"]["co-chunk"] = _came_to(130, 100)
    optima = {
        ("a", kind): Optimum(rate_per_s=rate_per_s, offered_share=1.0)
        for kind, rate_per_s in (("co", 10.0), ("pd", 20.0), ("slo", 20.0))
    }
    made = record(optima, found)
    assert (made["gain_slo"], made["gain_each_class_slo"]) == (1.1, 1.125)
    assert made["optimal_share_slo"] == 1.1


def test_the_optimum_of_either_kind_is_the_higher_one() -> None:
    both = [optimum(SMALL, kind).rate_per_s for kind in ("co", "pd")]
    assert optimum(SMALL, "slo").rate_per_s == max(both) > min(both)


def test_a_light_load_is_met_where_each_tier_has_a_server() -> None:
    few = Load(workload="lmsys", servers=4, counted_s=6.0)
    assert attained("polyserve-co", few, 2.0).overall == 1.0
    assert all(Load(workload=name).warm_s > 5.0 for name in WORKLOADS)


def test_a_simulation_ends_early_where_too_little_can_be_met() -> None:
    load = replace(SMALL, servers=1)
    whole = attained("co-random", load, 5.0)
    assert 0.0 < whole.overall < 0.8
    short = attained("co-random", load, 5.0, least=0.9)
    assert whole.overall < short.overall < 0.9
    assert attained("co-random", load, 5.0, least=whole.overall) == whole


def test_a_search_asks_anew_for_what_it_has_seen_in_part() -> None:
    search = Search(policy="co-random", load=SMALL, rate_per_s=20.0)
    short = search.at(100, least=0.99)
    assert search.at(100, least=0.99) is short
    assert search.at(100).overall < short.overall
    assert search.at(100, least=0.99) is search.at(100)


def test_servers_carry_the_batches_of_which_the_optimum_is() -> None:
    nodes = plan(SMALL.scenario("polyserve-pd", 1.0)).nodes
    assert [node.hello.batch_max for node in nodes] == [BATCH_MAX] * SMALL.servers


def test_tables_that_are_wrong_change_what_policies_decide_and_not_what_iterations_take() -> None:
    load = Load(workload="lmsys", servers=2, counted_s=4.0)
    for tables in TABLES_OFF:
        assert attained("co-random", replace(load, tables=tables), 2.0).overall == 1.0
    assert attained("co-random", replace(load, tables=1000.0), 2.0).overall < 0.5


def test_the_least_gain_counts_where_tables_are_wrong() -> None:
    def came_to(own: int, other: int) -> Mapping[str, Mapping[str, Goodput]]:
        return {"a": {"polyserve-co": _came_to(own), "co-random": _came_to(other)}}

    optimal = {("a", "co"): Optimum(rate_per_s=10.0, offered_share=0.5)}
    found = {"tables_0.8": came_to(60, 40), "lengths": came_to(66, 60)}
    made = record_of_loads(Figure.ROBUST, optimal, found)
    assert (made["robust_gain_co"], made["robust_gain_pd"]) == (1.1, None)
    assert set(made) == {"tables_0.8", "lengths", "robust_gain_co", "robust_gain_pd"}


def test_classes_swap_their_shares_halfway_through_what_counts() -> None:
    load = Figure.BURST.loads(Load(workload="lmsys", counted_s=20.0))["inverted"]
    drawn = list(load.arrivals(load.scenario("co-random", 100.0)))
    assert [a.at_s for a in drawn] == sorted(a.at_s for a in drawn)
    half_s = load.warm_s + 10.0
    before = [a.slo.tpot_s for a in drawn if a.slo and a.at_s < half_s]
    after = [a.slo.tpot_s for a in drawn if a.slo and a.at_s >= half_s]
    for of, shares in ((before, (0.1, 0.4)), (after, (0.4, 0.1))):
        found = of.count(0.02) / len(of), of.count(0.1) / len(of)
        assert found == pytest.approx(shares, abs=0.06)
    usual = list(arrivals(load.scenario("co-random", 100.0)))
    assert [a.at_s for a in usual] == [a.at_s for a in drawn]


def test_policies_expect_answers_of_another_workload_whatever_they_see() -> None:
    expected = Untaught(mean_tokens=mean_answer_tokens("uniform_4096_1024"))
    made = plan(SMALL.scenario("polyserve-co", 7.0))
    histories = {of.spec.name: expected for of in made.deployments}
    cell = VirtualCell(replace(made, histories=histories))
    cell.run([Arrival(0.0, "llama", 10, 20, made.deployments[0].spec.classes[0])])
    (entry,) = cell.core.cell.deployments.values()
    assert entry.served == 1
    assert entry.answer_tokens == pytest.approx(1024, rel=0.01)
    assert entry.history.mean_of("tpot-20ms") == entry.answer_tokens
    robust = Figure.ROBUST.loads(SMALL)
    assert [of.answers_of for of in robust.values()] == ["", "", "lmsys"]


def test_costs_are_servers_over_the_fewest_that_a_baseline_needs_at_each_rate(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("mesh.evaluation.polyserve.COST_PERCENTS", (30,))
    load = Load(workload="lmsys", servers=1, counted_s=3.0)
    rate_per_s = optimum(load).drawn_per_s
    found = {
        policy: FigureJob(
            policy=policy, load=load, rate_per_s=rate_per_s, figure=Figure.COST
        ).compute()
        for policy in ("polyserve-co", "co-minimal")
    }
    taken, needed = found["polyserve-co"], found["co-minimal"]
    assert isinstance(taken, dict)
    assert 1.0 <= taken[30] <= 3.0
    assert isinstance(needed, dict)
    assert set(needed.values()) <= {None, 1, 2, 3}
    made = cost_record({"lmsys": {"polyserve-co": {25: 3.0, 50: 5.0}, "co-chunk": {25: 4, 50: 4}}})
    assert (made["cost_ratio_co"], made["cost_ratio_most_co"]) == (1.0, 1.25)
