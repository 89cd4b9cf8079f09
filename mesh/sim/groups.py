"""Groups of equal nodes, and of equal deployments, as a scenario's entries say them.

A group checks itself and becomes node plans or deployments. Before: `scenario`. After: `cluster`.
"""

from collections.abc import Collection, Iterator
from dataclasses import field, replace
from math import inf

from mesh.domain.checks import check_name, check_spec
from mesh.domain.deployment import Deployment, DeploymentSpec, Scaling
from mesh.domain.energy import parse_watts
from mesh.domain.errors import InvalidInput
from mesh.domain.ids import DeploymentName, NodeId
from mesh.domain.limits import BATCH_MAX, CellLimits, NodeLimits
from mesh.domain.messages import NodeHello
from mesh.domain.model import Footprint
from mesh.domain.reasons import DeviceKind
from mesh.domain.slo import Slo
from mesh.domain.steps import LoadRate, LoadTier
from mesh.domain.values import dataclass
from mesh.sim.cell_costs import PROCESS_BYTES, CellCosts
from mesh.sim.costs import GivenCosts, ModelCosts, NodeCosts
from mesh.sim.node import NodePlan
from mesh.sim.testbed import (
    DEFAULT,
    Hardware,
    engine_name,
    known_hardware,
    known_model,
    known_models,
)

GIB = 1 << 30
RATES = (
    *("load_bytes_per_s", "resize_bytes_per_s"),
    *("grow_copy_bytes_per_s", "shrink_copy_bytes_per_s"),
)
FACTORS = ("factor", "prefill_factor", "load_slowdown", "load_stretch")
TIMES = ("load_s", "resize_s", "unload_s", "overhead_s", "priming_s", "swap_s", "swap_part_s")
GROUP_MAX = 1024
"""Nodes, or deployments, of one entry."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeGroup:
    """`count` equal nodes: NAME-1 and so on."""

    name: str
    count: int = 1
    device: DeviceKind
    hardware: str | None = None
    """The hardware whose tables are used; `None` stands for the device's own of the testbed:
    xeon-32, or a100-80gb.
    """
    memory_gib: float
    prefetch_gib: float = 0.0
    """How much of its memory may hold what is loaded before anybody calls for it."""
    kv_link_bytes_per_s: float = 0.0
    """How quickly KV blocks go from node to node; 0: they do not."""
    comes_s: float | None = None
    """Seconds from when one is wanted until it starts, of nodes that come and go as the cell wants
    them (limits.node_ranges). None: they are there all along.
    """
    shares_weights: bool = False
    """Its instances of a model with one context limit share the weights, as OpenVINO's do."""
    processes: int = 0
    """Engine processes that it is meant to keep: memory of their own is set aside for so many where
    it does not follow the instances (`CellCosts.kept_process_bytes`).
    """
    watts: str | None = None
    """IDLE:BUSY, in place of those of its hardware."""
    costs: GivenCosts = field(default_factory=GivenCosts)
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
    prefix_cache: bool = True


def names_of(group: NodeGroup | DeploymentGroup) -> list[str]:
    if group.count == 1:
        return [group.name]
    return [f"{group.name}-{n}" for n in range(1, group.count + 1)]


def hardware_of(group: NodeGroup) -> Hardware:
    """Raises InvalidInput when there are no tables of it."""
    key, known = group.hardware or DEFAULT[group.device], known_hardware()
    if key not in known or known[key].device is not group.device:
        fitting = ", ".join(k for k, hardware in known.items() if hardware.device is group.device)
        raise InvalidInput(f"{group.name}: no {group.device} is a {key!r}; there are {fitting}")
    return known[key]


def node_plans(
    group: NodeGroup, cell: CellLimits, costs: CellCosts, seed: int = 0
) -> Iterator[NodePlan]:
    """Nodes give turns by the same limits as their controller validates with."""
    hardware = hardware_of(group)
    models = {
        known.info.model_id: replace(
            table, footprint=_footprint(table, costs, shares=group.shares_weights)
        )
        for known in known_models().values()
        if (table := known.costs.get(hardware.key)) is not None
    }
    node_costs = group.costs.onto(costs.nodes[hardware.device])
    rate = LoadRate(fixed_s=node_costs.load_s, bytes_per_s=node_costs.load_bytes_per_s)
    # A CPU's weights are in the host's memory as they are; shared ones stay with the last of all.
    swaps = hardware.device is DeviceKind.GPU and not group.shares_weights
    rates = {LoadTier.DISK: rate, LoadTier.HOST: node_costs.swap_rate if swaps else None}
    memory_bytes = round(group.memory_gib * GIB) - group.processes * costs.kept_process_bytes
    for name in names_of(group):
        yield NodePlan(
            hello=NodeHello(
                node_id=NodeId(name),
                run_id="run-1",
                device=hardware.device,
                hardware=hardware.name,
                cores=hardware.cores,
                engine=engine_name(hardware.device),
                memory_bytes=memory_bytes,
                fingerprint=hardware.fingerprint,
                shares_weights=group.shares_weights,
                computes_ahead=hardware.device is DeviceKind.CPU or group.kv_link_bytes_per_s > 0.0,
                prefetch_bytes=round(group.prefetch_gib * GIB),
                load_rates=tuple((tier, r) for tier, r in rates.items() if r is not None),
                swaps=swaps,
                swaps_parts=swaps,
                kv_address=name if group.kv_link_bytes_per_s else "",
                kv_format=hardware.key if group.kv_link_bytes_per_s else "",
                kv_bytes_per_s=group.kv_link_bytes_per_s or inf,
                busy_load_factor=node_costs.load_stretch,
                batch_max=max(BATCH_MAX, cell.batch_max),
            ),
            models=models,
            costs=node_costs,
            limits=NodeLimits(
                prefill_tokens_max=cell.prefill_tokens_max,
                primed_tokens_max=group.primed_tokens_max,
            ),
            weights_use=costs.weights_use,
            seed=seed,
            comes_s=group.comes_s,
            power=hardware.power if group.watts is None else parse_watts(group.watts),
        )


