"""A scenario: a TOML file that says what a virtual cell is made of and what it is asked.

The TOML is read strictly: a number is no text, and an unknown key is an error. A `CellPlan` and the
arrivals, which `workload` makes, are built of it. Before: `mesh sim`. After: `cluster`.
"""

import difflib
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, field, fields, replace
from enum import Enum
from pathlib import Path
from typing import Any, TypeVar

from cattrs import BaseValidationError, Converter, transform_error
from cattrs.errors import ForbiddenExtraKeysError
from cattrs.preconf.json import make_converter
from cattrs.v import format_exception

from mesh.domain.deployment import Deployment
from mesh.domain.errors import InvalidInput, MeshError, NotFound, system_errors
from mesh.domain.limits import CellLimits
from mesh.domain.profile import Profile
from mesh.domain.values import dataclass
from mesh.policy.registry import DEFAULT_POLICY
from mesh.sim.cell_costs import cell_costs
from mesh.sim.cluster import Arrival, CellPlan
from mesh.sim.content import with_beginnings
from mesh.sim.costs import GivenCosts, NodeCosts
from mesh.sim.faults import (
    Fault,
    Faults,
    breaks_streams,
    check_faults,
    has_standby,
    occurrences,
)
from mesh.sim.groups import (
    GROUP_MAX,
    DeploymentGroup,
    NodeGroup,
    at_least,
    check_group,
    check_measured,
    deployments_of,
    hardware_of,
    names_of,
    node_plans,
)
from mesh.sim.slo_mix import read_mix, with_classes, with_slos
from mesh.sim.testbed import known_models
from mesh.sim.workload import (
    KINDS,
    Poisson,
    TraceFile,
    WorkloadKind,
    arrivals_of,
    drawn,
    from_file,
    generated,
)
from mesh_workloads.conversations import Conversations, generate
from mesh_workloads.sampling import functions_of
from mesh_workloads.trace import Trace

T = TypeVar("T")
HINT = "workloads/ has scenarios, docs/simulator.md explains every key"
_WORDS: Mapping[type, str] = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "text",
}


def strict_converter() -> Converter:
    """For TOML: nothing is turned into something else, but for a whole number that may be any."""
    made = make_converter(forbid_extra_keys=True)
    for kind in _WORDS:
        made.register_structure_hook(kind, _exactly(kind))
    return made


def read_toml(path: Path, converter: Converter, kind: type[T]) -> T:
    """Raises NotFound when the file cannot be read, InvalidInput when it holds no such value."""
    try:
        with system_errors(NotFound, f"cannot read the scenario {path}", HINT):
            raw = tomllib.loads(path.read_text("utf-8"))
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise InvalidInput(f"{path} is no TOML: {error}", hint=HINT) from error
    try:
        return converter.structure(raw, kind)
    except BaseValidationError as error:
        words, _, place = transform_error(error, format_exception=_words)[0].rpartition(" @ $")
        where = place.lstrip(".")
        raise InvalidInput(f"{path}: {f'{where}: ' if where else ''}{words}", hint=HINT) from error


def _exactly(kind: type) -> Callable[[Any, Callable[[Any], Any]], Any]:
    def structure(raw: Any, asked: Callable[[Any], Any]) -> Any:
        if asked is not kind:  # an enum of texts
            return asked(raw)
        if type(raw) is kind or (kind is float and type(raw) is int):
            return asked(raw)
        raise ValueError(f"{raw!r} is not {_WORDS[kind]}")

    return structure


def _words(error: BaseException, kind: type | None) -> str:
    """A value error says which value it met, and errors of mesh say what they mean."""
    if isinstance(error, MeshError):
        return error.message
    if isinstance(error, ForbiddenExtraKeysError):
        return _unknown(error)
    if isinstance(error, KeyError):
        return "it is missing"
    if isinstance(error, ValueError) and isinstance(kind, type) and issubclass(kind, Enum):
        return f"{str(error).partition(' is not ')[0]} is none of {', '.join(kind)}"
    return str(error) if type(error) is ValueError else format_exception(error, kind)


def _unknown(error: ForbiddenExtraKeysError) -> str:
    name, known = min(error.extra_fields), [field.name for field in fields(error.cl)]
    close = difflib.get_close_matches(name, known, n=1)
    return f"there is no {name} here; " + (
        f"did you mean {close[0]}?" if close else f"there are {', '.join(known)}"
    )


