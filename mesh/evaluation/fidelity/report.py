"""From a live run to what is said of the simulator: calibrate, simulate twice, compare twice.

Calibration uses the profile and the first part of the run; the rest is compared. The first kind of
simulation knows no more than that: its pace is the calibrated part's, over and over. The second one
is told the pace at which the machine really computed in each second, as a neighbour's work would be
told that no simulator can foresee; whatever differs then is the simulator's own. Before: the
command line. After: its tables.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from mesh.compute.times import Times
from mesh.domain.deployment import Deployment
from mesh.domain.errors import InvalidInput
from mesh.domain.ids import RequestId
from mesh.domain.messages import NodeHello
from mesh.domain.outcome import Outcome
from mesh.domain.profile import Profile
from mesh.domain.values import dataclass
from mesh.evaluation.fidelity.calibrating import calibrate, delay_s, jitter, pace
from mesh.evaluation.fidelity.comparing import Comparison, compare
from mesh.evaluation.fidelity.observing import Observed
from mesh.evaluation.fidelity.planning import MeasuredCell, simulate
from mesh.sim.cluster import SETTLE_S, Arrival
from mesh.sim.costs import Jitter, NodeCosts, Pace

SIMULATIONS = 5
"""How many simulations are made of each kind: they differ in which iteration has which jitter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveRun:
    """What was asked of a live cell of one node, and what came of it."""

    node: NodeHello
    """Nothing is loaded on it."""
    deployments: tuple[Deployment, ...]
    profile: Profile
    arrivals: tuple[Arrival, ...]
    outcomes: tuple[Outcome, ...]
    """The outcomes of the arrivals. Times count from `start_s`, and arrivals are when requests were
    sent.
    """
    start_s: float
    """On the node's clock."""
    calibrated_s: float
    """The first part of the run, which is not compared."""
    observed: Observed
    lead_s: float = 0.0
    """Virtual seconds before the first arrival, besides `SETTLE_S`: for what is loaded by then."""

    @property
    def zero_s(self) -> float:
        """On the node's clock, when the virtual clock is at 0."""
        return self.start_s - SETTLE_S - self.lead_s


@dataclass(frozen=True, slots=True, kw_only=True)
class FidelityReport:
    calibrated_s: float
    calibrated_steps: int
    costs: NodeCosts
    """The calibrated costs of the node, without pace and jitter."""
    loads: int
    resizes: int
    unloads: int
    """The number of unloads that the costs are means of; costs that were not seen are
    assumptions.
    """
    delay_s: float
    pace_calibrated: float
    """Mean, while it was calibrated: 1 by definition, but for what was disturbed."""
    pace_compared: float
    """Mean of the rest: by how much the machine was slower then than before."""
    rss_bytes_max: int
    """The most memory of the node's process, as it said itself."""
    booked_bytes_max: int
    """What it takes without instances, with weights and KV caches by its engine's books."""
    by_calibration: Comparison
    by_pace: Comparison


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibrated:
    """What the first part of a run tells of its cell."""

    cell: MeasuredCell
    costs: NodeCosts
    """At an even pace, without jitter."""
    pace: Pace
    """From the virtual clock's start on."""
    jitter: Jitter

    def simulations(
        self, run: LiveRun, count: int, pace: Pace | None = None
    ) -> list[tuple[Outcome, ...]]:
        """The run's arrivals again, at the calibrated pace unless another is given."""
        costs = replace(self.costs, pace=pace or self.pace)
        return [
            simulate(
                self.cell,
                replace(costs, jitter=replace(self.jitter, seed=seed)),
                run.arrivals,
                lead_s=run.lead_s,
            )
            for seed in range(count)
        ]


def calibrated(run: LiveRun, costs: NodeCosts | None = None) -> Calibrated:
    """By the first part of the run; `costs` are known where the node had other runs.

    Raises InvalidInput when that part does not do for it.
    """
    times, observed = Times(run.profile), run.observed
    if observed.footprint is None:
        raise InvalidInput("nothing was loaded", hint="run for longer")
    until_s = run.start_s + run.calibrated_s
    costs = costs or calibrate(observed, times, from_s=run.start_s, until_s=until_s)
    cell = MeasuredCell(
        node=run.node,
        deployments=run.deployments,
        profile=run.profile,
        footprint=observed.footprint,
        delay_s=delay_s(observed, *_observations(run)),
    )
    known = pace(observed, times, costs, from_s=run.zero_s, until_s=until_s)
    drawn = jitter(observed, times, costs, known, from_s=run.zero_s, until_s=until_s)
    return Calibrated(cell=cell, costs=costs, pace=known, jitter=drawn)


def report_on(run: LiveRun, *, simulations: int = SIMULATIONS) -> FidelityReport:
    """`simulations` of each kind.

    Raises InvalidInput when the run does not do for calibrating or comparing.
    """
    made, times, observed = calibrated(run), Times(run.profile), run.observed
    calibrated_s = run.start_s + run.calibrated_s
    end_s = max(s.began_s for s in observed.steps)
    whole = pace(observed, times, made.costs, from_s=run.zero_s, until_s=end_s)
    later = whole.factors[len(made.pace.factors) :]
    by_calibration = made.simulations(run, simulations)
    by_pace = made.simulations(run, simulations, whole)
    return FidelityReport(
        calibrated_s=run.calibrated_s,
        calibrated_steps=sum(run.start_s <= s.began_s < calibrated_s for s in observed.steps),
        costs=made.costs,
        loads=sum(spent.began_s < calibrated_s for spent in observed.loads),
        resizes=sum(spent.began_s < calibrated_s for spent in observed.resizes),
        unloads=sum(spent.began_s < calibrated_s for spent in observed.unloads),
        delay_s=made.cell.delay_s,
        pace_calibrated=_mean(made.pace.factors),
        pace_compared=_mean(later),
        rss_bytes_max=observed.rss_bytes_max,
        booked_bytes_max=run.node.base_bytes + observed.engine_bytes_max,
        by_calibration=compare(run.outcomes, by_calibration, from_s=run.calibrated_s),
        by_pace=compare(run.outcomes, by_pace, from_s=run.calibrated_s),
    )


def _observations(
    run: LiveRun,
) -> tuple[Mapping[RequestId, float], Mapping[RequestId, Sequence[float]]]:
    """When each request of the calibrated part was sent, and when its tokens came, on the node's
    clock.
    """
    asked = [o for o in run.outcomes if o.arrival_s < run.calibrated_s]
    sent_s = {o.request_id: run.start_s + o.arrival_s for o in asked}
    came_s = {o.request_id: [run.start_s + at_s for at_s in o.tokens_s] for o in asked}
    return sent_s, came_s


def _mean(factors: Sequence[float]) -> float:
    return sum(factors) / len(factors) if factors else 1.0
