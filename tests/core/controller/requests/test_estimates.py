"""The controller core on models without a measured profile: one request tries the estimate out."""

from dataclasses import replace

import pytest

from mesh.compute.correction import TRIAL_ITERATIONS
from mesh.core.controller.instances.node_schedule import forecast_on
from mesh.core.controller.state.expectations import Expectations
from mesh.core.controller.state.request import RequestEntry
from mesh.domain.actions import RefuseRequest, TellAccepted
from mesh.domain.ids import InstanceId, ModelId
from mesh.domain.limits import CellLimits
from mesh.domain.messages import InstanceGone, LoadInstance, TokensReport
from mesh.domain.reasons import FinishReason, RefusalReason, Verdict
from mesh.domain.slo import Slo
from tests.core.admission import BusyCell, instance, node, submitted
from tests.core.cells import (
    FOOTPRINT,
    MODEL,
    commands,
    deployment,
    hello,
    of_kind,
    one_node,
    request,
)
from tests.support.profiles import profile

PATIENT = Slo(ttft_s=20.0, ttft_tokens_per_s=1e6, tpot_s=10.0)
HASTY = Slo(ttft_s=0.5, ttft_tokens_per_s=1e6, tpot_s=10.0)

TIGHT = Slo(ttft_s=20.0, ttft_tokens_per_s=1e6, tpot_s=0.02)
"""By the estimate there is time for several, and by eight times as much for none."""


def unmeasured(slo: Slo = PATIENT) -> BusyCell:
    return BusyCell(deployment("a", slo=slo), profiles=())


def try_out(cell: BusyCell, on: str, correction: float) -> None:
    for _ in range(TRIAL_ITERATIONS):
        assert submitted(cell.retry()) == [], "the estimate is on trial"
        cell.iterated(on, correction=correction)


def test_others_wait_until_the_first_request_has_corrected_the_estimate() -> None:
    cell = unmeasured()
    assert submitted(cell.ask("r1", "a")) == [("r1", "a")]
    assert submitted(cell.ask("r2", "a")) == []
    assert submitted(cell.ask("r3", "a")) == []
    try_out(cell, "a", correction=1.5)
    assert submitted(cell.retry()) == [("r2", "a"), ("r3", "a")]


def test_an_estimate_that_turns_out_too_short_lets_nobody_else_in() -> None:
    cell = unmeasured(TIGHT)
    assert submitted(cell.ask("r1", "a")) == [("r1", "a")]
    assert submitted(cell.ask("r2", "a")) == []
    try_out(cell, "a", correction=8.0)
    assert submitted(cell.retry()) == []


def test_what_the_first_iterations_took_does_not_count_as_a_neighbour_that_may_come_back() -> None:
    """The engine builds its kernels in them."""
    cell = unmeasured(TIGHT)
    cell.ask("r1", "a")
    cell.ask("r2", "a")
    cell.iterated("a", correction=8.0)
    for _ in range(TRIAL_ITERATIONS - 1):
        cell.iterated("a", correction=1.0)
    assert submitted(cell.retry()) == [("r2", "a")]


def test_iterations_beside_a_load_are_no_trial() -> None:
    """Their node learns from them what a load costs, and nothing of the estimate."""
    names = ("a", "b")
    cell, link = one_node(
        *(deployment(name, slo=PATIENT) for name in names),
        profiles=(),
        node=node("n1", instance("a", "a")),
    )
    assert submitted(cell.invoke(request("r1", of="a"))) == [("r1", "a")]
    (load,) = commands(cell.invoke(request("r2", of="b")), LoadInstance)
    assert submitted(cell.invoke(request("r3", of="a"))) == []
    said = TokensReport(instance_id=InstanceId("a"), outputs=(), correction=1.0)
    for _ in range(TRIAL_ITERATIONS):
        cell.report(link, said)
    assert submitted(cell.retry()) == [], "nothing has corrected it"
    cell.loaded(link, load.instance_id)
    for _ in range(TRIAL_ITERATIONS):
        assert submitted(cell.retry()) == []
        cell.report(link, said)
    assert submitted(cell.retry()) == [("r3", "a")]