NOT_0 = frozenset(
    {
        *("attempts_max", "load_attempts_max", "operations_max", "batch_max", "validations_max"),
        *("load_retry_s", "lease_check_s", "grow_retry_s", "place_retry_s", "history_store_s"),
        *("node_lease_s", "node_idle_s", "import_s_max", "load_s_max"),
        *("prefill_tokens_max", "kv_tokens_profiled"),
    }
)
"""The fields of CellLimits that must be above 0: at 0 a cell does no work, or never finishes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    nodes: tuple[NodeGroup, ...]
    deployments: tuple[DeploymentGroup, ...]
    workload: WorkloadKind
    policy: str = DEFAULT_POLICY
    seed: int = 1
    link_delay_s: float = 0.0005
    ideal: bool = False
    """Whether nothing counts but its tables and what it says itself: see `cell_costs`."""
    slo_mix: str = ""
    """SLO classes of all deployments, and their shares of the requests: see `slo_mix`."""
    slo_ttfts_s: tuple[float, ...] = ()
    """TTFT limits, one of which each request of a mix has, if an idle node could keep it."""
    beginnings: int = 0
    """Texts with which prompts begin, each with a part of one; 0: they have nothing in common."""
    output_tokens_max: int | None = None
    """The most tokens that callers take, unless `ideal`; `None` stands for what the context
    leaves.
    """
    limits: CellLimits = field(default_factory=CellLimits)
    prefetch_compared_from_s: float | None = None
    """It is run once more without prefetch budgets, and its report has the ratios of what came from
    then on: before, calls only teach. `None`: it is run once.
    """
    faults: Faults | None = None


_converter = strict_converter()


def _workload(raw: Any, _: object) -> WorkloadKind:
    if not isinstance(raw, Mapping):
        raise ValueError("the workload must be a table")
    kind = raw.get("kind", "poisson")
    if kind not in KINDS:
        raise ValueError(f"there is no kind of workload {kind!r}, only {', '.join(KINDS)}")
    made: WorkloadKind = _converter.structure(
        {key: value for key, value in raw.items() if key != "kind"}, KINDS[kind]
    )
    return made


def _given_costs(raw: Any, _: object) -> GivenCosts:
    made = _converter.structure(raw, NodeCosts)
    return GivenCosts({name: getattr(made, name) for name in raw})


_converter.register_structure_hook(WorkloadKind, _workload)
_converter.register_structure_hook(GivenCosts, _given_costs)


def read_scenario(path: Path) -> Scenario:
    """Raises NotFound when the file cannot be read, InvalidInput when it is no scenario."""
    scenario = read_toml(path, _converter, Scenario)
    try:
        _check(scenario)
    except InvalidInput as error:
        raise InvalidInput(f"{path}: {error.message}", hint=error.hint or HINT) from error
    if isinstance(scenario.workload, TraceFile):
        beside = replace(scenario.workload, file=path.parent / scenario.workload.file)
        return replace(scenario, workload=beside)
    return scenario


def plan(scenario: Scenario) -> CellPlan:
    """Raises NotFound for a model that has no tables, InvalidInput for what cannot be meant."""
    for nodes_group in scenario.nodes:
        for group in scenario.deployments:
            check_measured(nodes_group, group)
    limits, costs = scenario.limits, cell_costs(ideal=scenario.ideal)
    return CellPlan(
        nodes=tuple(
            made
            for group in scenario.nodes
            for made in node_plans(group, limits, costs, scenario.seed)
        ),
        deployments=_deployments(scenario),
        profiles=_profiles(scenario),
        policy=scenario.policy,
        limits=limits,
        link_delay_s=scenario.link_delay_s,
        lengths_told=costs.lengths_told,
        output_tokens_max=scenario.output_tokens_max,
        resumes=scenario.faults is not None and breaks_streams(scenario.faults),
        controllers=1 + (scenario.faults is not None and has_standby(scenario.faults)),
    )


def without_prefetch(scenario: Scenario) -> Scenario:
    """The same, with nothing loaded before it is called."""
    return replace(scenario, nodes=tuple(replace(n, prefetch_gib=0.0) for n in scenario.nodes))


def faults(scenario: Scenario, made: CellPlan) -> tuple[Fault, ...]:
    """What goes wrong; the same for the same seed."""
    if scenario.faults is None:
        return ()
    node_ids = [node.hello.node_id for node in made.nodes]
    return occurrences(scenario.faults, node_ids, scenario.seed)


def trace_of(scenario: Scenario) -> Trace | None:
    """The trace of its workload, read or generated; None for one that is drawn as it goes.

    Raises InvalidInput, NotFound or StorageError for a trace that cannot be had.
    """
    match scenario.workload:
        case Poisson():
            return None
        case TraceFile() as file:
            return from_file(file, scenario.seed)
        case Conversations() as talk:
            functions = min(len(_deployment_names(scenario)), talk.users)
            return generate(replace(talk, functions=functions), scenario.seed)
        case work:
            return generated(work, len(_deployment_names(scenario)), scenario.seed)


def arrivals(scenario: Scenario, trace: Trace | None = None) -> Iterator[Arrival]:
    """The same ones for the same seed. `trace` is `trace_of` the scenario, where it is at hand."""
    trace = trace or trace_of(scenario)
    made = _arrivals(scenario, trace)
    if scenario.slo_mix:
        drawn_of = scenario.slo_mix, scenario.seed, scenario.slo_ttfts_s
        made = with_slos(made, _deployments(scenario), *drawn_of, _profiles(scenario))
    if not scenario.beginnings:
        return made
    if trace is not None and any(arrival.blocks or arrival.turn for arrival in trace.arrivals):
        raise InvalidInput(
            f"trace {trace.name} tells itself what its prompts begin with",
            hint="leave beginnings out of the scenario",
        )
    return with_beginnings(made, scenario.beginnings, scenario.seed)


def _arrivals(scenario: Scenario, trace: Trace | None) -> Iterator[Arrival]:
    """`trace` is the scenario's, where it has one."""
    work, names = scenario.workload, _deployment_names(scenario)
    if isinstance(work, Poisson):
        return drawn(work, names, scenario.seed)
    assert trace is not None, "only Poisson arrivals have no trace"
    functions, contexts = None, None
    if isinstance(work, TraceFile):
        functions = functions_of(work.functions) if work.functions is not None else None
        contexts = _contexts(scenario) if work.clip_tokens else None
    return arrivals_of(trace, names, functions=functions, contexts=contexts)


