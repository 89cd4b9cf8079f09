"""The life of a node's link, without the link: when to dial, and what to make of each end.

A link is dialled, welcomed and ends; after that it is dialled anew, after a pause that doubles with
each dial in a row that was not welcomed. An answer to a hello that waiting does not heal ends the
node instead. The live link and the simulator's agent ask the same object. Before: they say what
happened. After: they wait, or end.
"""

import random

from mesh.domain.errors import AlreadyExists, Forbidden, InvalidInput, Unauthenticated
from mesh.domain.values import dataclass

FATAL = frozenset(
    error.__name__ for error in (AlreadyExists, InvalidInput, Unauthenticated, Forbidden)
)
"""The name is taken by another node, the controller cannot make sense of this one, or its key does
not do."""
DOUBLINGS_MAX = 16


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

    def __init__(self, rng: random.Random, limits: LinkLimits) -> None:
        self._rng = rng
        self._limits = limits
        self.welcomed = False
        """The controller has taken the node on the link that there is."""
        self.failures = 0
        """Dials in a row that were not welcomed."""

    def welcome(self) -> None:
        self.welcomed = True

    def end(self, error: str) -> float | None:
        """The link has ended with this error (a class name in mesh.domain.errors): seconds until
        the next dial, None where there is to be none.
        """
        welcomed, self.welcomed = self.welcomed, False
        if error in FATAL and not welcomed:
            return None
        self.failures = 0 if welcomed else self.failures + 1
        doubled_s = self._limits.pause_s_min * 2.0 ** min(self.failures, DOUBLINGS_MAX)
        return min(self._limits.pause_s_max, doubled_s) * self._rng.uniform(0.5, 1.0)