def test_an_iteration_beside_a_load_that_is_quicker_than_estimated_is_one_of_the_trial() -> None:
    cell, link = one_node(
        *(deployment(name, slo=PATIENT) for name in ("a", "b")),
        profiles=(),
        node=node("n1", instance("a", "a")),
    )
    assert submitted(cell.invoke(request("r1", of="a"))) == [("r1", "a")]
    assert commands(cell.invoke(request("r2", of="b")), LoadInstance)
    assert submitted(cell.invoke(request("r3", of="a"))) == []
    said = TokensReport(instance_id=InstanceId("a"), outputs=(), correction=0.5)
    for _ in range(TRIAL_ITERATIONS):
        assert submitted(cell.retry()) == []
        cell.report(link, said)
    assert submitted(cell.retry()) == [("r3", "a")]


def test_what_has_corrected_an_estimate_corrects_the_same_one_of_another_model() -> None:
    """By the estimate, and at first, a node has time for one of them; the first takes a quarter."""
    cell, link = one_node(
        *(deployment(name, slo=PATIENT) for name in "abc"),
        profiles=(),
        node=node("n1", instance("a", "a"), instance("b", "b")),
    )
    cell.invoke(request("r1", of="a"))
    (load,) = commands(cell.invoke(request("r2", of="c")), LoadInstance)
    held = cell.core.cell.instances
    for _ in range(TRIAL_ITERATIONS):
        assert held[InstanceId("b")].correction.latest == 1.0
        cell.report(link, TokensReport(instance_id=InstanceId("a"), outputs=(), correction=0.25))
    assert held[InstanceId("b")].correction.latest == 0.25, "it was loaded before"
    cell.loaded(link, load.instance_id)
    assert held[load.instance_id].correction.latest == 0.25


def test_a_trial_is_not_for_several_that_move_at_once() -> None:
    cell = unmeasured()
    idle = cell.core.cell.instances[InstanceId("a")]
    first, second = (
        RequestEntry(original=request(name, of="a"), slo=PATIENT, arrival_s=cell.now_s)
        for name in ("r1", "r2")
    )

    def verdict(*beside: RequestEntry) -> Verdict:
        return forecast_on(
            idle,
            second,
            now_s=cell.now_s,
            limits=CellLimits(),
            beside=beside,
            moves=True,
        ).verdict

    assert verdict() is Verdict.PASSES
    assert verdict(first) is Verdict.DELAYS_RUNNING


def test_no_other_instance_is_loaded_for_those_who_wait_for_a_trial() -> None:
    cell = unmeasured()
    cell.join(node("n2"))
    cell.ask("r1", "a")
    assert commands(cell.ask("r2", "a"), LoadInstance) == []
    assert commands(cell.retry(), LoadInstance) == []


@pytest.mark.parametrize("rule", ["llm-mesh", "fcfs"])
def test_those_who_lack_a_place_do_not_wait_for_a_trial(rule: str) -> None:
    limits = CellLimits(batch_max=1)
    cell, link = one_node(
        deployment("a", slo=PATIENT), profiles=(), limits=limits, rule=rule, node=node("n1")
    )
    cell.join(node("n2"))
    (load,) = commands(cell.invoke(request("r1", of="a")), LoadInstance)
    assert submitted(cell.loaded(link, load.instance_id)) == [("r1", load.instance_id)]
    assert len(commands(cell.invoke(request("r2", of="a")), LoadInstance)) == 1


def test_a_request_that_is_late_already_does_not_try_an_estimate_out() -> None:
    cell = unmeasured(HASTY)
    cell.ask("r1", "a")
    assert submitted(cell.ask("r2", "a")) == []
    cell.now_s += 0.6
    after = cell.tokens(cell.link, "r1", [7], finish=FinishReason.LENGTH)
    assert submitted(after) == []
    assert len(of_kind([*after, *cell.retry()], RefuseRequest)) == 1


def test_a_measured_profile_is_not_on_trial() -> None:
    cell = BusyCell(deployment("a", slo=PATIENT))
    assert submitted(cell.ask("r1", "a")) == [("r1", "a")]
    assert submitted(cell.ask("r2", "a")) == [("r2", "a")]


