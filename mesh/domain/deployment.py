"""A deployment: a model offered as a function, with an SLO and scaling limits."""

from collections.abc import Iterable
from dataclasses import field

from mesh.domain.ids import DeploymentName
from mesh.domain.model import ComputePrecision, Footprint, ModelInfo, Task, WeightPrecision
from mesh.domain.ranges import Count
from mesh.domain.reasons import DeviceKind
from mesh.domain.slo import Slo
from mesh.domain.text import ToolFormat
from mesh.domain.values import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRule:
    """The cell plans how many instances are loaded ahead, by the calls that have come."""

    every_s: float = 10.0
    """From one plan to the next, each by the calls since the one before it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scaling:
    """Limits on the number of instances, and how long an idle one stays loaded."""

    replicas_min: int = 0
    replicas_max: int = 4
    keep_alive_s: float = 1.0
    plan: PlanRule | None = None
    """Without one, `replicas_min` alone says how many stay loaded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeploymentSpec:
    """What `model.yaml` says, validated."""

    name: DeploymentName
    source: str
    context_tokens_max: int | None = None
    """The longest context; `None` stands for what the model allows."""
    slo: Slo = field(default_factory=Slo)
    classes: tuple[Slo, ...] = ()
    """The SLOs that a request may name; without any, `slo` is the only one."""
    class_default: str = ""
    """The class of a request that names none; `slo` is this one."""
    scaling: Scaling = field(default_factory=Scaling)
    devices: tuple[DeviceKind, ...] = (DeviceKind.CPU, DeviceKind.GPU)
    tensor_parallel: Count = 1
    """Devices that an instance spans, each with a part of every layer."""
    weights: WeightPrecision | None = None
    """The precision in which nodes for CPUs hold the weights; `None` stands for each node's
    default.
    """
    precision: ComputePrecision | None = None
    """The precision in which nodes for CPUs compute the model, where they can; `None` lets each use
    its own.
    """
    task: Task | None = None
    """What it computes in place of text; `None` stands for text."""
    prefix_cache: bool = True
    """Whether its requests share what they compute of a common beginning."""
    tool_format: ToolFormat | None = None
    """The format of tool calls; `None` stands for what the model's chat template tells."""
    special_tokens_in_content: bool = False
    """Whether the texts of special tokens in what a chat's messages say are read as such tokens."""
    tenant: str = ""
    """Whose it is; nobody's where it was deployed without a tenant's key."""
    cells: Count = 1
    """How many cells are to serve it, where a front is before several."""

    @property
    def tpot_limit_s(self) -> float | None:
        """The TPOT limit of requests that name no class; `None` where there are no tokens after the
        first, or they come as others let them.
        """
        return None if self.task is not None or self.slo.best_effort else self.slo.tpot_s


def class_order(names: Iterable[str], specs: Iterable[DeploymentSpec]) -> list[str]:
    """These names of SLO classes as the specs list them, best effort last; after that by name those
    that none of them lists.
    """
    places: dict[str, tuple[bool, int]] = {}
    for slo in (slo for spec in sorted(specs, key=lambda of: of.name) for slo in spec.classes):
        places.setdefault(slo.name, (slo.best_effort, len(places)))
    unlisted = (True, len(places))
    return sorted(names, key=lambda name: (places.get(name, unlisted), name))


@dataclass(frozen=True, slots=True, kw_only=True)
class Deployment:
    """A deployment that has been acknowledged: its spec and the model that it resolved to.

    `footprints` holds what an instance takes, by the name of the engine that said so.
    """

    spec: DeploymentSpec
    model: ModelInfo
    context_tokens_max: int
    footprints: tuple[tuple[str, Footprint], ...] = ()
    revision: int = 1
