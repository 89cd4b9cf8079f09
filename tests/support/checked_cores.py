"""Holds every core that a test makes to its invariants, wherever it is made: in the test itself, in
a simulated cell, or in a live one in this process.

The classes' `handle` is wrapped for as long as the test lasts. What is broken raises where it
happens, and once more at the end of the test, for a live cell outlives an error in its loop.
"""

from typing import Any

import pytest

from mesh.core.controller.core import ControllerCore
from mesh.core.node.core import NodeCore
from mesh.sim.invariants import RuleBroken, check_cell, check_node_core
from tests.support.depth import DEEP

ALL = 500 if DEEP else 100
"""Events of a core after each of which it is checked; of those that follow, after one in EVERY."""
EVERY = 50


class CheckedCores:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._events: dict[ControllerCore | NodeCore, int] = {}
        self._now_s: dict[ControllerCore | NodeCore, float] = {}
        """The time of its last event."""
        self._broken: RuleBroken | None = None
        for kind in (ControllerCore, NodeCore):
            monkeypatch.setattr(kind, "handle", self._checked(kind.handle))

    def _checked(self, handle: Any) -> Any:
        def checked(core: ControllerCore | NodeCore, event: object, now_s: float) -> object:
            actions = handle(core, event, now_s)
            events = self._events[core] = self._events.get(core, 0) + 1
            self._now_s[core] = now_s
            if events <= ALL or events % EVERY == 0:
                self._check(core)
            return actions

        return checked

    def end(self) -> None:
        """All cores once more, for what was done to them since."""
        if self._broken is not None:
            raise self._broken
        for core in self._events:
            self._check(core)

    def _check(self, core: ControllerCore | NodeCore) -> None:
        try:
            if isinstance(core, ControllerCore):
                check_cell(core, self._now_s[core])
            else:
                check_node_core(core)
        except RuleBroken as broken:
            self._broken = self._broken or broken
            raise
