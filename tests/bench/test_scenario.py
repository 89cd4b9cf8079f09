"""Scenarios of live cells: their files, the calls that they draw, and what is told of them."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any, cast

import pytest

from bench import cells, live
from bench.audit import Audit
from bench.demo_model import SOURCE
from bench.judging import judge
from bench.live import Shown, figures, report
from bench.overcommit_shapes import Resident
from bench.played import Played, check_spec, jain, measured
from bench.scenario import Asked, Scenario, Scene, read_scenario, wanted
from bench.sending import (
    CONTEXT_TOKENS,
    AtOnce,
    Load,
    Overload,
    Poisson,
    Waves,
    batch_at_capacity,
    calls_for,
    limit_bytes,
)
from bench.spans import Kind, Span
from mesh.compute.times import Times
from mesh.domain.errors import InvalidInput
from mesh.domain.ids import DeploymentName
from mesh.domain.slo import Slo, best_effort
from mesh.domain.steps import LoadTier
from mesh.evaluation.bursts import INPUT_TOKENS, OUTPUT_TOKENS
from mesh.evaluation.load_client import Answer, Call
from mesh_nodes.engines.openvino.footprint import ENGINE_BYTES
from tests.cli.views import READY
from tests.core.cells import FOOTPRINT, MIB
from tests.support.profiles import PROFILE

FOLDER = Path(live.__file__).parent / "scenarios"
SLO, FLEET, LATE, OVERCOMMIT, RETURNS, CLASSES, SIDES, PLAN = (
    read_scenario(FOLDER / f"{name}.toml")
    for name in (
        *("slo", "fleet", "late-starts", "overcommit", "returns", "classes", "side-by-side"),
        "plan",
    )
)


def scene(scenario: Scenario, name: str) -> Scene:
    (found,) = (each for each in scenario.scenes if each.name == name)
    return found


def calls(of: Scene, load: Load, seed: int = 1, times: Times | None = None) -> list[Call]:
    return load.calls(of.specs(), seed, times)


# Files.


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.toml")), ids=lambda path: path.stem)
def test_targets_of_a_file_are_of_figures_that_it_tells(path: Path) -> None:
    scenario = read_scenario(path)
    told = set(scenario.figures) | set(scenario.whole)
    for each in scenario.scenes:
        told |= {f"{each.mark}{name}" for name in (*(each.figures or {}), *each.whole)}
        told |= {name for peer in each.peers for name in (*peer.ratios, *peer.enough)}
    assert set(scenario.targets) <= told
    assert scenario.about.splitlines()[0].endswith(".")


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ('kind = "at once"', 'there is no kind of load "all"'),
        ('burst_calls = "requests"', "is no figure"),
        ("surveyed = true", "there is no served here"),
        ('policy = "llm-mesh" }', "is cold or audited, and has several nodes"),
    ],
)
def test_a_wrong_file_is_an_error_that_says_where(wrong: str, said: str, tmp_path: Path) -> None:
    text = (FOLDER / "slo.toml").read_text()
    damaged = {
        'kind = "at once"': 'kind = "all"',
        'burst_calls = "requests"': 'burst_calls = "request"',
        "surveyed = true": "served = true",
        'policy = "llm-mesh" }': "nodes = 2 }\naudited = true",
    }
    path = tmp_path / "wrong.toml"
    path.write_text(text.replace(wrong, damaged[wrong], 1))
    with pytest.raises(InvalidInput, match=said.replace('"', "'")):
        read_scenario(path)


def asked(scenario: Scenario, **options: Any) -> list[Scene]:
    return wanted(scenario, Asked(**options))


def test_options_choose_scenes_and_change_their_loads() -> None:
    assert [each.name for each in asked(FLEET)] == [
        *("fleet", "resident", "locality", "conversations")
    ]
    (i4,) = asked(FLEET, scene="i4", rates=(3.0,), seconds=7.0)
    assert [(one.name, cast(Poisson, one).seconds) for one in i4.loads] == [("3 calls/s", 7.0)]
    assert [each.name for each in asked(OVERCOMMIT, quick=True)] == ["waves"]
    assert asked(OVERCOMMIT, quick=True)[0].loads[0].name == "20 s of waves"
    assert len(asked(LATE, deployments=3)[0].specs()) == 3
    assert all(each.surveyed for each in asked(SLO, survey=True))
    with pytest.raises(InvalidInput, match="no scene no-such"):
        asked(SLO, scene="no-such")


def test_a_peer_lacks_what_its_cell_says_and_nothing_else() -> None:
    talks = scene(FLEET, "conversations")
    assert talks.specs(talks.peers[0].cell) == [
        replace(spec, prefix_cache=False) for spec in talks.specs()
    ]
    ahead = scene(FLEET, "locality")
    assert ahead.specs(ahead.peers[0].cell) == ahead.specs()
    assert {spec.source for spec in scene(SLO, "overload").specs()} == {SOURCE}
    assert len({spec.source for spec in ahead.specs()}) == 40


def test_nodes_apart_have_equal_parts_and_no_core_in_common(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """There are two cores with two threads each, numbered 0, 2 and 1, 3."""
    monkeypatch.setattr(cells, "siblings", lambda cpu: frozenset({cpu % 2, cpu % 2 + 2}))
    monkeypatch.setattr(cells, "usable_cpus", lambda: frozenset(range(4)))
    apart = {node.name: node.cpus for node in cells.nodes_apart(2)}
    assert apart == {"cpu0": frozenset({0, 2}), "cpu1": frozenset({1, 3})}
    assert [node.cpus for node in cells.nodes_apart(1)] == [frozenset(range(4))]
    monkeypatch.setattr(cells, "usable_cpus", lambda: frozenset({0, 1, 3}))
    assert [node.cpus for node in cells.nodes_apart(2)] == [frozenset({0}), frozenset({1, 3})]
    with pytest.raises(InvalidInput, match="2 cores cannot be divided into 3 equal parts"):
        cells.nodes_apart(3)


# Calls.


def test_each_turn_of_a_conversation_that_returns_begins_with_all_that_was_said_before() -> None:
    (load,) = scene(RETURNS, "returns").loads
    turns = calls(scene(RETURNS, "returns"), load)
    assert len(turns) == 8
    for one, next_one in pairwise(turns):
        assert next_one.prompt_tokens[: len(one.prompt_tokens)] == one.prompt_tokens
        assert 332 <= len(next_one.prompt_tokens) - len(one.prompt_tokens) <= 432


def test_calls_come_in_order_at_their_rate_and_the_popular_more_often() -> None:
    fleet = scene(FLEET, "fleet")
    sent = calls(fleet, Poisson(rate=20.0, seconds=200.0), seed=2)
    assert len(sent) == pytest.approx(4000, rel=0.05)
    assert [call.at_s for call in sent] == sorted(call.at_s for call in sent)
    assert sent[0].at_s > 0.0
    assert sent[-1].at_s < 200.0
    counts = Counter(call.deployment for call in sent)
    first, second, *_, last = (spec.name for spec in fleet.specs())
    assert counts[first] / counts[second] == pytest.approx(2**0.9, rel=0.2)
    assert counts[first] / counts[last] == pytest.approx(40**0.9, rel=0.4)
    assert {call.output_tokens for call in sent} == {16, 48, 96}
    assert sum(len(call.prompt_tokens) for call in sent) / len(sent) == pytest.approx(27, rel=0.02)


@pytest.mark.parametrize(
    ("of", "load"),
    [
        (scene(FLEET, "fleet"), Poisson(rate=1.0, seconds=9.0)),
        (scene(SLO, "bursts"), scene(SLO, "bursts").loads[1]),
        (
            scene(SLO, "overload"),
            replace(cast(Overload, scene(SLO, "overload").loads[0]), seconds=10.0),
        ),
        (scene(OVERCOMMIT, "waves"), scene(OVERCOMMIT, "waves").loads[0]),
    ],
)
def test_the_same_seed_draws_the_same_calls(of: Scene, load: Load) -> None:
    times = Times(PROFILE)
    assert calls(of, load, 3, times) == calls(of, load, 3, times)
    assert calls(of, load, 3, times) != calls(of, load, 4, times)


def test_a_short_run_has_a_call() -> None:
    assert calls(scene(FLEET, "fleet"), Poisson(rate=0.001, seconds=1.0), seed=5)


def test_a_turn_asks_with_all_that_was_said() -> None:
    talks = scene(FLEET, "conversations")
    sent = calls(talks, replace(cast(Poisson, talks.loads[0]), seconds=300.0), seed=6)
    first = [call for call in sent if call.deployment == talks.specs()[0].name]
    system = first[0].prompt_tokens[:300]
    assert all(call.prompt_tokens[:300] == system for call in first)
    prompts = [call.prompt_tokens for call in first]
    later = [p for p in prompts if any(p != q and p[: len(q)] == q for q in prompts)]
    assert len(later) > len(prompts) / 2
    assert all(len(c.prompt_tokens) + c.output_tokens <= 1024 for c in sent)


def test_a_burst_comes_at_once_and_each_deployment_is_called_as_often() -> None:
    bursts, late = scene(SLO, "bursts"), scene(LATE, "compiled")
    sent = calls(bursts, bursts.loads[1])
    assert (len(sent), {call.at_s for call in sent}) == (64, {0.0})
    assert len({call.prompt_tokens for call in sent}) == 64
    assert len({call.deployment for call in calls(late, late.loads[0])}) == 20


def test_an_overload_is_as_much_work_as_asked_for_in_order_and_within_the_run() -> None:
    overload, times = scene(SLO, "overload"), Times(PROFILE)
    load = replace(cast(Overload, overload.loads[0]), seconds=30.0)
    sent = calls(overload, load, 3, times)
    most = max(load.offered([call], times) for call in sent)
    assert load.offered(sent, times) == pytest.approx(2.0, abs=4 * most)
    assert [call.at_s for call in sent] == sorted(call.at_s for call in sent)
    assert 0.0 <= sent[0].at_s <= sent[-1].at_s <= 30.0
    assert {call.deployment for call in sent} == {spec.name for spec in overload.specs()}
    assert all(
        INPUT_TOKENS[0] <= len(call.prompt_tokens) <= INPUT_TOKENS[1]
        and OUTPUT_TOKENS[0] <= call.output_tokens <= OUTPUT_TOKENS[1]
        for call in sent
    )


def test_capacity_is_the_largest_batch_whose_decodes_keep_every_tpot() -> None:
    slos, times = [spec.slo for spec in scene(SLO, "overload").specs()], Times(PROFILE, 10.0)
    batch, rounds_per_s = batch_at_capacity(times, slos), sum(1 / slo.tpot_s for slo in slos)
    assert times.decode_s(batch, CONTEXT_TOKENS) * rounds_per_s <= 1.0
    assert times.decode_s(batch + 1, CONTEXT_TOKENS) * rounds_per_s > 1.0


def test_each_class_has_its_bursts_and_best_effort_comes_beside_them() -> None:
    of, times = scene(CLASSES, "classes"), Times(PROFILE)
    load = replace(cast(Overload, of.loads[0]), seconds=60.0)
    sent = calls(of, load, 3, times)
    counts = Counter(call.slo.name for call in sent)
    limited = [counts[name] for name in ("interactive", "agent", "report")]
    assert max(limited) - min(limited) <= 1
    most = max(load.offered([call], times) for call in sent)
    assert load.offered(sent, times) == pytest.approx(1.5, abs=4 * most)
    best = [replace(call, slo=of.specs()[0].slo) for call in sent if call.slo.best_effort]
    assert load.offered(best, times) == pytest.approx(0.5, abs=4 * most)
    assert [call.at_s for call in sent] == sorted(call.at_s for call in sent)
    assert {call.deployment for call in sent} == {"classes"}


def test_a_peer_gets_each_call_where_its_class_is_offered_or_without_a_class() -> None:
    of = scene(CLASSES, "classes")
    sent = calls(of, of.loads[0].shortened(), 3, Times(PROFILE))
    deployments, single, without = of.peers
    apart = calls_for(of.beside(deployments).specs(), sent, best_effort=True)
    reached = {(call.slo.name, call.deployment) for call in apart}
    assert reached == {("batch", "report"), *((n, n) for n in ("interactive", "agent", "report"))}
    alike = calls_for(of.beside(single).specs(), sent, best_effort=True)
    assert {(call.slo.name, call.deployment) for call in alike} == {("", "single")}
    assert [replace(call.slo, name="") for call in sent] == [call.slo for call in alike]
    limited = [call for call in sent if not call.slo.best_effort]
    assert calls_for(of.beside(without).specs(), sent, best_effort=False) == limited


def test_best_effort_has_the_share_of_the_time_that_others_left_by_what_it_computed_in_it() -> None:
    times, load = Times(PROFILE), Overload(load=1.0, seconds=4.0, quick_seconds=1.0)
    limited = replace(CALL, prompt_tokens=(7,) * 100, output_tokens=2)
    best = replace(limited, slo=best_effort("batch", 60.0))
    answer = replace(MET, tokens_s=(1.0, 5.0))
    one_s = load.offered([limited], times) * load.seconds
    (share,) = load.best_effort_share(judge([limited, best], [answer, answer]), times)
    assert share == pytest.approx((one_s / 2) / (4.0 - one_s / 2))
    assert load.best_effort_share(judge([limited], [answer]), times) == ()


def test_waves_keep_the_bounds_of_their_deployment_and_alternate() -> None:
    of = scene(OVERCOMMIT, "waves")
    load, specs = cast(Waves, of.loads[0]), of.specs()
    sent = calls(of, load, 3)
    assert [call.at_s for call in sent] == sorted(call.at_s for call in sent)
    contexts = {spec.name: spec.context_tokens_max or 0 for spec in specs}
    for call in sent:
        bounds = load.traffic[call.deployment]
        assert bounds.prompt_tokens[0] <= len(call.prompt_tokens) <= bounds.prompt_tokens[1]
        assert bounds.output_tokens[0] <= call.output_tokens <= bounds.output_tokens[1]
        assert len(call.prompt_tokens) + call.output_tokens < contexts[call.deployment]
    for name, waves in groupby(load.waves(specs, 3), key=lambda wave: wave[0].deployment):
        sizes, most = list(map(len, waves)), load.traffic[name].calls_max
        assert min(sizes[0::2]) >= most // 2 >= max(sizes[1::2])
        assert max(sizes) <= most


def test_the_limit_is_a_share_of_what_the_largest_waves_and_the_weights_want() -> None:
    specs = scene(OVERCOMMIT, "waves").specs()
    call = replace(CALL, deployment=specs[0].name, prompt_tokens=(7,) * 100)
    whole_bytes = 4 * FOOTPRINT.weights_bytes + (30 * 4 + 32 + 32 + 64) * MIB
    found = limit_bytes([(call,) * 10, (call,) * 30], specs, FOOTPRINT, 2.0)
    assert found == whole_bytes // 2 + ENGINE_BYTES


# Figures.

CALL = Call(
    at_s=0.0,
    deployment=DeploymentName("fleet-01"),
    slo=Slo(ttft_s=1.0, tpot_s=0.1),
    prompt_tokens=(7,),
    output_tokens=3,
)
MET = Answer(ended_s=1.0, tokens_s=(0.5, 0.6, 0.7), finishes=1)
TOO_LATE = replace(MET, tokens_s=(9.0, 9.1, 9.2))
AS_TOLD = replace(MET, tokens_s=(1.5, 1.6, 1.7), grace_s=0.5)
REFUSED = Answer(ended_s=0.1, tokens_s=(), refused="memory_full", retry_after_s=2.0)


def played(*answers: Answer, again: Sequence[Answer] = (), **more: Any) -> Played:
    return Played(
        judged=judge([CALL] * len(answers), answers),
        again=judge([CALL] * len(again), again),
        **more,
    )


MIXED = played(
    MET,
    replace(MET, tokens_s=(0.95, 1.14, 1.14)),
    replace(MET, tokens_s=(0.5, 0.85, 1.19)),
    replace(AS_TOLD, grace_s=3.0),
    REFUSED,
    rate=1.0,
    seconds=10.0,
    spans=[Span(Kind.LOAD, 0.0, 4.0), Span(Kind.DECODE, 3.0, 5.0)],
    simulated_met_share=0.3,
)
"""One met, one only in the mean, one only by every token, one late as told, one refused."""


@pytest.mark.parametrize(
    ("spec", "figure"),
    [
        ("requests", 5),
        ("admitted", 4),
        ("met_share", 0.4),
        ("met_every_token_share", 0.4),
        ("met_of_promised", 0.6667),
        ("met_of_promised_in_the_mean", 0.6667),
        ("both_of_promised", 0.3333),
        ("told_late", 1),
        ("ttfts_s max", 1.5),
        ("ttfts_s p50 / 0.5", 1.0),
        ("late_over_told mean", 0.1667),
        ("load_errors mean", None),
        ("sim_difference", 0.1),
        ("refused_by_reason", {"memory_full": 1}),
        ("refused_by_reason.memory_full", 1),
        ("counts.loads", 0),
        ("again_admitted", 0.0),
        ("loads_begun", 1),
        ("loading_s", 4.0),
        ("seconds_by_kind.load", 3.0),
    ],
)
def test_a_figure_is_a_measure_and_what_is_made_of_it(spec: str, figure: object) -> None:
    check_spec(spec)
    assert measured(MIXED, spec) == figure


@pytest.mark.parametrize("wrong", ["", "no_such", "met_share half", "ttfts_s median", "_outcomes"])
def test_what_is_no_figure_is_an_error(wrong: str) -> None:
    with pytest.raises(InvalidInput, match="is no figure"):
        check_spec(wrong)


def test_jain_is_one_for_equal_shares_and_a_share_for_one_that_has_all() -> None:
    assert jain([0.4, 0.4, 0.4, 0.4]) == pytest.approx(1.0)
    assert jain([0.9, 0.0, 0.0, 0.0]) == pytest.approx(0.25)


def test_figures_are_lists_by_load_beside_those_of_the_peer() -> None:
    peer = [played(MET, MET, MET, MET, TOO_LATE), played(TOO_LATE)]
    shown = Shown(
        scene=scene(FLEET, "fleet"), ours=[MIXED, played(MET, rate=2.0)], peers={"lru": peer}
    )
    found = figures(FLEET, shown)
    assert found["rates"] == [1.0, 2.0]
    assert found["met_share"] == [0.4, 1.0]
    assert found["lru_met_share"] == [0.8, 0.0]
    assert found["lru_ratio"] == [0.5, None]
    assert found["sim_difference"] == [pytest.approx(0.1), None]
    assert found["load_estimate_error"] is None


def test_figures_say_of_which_scene_they_are_and_do_without_a_peer() -> None:
    found = figures(FLEET, Shown(scene=scene(FLEET, "resident"), ours=[played(MET)]))
    assert found["resident_met_share"] == [1.0]
    assert found["resident_peer_met_share"] == []
    assert "met_share" not in found
    locality = scene(FLEET, "locality")
    peers = {"locality_without": [played(MET, TOO_LATE)]}
    shown = Shown(scene=locality, ours=[played(MET, MET)], peers=peers)
    assert figures(FLEET, shown)["locality_gain"] == [2.0]


def test_a_decision_is_right_in_the_loads_in_which_what_it_chose_met_no_less() -> None:
    """Two nodes met fewer, as many, more, and all of a load of which one met none."""
    halves = [played(MET, late) for late in (TOO_LATE, TOO_LATE, MET, MET)]
    whole = [played(one, late) for one, late in ((MET, MET), (MET, TOO_LATE), (MET, TOO_LATE))]
    peers = {"whole": [*whole, played(TOO_LATE, TOO_LATE)]}
    of = scene(SIDES, "side-by-side")
    found = figures(SIDES, Shown(scene=of, ours=halves, peers=peers))
    assert found["halves_met_ratio"] == [0.5, 1.0, 2.0, None]
    assert found["decision_right"] == 0.5
    assert found["halves_tpot_s"] == [pytest.approx(0.1)] * 4
    assert "decision_right" not in figures(SIDES, Shown(scene=of, ours=halves))


def test_plans_that_were_refused_are_counted_beside_the_errors_of_the_others() -> None:
    turns = [
        played(MET, ttft_forecast_errors=(0.1,), forecasts_refused=1),
        played(MET, forecasts_refused=4),
        played(MET, ttft_forecast_errors=(0.2,)),
    ]
    found = figures(PLAN, Shown(scene=scene(PLAN, "plan"), ours=turns, peers={}))
    assert (found["ttft_forecast_error"], found["forecasts_refused"]) == (0.15, 5)


def test_policies_are_compared_by_all_of_their_calls() -> None:
    overload = scene(SLO, "overload")
    ours, peer = played(MET, MET, REFUSED, offered=(2.1,)), played(MET, TOO_LATE, TOO_LATE)
    found = figures(SLO, Shown(scene=overload, ours=[ours], peers={"fcfs": [peer]}))
    assert (found["met"], found["fcfs_met"], found["met_ratio_to_fcfs"]) == (2, 1, 2.0)
    assert found["offered_over_capacity"] == 2.1
    assert found["met_share_by_deployment"] == {"fleet-01": 0.6667}


def test_classes_are_told_apart_and_what_best_effort_costs_them_is_a_share() -> None:
    of = scene(CLASSES, "classes")
    slos = [*of.specs()[0].classes[:2], of.specs()[0].classes[3]]
    asked = [replace(CALL, slo=slo) for slo in (slos[0], slos[0], slos[1], slos[2])]
    ours = Played(judged=judge(asked, [MET, TOO_LATE, REFUSED, MET]))
    without = Played(judged=judge(asked[:2], [MET, MET]))
    found = figures(CLASSES, Shown(scene=of, ours=[ours], peers={"without": [without]}))
    assert found["requests"] == {"agent": 1, "interactive": 2}
    assert found["met_of_admitted"] == {"agent": None, "interactive": 0.5}
    assert (found["met"], found["class_loss_to_best_effort"]) == (1, 0.5)
    assert "met_of_admitted" in missed(CLASSES, of, ours)


def missed(scenario: Scenario, of: Scene, *ours: Played) -> set[str]:
    made = report(scenario, [Shown(scene=of, ours=ours)])
    return {str(line).split(" is ")[0] for line in cast(list[str], made.figures["faults"])}


@pytest.mark.parametrize(
    ("answers", "late"),
    [
        ((MET, AS_TOLD), set()),
        ((AS_TOLD, AS_TOLD), set()),
        ((MET, REFUSED), {"served"}),
        ((MET, replace(AS_TOLD, grace_s=0.0)), {"met_of_told_in_time"}),
        ((replace(AS_TOLD, grace_s=0.3),), {"late_over_told_max"}),
        ((replace(AS_TOLD, grace_s=0.9),), {"late_over_told_min"}),
        ((replace(AS_TOLD, tokens_s=(), failed="unavailable"),), {"served"}),
    ],
)
def test_what_was_told_must_hold(answers: Sequence[Answer], late: set[str]) -> None:
    assert missed(LATE, scene(LATE, "compiled"), played(*answers), played(MET)) == late


def test_loads_are_told_by_tier_and_by_how_far_they_were_foretold() -> None:
    loads = tuple(
        replace(READY, load_s=2.0, load_expected_s=expected_s, tier=LoadTier.DISK)
        for expected_s in (1.8, 2.6)
    )
    made = played(MET, name="all at once", instances=loads)
    found = figures(LATE, Shown(scene=scene(LATE, "compiled"), ours=[made]))
    assert found["scenes"] == ["all at once"]
    assert found["load_tiers"] == [{"disk": 2}]
    assert found["load_estimate_error"] == [pytest.approx(0.2)]


@pytest.mark.parametrize(
    ("again", "late"),
    [
        ([MET] * 9 + [REFUSED], set()),
        ([MET] * 8 + [REFUSED] * 2, {"again_admitted"}),
        ([], {"again_admitted"}),
    ],
)
def test_who_is_refused_is_told_when_to_come_again(again: list[Answer], late: set[str]) -> None:
    first = [played(*[MET] * n) for n in (16, 64)]
    last = played(*[MET] * 32, *[REFUSED] * 224, again=again)
    assert missed(SLO, scene(SLO, "bursts"), *first, last) == late


def test_a_burst_of_which_too_few_are_met_or_some_hear_late_is_missed() -> None:
    uneven = replace(MET, tokens_s=(0.5, 0.85, 1.19))
    hears_late = replace(REFUSED, ended_s=2.5)
    bursts = scene(SLO, "bursts")
    first = [played(*[MET] * 15, uneven), played(*[MET] * 64), played(*[MET] * 32)]
    assert missed(SLO, bursts, *first) == {"burst_met_of_admitted", "burst_met_in_the_mean"}
    first = [played(*[MET] * 16), played(*[MET] * 64), played(*[MET] * 32, hears_late)]
    assert "refused_after_deadline" in missed(SLO, bursts, *first)


def test_a_fleet_that_is_booked_too_high_or_takes_too_much_is_a_fault() -> None:
    """One sample of ten is over the limit."""
    within = Resident(limit_bytes=100, samples=10)
    audit = Audit(resident_max=8, books=[(80, 90), (100, 105)])
    made = played(MET, audit=audit, resident=within, shapes={"1B": 1.05})
    fleet = scene(OVERCOMMIT, "fleet")
    found = figures(OVERCOMMIT, Shown(scene=fleet, ours=[made]))
    assert found["density_ratio"] == pytest.approx(8 / 6, abs=0.001)
    assert found["fleet_booked_over_rss"] == 1.05
    assert missed(OVERCOMMIT, fleet, made) == set()
    over = replace(made, resident=replace(within, over=1))
    assert missed(OVERCOMMIT, fleet, over) == {"fleet_rss_over_limit"}
    failed = replace(audit, errors=Counter({"load OutOfMemory": 1}))
    assert missed(OVERCOMMIT, fleet, replace(made, audit=failed)) == {"fleet_errors"}
    low = replace(made, shapes={"135M": 1.0, "1B": 0.9})
    assert missed(OVERCOMMIT, fleet, low) == {"booked_over_rss"}


def test_each_load_has_a_name_of_its_own() -> None:
    loads = [
        load for each in (SLO, FLEET, LATE, OVERCOMMIT) for s in each.scenes for load in s.loads
    ]
    assert all(load.name for load in loads)
    for each in (SLO, FLEET, LATE, OVERCOMMIT):
        for one in each.scenes:
            assert len({load.name for load in one.loads}) == len(one.loads)
    assert isinstance(scene(LATE, "compiled").loads[0], AtOnce)