def deployments_of(
    group: DeploymentGroup, costs: CellCosts, sharing: Collection[str] = ()
) -> Iterator[Deployment]:
    """`sharing`: the hardware of nodes whose instances share weights."""
    known, hardware = known_model(group.model), known_hardware()
    by_engine = {
        engine_name(hardware[key].device): _footprint(table, costs, shares=key in sharing)
        for key, table in known.costs.items()
    }
    footprints = tuple(by_engine.items())
    for name in names_of(group):
        spec = DeploymentSpec(
            name=DeploymentName(name),
            source=known.info.source,
            context_tokens_max=group.context_tokens_max,
            slo=group.slo,
            scaling=group.scaling,
            devices=group.devices,
            prefix_cache=group.prefix_cache,
        )
        check_spec(spec)
        most = known.info.context_tokens_max
        yield Deployment(
            spec=spec,
            model=known.info,
            context_tokens_max=min(group.context_tokens_max or most, most),
            footprints=footprints,
        )


def _footprint(table: ModelCosts, costs: CellCosts, *, shares: bool) -> Footprint:
    own = table.footprint
    return replace(
        own,
        weights_bytes=own.weights_bytes + costs.instance_bytes - costs.stays_bytes,
        stays_bytes=costs.stays_bytes,
        shared_bytes=own.weights_bytes if shares else 0,
    )


def check_measured(nodes: NodeGroup, deployments: DeploymentGroup) -> None:
    """Raises InvalidInput when the deployments may use these nodes, for which no table is."""
    hardware, known = hardware_of(nodes), known_model(deployments.model)
    if nodes.device in deployments.devices and hardware.key not in known.costs:
        raise InvalidInput(
            f"{deployments.name}: {deployments.model} was not measured on {hardware.key}, "
            f"which {nodes.name} is; it was on {', '.join(known.costs)}",
            hint=f"leave {nodes.device} out of its devices, or choose other hardware",
        )


def check_group(group: NodeGroup | DeploymentGroup) -> None:
    """Raises InvalidInput."""
    check_name(group.name)
    if not 1 <= group.count <= GROUP_MAX:
        raise InvalidInput(f"{group.name}: count is {group.count}, not from 1 to {GROUP_MAX}")
    if isinstance(group, NodeGroup):
        hardware_of(group)
        costs = group.costs.onto(NodeCosts())
        at_least(f"{group.name}: processes", group.processes, above=False)
        at_least(f"{group.name}: memory_gib", group.memory_gib, above=True, finite=True)
        if group.watts is not None:
            parse_watts(group.watts)
        if group.comes_s is not None:
            at_least(f"{group.name}: comes_s", group.comes_s, above=False)
        at_least(f"{group.name}: prefetch_gib", group.prefetch_gib, above=False, finite=True)
        link = group.kv_link_bytes_per_s
        at_least(f"{group.name}: kv_link_bytes_per_s", link, above=False, finite=False)
        left_gib = group.memory_gib - group.processes * PROCESS_BYTES / GIB
        at_least(f"{group.name}: memory_gib beside its processes", left_gib, above=True)
        for name in RATES:
            at_least(f"{group.name}: {name}", getattr(costs, name), above=True)
        for name in FACTORS:
            at_least(f"{group.name}: {name}", getattr(costs, name), above=True, finite=True)
        for name in TIMES:
            at_least(f"{group.name}: {name}", getattr(costs, name), above=False, finite=True)


def at_least(where: str, value: float, *, above: bool, finite: bool = False) -> None:
    """Raises InvalidInput for what is below 0, or for 0 itself, and for what is no number."""
    if value < 0 or (above and value == 0) or value != value or (finite and value == inf):
        least = "above 0" if above else "0 or more"
        raise InvalidInput(f"{where} is {value:g}; it must be {least}{' and finite' * finite}")
