"""What a node learns from the iterations of an instance: the factor, by what to plan, its stalls.

Promises are planned with a high quantile of what the factor was in the last seconds: neighbours of
a virtual machine come and go within seconds and take up to a third of its speed, and a request that
is let in between two of them runs on into the next.

An iteration far off the others is held back. If the next one is like the others it was a stall: it
is noted, and left out. If the next one is as far off, the machine has become slower, and both count
as any other; so does a stall that follows another one within the window, and then all the time that
was lost in the window counts, as a mean. Before: the node core's turns. After: the node's reports,
for the controller's `Correction`.
"""

from collections import deque
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from math import inf
from operator import attrgetter

from mesh.compute.correction import Correction, bounded
from mesh.domain.profile import Stalls

WINDOW_S = 20.0
"""Neighbours are gone for seconds and come again. Beside them 97 to 98 % of the admitted were in
time when promises held on to nothing, and 99 % when a peak faded over as much as this.
"""
SLOT_S = 0.25
"""Iterations are remembered together that ended within so long: a window is 80 slots at most."""
QUANTILE = 0.9
"""Of the window's computing. A second in which everything was slow, and the second in which the
factor returns from it, are left out of a full one.
"""
STALL_RATIO = 2.0
"""Of what was expected. A neighbour that takes half of the machine makes iterations twice as long;
what alone takes longer than that is no neighbour.
"""
STALL_S_LEAST = 0.1
"""Above what was expected. Tens of milliseconds (an engine builds kernels in 10 to 20) are lost all
the time, and belong to what iterations take.
"""


@dataclass(slots=True, kw_only=True)
class _Slot:
    """What was computed within SLOT_S."""

    began_s: float
    factor: float
    """As of its last iteration."""
    measured_s: float = 0.0
    predicted_s: float = 0.0
    stalls: int = 0
    left_out_s: float = 0.0
    """Of what was measured: lost in a stall."""


_FACTOR, _MEASURED_S = attrgetter("factor"), attrgetter("measured_s")


class LearnedCorrection(Correction):
    """Of one model on the node that computes it."""

    __slots__ = ("_far_off", "_held", "_slots", "_stalled_at_s", "_stalls")

    def __init__(self, *, guessed: bool = False) -> None:
        super().__init__(guessed=guessed)
        self._slots: deque[_Slot] = deque()
        """By their time; the last one is being filled."""
        self._far_off = False
        """Whether the last iteration was."""
        self._held: tuple[float, float, float, Stalls, float] | None = None
        """An iteration that nothing rests on yet, as it was observed, and what was known of stalls
        before it.
        """
        self._stalls = Stalls()
        self._stalled_at_s = -inf

    def planned(self, now_s: float) -> float:
        """By which predictions are to be multiplied that a promise rests on: a high quantile of the
        window, the mean of all that has passed in it if stalls repeat, or `factor` if that is more.
        """
        slots = self._slots
        self._forget(now_s)
        factor = self.factor(now_s)
        slower = [slot for slot in slots if slot.factor > factor]
        if slower:
            factor = max(factor, _quantile(slots, slower))
        return max(factor, _mean_of_stalled(slots)) if self._stalls.count > 1 else factor

    def stalls(self, now_s: float) -> Stalls:
        """So far."""
        known = self._stalls
        if not known.count:
            return known
        ago_s = max(now_s - self._stalled_at_s, 0.0)
        return Stalls(count=known.count, longest_s=known.longest_s, ago_s=ago_s)

    def observe(self, measured_s: float, predicted_s: float, now_s: float) -> None:
        """An iteration has ended, beside no load. `predicted_s` is the profile's, uncorrected."""
        if predicted_s <= 0.0:
            return
        if self.trial_left:
            self.trial_left -= 1
            super().observe(measured_s, predicted_s, now_s)
            return
        expected_s = predicted_s * self.factor(now_s - measured_s)
        lost_s = measured_s - expected_s
        far_off = lost_s >= STALL_S_LEAST and measured_s > STALL_RATIO * expected_s
        if self._held is not None:
            self._settle(repeated=far_off)
        elif far_off and not self._far_off:
            self._hold(measured_s, predicted_s, now_s, lost_s)
            return
        self._far_off = far_off
        self._count(measured_s, predicted_s, now_s)

    def _hold(self, measured_s: float, predicted_s: float, now_s: float, lost_s: float) -> None:
        """It is a stall unless the next one says otherwise."""
        before, before_s = self._stalls, self._stalled_at_s
        self._held = (measured_s, predicted_s, now_s, before, before_s)
        self._far_off = True
        self._stalls = Stalls(count=before.count + 1, longest_s=max(before.longest_s, lost_s))
        self._stalled_at_s = now_s

    def _settle(self, *, repeated: bool) -> None:
        """The iteration after the held one has shown what that was."""
        assert self._held is not None
        measured_s, predicted_s, at_s, before, before_s = self._held
        self._held = None
        if repeated:
            self._stalls, self._stalled_at_s = before, before_s
            self._count(measured_s, predicted_s, at_s)
            return
        if before_s > at_s - WINDOW_S:
            self._count(measured_s, predicted_s, at_s)
            self._slots[-1].stalls += 1
            return
        expected_s = predicted_s * self.factor(at_s - measured_s)
        slot = self._slot(measured_s, at_s)
        slot.measured_s += expected_s
        slot.predicted_s += predicted_s
        slot.stalls += 1
        slot.left_out_s += measured_s - expected_s

    def _count(self, measured_s: float, predicted_s: float, now_s: float) -> None:
        super().observe(measured_s, predicted_s, now_s)
        slot = self._slot(measured_s, now_s)
        slot.factor = self.latest
        slot.measured_s += measured_s
        slot.predicted_s += predicted_s

    def _slot(self, measured_s: float, now_s: float) -> _Slot:
        """Which an iteration that has ended now belongs to."""
        slots = self._slots
        if slots and now_s - slots[-1].began_s <= SLOT_S:
            return slots[-1]
        self._forget(now_s)
        began_s = now_s - measured_s
        slots.append(_Slot(began_s=began_s, factor=self.factor(began_s)))
        return slots[-1]

    def _forget(self, now_s: float) -> None:
        """Drop what has left the window."""
        slots, since_s = self._slots, now_s - WINDOW_S
        while slots and slots[0].began_s <= since_s:
            slots.popleft()


def _quantile(slots: Iterable[_Slot], slower: Iterable[_Slot]) -> float:
    """Of the factor, by what was computed with it, if that is one of the `slower`, who have a
    greater factor than all others; a single slot, be it a long iteration, is never enough. 0 where
    nothing is left.
    """
    left_out_s = (1.0 - QUANTILE) * sum(map(_MEASURED_S, slots))
    slower_s = 0.0
    for number, slot in enumerate(sorted(slower, key=_FACTOR, reverse=True)):
        slower_s += slot.measured_s
        if number and slower_s > left_out_s:
            return slot.factor
    return 0.0


def _mean_of_stalled(slots: Collection[_Slot]) -> float:
    """Measured over predicted time, with that lost in stalls; 0 if there was one at most."""
    if sum(slot.stalls for slot in slots) < 2:
        return 0.0
    passed_s = sum(slot.measured_s + slot.left_out_s for slot in slots)
    return bounded(passed_s / sum(slot.predicted_s for slot in slots))
