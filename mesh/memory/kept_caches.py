"""The cached KV blocks that unloaded instances leave, until their deployments are loaded again.

They stay in memory that nobody has been promised, as cached blocks beyond the sizes in force do:
`cache_budget` frees the oldest of all first. The next instance of the deployment takes them over
where it has the same model and context. Before: an engine's unloads. After: its loads.
"""

from collections.abc import Hashable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

from mesh.domain.ids import DeploymentName, InstanceId
from mesh.domain.limits import KEPT_CACHES_MAX
from mesh.domain.steps import LoadOrder, PrefixChange
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

    @property
    def held_bytes(self) -> int:
        with self.lock:
            return sum(kept.cache.held_bytes for kept in self._kept.values())

    def put(self, order: LoadOrder, cache: Cache) -> None:
        """An instance that was loaded so has left this."""
        with self.lock:
            self._drop(order.deployment)
            self._kept[order.deployment] = _Kept(order.instance_id, _like(order), cache)
            emptied = [name for name, kept in self._kept.items() if not kept.cache.pool.cached]
            beyond = len(self._kept) - len(emptied) - KEPT_CACHES_MAX
            oldest = [name for name in self._kept if name not in emptied][: max(beyond, 0)]
            for name in (*emptied, *oldest):
                self._drop(name)

    def take(self, order: LoadOrder) -> Cache | None:
        """What an instance that is being loaded finds, with the blocks of the order in force from
        now on. What is of no use to it goes.
        """
        with self.lock:
            kept = self._kept.pop(order.deployment, None)
        if kept is None:
            return None
        if kept.like != _like(order) or not kept.cache.pool.cached:
            kept.cache.close()
            return None
        kept.cache.pool.resize(order.kv_blocks)
        return kept.cache

    def tell(self) -> dict[InstanceId, PrefixChange]:
        """What has come and gone since this was told last, by the instances that left it."""
        with self.lock:
            told = ((k.instance_id, k.cache.pool.tell()) for k in self._kept.values())
            return {instance_id: change for instance_id, change in told if change is not None}

    def close(self) -> None:
        with self.lock:
            for name in tuple(self._kept):
                self._drop(name)

    def _drop(self, deployment: DeploymentName) -> None:
        kept = self._kept.pop(deployment, None)
        if kept is not None:
            kept.cache.close()


def _like(order: LoadOrder) -> Hashable:
    return order.model.model_id, order.context_tokens_max
