"""A run whose truth is known: the node's costs are found out, and the run comes out again."""

from dataclasses import replace
from pathlib import Path

import pytest

from mesh.domain.deployment import Scaling
from mesh.domain.errors import InvalidInput
from mesh.domain.ids import ModelId
from mesh.evaluation.fidelity.report import calibrated, report_on
from mesh.sim.cluster import SETTLE_S, CellPlan
from mesh.sim.costs import NodeCosts, Pace
from mesh.sim.scenario import plan
from tests.evaluation.fidelity.living import SCENARIO, arrivals, live
from tests.sim.scenarios import scenario

SECRET = NodeCosts(
    factor=1.3,
    prefill_factor=1.15,
    overhead_s=0.003,
    load_s=0.9,
    load_bytes_per_s=1e15,
    load_stretch=1.5,
    load_slowdown=1.7,
    priming_s=0.02,
)

SECRET_NAMES = (
    *("factor", "prefill_factor", "overhead_s", "load_s", "load_stretch", "load_slowdown"),
    "priming_s",
)


@pytest.fixture
def made(tmp_path: Path) -> CellPlan:
    return replace(plan(scenario(tmp_path, SCENARIO)), link_delay_s=0.004)


def test_costs_are_found_out_and_the_run_comes_out_again(made: CellPlan) -> None:
    run = live(made, SECRET, arrivals(130, 1.3), calibrated_s=33.0)
    found = report_on(run, simulations=2)
    for name in SECRET_NAMES:
        assert getattr(found.costs, name) == pytest.approx(getattr(SECRET, name), rel=0.01), name
    assert found.delay_s == pytest.approx(0.008, rel=0.01)
    for compared in (found.by_calibration, found.by_pace):
        assert compared.requests > 90
        assert compared.same_end >= compared.requests - 2
        assert compared.tpot_s.error < 0.02
        assert compared.e2e_s.error < 0.02
        assert compared.ttft_s_p95.error < 0.1


def test_a_machine_that_slows_down_is_told_by_its_pace_alone(made: CellPlan) -> None:
    """It is even while calibrated, and half as quick from then on."""
    slowed = replace(SECRET, pace=Pace(window_s=21.0, factors=(1.0, 2.0, 2.0, 2.0)))
    found = report_on(live(made, slowed, arrivals(70, 1.1), calibrated_s=20.0), simulations=1)
    assert found.pace_compared / found.pace_calibrated == pytest.approx(2.0, rel=0.05)
    assert found.by_calibration.tpot_s.error > 0.3
    assert found.by_pace.tpot_s.error < 0.05
    assert found.by_pace.e2e_s.error < 0.05


def test_deployments_may_have_models_of_their_own(made: CellPlan) -> None:
    """The models have one shape: what was measured of one holds for all."""
    run = live(made, SECRET, arrivals(20, 1.1), calibrated_s=30.0)
    own = tuple(
        replace(d, model=replace(d.model, model_id=ModelId(f"{d.model.model_id}-{d.spec.name}")))
        for d in run.deployments
    )
    (simulated,) = calibrated(run).simulations(replace(run, deployments=own), 1)
    (own_simulated,) = calibrated(replace(run, deployments=own)).simulations(run, 1)
    assert [o.end for o in own_simulated] == [o.end for o in simulated]
    assert all(o.finished for o in own_simulated)


def test_what_was_loaded_before_the_run_is_so_in_its_simulations(made: CellPlan) -> None:
    always = tuple(
        replace(d, spec=replace(d.spec, scaling=Scaling(replicas_min=1, replicas_max=1)))
        for d in made.deployments
    )
    run = live(
        replace(made, deployments=always),
        SECRET,
        arrivals(70, 1.1),
        calibrated_s=80.0,
        lead_s=30.0,
    )
    assert run.observed.first_s == pytest.approx(run.start_s - SETTLE_S - run.lead_s, abs=0.1)
    (simulated,) = calibrated(run).simulations(run, 1)
    for again, first in zip(simulated[:3], run.outcomes, strict=False):
        assert first.ttft_s is not None
        assert first.ttft_s < SECRET.load_s
        assert again.ttft_s == pytest.approx(first.ttft_s, rel=0.1)


def test_too_short_a_calibration_is_refused(made: CellPlan) -> None:
    with pytest.raises(InvalidInput, match="too few"):
        report_on(live(made, SECRET, arrivals(20, 0.5), calibrated_s=0.5))
