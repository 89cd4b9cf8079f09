"""A scenario: a TOML file that says what a virtual cell is made of and what it is asked.

It reads the file strictly (an unknown key is an error) and builds a `CellPlan` and the arrivals.
A workload is any iterable of arrivals; the file knows one kind, Poisson arrivals with uniform
lengths. Before: `mesh sim`. After: `cluster`.
"""

import random
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from cattrs import BaseValidationError, transform_error
from cattrs.preconf.json import make_converter
from cattrs.v import format_exception

from mesh.domain.checks import check_name, check_spec
from mesh.domain.deployment import Deployment, DeploymentSpec, Scaling
from mesh.domain.errors import InvalidInput, NotFound
from mesh.domain.ids import DeploymentName, NodeId
from mesh.domain.limits import CellLimits, NodeLimits
from mesh.domain.messages import NodeHello
from mesh.domain.reasons import DeviceKind
from mesh.domain.slo import Slo
from mesh.policy.registry import DEFAULT_POLICY
from mesh.sim.cluster import Arrival, CellPlan
from mesh.sim.costs import NodeCosts
from mesh.sim.faults import Fault, Faults, check_faults, occurrences
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Poisson:
    """Arrivals of a Poisson process, for any deployment alike; lengths uniform, both ends in."""

    duration_s: float
    requests_per_s: float
    input_tokens: tuple[int, int]
    output_tokens: tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    nodes: tuple[NodeGroup, ...]
    deployments: tuple[DeploymentGroup, ...]
    workload: Poisson
    policy: str = DEFAULT_POLICY
    seed: int = 1
    link_delay_s: float = 0.0005
    limits: CellLimits = field(default_factory=CellLimits)
    faults: Faults | None = None


_converter = make_converter(forbid_extra_keys=True)


def read_scenario(path: Path) -> Scenario:
    """Raises NotFound when the file cannot be read, InvalidInput when it is no scenario."""
    try:
        text = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise NotFound(f"cannot read the scenario {path}: {error}") from error
    try:
        raw = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise InvalidInput(f"{path} is no TOML: {error}") from error
    try:
        scenario: Scenario = _converter.structure(raw, Scenario)
    except BaseValidationError as error:
        first = transform_error(error, format_exception=_words)[0].replace("$", path.name)
        raise InvalidInput(f"{path} is no scenario: {first}") from error
    except (TypeError, ValueError, KeyError) as error:
        raise InvalidInput(f"{path} is no scenario: {error}") from error
    _check(scenario)
    return scenario


def _words(error: BaseException, kind: type | None) -> str:
    """A value error says which value it met."""
    return str(error) if type(error) is ValueError else format_exception(error, kind)


def plan(scenario: Scenario) -> CellPlan:
    """Raises NotFound for a model that has no tables, InvalidInput for what cannot be meant."""
    nodes = tuple(made for group in scenario.nodes for made in _nodes(group))
    deployments = tuple(made for group in scenario.deployments for made in _deployments(group))
    return CellPlan(
        nodes=nodes,
        deployments=deployments,
        profiles=tuple(
            costs.profile for known in known_models().values() for costs in known.costs.values()
        ),
        policy=scenario.policy,
        limits=scenario.limits,
        link_delay_s=scenario.link_delay_s,
    )


def arrivals(scenario: Scenario) -> Iterator[Arrival]:
    """The same ones for the same seed."""
    work, rng = scenario.workload, random.Random(scenario.seed)
    names = [made.spec.name for group in scenario.deployments for made in _deployments(group)]
    at_s = rng.expovariate(work.requests_per_s)
    while at_s <= work.duration_s:
        yield Arrival(
            at_s,
            rng.choice(names),
            rng.randint(*work.input_tokens),
            rng.randint(*work.output_tokens),
        )
        at_s += rng.expovariate(work.requests_per_s)


def faults(scenario: Scenario, made: CellPlan) -> tuple[Fault, ...]:
    """What goes wrong; the same for the same seed."""
    if scenario.faults is None:
        return ()
    node_ids = [node.hello.node_id for node in made.nodes]
    return occurrences(scenario.faults, node_ids, scenario.seed)


def _names(name: str, count: int) -> list[str]:
    return [name] if count == 1 else [f"{name}-{n}" for n in range(1, count + 1)]


def _nodes(group: NodeGroup) -> Iterator[NodePlan]:
    device = group.device
    for name in _names(group.name, group.count):
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


def _deployments(group: DeploymentGroup) -> Iterator[Deployment]:
    known = known_model(group.model)
    for name in _names(group.name, group.count):
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


def _check(scenario: Scenario) -> None:
    groups: tuple[NodeGroup | DeploymentGroup, ...] = (*scenario.nodes, *scenario.deployments)
    for group in groups:
        check_name(group.name)
        if not 1 <= group.count <= GROUP_MAX:
            raise InvalidInput(f"{group.name}: count is {group.count}, not from 1 to {GROUP_MAX}")
    for kind in (scenario.nodes, scenario.deployments):
        names = [name for group in kind for name in _names(group.name, group.count)]
        if not names or len(set(names)) < len(names):
            raise InvalidInput(f"names must be there and differ: {', '.join(names) or 'none'}")
    for node in scenario.nodes:
        costs = node.costs
        rates = (node.memory_gib, costs.factor, costs.load_bytes_per_s, costs.resize_bytes_per_s)
        _at_least(node.name, min(rates), above=True)
        _at_least(node.name, min(costs.load_s, costs.resize_s, costs.unload_s), above=False)
    _at_least("link_delay_s", scenario.link_delay_s, above=False)
    if scenario.faults is not None:
        check_faults(scenario.faults)
    work = scenario.workload
    _at_least("workload", min(work.duration_s, work.requests_per_s), above=True)
    for least, most in (work.input_tokens, work.output_tokens):
        if not 1 <= least <= most:
            raise InvalidInput(f"workload: lengths from {least} to {most} tokens cannot be meant")


def _at_least(where: str, value: float, *, above: bool) -> None:
    if value < 0 or (above and value == 0) or value != value:
        raise InvalidInput(f"{where}: {value:g} must be {'above 0' if above else '0 or more'}")
