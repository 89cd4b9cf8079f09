"""Engine processes of unloaded instances, kept with their weights in the host's memory.

Decides who sleeps, who wakes and who has to go: the one asleep the longest goes when a place or the
host's memory is wanted. What has slept keeps its copy there while it is awake, so that it falls
asleep again in no time; that counts, too, and is not taken from it. One sleep or wake is under way
at a time, since they share the bus to the device. Whatever fails in one ends the process, and the
instance goes or comes as if there were no sleep. Before: `engine`, at an unload or a load. After:
`remote`.
"""

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from mesh.domain.errors import MeshError
from mesh.domain.model import ModelInfo
from mesh.domain.steps import HeldModel, LoadOrder, LoadTier
from mesh_nodes.engines.vllm.messages import ProcessOptions, Verb
from mesh_nodes.engines.vllm.remote import Remote

MOVE_S_MAX = 60.0
"""For a sleep or a wake: 14 GB at a quarter of a GB a second."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """What a load must have in common with an instance that sleeps to be served by waking it."""

    model: ModelInfo
    model_path: Path
    context_tokens_max: int
    batch_max: int
    options: ProcessOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class Bed:
    """Where a loaded instance could sleep: what it is, and what it would take of the host."""

    kind: Kind
    host_bytes: int
    remote: Remote


def kind_of(order: LoadOrder, options: ProcessOptions) -> Kind:
    return Kind(
        model=order.model,
        model_path=order.model_path,
        context_tokens_max=order.context_tokens_max,
        batch_max=order.batch_max,
        options=options,
    )


class Sleepers:
    """May be called from any thread; `sleep` and `wake` wait for one another."""

    def __init__(
        self, *, count_max: int, bytes_max: int, host_available_bytes: Callable[[], int]
    ) -> None:
        """`host_available_bytes` is asked before each sleep, which has to fit in there, too."""
        self.count_max = count_max
        self._bytes_max = bytes_max
        self._available_bytes = host_available_bytes
        self._moving = threading.Lock()
        self._table = threading.Lock()
        """Guards what follows, never a call."""
        self._asleep: list[Bed] = []
        """The one asleep the longest first."""
        self._awake: list[Bed] = []
        """Those that hold some of the host: reserved, or the copy that they were woken from."""
        self._falling: list[Bed] = []
        """Those that will be asleep soon, or gone."""
        self._moved: Remote | None = None
        self._closed = False

    def reserve(self, bed: Bed) -> None:
        """Have one that has just been loaded take the host's memory for its first sleep already, if
        there is plenty: no more than half for all that are awake.
        """
        if not self.count_max:
            return
        with self._table:
            self._awake = [other for other in self._awake if other.remote.alive]
            held_bytes = sum(other.host_bytes for other in (*self._awake, *self._asleep))
            awake_bytes = sum(other.host_bytes for other in self._awake)
            plenty = awake_bytes + bed.host_bytes <= self._bytes_max // 2
            fits = held_bytes + bed.host_bytes <= self._bytes_max
            if not plenty or not fits or bed.host_bytes > self._available_bytes():
                return
            self._awake.append(bed)
        bed.remote.call(Verb.RESERVE)

    def sleep(self, bed: Bed) -> bool:
        """Whether it sleeps now: then it is found by a `wake`. Else it is the caller's to end."""
        if not self.count_max or not bed.remote.alive:
            return False
        with self._table:
            self._falling.append(bed)
        try:
            with self._moving:
                if not self._make_room(bed) or not self._call(bed.remote, Verb.SLEEP):
                    return False
                with self._table:
                    if not self._closed:
                        self._asleep.append(bed)
                    return not self._closed
        finally:
            with self._table:
                self._falling.remove(bed)

    def has(self, kind: Kind) -> bool:
        """Whether one of this kind sleeps, or will soon."""
        with self._table:
            return any(bed.kind == kind for bed in (*self._asleep, *self._falling))

    def wake(self, order: LoadOrder, kind: Kind) -> Bed | None:
        """One that slept, as the instance of the order. None: load it the ordinary way."""
        if not self.has(kind):
            # A load from disk need not wait for what moves.
            return None
        with self._moving:
            # Not before the lock is had: it may just be falling asleep.
            bed = self._take(kind)
            if bed is None:
                return None
            bed.remote.instance_id = order.instance_id
            if self._call(bed.remote, Verb.WAKE, order):
                with self._table:
                    self._awake.append(bed)
                return bed
            bed.remote.end()
            return None

    def evict(self) -> bool:
        """End the one asleep the longest. False when there is none."""
        with self._table:
            bed = self._asleep.pop(0) if self._asleep else None
        if bed is not None:
            bed.remote.end()
        return bed is not None

    def listed(self) -> tuple[HeldModel, ...]:
        """What sleeps, the one asleep the longest first."""
        with self._table:
            kinds = [bed.kind for bed in self._asleep if bed.remote.alive]
        return tuple(
            HeldModel(
                model_id=kind.model.model_id,
                tier=LoadTier.HOST,
                context_tokens_max=kind.context_tokens_max,
            )
            for kind in kinds
        )

    def pids(self) -> list[int]:
        with self._table:
            moved = [] if self._moved is None else [self._moved.pid]
            return [bed.remote.pid for bed in self._asleep] + moved

    def close(self) -> None:
        """End all of them, one that is being moved as well. Nothing sleeps or wakes any more."""
        with self._table:
            self._closed = True
            remotes = [bed.remote for bed in self._asleep]
            remotes += [] if self._moved is None else [self._moved]
            self._asleep.clear()
        for remote in remotes:
            remote.end()

    def _call(self, remote: Remote, verb: Verb, *arguments: object) -> bool:
        """Whether it was done. If not, the process is gone, or the engine is closed."""
        with self._table:
            if self._closed:
                return False
            self._moved = remote
        try:
            remote.call(verb, *arguments, timeout_s=MOVE_S_MAX)
        except MeshError as error:
            log.warning("a %s of %s failed: %s", verb, remote.instance_id, error.message)
            return False
        finally:
            with self._table:
                self._moved = None
        return True

    def _take(self, kind: Kind) -> Bed | None:
        """The one of this kind that fell asleep last."""
        self._let_dead_go()
        with self._table:
            found = next((bed for bed in reversed(self._asleep) if bed.kind == kind), None)
            if found is not None:
                self._asleep.remove(found)
        return found

    def _let_dead_go(self) -> None:
        """Those that died in their sleep take nobody's place."""
        with self._table:
            dead = [bed for bed in self._asleep if not bed.remote.alive]
            self._asleep = [bed for bed in self._asleep if bed not in dead]
        for bed in dead:
            bed.remote.end()

    def _make_room(self, bed: Bed) -> bool:
        """For one more, in the place of others if need be. False when it cannot be had, and then
        others sleep on, unless the host's memory goes meanwhile.
        """
        self._let_dead_go()
        with self._table:
            self._awake = [other for other in self._awake if other.remote.alive]
            has_copy = bed in self._awake
            if has_copy:
                self._awake.remove(bed)
            left_bytes = self._bytes_max - sum(other.host_bytes for other in self._awake)
            asleep_bytes = sum(other.host_bytes for other in self._asleep)
        wanted_bytes = 0 if has_copy else bed.host_bytes
        if bed.host_bytes > left_bytes or wanted_bytes > asleep_bytes + self._available_bytes():
            return False
        while not self._has_room(left_bytes - bed.host_bytes, wanted_bytes):
            if not self.evict():
                return False
        return True

    def _has_room(self, others_bytes_max: int, wanted_bytes: int) -> bool:
        """`wanted_bytes` is what has not been taken of the host yet."""
        with self._table:
            asleep_bytes = sum(bed.host_bytes for bed in self._asleep)
            if len(self._asleep) >= self.count_max or asleep_bytes > others_bytes_max:
                return False
        return wanted_bytes <= self._available_bytes()
