"""What iterations and wakes took beside loads and without, by the decisions of the node; pure.

Before: a node's journal. After: `__main__`, which prints the ratios.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from mesh.domain.ids import DeploymentName, InstanceId
from mesh.domain.messages import InstanceLoaded, LoadInstance
from mesh.domain.node_events import StepFinished
from mesh.domain.steps import LoadTier
from mesh.runtime.journal import Decision


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """From the order to the end; a wake is one from the host's memory."""

    deployment: DeploymentName
    tier: LoadTier
    begin_s: float
    end_s: float

    @property
    def elapsed_s(self) -> float:
        return self.end_s - self.begin_s

    def meets(self, begin_s: float, end_s: float) -> bool:
        return begin_s < self.end_s and self.begin_s < end_s


@dataclass(slots=True)
class Iterations:
    """Seconds of the neighbour's decodes."""

    alone_s: list[float] = field(default_factory=list)
    beside_s: list[float] = field(default_factory=list)


def loads_of(decisions: Iterable[Decision]) -> list[Load]:
    """Those that ended well, in the order of their ends."""
    begun: dict[InstanceId, tuple[DeploymentName, float]] = {}
    found = []
    for decision in decisions:
        if isinstance(decision.event, InstanceLoaded) and decision.event.instance_id in begun:
            deployment, begin_s = begun.pop(decision.event.instance_id)
            tier = decision.event.tier
            found.append(
                Load(deployment=deployment, tier=tier, begin_s=begin_s, end_s=decision.now_s)
            )
        for action in decision.actions:
            if isinstance(action, LoadInstance):
                begun[action.instance_id] = action.deployment, decision.now_s
    return found


def iterations_of(
    decisions: Iterable[Decision], neighbour: InstanceId, batch: int, loads: Sequence[Load]
) -> Iterations:
    """Decodes of a full batch: those that lie wholly within a load, and those that meet none."""
    found = Iterations()
    for begin_s, end_s, elapsed_s in _decodes(decisions, neighbour, batch):
        met = [load for load in loads if load.meets(begin_s, end_s)]
        if not met:
            found.alone_s.append(elapsed_s)
        elif any(load.begin_s <= begin_s and end_s <= load.end_s for load in met):
            found.beside_s.append(elapsed_s)
    return found


def wakes_of(loads: Sequence[Load]) -> tuple[list[float], list[float]]:
    """Seconds of wakes that met no load from the disk, and of those that met one."""
    wakes = [load for load in loads if load.tier is LoadTier.HOST]
    others = [load for load in loads if load.tier is not LoadTier.HOST]
    met = [any(load.meets(wake.begin_s, wake.end_s) for load in others) for wake in wakes]
    alone = [wake.elapsed_s for wake, meets in zip(wakes, met, strict=True) if not meets]
    return alone, [wake.elapsed_s for wake, meets in zip(wakes, met, strict=True) if meets]


def _decodes(
    decisions: Iterable[Decision], neighbour: InstanceId, batch: int
) -> Iterator[tuple[float, float, float]]:
    """Begin and end of a turn, and the seconds of one of its iterations."""
    for decision in decisions:
        match decision.event:
            case StepFinished(instance_id=i, result=result) if i == neighbour:
                if result.decode_batch == batch and not result.prefill_tokens:
                    begin_s = decision.now_s - result.elapsed_s
                    yield begin_s, decision.now_s, result.elapsed_s / result.iterations
            case _:
                pass
