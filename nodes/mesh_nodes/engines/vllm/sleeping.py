"""Engine processes of unloaded instances, kept with their weights in the host's memory.

Decides which instances sleep and wake, and which are ended: the one asleep the longest, when a
place or the host's memory is needed. Parameters are copied into the node's pool once, beside a
model's first requests if the pool has plenty of memory; an instance whose parameters are there
falls asleep at once. One sleep or wake runs at a time, since they share the bus to the device. If
one fails, the process is ended, and the instance is unloaded or loaded without sleep. Before:
`engine`, at an unload or a load. After: `remote`, `host_pool`.
"""

import logging
import threading
import time
from pathlib import Path

from mesh.domain.errors import EngineError, MeshError, OutOfMemory
from mesh.domain.model import ModelInfo
from mesh.domain.steps import HeldModel, LoadOrder, LoadTier
from mesh.domain.values import dataclass
from mesh_nodes.engines.vllm.host_pool import HostPool, WeightsKey, range_bytes
from mesh_nodes.engines.vllm.messages import Layout, Loaded, ProcessOptions, Range, Verb
from mesh_nodes.engines.vllm.remote import Remote

MOVE_S_MAX = 60.0
"""For a sleep or a wake: 14 GB at a quarter of a GB a second."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class WakeKey:
    """What a load must have in common with an instance that sleeps to be served by waking it."""

    model: ModelInfo
    model_path: Path
    context_tokens_max: int
    batch_max: int
    options: ProcessOptions

    @property
    def weights(self) -> WeightsKey:
        return WeightsKey(model=self.model, model_path=self.model_path, dtype=self.options.dtype)


@dataclass(slots=True, kw_only=True, eq=False)
class SleepSlot:
    """Where a loaded instance could sleep: what it is, and what it would take of the host."""

    key: WakeKey
    loaded: Loaded
    remote: Remote
    pinned: bool = False
    """Its parameters have a range of the pool until its process ends."""

    def moved(self, weights_bytes: int, share: float) -> float:
        """The share of its tensors that is on the device where this share of its footprint's
        `weights_bytes` is. What never moves counts first: an instance has no tensor there before.
        """
        moves_bytes = sum(self.loaded.layout.sizes_bytes) + self.loaded.beside_bytes
        stays_bytes = max(weights_bytes - moves_bytes, 0)
        moves_bytes = weights_bytes - stays_bytes
        return max(weights_bytes * share - stays_bytes, 0.0) / max(moves_bytes, 1)


def wake_key(order: LoadOrder, options: ProcessOptions) -> WakeKey:
    return WakeKey(
        model=order.model,
        model_path=order.model_path,
        context_tokens_max=order.context_tokens_max,
        batch_max=order.batch_max,
        options=options,
    )


class SleepingProcesses:
    """May be called from any thread; `sleep` and `wake` wait for one another."""

    def __init__(self, *, count_max: int, pool: HostPool | None) -> None:
        """Without a pool nothing sleeps."""
        self.count_max = 0 if pool is None else count_max
        self._pool = pool
        self._moving = threading.Lock()
        self._table = threading.Lock()
        """Guards what follows, never a call."""
        self._asleep: list[SleepSlot] = []
        """The one asleep the longest first."""
        self._falling: list[SleepSlot] = []
        """Those that will be asleep soon, or gone."""
        self._moved: Remote | None = None
        self._closed = False

    def reserve(self, slot: SleepSlot) -> None:
        """Have one that has just been loaded put its parameters into the pool already, if there is
        plenty: no more than half for all that are awake.
        """
        if self._pool is None:
            return
        with self._table:
            asleep = [other.remote for other in self._asleep]
        awake_bytes = self._pool.held_bytes(but=asleep)
        if awake_bytes + range_bytes(slot.loaded.layout) > self._pool.bytes_max // 2:
            return
        where = self._place(slot)
        if where is not None:
            slot.remote.call(Verb.FILL, where)

    def sleep(self, slot: SleepSlot) -> bool:
        """Whether it sleeps now: then it is found by a `wake`. Else it is the caller's to end."""
        if not self.count_max or not slot.remote.alive:
            return False
        with self._table:
            self._falling.append(slot)
        try:
            with self._moving:
                if not self._lie_down(slot):
                    return False
                with self._table:
                    if not self._closed:
                        self._asleep.append(slot)
                    return not self._closed
        finally:
            with self._table:
                self._falling.remove(slot)

    def swap(self, slot: SleepSlot, share: float) -> None:
        """Move weights of an instance that stays, between the device and its place in the pool,
        until this share of them is on the device.

        Raises OutOfMemory when there is no room where they are to go, and EngineError when its
        process is gone.
        """
        with self._moving:
            where = None if share >= 1.0 else self._find_place(slot)
            if self._pool is None or not (share >= 1.0 or slot.pinned):
                raise OutOfMemory(
                    f"the host's pool has no place for the weights of {slot.remote.instance_id}",
                    hint="raise --asleep and --asleep-memory",
                )
            self._pool.touch(slot.key.weights)
            self._ask(slot.remote, Verb.SWAP, share, where)
            until_s = time.monotonic() + MOVE_S_MAX
            while not self._ask(slot.remote, Verb.MOVED):
                if time.monotonic() > until_s:
                    slot.remote.end()

    def has(self, key: WakeKey) -> bool:
        """Whether one with this key sleeps, or will soon."""
        with self._table:
            return any(slot.key == key for slot in (*self._asleep, *self._falling))

    def wake(self, order: LoadOrder, key: WakeKey) -> SleepSlot | None:
        """One that slept, as the instance of the order. None: load it the ordinary way."""
        if not self.has(key):
            # A load from disk need not wait for what moves.
            return None
        with self._moving:
            # Not before the lock is had: it may just be falling asleep.
            slot = self._take(key)
            if slot is None:
                return None
            slot.remote.instance_id = order.instance_id
            if self._call(slot.remote, Verb.WAKE, order):
                if self._pool is not None:
                    self._pool.touch(key.weights)
                return slot
            slot.remote.end()
            return None

    def evict(self) -> bool:
        """End the one asleep the longest. False when there is none."""
        with self._table:
            slot = self._asleep.pop(0) if self._asleep else None
        if slot is not None:
            slot.remote.end()
        return slot is not None

    def listed(self) -> tuple[HeldModel, ...]:
        """What sleeps, the one asleep the longest first."""
        with self._table:
            keys = [slot.key for slot in self._asleep if slot.remote.alive]
        return tuple(
            HeldModel(
                model_id=key.model.model_id,
                tier=LoadTier.HOST,
                context_tokens_max=key.context_tokens_max,
            )
            for key in keys
        )

    def close(self) -> None:
        """End all of them, one that is being moved as well. Nothing sleeps or wakes any more."""
        with self._table:
            self._closed = True
            remotes = [slot.remote for slot in self._asleep]
            remotes += [] if self._moved is None else [self._moved]
            self._asleep.clear()
        for remote in remotes:
            remote.end()

    def _call(self, remote: Remote, verb: Verb, *arguments: object) -> bool:
        """Whether it was done. If not, the process is gone, or the engine is closed."""
        try:
            self._ask(remote, verb, *arguments)
        except MeshError as error:
            log.warning("a %s of %s failed: %s", verb, remote.instance_id, error.message)
            return False
        return True

    def _ask(self, remote: Remote, verb: Verb, *arguments: object) -> object:
        """What the process answers. Raises what it refuses with, and EngineError once the engine is
        closed.
        """
        with self._table:
            if self._closed:
                raise EngineError("the engine is closed")
            self._moved = remote
        try:
            return remote.call(verb, *arguments, timeout_s=MOVE_S_MAX)
        finally:
            with self._table:
                self._moved = None

    def _take(self, key: WakeKey) -> SleepSlot | None:
        """The one with this key that fell asleep last."""
        self._end_dead()
        with self._table:
            found = next((slot for slot in reversed(self._asleep) if slot.key == key), None)
            if found is not None:
                self._asleep.remove(found)
        return found

    def _end_dead(self) -> None:
        """Those that died in their sleep take nobody's place."""
        with self._table:
            dead = [slot for slot in self._asleep if not slot.remote.alive]
            self._asleep = [slot for slot in self._asleep if slot not in dead]
        for slot in dead:
            slot.remote.end()

    def _lie_down(self, slot: SleepSlot) -> bool:
        """Whether it sleeps, in the place of others if need be. Where it cannot, others sleep on,
        unless the host's memory goes meanwhile.
        """
        assert self._pool is not None
        self._end_dead()
        if not self._fits(slot):
            return False
        while len(self._asleep) >= self.count_max:
            if not self.evict():
                return False
        where = self._find_place(slot)
        if not slot.pinned:
            return False
        self._pool.touch(slot.key.weights)
        return self._call(slot.remote, Verb.SLEEP, where)

    def _find_place(self, slot: SleepSlot) -> Range | None:
        """A range of the pool, in the place of others that sleep if need be; None where it has one,
        or there is none to be had.
        """
        where = None
        while not slot.pinned:
            where = self._place(slot)
            if where is None and not (self._fits(slot) and self.evict()):
                break
        return where

    def _fits(self, slot: SleepSlot) -> bool:
        """Whether its parameters are or could be in the pool, if all that sleep went."""
        assert self._pool is not None
        with self._table:
            asleep = [other.remote for other in self._asleep]
        return slot.pinned or self._pool.fits(*self._wants(slot), but=asleep)

    def _place(self, slot: SleepSlot) -> Range | None:
        """Its own from now on."""
        assert self._pool is not None
        key, layout, beside_bytes = self._wants(slot)
        where = self._pool.take(key, slot.remote, layout, beside_bytes)
        slot.pinned = where is not None
        return where

    def _wants(self, slot: SleepSlot) -> tuple[WeightsKey, Layout, int]:
        return slot.key.weights, slot.loaded.layout, slot.loaded.beside_bytes
