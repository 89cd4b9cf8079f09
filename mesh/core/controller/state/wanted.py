"""What the controller core keeps to say how many nodes of a kind its cell wants.

There is an entry for each kind of which somebody starts and stops nodes. It counts the calls of the
last seconds, those that found a place and those that lacked a node, and how many nodes had work.
`wanted_nodes` decides by it.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import field
from math import inf

from mesh.core.controller.state.node import NodeEntry
from mesh.domain.limits import NodeRange
from mesh.domain.values import dataclass

LOOK_S = 0.9
"""Looks are no closer together: most controllers have one a second."""
LACKS_LEAST = 3
"""More nodes are wanted once something lacked one in so many of the last looks: a call alone that
came at a bad moment starts no machine.
"""
LOOKS = 10
"""Calls are counted over so many looks."""


@dataclass(slots=True, kw_only=True, eq=False)
class WantedEntry:
    range: NodeRange
    wanted: int | None = None
    """The number is None while nodes of an earlier controller may yet join."""
    why: str = ""
    began_s: float = inf
    looked_s: float = -inf
    changed_s: float = -inf
    lacked_s: float = -inf
    """When something last lacked a node."""
    ready: int = 0
    known: Sequence[NodeEntry] = ()
    """The nodes of the kind that were ready when any was last: what one more would be like."""
    lacking_since_s: float | None = None
    """Since when fewer nodes are ready than wanted."""
    reported: bool = False
    """Operators have been told that they lack."""
    working: float = 0.0
    """How many nodes had work, in the mean of the last minutes; 0 where none had any."""
    worked_s: float = -inf
    """When a node last had work."""
    waiting: int = 0
    """Requests that waited at the last look, and deployments without their minimum."""
    looks: deque[tuple[int, int, int]] = field(default_factory=lambda: deque(maxlen=LOOKS))
    """The calls that found a place at each, those that were refused, and 1 where anything lacked
    a node; `LACKS_LEAST` where no node of any kind takes the deployment of such a call.
    """
    _placed: int = 0
    _refused: int = 0
    _lacks: int = 0

    def note_placed(self) -> None:
        """A call has found a place on such a node."""
        self._placed += 1

    def note_refused(self, *, alone: bool) -> None:
        """A call was refused that such a node would have served; `alone`: that none there takes."""
        self._refused += 1
        self._lacks = max(self._lacks, LACKS_LEAST if alone else 1)

    def note_look(self, now_s: float, *, working: int, waiting: int, mean_s: float) -> None:
        """A look at the cell, by which `working` nodes have work, and what waits lacks a node."""
        self.began_s = min(self.began_s, now_s)
        span_s = min(now_s - self.began_s, mean_s)
        share = min((now_s - self.looked_s) / span_s, 1.0) if span_s else 1.0
        self.worked_s = now_s if working else self.worked_s
        self.working += (working - self.working) * share
        if now_s - self.worked_s >= mean_s:
            self.working = 0.0
        lacks = max(self._lacks, int(waiting > 0))
        self.looks.append((self._placed, self._refused, lacks))
        self.waiting, self.looked_s = waiting, now_s
        if lacks:
            self.lacked_s = now_s
        self._placed = self._refused = self._lacks = 0

    def want(self, count: int, why: str, now_s: float) -> None:
        self.wanted, self.why, self.changed_s = count, why, now_s

    def note_ready(self, nodes: Sequence[NodeEntry], now_s: float) -> None:
        """These have joined. What was refused before is not due to those that came just now."""
        ready = len(nodes)
        if ready > self.ready:
            self.looks.clear()
        self.ready, self.known = ready, nodes or self.known
        if self.wanted is not None and ready < self.wanted:
            self.lacking_since_s = now_s if self.lacking_since_s is None else self.lacking_since_s
        else:
            self.lacking_since_s, self.reported = None, False

    def note_reported(self) -> None:
        """Operators are told that some have not joined."""
        self.reported = True
