"""Groups of equal nodes, and of equal deployments, as a scenario's entries say them.

A group checks itself and becomes node plans or deployments. Before: `scenario`. After: `cluster`.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

from mesh.domain.checks import check_name, check_spec
from mesh.domain.deployment import Deployment, DeploymentSpec, Scaling
from mesh.domain.errors import InvalidInput
from mesh.domain.ids import DeploymentName, NodeId
from mesh.domain.limits import NodeLimits
from mesh.domain.messages import NodeHello
from mesh.domain.reasons import DeviceKind
from mesh.domain.slo import Slo
from mesh.sim.costs import NodeCosts
from mesh.sim.node import NodePlan
from mesh.sim.testbed import CORES, HARDWARE, engine_name, known_model, known_models

GIB = 1 << 30
GROUP_MAX = 1024
"""Nodes, or deployments, of one entry."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeGroup:
    """`count` equal nodes: NAME-1 and so on."""

    name: str
    count: int = 1
    device: DeviceKind
    memory_gib: float
    costs: NodeCosts = field(default_factory=NodeCosts)
    primed_tokens_max: int = 0
    """As in NodeLimits; tables know no first time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeploymentGroup:
    """`count` equal deployments: NAME-1 and so on, NAME when there is one."""

    name: str
    count: int = 1
    model: str
    context_tokens_max: int | None = None
    slo: Slo = field(default_factory=Slo)
    scaling: Scaling = field(default_factory=Scaling)
    devices: tuple[DeviceKind, ...] = (DeviceKind.CPU, DeviceKind.GPU)


def names_of(group: NodeGroup | DeploymentGroup) -> list[str]:
    if group.count == 1:
        return [group.name]
    return [f"{group.name}-{n}" for n in range(1, group.count + 1)]


def node_plans(group: NodeGroup) -> Iterator[NodePlan]:
    device = group.device
    for name in names_of(group):
        yield NodePlan(
            hello=NodeHello(
                node_id=NodeId(name),
                run_id="run-1",
                device=device,
                hardware=HARDWARE[device],
                cores=CORES[device],
                engine=engine_name(device),
                memory_bytes=round(group.memory_gib * GIB),
                fingerprint=f"testbed/{device}",
            ),
            models={known.info.model_id: known.costs[device] for known in known_models().values()},
            costs=group.costs,
            limits=NodeLimits(primed_tokens_max=group.primed_tokens_max),
        )


def deployments_of(group: DeploymentGroup) -> Iterator[Deployment]:
    known = known_model(group.model)
    for name in names_of(group):
        spec = DeploymentSpec(
            name=DeploymentName(name),
            source=known.info.source,
            context_tokens_max=group.context_tokens_max,
            slo=group.slo,
            scaling=group.scaling,
            devices=group.devices,
        )
        check_spec(spec)
        most = known.info.context_tokens_max
        yield Deployment(
            spec=spec,
            model=known.info,
            context_tokens_max=min(group.context_tokens_max or most, most),
            footprints=tuple((engine_name(d), c.footprint) for d, c in known.costs.items()),
        )


def check_group(group: NodeGroup | DeploymentGroup) -> None:
    """Raises InvalidInput."""
    check_name(group.name)
    if not 1 <= group.count <= GROUP_MAX:
        raise InvalidInput(f"{group.name}: count is {group.count}, not from 1 to {GROUP_MAX}")
    if isinstance(group, NodeGroup):
        costs = group.costs
        rates = (group.memory_gib, costs.factor, costs.load_bytes_per_s, costs.resize_bytes_per_s)
        at_least(group.name, min(rates), above=True)
        at_least(group.name, min(costs.load_s, costs.resize_s, costs.unload_s), above=False)


def at_least(where: str, value: float, *, above: bool) -> None:
    """Raises InvalidInput for what is below 0, or for 0 itself, and for what is no number."""
    if value < 0 or (above and value == 0) or value != value:
        raise InvalidInput(f"{where}: {value:g} must be {'above 0' if above else '0 or more'}")
