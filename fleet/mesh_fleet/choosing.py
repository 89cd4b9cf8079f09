"""Where agents are to run: pure, so that a test can try every case.

A place is one device of a machine. Before: `supplier`, which sees the machines and how many nodes
are wanted. After: keepers are started at some places, and drained at others.
"""

from collections.abc import Iterable
from enum import IntEnum

from mesh.domain.values import dataclass


class Use(IntEnum):
    """What is at a place; what comes first is kept first where fewer nodes are wanted."""

    KEPT = 0
    """A keeper has an agent there."""
    FOUND = 1
    """An agent runs there that no keeper knows: Ray, or the fleet, was started anew."""
    FREE = 2
    LEAVING = 3
    """Its agent drains. That cannot be called back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    machine: str
    """Ray's id of the machine."""
    device: str
    """Such as `gpu1`."""
    use: Use
    since: int = 0
    """The order in which keepers were started; 0 where there is none."""

    @property
    def name(self) -> str:
        return f"{self.device}@{self.machine}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    keep: tuple[Place, ...]
    """A keeper is to be started there, which adopts an agent that it finds."""
    drain: tuple[Place, ...]


def choose(places: Iterable[Place], wanted: int) -> Choice:
    """The places that are to have `wanted` agents together. The agents that run stay, in the order
    in which they came; an agent that was found and is too many gets a keeper, too, which drains it.
    """
    ordered = sorted(places, key=lambda place: (place.use, place.since, place.name))
    usable = [place for place in ordered if place.use is not Use.LEAVING]
    run, rest = usable[:wanted], usable[wanted:]
    return Choice(
        keep=tuple(
            p for p in (*run, *rest) if p.use is Use.FOUND or (p in run and p.use is Use.FREE)
        ),
        drain=tuple(place for place in rest if place.use is Use.KEPT),
    )
