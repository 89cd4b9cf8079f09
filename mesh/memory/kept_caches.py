"""The cached KV blocks that unloaded instances leave, until their deployments are loaded again.

They stay in memory that nobody has been promised, as cached blocks beyond the sizes in force do:
`cache_budget` frees the oldest of all first. The next instance of the deployment takes them over
where it has the same model and context. Before: an engine's unloads. After: its loads.
"""

from collections.abc import Hashable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import field
from typing import Generic, Protocol, TypeVar

from mesh.domain.ids import DeploymentName, InstanceId
from mesh.domain.limits import KEPT_CACHES_MAX
from mesh.domain.steps import LoadOrder, PrefixChange
from mesh.domain.values import dataclass
from mesh.memory.block_keys import CachedDigests, digest_of
from mesh.memory.kv_blocks import KvBlocks


class KvCache(Protocol):
    """Blocks with the memory under them, and no instance."""

    @property
    def pool(self) -> KvBlocks: ...
    @property
    def held_bytes(self) -> int:
        """What they take of the node's memory."""
        ...

    def close(self) -> None:
        """Give all of it back."""
        ...


Cache = TypeVar("Cache", bound=KvCache)


@dataclass(frozen=True, slots=True)
class _Kept(Generic[Cache]):
    instance_id: InstanceId
    like: Hashable
    """What the next instance must equal."""
    cache: Cache


@dataclass(slots=True)
class KeptCaches(Generic[Cache]):
    """At most one for each deployment, and `KEPT_CACHES_MAX` of a node. `lock` guards them where
    several threads come.
    """

    lock: AbstractContextManager[object] = field(default_factory=nullcontext)
    _kept: dict[DeploymentName, _Kept[Cache]] = field(default_factory=dict)
    """By deployment, the one unloaded last at the end."""
    _gone: dict[InstanceId, CachedDigests] = field(default_factory=dict)
    """What has not been told yet of those that were dropped: at most KEPT_CACHES_MAX of them."""

    @property
    def held_bytes(self) -> int:
        with self.lock:
            return sum(kept.cache.held_bytes for kept in self._kept.values())

    def put(self, order: LoadOrder, cache: Cache) -> None:
        """An instance that was loaded so has left this."""
        with self.lock:
            dropped = self._drop(order.deployment, but=cache.pool)
            self._kept[order.deployment] = _Kept(order.instance_id, _like(order), cache)
            emptied = [name for name, kept in self._kept.items() if not kept.cache.pool.cached]
            beyond = len(self._kept) - len(emptied) - KEPT_CACHES_MAX
            oldest = [name for name in self._kept if name not in emptied][: max(beyond, 0)]
            dropped += [cache for name in (*emptied, *oldest) for cache in self._drop(name)]
        _close(dropped)

    def take(self, order: LoadOrder) -> Cache | None:
        """What an instance that is being loaded finds, with the blocks of the order in force from
        now on. What is of no use to it goes.
        """
        with self.lock:
            kept = self._kept.get(order.deployment)
            if kept is None:
                return None
            if kept.like == _like(order) and kept.cache.pool.cached:
                del self._kept[order.deployment]
                kept.cache.pool.resize(order.kv_blocks)
                return kept.cache
            dropped = self._drop(order.deployment)
        _close(dropped)
        return None

    def tell(self) -> dict[InstanceId, PrefixChange]:
        """What has come and gone since this was told last, by the instances that left it."""
        with self.lock:
            told = [(instance_id, gone.tell()) for instance_id, gone in self._gone.items()]
            self._gone = {i: self._gone[i] for i, change in told if change is not None}
            told += [(k.instance_id, k.cache.pool.tell()) for k in self._kept.values()]
            return {instance_id: change for instance_id, change in told if change is not None}

    def close(self) -> None:
        with self.lock:
            dropped = [cache for name in tuple(self._kept) for cache in self._drop(name)]
            self._gone.clear()
        _close(dropped)

    def _drop(self, deployment: DeploymentName, but: KvBlocks | None = None) -> list[Cache]:
        """What is to be closed once the lock is free, which may take long. Its keys have gone,
        `but` those that the next one of the deployment has.
        """
        kept = self._kept.pop(deployment, None)
        if kept is None:
            return []
        stays = set() if but is None else {digest_of(key) for key, _ in but.named()}
        gone = self._gone[kept.instance_id] = CachedDigests()
        while (change := kept.cache.pool.tell()) is not None:
            for digest in change.went:
                gone.went(digest)
        for key, _ in kept.cache.pool.named():
            if (digest := digest_of(key)) not in stays:
                gone.went(digest)
        for instance_id in tuple(self._gone)[:-KEPT_CACHES_MAX]:
            del self._gone[instance_id]
        return [kept.cache]


def _close(caches: Iterable[KvCache]) -> None:
    for cache in caches:
        cache.close()


def _like(order: LoadOrder) -> Hashable:
    return order.model.model_id, order.context_tokens_max