def test_the_next_instance_goes_out_from_the_estimate_as_it_was_corrected() -> None:
    cell = unmeasured()
    estimate = cell.core.cell.instances[InstanceId("a")].profile
    assert estimate is not None
    cell.ask("r1", "a")
    try_out(cell, "a", correction=1.75)
    cell.tokens(cell.link, "r1", [7], finish=FinishReason.LENGTH)
    cell.iterated("a", correction=1.75)
    cell.report(cell.link, InstanceGone(instance_id=InstanceId("a")))
    (load,) = commands(cell.ask("r2", "a"), LoadInstance)
    assert load.profile.decode.at(4, 100) == pytest.approx(1.75 * estimate.decode.at(4, 100))
    assert load.profile.prefill.at(64, 0) == pytest.approx(1.75 * estimate.prefill.at(64, 0))
    assert not load.profile.measured


def test_corrected_estimates_give_way_to_what_is_measured() -> None:
    known = Expectations()
    estimate = known.profile(MODEL, FOOTPRINT, hello())
    known.learn_estimate(estimate, 2.0)
    longer = known.profile(MODEL, FOOTPRINT, hello())
    assert longer.decode.at(1, 64) == pytest.approx(2.0 * estimate.decode.at(1, 64))
    measured = profile()
    known.learn_profile(measured)
    assert known.profile(MODEL, FOOTPRINT, hello()) == measured
    known.learn_estimate(measured, 3.0)
    assert known.profile(MODEL, FOOTPRINT, hello()) == measured
    other = replace(MODEL, model_id=ModelId("sha256-ffff"))
    assert known.profile(other, FOOTPRINT, hello()).scaled_from, "from what was measured, now"


def test_a_load_is_promised_unseen_only_where_nobody_computes() -> None:
    """`a` is loaded for its minimum beside `b`, which takes all the time that there is."""
    wanted = deployment("a", replicas_min=1, slo=TIGHT)
    cell, link = one_node(
        wanted, deployment("b", slo=TIGHT), profiles=(), node=node("n1", instance("b", "b"))
    )
    cell.invoke(request("b1", of="b", max_tokens=100))
    slow = TokensReport(instance_id=InstanceId("b"), outputs=(), correction=8.0)
    for _ in range(TRIAL_ITERATIONS):
        cell.report(link, slow)
    assert of_kind(cell.invoke(request("a1", of="a")), TellAccepted) == []


BURST = Slo(ttft_s=2.0, ttft_tokens_per_s=1e6, tpot_s=0.15)


def test_of_a_burst_those_without_time_are_refused_as_soon_as_the_estimate_is_corrected() -> None:
    """By the estimate there is time for all 32 that the instance has places for."""
    cell = unmeasured(replace(BURST, tpot_s=10.0))
    cell.ask("first", "a", 200)
    for number in range(100):
        assert of_kind(cell.ask(f"r{number}", "a", 200), RefuseRequest) == []
    for _ in range(TRIAL_ITERATIONS):
        cell.iterated("a", correction=8.0)
    cell.now_s += CellLimits().place_retry_s
    refused = of_kind(cell.retry(), RefuseRequest)
    late = [r for r in refused if r.reason is RefusalReason.FIRST_TOKEN_LATE]
    assert len(refused) >= len(late) > 60


@pytest.mark.parametrize("correction", [None, 1.0, 8.0])
def test_nobody_is_refused_when_its_first_token_was_due(correction: float | None) -> None:
    """The instance computes for one request all along, and nothing is known of its times but what
    its iterations tell, if they tell anything.
    """
    cell = unmeasured(BURST)
    cell.ask("first", "a", 20)
    for number in range(40):
        cell.ask(f"r{number}", "a", 200)
    due_s, refused = cell.now_s + BURST.ttft_s, 0
    while cell.now_s < due_s:
        if correction is not None:
            cell.iterated("a", correction=correction)
        refused += len(of_kind(cell.retry(), RefuseRequest))
        cell.now_s = min(cell.core.cell.retry_at_s or due_s, due_s)
    held = cell.core.cell.requests.values()
    assert [r for r in held if r.instance is None and not r.accepted] == []
    assert refused or correction is not None


def test_an_estimate_alone_refuses_nobody() -> None:
    """It says that a prompt takes longer than there is time, and may be wrong."""
    cell = unmeasured(Slo(ttft_s=0.01, ttft_tokens_per_s=1e6, tpot_s=0.15))
    assert submitted(cell.ask("r1", "a", 200)) == [("r1", "a")]
