"""What a node learns from the iterations of an instance: the factor, by what to plan, its stalls.

Promises are planned with a high quantile of what the factor was in the last seconds: neighbours of
a virtual machine come and go within seconds and take up to a third of its speed, and a request that
is let in between two of them runs on into the next.

An iteration far off the others is deferred. If the next one is like the others it was a stall: it
is noted, and left out. If the next one is as far off, the machine has become slower, and both count
as any other; so does a stall that follows another one within the window, and then all the time that
was lost in the window counts, as a mean. Before: the node core's turns. After: the node's reports,
for the controller's `Correction`.
"""

from collections import deque
from collections.abc import Collection, Iterable
from dataclasses import field
from math import exp, inf
from operator import attrgetter

from mesh.compute.correction import LEARNING_S, Correction, bounded
from mesh.compute.times import Times
from mesh.domain.profile import IterationShape, Stalls
from mesh.domain.values import dataclass

WINDOW_S = 20.0
"""Neighbours are gone for seconds and come again. Beside them 97 to 98 % of the admitted were in
time when promises held on to nothing, and 99 % when a peak faded over as much as this.
"""
SLOT_S = 0.25
"""Iterations are remembered together that ended within so long: a window is 80 slots at most."""
QUANTILE = 0.9
"""The share of the window's computing time that a plan's factor covers. A second in which
everything was slow, and the second in which the factor returns from it, are left out of a full
window.
"""
STALL_RATIO = 2.0
"""An iteration that takes longer than this many times what was expected is a stall. A neighbour
that takes half of the machine makes iterations twice as long; what takes longer than that by itself
is no neighbour.
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
    """The part of the measured time that was lost in stalls."""
    kinds: dict[bool, tuple[IterationShape, float]] = field(default_factory=dict)
    """For iterations with prompts among them, and for those without: the last one's shape, and the
    time that was predicted for all.
    """

    def predict_anew(self, was: Times, becomes: Times) -> float:
        """By another profile. Returns by how much less than before."""
        before_s = self.predicted_s
        for kind, (shape, predicted_s) in self.kinds.items():
            becomes_s = predicted_s * _stretched(shape, was, becomes)
            self.kinds[kind] = shape, becomes_s
            self.predicted_s += becomes_s - predicted_s
        return before_s / self.predicted_s


@dataclass(slots=True, kw_only=True)
class _Deferred:
    """An iteration that nothing rests on yet, and what was known of stalls before it."""

    measured_s: float
    predicted_s: float
    at_s: float
    shape: IterationShape | None
    before: Stalls
    before_s: float


_FACTOR, _MEASURED_S = attrgetter("factor"), attrgetter("measured_s")


class LearnedCorrection(Correction):
    """What is learned about one model on the node that computes it."""

    __slots__ = ("_deferred", "_far_off", "_slots", "_stalled_at_s", "_stalls")

    def __init__(self, *, guessed: bool = False) -> None:
        super().__init__(guessed=guessed)
        self._slots: deque[_Slot] = deque()
        """By their time; the last one is being filled."""
        self._far_off = False
        """Whether the last iteration was."""
        self._deferred: _Deferred | None = None
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
        """The stalls so far."""
        known = self._stalls
        if not known.count:
            return known
        ago_s = max(now_s - self._stalled_at_s, 0.0)
        return Stalls(count=known.count, longest_s=known.longest_s, ago_s=ago_s)

    def observe(
        self,
        measured_s: float,
        predicted_s: float,
        now_s: float,
        shape: IterationShape | None = None,
    ) -> None:
        """An iteration has ended, beside no load. `predicted_s` is the profile's, uncorrected;
        `shape` is needed where that may be refined.
        """
        if predicted_s <= 0.0:
            return
        if self.trial_left:
            self.trial_left -= 1
            super().observe(measured_s, predicted_s, now_s)
            return
        expected_s = predicted_s * self.factor(now_s - measured_s)
        lost_s = measured_s - expected_s
        far_off = lost_s >= STALL_S_LEAST and measured_s > STALL_RATIO * expected_s
        if self._deferred is not None:
            self._settle(repeated=far_off)
        elif far_off and not self._far_off:
            self._deferred = _Deferred(
                measured_s=measured_s,
                predicted_s=predicted_s,
                at_s=now_s,
                shape=shape,
                before=self._stalls,
                before_s=self._stalled_at_s,
            )
            self._note_stall(lost_s, now_s)
            return
        self._far_off = far_off
        self._count(measured_s, predicted_s, now_s, shape)

    def refined(self, was: Times, becomes: Times) -> None:
        """Predictions are another profile's from now on: what that has taken up goes out of the
        factors, so that what they make of it stays where it was. Each slot's is a mean over the
        computing before it, and so is what it changes by.
        """
        change = 0.0
        for slot in self._slots:
            weight = 1.0 - exp(-slot.predicted_s / LEARNING_S) if change else 1.0
            change += (slot.predict_anew(was, becomes) - change) * weight
            slot.factor = bounded(slot.factor * change)
        if change:
            self._factor = bounded(self._factor * change)
        deferred = self._deferred
        if deferred is not None and deferred.shape is not None:
            deferred.predicted_s *= _stretched(deferred.shape, was, becomes)

    def _note_stall(self, lost_s: float, now_s: float) -> None:
        """It is one unless the next iteration says otherwise."""
        known = self._stalls
        self._far_off = True
        self._stalls = Stalls(count=known.count + 1, longest_s=max(known.longest_s, lost_s))
        self._stalled_at_s = now_s

    def _settle(self, *, repeated: bool) -> None:
        """The iteration after the deferred one has shown what that was."""
        deferred, self._deferred = self._deferred, None
        assert deferred is not None
        measured_s, predicted_s, at_s = deferred.measured_s, deferred.predicted_s, deferred.at_s
        if repeated:
            self._stalls, self._stalled_at_s = deferred.before, deferred.before_s
            self._count(measured_s, predicted_s, at_s, deferred.shape)
            return
        if deferred.before_s > at_s - WINDOW_S:
            self._count(measured_s, predicted_s, at_s, deferred.shape)
            self._slots[-1].stalls += 1
            return
        expected_s = predicted_s * self.factor(at_s - measured_s)
        slot = self._slot(measured_s, predicted_s, at_s, deferred.shape)
        slot.measured_s += expected_s
        slot.stalls += 1
        slot.left_out_s += measured_s - expected_s

    def _count(
        self, measured_s: float, predicted_s: float, now_s: float, shape: IterationShape | None
    ) -> None:
        super().observe(measured_s, predicted_s, now_s)
        slot = self._slot(measured_s, predicted_s, now_s, shape)
        slot.factor = self.latest
        slot.measured_s += measured_s

    def _slot(
        self, measured_s: float, predicted_s: float, now_s: float, shape: IterationShape | None
    ) -> _Slot:
        """The slot of an iteration that ends now, with what was predicted of it added."""
        slots = self._slots
        if not slots or now_s - slots[-1].began_s > SLOT_S:
            self._forget(now_s)
            began_s = now_s - measured_s
            slots.append(_Slot(began_s=began_s, factor=self.factor(began_s)))
        slot = slots[-1]
        slot.predicted_s += predicted_s
        if shape is not None:
            kind = shape.prefill_tokens > 0
            so_far_s = slot.kinds[kind][1] if kind in slot.kinds else 0.0
            slot.kinds[kind] = shape, so_far_s + predicted_s
        return slot

    def _forget(self, now_s: float) -> None:
        """Drop what has left the window."""
        slots, since_s = self._slots, now_s - WINDOW_S
        while slots and slots[0].began_s <= since_s:
            slots.popleft()


def _quantile(slots: Iterable[_Slot], slower: Iterable[_Slot]) -> float:
    """The factor that all but a share of 1 - QUANTILE of the measured time stays below, if it is
    one of the `slower` slots, whose factors are greater than all others. A single slot, be it a
    long iteration, is never enough. 0 where nothing is left.
    """
    left_out_s = (1.0 - QUANTILE) * sum(map(_MEASURED_S, slots))
    slower_s = 0.0
    for number, slot in enumerate(sorted(slower, key=_FACTOR, reverse=True)):
        slower_s += slot.measured_s
        if number and slower_s > left_out_s:
            return slot.factor
    return 0.0


def _stretched(shape: IterationShape, was: Times, becomes: Times) -> float:
    """By how much longer than before an iteration is predicted to take now."""
    was_s = was.iteration_s(shape)
    return becomes.iteration_s(shape) / was_s if was_s > 0.0 else 1.0


def _mean_of_stalled(slots: Collection[_Slot]) -> float:
    """The ratio of measured to predicted time, including the time that was lost in stalls; 0 if
    there was at most one stall.
    """
    if sum(slot.stalls for slot in slots) < 2:
        return 0.0
    passed_s = sum(slot.measured_s + slot.left_out_s for slot in slots)
    return bounded(passed_s / sum(slot.predicted_s for slot in slots))
