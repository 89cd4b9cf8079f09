"""A scenario of a live cell, as a TOML file in `bench/scenarios` says it: data, and no code.

A scene says what is deployed, in which memory, the loads that are offered, and beside what peer;
the file, which figures are told of every load, and what they have to be. Before: a file. After:
`live`, which plays it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

from bench.demo_model import SOURCE
from bench.own_models import own_source
from bench.played import check_spec
from bench.sending import AtOnce, Overload, Poisson, Returns, Waves
from mesh.domain.deployment import DeploymentSpec, Scaling
from mesh.domain.errors import InvalidInput
from mesh.domain.ids import DeploymentName
from mesh.domain.model import WeightPrecision
from mesh.domain.slo import Slo, best_effort
from mesh.sim.scenario import read_toml, strict_converter

LoadKind = AtOnce | Overload | Poisson | Returns | Waves
KINDS: Mapping[str, type[LoadKind]] = {
    "at once": AtOnce,
    "overload": Overload,
    "poisson": Poisson,
    "returns": Returns,
    "waves": Waves,
}
"""The loads, by the `kind` that a file says."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Equal deployments: NAME-01 and so on, or NAME alone."""

    name: str
    count: int = 0
    """How many are numbered; 0: the deployment has the group's name."""
    own_models: bool = False
    """Each has a model of its own, of the demo model's shape; else all are the demo model."""
    context_tokens_max: int = 1024
    slo: Slo = field(default_factory=Slo)
    classes: tuple[Slo, ...] = ()
    """Its SLO classes, in place of `slo`; a call without one has the first. Of best effort a file
    says the name, and how long it waits as `ttft_s`.
    """
    scaling: Scaling = field(default_factory=Scaling)

    def names(self) -> list[DeploymentName]:
        """The most popular first."""
        numbered = [f"{self.name}-{n:02}" for n in range(1, self.count + 1)]
        return [DeploymentName(name) for name in numbered or [self.name]]

    def specs(self) -> list[DeploymentSpec]:
        """The most popular first."""
        classes = tuple(
            best_effort(of.name, of.ttft_s) if of.best_effort else of for of in self.classes
        )
        slo = classes[0] if classes else self.slo
        return [
            DeploymentSpec(
                name=name,
                source=own_source(name) if self.own_models else SOURCE,
                context_tokens_max=self.context_tokens_max,
                slo=slo,
                classes=classes,
                class_default=slo.name,
                scaling=self.scaling,
            )
            for name in self.names()
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One controller and one CPU node, or several on cores of their own."""

    nodes: int = 1
    """Each has an equal part of the cores and of the memory. A scene that is `cold` or `audited`
    has one.
    """
    policy: str | None = None
    memory_bytes: int | None = None
    memory_for: int | None = None
    """There is memory for so many instances as they are loaded."""
    overcommit: float | None = None
    """The node has the memory that the largest waves want, over this."""
    ahead: bool = True
    """Models are loaded, or read, before they are called."""
    prefix_cache: bool = True
    weights: WeightPrecision | None = None
    """How weights are held; `None` stands for the node's default."""
    shared: bool = False
    """All deployments are the demo model and share its weights, whatever their groups say."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """What gets the same calls after mesh: another cell, or llama.cpp servers that are swapped."""

    name: str
    """Before the names of its figures."""
    ratios: Mapping[str, str]
    """By name the figure of which mesh's is told over its."""
    enough: Mapping[str, str] = field(default_factory=dict)
    """By name the figure of which is told in what share of the loads its is at least mesh's."""
    cell: Cell | None = None
    """`None` stands for the swapper."""
    deployments: tuple[Group, ...] = ()
    """What it has in place of the scene's; see `sending.calls_for`."""
    scaling: Scaling | None = None
    """That of its deployments, in place of their own."""
    best_effort: bool = True
    """Whether it gets the calls of best effort, too."""
    lacks: bool = False
    """`ratios` are the shares of what the peer has that mesh lacks instead."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    name: str
    deployments: tuple[Group, ...]
    loads: tuple[LoadKind, ...]
    """They are offered one after the other."""
    cell: Cell = field(default_factory=Cell)
    peers: tuple[Peer, ...] = ()
    """They get the same calls, one after the other."""
    mark: str = ""
    """Before the names of its figures."""
    figures: Mapping[str, str] | None = None
    """By name what is told of each load, in place of the file's: see `played.measured`."""
    whole: Mapping[str, str] = field(default_factory=dict)
    """The same of all loads of the scene together."""
    resident: bool = False
    """All deployments are loaded, and the node is idle, before a load."""
    fresh: bool = False
    """Each load has a cell of its own."""
    cold: bool = False
    """Each load has a cell of its own that knows its deployments from before, and nothing of their
    models is in the page cache.
    """
    surveyed: bool = False
    """The first deployment's model is measured before."""
    compiled: bool = True
    """What was compiled in one cell is there in the next one."""
    audited: bool = False
    """The controller's journal is decided again, and the node's memory watched."""
    each_first: bool = False
    """Every deployment is called once by itself before."""
    simulated: bool = False
    """Virtual nodes get the same calls as well."""
    come_again: bool = False
    """Who is refused comes again when the refusal says."""
    call_s_max: float = 60.0
    """After the last call of a load."""
    optional: bool = False
    """It is played where it is asked for by name alone."""
    quick: bool = True
    """Whether a quick run has it."""
    shapes: bool = False
    """What instances of two shapes take is measured beside it."""

    def specs(self, cell: Cell | None = None) -> list[DeploymentSpec]:
        """As a cell has them: the scene's own, or the peer's."""
        held = cell or self.cell
        groups = [
            replace(group, own_models=group.own_models and not held.shared)
            for group in self.deployments
        ]
        return [
            replace(spec, prefix_cache=held.prefix_cache, weights=held.weights)
            for group in groups
            for spec in group.specs()
        ]

    def beside(self, peer: Peer) -> "Scene":
        """The scene as a peer that is a cell has it."""
        assert peer.cell is not None
        groups = peer.deployments or self.deployments
        if peer.scaling is not None:
            groups = tuple(replace(group, scaling=peer.scaling) for group in groups)
        resident = self.resident and all(group.scaling.replicas_min for group in groups)
        return replace(self, cell=peer.cell, deployments=groups, resident=resident)

    def own_models(self, cell: Cell) -> bool:
        return not cell.shared and any(group.own_models for group in self.deployments)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    about: str
    """What it measures, in its first sentence, and what its figures mean."""
    scenes: tuple[Scene, ...]
    figures: Mapping[str, str] = field(default_factory=dict)
    """What is told of each load of a scene that has no figures of its own."""
    whole: Mapping[str, str] = field(default_factory=dict)
    """The same of all loads of such a scene together."""
    peer_figures: Mapping[str, str] = field(default_factory=dict)
    """What is told of a peer."""
    targets: Mapping[str, str | tuple[str, ...]] = field(default_factory=dict)
    """By figure what it has to be, as `harness.Report` has it."""


_converter = strict_converter()


def _load(raw: Any, _: object) -> LoadKind:
    kind = str(raw.get("kind")) if isinstance(raw, Mapping) else ""
    if kind not in KINDS:
        raise ValueError(f"there is no kind of load {kind!r}, only {', '.join(KINDS)}")
    without = {key: value for key, value in raw.items() if key != "kind"}
    made: LoadKind = _converter.structure(without, KINDS[kind])
    return made


def _target(raw: Any, _: object) -> str | tuple[str, ...]:
    return raw if isinstance(raw, str) else tuple(raw)


_converter.register_structure_hook(LoadKind, _load)
_converter.register_structure_hook(str | tuple[str, ...], _target)


def read_scenario(path: Path) -> Scenario:
    """Raises NotFound when the file cannot be read, InvalidInput when it is no scenario."""
    made = read_toml(path, _converter, Scenario)
    said = [made.figures, made.whole, made.peer_figures]
    said += [each for scene in made.scenes for each in (scene.figures or {}, scene.whole)]
    peers = [peer for scene in made.scenes for peer in scene.peers]
    said += [each for peer in peers for each in (peer.ratios, peer.enough)]
    for scene in made.scenes:
        played = [scene.cell, *(peer.cell for peer in scene.peers if peer.cell is not None)]
        if (scene.cold or scene.audited) and any(cell.nodes > 1 for cell in played):
            raise InvalidInput(f"scene {scene.name!r} is cold or audited, and has several nodes")
    for spec in (spec for each in said for spec in each.values()):
        check_spec(spec)
    return made


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """The options that all scenarios have; `harness` makes them options of the command line."""

    scene: Annotated[str | None, "only this scene"] = None
    rates: Annotated[tuple[float, ...], "calls a second"] = ()
    seconds: Annotated[float | None, "for how long a load's calls come"] = None
    deployments: Annotated[int | None, "deployments of a group"] = None
    rounds: Annotated[int, "rounds, each with other calls"] = 1
    seed: int = 1
    quick: bool = False
    peer: Annotated[bool, "without the peer that is not mesh"] = True
    sim: Annotated[bool, "simulate nothing"] = True
    survey: bool = False
    journal: Path | None = None


def wanted(scenario: Scenario, asked: Asked) -> list[Scene]:
    """The scenes as these options would have them. Raises InvalidInput."""
    names = [each.name for each in scenario.scenes]
    if asked.scene is not None and asked.scene not in names:
        raise InvalidInput(f"there is no scene {asked.scene}, only {', '.join(names)}")
    found = []
    for scene in scenario.scenes:
        usual = not scene.optional and (scene.quick or not asked.quick)
        if scene.name == asked.scene if asked.scene is not None else usual:
            loads = [_as_asked(load, asked.quick, asked.seconds) for load in scene.loads]
            if asked.rates and isinstance(loads[0], Poisson):
                loads = [replace(loads[0], rate=rate) for rate in asked.rates]
            groups = [
                replace(group, count=asked.deployments or group.count) if group.count else group
                for group in scene.deployments
            ]
            surveyed = scene.surveyed or asked.survey
            made = replace(scene, loads=tuple(loads), deployments=tuple(groups), surveyed=surveyed)
            found.append(made)
    return found


def _as_asked(load: LoadKind, quick: bool, seconds: float | None) -> LoadKind:
    if quick:
        load = load.shortened()
    return (
        load
        if seconds is None or isinstance(load, AtOnce | Returns)
        else replace(load, seconds=seconds)
    )
