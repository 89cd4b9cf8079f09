"""A virtual cell after a live one: its node, its deployments, what was measured of both."""

from collections.abc import Sequence
from dataclasses import replace

from mesh.domain.deployment import Deployment
from mesh.domain.messages import NodeHello
from mesh.domain.model import Footprint
from mesh.domain.outcome import Outcome
from mesh.domain.profile import Profile
from mesh.domain.steps import LoadRate
from mesh.domain.values import dataclass
from mesh.domain.views import LoadTimesView, NodeSnapshot
from mesh.sim.cluster import SETTLE_S, Arrival, CellPlan, VirtualCell
from mesh.sim.costs import ModelCosts, NodeCosts
from mesh.sim.node import NodePlan


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredCell:
    """What was measured of a live cell: one node, deployments of models of one shape."""

    node: NodeHello
    deployments: tuple[Deployment, ...]
    profile: Profile
    """The profile of one of the models; it holds for each."""
    footprint: Footprint
    delay_s: float
    """From a client to the node and back, without what is computed there."""


def cell_plan(live: MeasuredCell, costs: NodeCosts) -> CellPlan:
    """Nothing is loaded at its start; callers ask for as many tokens as live ones did. A quarter of
    the delay is each link's, each way; the rest, on the way between clients and controller, is
    `seen_by_clients`.
    """
    model_ids = dict.fromkeys(d.model.model_id for d in live.deployments)
    profiles = tuple(replace(live.profile, model_id=model_id) for model_id in model_ids)
    models = {p.model_id: ModelCosts(profile=p, footprint=live.footprint) for p in profiles}
    return CellPlan(
        nodes=(NodePlan(hello=live.node, models=models, costs=costs),),
        deployments=live.deployments,
        profiles=profiles,
        link_delay_s=live.delay_s / 4,
        lengths_told=True,
    )


def simulate(
    live: MeasuredCell, costs: NodeCosts, arrivals: Sequence[Arrival], *, lead_s: float = 0.0
) -> tuple[Outcome, ...]:
    """In the order of the arrivals; times count from the start of the workload, which is at
    `SETTLE_S` + `lead_s` on the virtual clock.
    """
    cell = VirtualCell(cell_plan(live, costs))
    cell.clock.run_until(SETTLE_S + lead_s)
    ended = cell.run(arrivals)
    by_number = {int(o.request_id.removeprefix("r-")): o for o in ended}
    return tuple(
        seen_by_client(by_number[number + 1], SETTLE_S + lead_s, live.delay_s / 2)
        for number in range(len(arrivals))
    )


def hello_of(node: NodeSnapshot) -> NodeHello:
    """What the node said when it came, as far as it matters; nothing is loaded on it."""
    return NodeHello(
        node_id=node.node_id,
        run_id="virtual",
        device=node.device,
        hardware=node.hardware,
        cores=node.cores,
        engine=node.engine,
        memory_bytes=node.memory_bytes,
        base_bytes=node.base_bytes,
        fingerprint=node.fingerprint,
        prefetch_bytes=node.prefetch_bytes,
        busy_load_factor=node.busy_load_factor,
        load_rates=tuple((t.tier, _rate(t)) for t in node.load_times),
    )


def _rate(times: LoadTimesView) -> LoadRate:
    """With what loads have shown: a virtual controller starts from there."""
    return LoadRate(
        fixed_s=times.fixed_s * times.factor, bytes_per_s=times.bytes_per_s / times.factor
    )


def seen_by_client(outcome: Outcome, start_s: float, delay_s: float) -> Outcome:
    """As if the client had sent it that much before it came, and saw all of it that much later:
    `delay_s` is both ways together.
    """
    back_s = delay_s - start_s
    return replace(
        outcome,
        arrival_s=outcome.arrival_s - start_s,
        tokens_s=tuple(at_s + back_s for at_s in outcome.tokens_s),
        ended_s=outcome.ended_s + back_s,
    )
