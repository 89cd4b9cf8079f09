"""The same calls in a simulated cell that is described from a live one: its nodes, its deployments,
and what its controller knows of their iteration times.

Nothing is calibrated by what the replay measured: the simulator says what the cell's own profiles
promise. `mesh bench fidelity` says how far that carries. Before: `running`. After: `numbers`.
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace

from mesh.domain.deployment import Deployment
from mesh.domain.errors import InvalidInput
from mesh.domain.ids import DeploymentName, ModelId, NodeId
from mesh.domain.lifecycle import NodeState
from mesh.domain.profile import Profile
from mesh.domain.values import dataclass
from mesh.domain.views import DeploymentSnapshot, NodeSnapshot, ProfileView
from mesh.evaluation.fidelity.planning import hello_of, seen_by_client
from mesh.evaluation.replay.results import CallResult
from mesh.sim.cell_costs import MEASURED
from mesh.sim.cluster import Arrival, CellPlan, VirtualCell
from mesh.sim.costs import ModelCosts
from mesh.sim.node import NodePlan
from mesh.wire.client import MeshClient
from mesh_workloads.replay_plan import ReplayPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayedCell:
    """What its controller says of a cell."""

    nodes: tuple[NodeSnapshot, ...]
    deployments: tuple[DeploymentSnapshot, ...]
    profiles: Mapping[str, tuple[ProfileView, ...]]
    """By deployment."""


def look(client: MeshClient, names: Iterable[str]) -> ReplayedCell:
    found = tuple(client.get(DeploymentName(name)) for name in names)
    return ReplayedCell(
        nodes=tuple(n for n in client.nodes() if n.state is not NodeState.STARTING),
        deployments=found,
        profiles={view.spec.name: client.profiles(view.spec.name) for view in found},
    )


def simulate(cell: CellPlan, plan: ReplayPlan) -> tuple[CallResult, ...]:
    """What came of each call; times count from the replay's start, at which nothing is loaded."""
    virtual = VirtualCell(cell)
    ended = virtual.run(
        Arrival(call.at_s, call.deployment, call.input_tokens, call.output_tokens)
        for call in plan.calls
    )
    by_number = {int(o.request_id.removeprefix("r-")) - 1: o for o in ended}
    start_s = virtual.started_s
    outcomes = [seen_by_client(by_number[call.number], start_s, 0.0) for call in plan.calls]
    return tuple(
        CallResult(call=call, outcome=outcome, late_s=0.0)
        for call, outcome in zip(plan.calls, outcomes, strict=True)
    )


def cell_plan(cell: ReplayedCell) -> CellPlan:
    """Raises InvalidInput when no node could load a deployment, as far as is known."""
    profiles = {
        (view.profile.model_id, node_id): view.profile
        for views in cell.profiles.values()
        for view in views
        for node_id in view.nodes
    }
    made = [_deployment(view) for view in cell.deployments]
    nodes = tuple(_node(node, made, profiles) for node in cell.nodes)
    for each in made:
        if not any(each.model.model_id in node.models for node in nodes):
            raise InvalidInput(
                f"the cell knows of no node how long {each.spec.name!r} would take there",
                hint=f"measure it: mesh profile {each.spec.name}",
            )
    return CellPlan(
        nodes=nodes,
        deployments=tuple(made),
        profiles=tuple(dict.fromkeys(view.profile for v in cell.profiles.values() for view in v)),
        lengths_told=True,
    )


def _deployment(view: DeploymentSnapshot) -> Deployment:
    if view.model is None:
        raise InvalidInput(f"deployment {view.spec.name!r} has no model yet")
    return Deployment(
        spec=view.spec,
        model=view.model,
        context_tokens_max=view.context_tokens_max,
        footprints=view.footprints,
    )


def _node(
    node: NodeSnapshot,
    deployments: Iterable[Deployment],
    profiles: Mapping[tuple[ModelId, NodeId], Profile],
) -> NodePlan:
    """Its loads take as long as those of the instances that it has, whatever is beside them; what
    it does not tell costs what was measured elsewhere. Raises InvalidInput where that is nowhere.
    """
    measured = MEASURED.nodes.get(node.device)
    if measured is None:
        raise InvalidInput(
            f"node {node.node_id!r} computes on {node.device.value!r}, and no simulated node does",
            hint="simulate with the controller's version of mesh",
        )
    models: dict[ModelId, ModelCosts] = {}
    for each in deployments:
        profile = profiles.get((each.model.model_id, node.node_id))
        footprint = dict(each.footprints).get(node.engine)
        if profile is not None and footprint is not None:
            models[each.model.model_id] = ModelCosts(profile=profile, footprint=footprint)
    loads_s = [i.load_s for i in node.instances if i.tier is not None and i.load_s > 0]
    costs = replace(measured, load_slowdown=max(node.load_slowdown, 1.0))
    if loads_s:
        mean_s = sum(loads_s) / len(loads_s)
        costs = replace(costs, load_s=mean_s, load_bytes_per_s=float("inf"))
    hello = replace(hello_of(node), busy_load_factor=1.0)
    return NodePlan(hello=hello, models=models, costs=costs)
