"""The weights of a node that swaps, rolled forward beside its turns by the rule that it follows.

Weights that are on their way cannot compute, and one swap follows another. Before: the schedule of
a validation, which owns it. After: `mesh.request.shadow`, which asks who can compute.
"""

from collections.abc import Sequence
from math import inf

from mesh.domain.ids import InstanceId
from mesh.domain.steps import part_bytes
from mesh.domain.values import dataclass
from mesh.policy.rules.run_queues import RunQueue
from mesh.policy.rules.swapping import Swap, SwapRule, Weights, wanted

MOVES_MAX = 64
"""Swaps that a step of a forecast rolls a pool forward."""


@dataclass(slots=True, kw_only=True, eq=False)
class Held:
    """The weights of one instance of the node."""

    weights_bytes: int
    copy_s: float
    """Seconds in which all of them come to the device."""
    share: float = 0.0
    """The share of them that is on the device."""
    due_s: float = inf
    """When what no run queue has, best effort, is due: behind all deadlines."""


@dataclass(slots=True, kw_only=True, eq=False)
class Pool:
    """A validation changes it."""

    rule: SwapRule
    held: dict[InstanceId, Held]
    free_bytes: int
    """What there is beside the weights on the device and on their way to it."""
    away_s: float = 0.0
    """Seconds in which all weights of an instance leave the device."""
    moving: Swap | None = None
    """The weights that are on their way."""
    moved_s: float = inf
    """When they are there; infinite where none are on their way."""

    def hold(self, name: InstanceId, held: Held) -> None:
        """One more instance takes part in it."""
        self.held[name] = held

    def computes(self, queue: RunQueue) -> bool:
        """Whether the weights of its instance are on the device, and stay there."""
        name = queue.instance_id
        return self.held[name].share >= 1.0 and not self._moves(name)

    def _moves(self, name: InstanceId) -> bool:
        return self.moving is not None and self.moving.instance_id == name

    def roll(
        self, queues: Sequence[RunQueue], now_s: float, stepping: RunQueue | None = None
    ) -> None:
        """Carry out the swaps that end until then, each followed by the next one at once, while one
        run queue may be `stepping`.
        """
        while self.moving is not None and self.moved_s <= now_s:
            at_s = self.moved_s
            self._end(self.moving)
            self.decide(queues, at_s, stepping)

    def roll_on(self, queues: Sequence[RunQueue], until_s: float) -> float:
        """Carry out swaps until one with work can compute, or what lacked room has it, at the
        latest until then; returns when that is, or a time from which to go on after `MOVES_MAX`.
        """
        lacked, at_s = self.free_bytes < 0, until_s
        for _ in range(MOVES_MAX):
            at_s = min(self.moved_s, until_s)
            self.roll(queues, at_s)
            if at_s == until_s or self.moving is None or (lacked and self.free_bytes >= 0):
                break
            if any(self.computes(queue) for queue in queues if queue.batch or queue.prompts):
                break
        return at_s

    def decide(
        self, queues: Sequence[RunQueue], now_s: float, stepping: RunQueue | None = None
    ) -> None:
        """Begin the swap that the rule wants now, if none is under way."""
        if self.moving is not None or not self._may_want(queues):
            return
        dues_s = {queue.instance_id: queue.first_due_s for queue in queues}
        busy = None if stepping is None else stepping.instance_id
        found = wanted(
            self.rule,
            [
                Weights(
                    instance_id=name,
                    weights_bytes=held.weights_bytes,
                    share=held.share,
                    due_s=min(dues_s.get(name, inf), held.due_s),
                    may_go=name != busy,
                )
                for name, held in self.held.items()
            ],
            self.free_bytes,
        )
        if found is not None:
            self.begin(found, now_s)

    def _may_want(self, queues: Sequence[RunQueue]) -> bool:
        """Whether the node would ask its rule: weights have to make room, or are out and wanted."""
        held = self.held
        return (
            self.free_bytes < 0
            or any(held[q.instance_id].share < 1.0 and q.first_due_s < inf for q in queues)
            or any(each.share < 1.0 and each.due_s < inf for each in held.values())
        )

    def begin(self, swap: Swap, now_s: float) -> None:
        """Weights begin to leave the device, or to come to it."""
        held = self.held[swap.instance_id]
        more = swap.share - held.share
        self.moving = swap
        self.moved_s = now_s + max(more * held.copy_s, -more * self.away_s)
        if more > 0.0:
            self.free_bytes -= _between(held, held.share, swap.share)

    def _end(self, swap: Swap) -> None:
        held = self.held[swap.instance_id]
        if swap.share < held.share:
            self.free_bytes += _between(held, swap.share, held.share)
        held.share = swap.share
        self.moving, self.moved_s = None, inf

    def arrivals_s(self, queues: Sequence[RunQueue], now_s: float) -> dict[InstanceId, float]:
        """When the weights that are out would be there, if they came by their deadlines, one after
        the other; those on the device are there.
        """
        at_s = max(now_s, self.moved_s) if self.moving is not None else now_s
        arrivals_s: dict[InstanceId, float] = {}
        for queue in sorted(queues, key=lambda queue: (queue.first_due_s, queue.instance_id)):
            name, held = queue.instance_id, self.held[queue.instance_id]
            if self.moving is not None and self.moving.instance_id == name:
                share, whole_s = self.moving.share, self.moved_s
            else:
                share, whole_s = held.share, now_s
            if share < 1.0:
                at_s += (1.0 - share) * held.copy_s
                whole_s = at_s
            arrivals_s[name] = whole_s
        return arrivals_s

    def cycle_s(self, queues: Sequence[RunQueue]) -> float:
        """Seconds in which the weights of all of these come once, each in the place of another."""
        return sum(self.held[queue.instance_id].copy_s + self.away_s for queue in queues)


def _between(held: Held, less: float, more: float) -> int:
    """The bytes by which two shares of weights differ."""
    return part_bytes(held.weights_bytes, more) - part_bytes(held.weights_bytes, less)