def fitted(scenario: Scenario, trace: Trace) -> Scenario:
    """With as many deployments as the trace of its file has functions, where it has one group.

    Raises InvalidInput when there are more than a group may have.
    """
    work, groups = scenario.workload, scenario.deployments
    if not isinstance(work, TraceFile) or len(groups) != 1:
        return scenario
    count = work.functions or 1 + max((a.function for a in trace.arrivals), default=0)
    if count > GROUP_MAX:
        raise InvalidInput(
            f"trace {trace.name} has {count} functions; a scenario has up to {GROUP_MAX} "
            "deployments of a group",
            hint="sample them: --functions 32, 64 or 128",
        )
    return replace(scenario, deployments=(replace(groups[0], count=count),))


def _deployment_names(scenario: Scenario) -> list[str]:
    return [name for group in scenario.deployments for name in names_of(group)]


def _contexts(scenario: Scenario) -> dict[str, int]:
    """Tokens, by deployment."""
    return {each.spec.name: each.context_tokens_max for each in _deployments(scenario)}


def _deployments(scenario: Scenario) -> tuple[Deployment, ...]:
    costs = cell_costs(ideal=scenario.ideal)
    sharing = [hardware_of(nodes).key for nodes in scenario.nodes if nodes.shares_weights]
    made = (of for group in scenario.deployments for of in deployments_of(group, costs, sharing))
    return tuple(with_classes(of, scenario.slo_mix) if scenario.slo_mix else of for of in made)


def _profiles(scenario: Scenario) -> tuple[Profile, ...]:
    """All that are known of its nodes' hardware."""
    used = {hardware_of(group).key for group in scenario.nodes}
    return tuple(
        table.profile
        for known in known_models().values()
        for key, table in known.costs.items()
        if key in used
    )


def _check(scenario: Scenario) -> None:
    for groups in (scenario.nodes, scenario.deployments):
        for group in groups:
            check_group(group)
        names = [name for group in groups for name in names_of(group)]
        if not names or len(set(names)) < len(names):
            raise InvalidInput(f"names must be there and differ: {', '.join(names) or 'none'}")
    if scenario.slo_mix:
        read_mix(scenario.slo_mix)
    for ttft_s in scenario.slo_ttfts_s:
        at_least("slo_ttfts_s", ttft_s, above=True, finite=True)
    if scenario.slo_ttfts_s and not scenario.slo_mix:
        raise InvalidInput("slo_ttfts_s are drawn for the requests of a slo_mix, and there is none")
    if scenario.faults is not None:
        check_faults(scenario.faults)
    for name, value in asdict(scenario.limits).items():
        if isinstance(value, int | float):
            at_least(f"limits: {name}", value, above=name in NOT_0, finite=True)
    if (from_s := scenario.prefetch_compared_from_s) is not None:
        at_least("prefetch_compared_from_s", from_s, above=False, finite=True)
    at_least("link_delay_s", scenario.link_delay_s, above=False, finite=True)
    at_least("seed", scenario.seed, above=False)
    at_least("beginnings", scenario.beginnings, above=False)
    if scenario.output_tokens_max is not None:
        at_least("output_tokens_max", scenario.output_tokens_max, above=True)
