"""The life of a node's link, without the link: when to dial, and what to make of each end.

A link is dialled, welcomed and ends; after that it is dialled anew, after a pause that doubles with
each dial in a row that was not welcomed. Of several controllers one after the other is dialled,
until one takes the node, which leaves that when another one begins to lead. A node obeys the
leaders of one cell, and no earlier one after a later one. An answer to a hello that waiting does
not heal ends it. The live link and the simulator's agent ask the same objects. Before: they say
what happened. After: they wait, or end.
"""

import random
from typing import NamedTuple

from mesh.domain.errors import AlreadyExists, Forbidden, InvalidInput, Unauthenticated
from mesh.domain.values import dataclass

FATAL = frozenset(
    error.__name__ for error in (AlreadyExists, InvalidInput, Unauthenticated, Forbidden)
)
"""The name is taken by another node, the controller cannot make sense of this one, or its key does
not do."""
DOUBLINGS_MAX = 16
LOOK_S = 0.25
"""Between two looks whether another controller leads."""
ROUND_S_MAX = 0.5
"""The longest pause between two rounds of several addresses."""


class CellEpoch(NamedTuple):
    """One leader of one cell, or the latest that a node has obeyed."""

    number: int = 0
    """Each leader of a cell has a higher one than the leader before it; 0: none is known."""
    cell: str = ""
    """The id in the cell's registry; empty where that is not known."""

    def why_not_after(self, obeyed: "CellEpoch") -> str:
        """Why a node that has obeyed another leader must not obey this one; empty where it may."""
        if self.cell and obeyed.cell and self.cell != obeyed.cell:
            return f"this node is of the cell {obeyed.cell}, and that controller of {self.cell}"
        if self.number < obeyed.number:
            return f"another controller leads, later than epoch {self.number}: {obeyed.number}"
        return ""


NO_EPOCH = CellEpoch()


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkLimits:
    reports_max: int = 10_000
    """At most so many reports wait to be sent; a controller that takes them more slowly counts as
    gone.
    """
    welcome_s_max: float = 5.0
    """From dialling to the controller's welcome."""
    pause_s_min: float = 0.1
    """Before the first new try; doubled for each further one."""
    pause_s_max: float = 5.0


class LinkLife:
    """`rng` spreads the pauses, so that the nodes of a cell do not come back as one."""

    def __init__(self, rng: random.Random, limits: LinkLimits, addresses: int = 1) -> None:
        self._rng = rng
        self._limits = limits
        self._addresses = addresses
        self.at = 0
        """Which of them is linked, or dialled next."""
        self._dialled = 0
        self._tried = 0
        """So many dials of this round were not welcomed."""
        self._led = set(range(addresses))
        """Those that led when they were looked at last."""
        self.welcomed = False
        """The controller has taken the node on the link that there is."""
        self.failures = 0
        """Dials in a row that were not welcomed."""

    def dial(self) -> int:
        """The address to dial now."""
        self._dialled = self.at
        return self.at

    def welcome(self) -> None:
        self.welcomed = True

    def others(self) -> list[int]:
        """The addresses to look at."""
        return [at for at in range(self._addresses) if at != self.at]

    def looked(self, at: int, *, leads: bool) -> bool:
        """Another controller was looked at: whether it began to lead, so that the link is to end
        for it. One that hangs does not say that it leads no more.
        """
        self._led.add(self.at)
        begun = leads and at not in self._led
        (self._led.add if leads else self._led.discard)(at)
        if begun:
            self.at = at
        return begun

    def end(self, error: str) -> float | None:
        """The link has ended with this error (a class name in mesh.domain.errors): seconds until
        the next dial, None where there is to be none. A round of all addresses is one try.
        """
        welcomed, self.welcomed = self.welcomed, False
        if error in FATAL and not welcomed:
            return None
        self.failures = 0 if welcomed else self.failures + 1
        self._tried = 1 if welcomed else self._tried + 1
        if self.at == self._dialled:
            self.at = (self.at + 1) % self._addresses
        if self._tried % self._addresses:
            return 0.0
        doubled_s = self._limits.pause_s_min * 2.0 ** min(self.failures, DOUBLINGS_MAX)
        pause_s = min(self._limits.pause_s_max, doubled_s) * self._rng.uniform(0.5, 1.0)
        return pause_s if self._addresses == 1 else min(pause_s, ROUND_S_MAX)
