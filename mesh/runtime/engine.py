"""The engine port: what an iteration computes, behind one narrow protocol.

The node's agent is the only caller. Calls are blocking; the agent makes `submit`, `abort`, `step`,
`measure`, `resize_kv`, `unload` and what moves KV of one engine from a single compute thread, one
after the other, and `prepare`, `load` and `swap` from another thread beside them, so these must not
disturb a step. An engine may allow `unload` beside them, too (`EngineCapabilities.unloads_beside`):
it comes from a third thread then, after all calls for its instance. The simulator's cost model
implements the same protocol and says in `elapsed_s` how long a call took on its own clock.
"""

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Protocol

from mesh.domain.errors import EngineError
from mesh.domain.ids import InstanceId, RequestId
from mesh.domain.messages import InstanceLoaded, KvResized
from mesh.domain.model import Footprint, ModelInfo
from mesh.domain.profile import CountedIteration, IterationShape
from mesh.domain.steps import (
    Decode,
    EngineCapabilities,
    EngineRequest,
    InstanceMemory,
    KvChunk,
    KvHeader,
    LoadOrder,
    LoadTier,
    Prefill,
    PrefixChange,
    StepResult,
)

__all__ = [
    "Ended",
    "Engine",
    "EngineCapabilities",
    "EngineRequest",
    "InstanceMemory",
    "LoadOrder",
    "Progress",
    "StepResult",
    "same_phase",
]

Progress = Callable[[str, float], None]
"""The engine calls it with a phase in words and the share done, 0 to 1. What follows a comma in a
phase tells how far it is, and may be another with every call.
"""
Ended = Callable[[InstanceId, EngineError], None]
"""The engine calls it when a loaded instance has ended by itself, with the reason."""


def same_phase(one: str, other: str) -> bool:
    """Whether they differ in how far it is, at most."""
    return one.partition(", ")[0] == other.partition(", ")[0]


class Engine(Protocol):
    """See the module's text for who calls what from where.

    Expected failures raise EngineError (OutOfMemory where that is why) or ModelError; the engine
    and its other instances stay usable after any of them.
    """

    @property
    def capabilities(self) -> EngineCapabilities: ...

    def watch(self, ended: Ended) -> None:
        """From now on, tell of every loaded instance that ends by itself, from any thread, at once,
        whether a call of it is under way or not. It holds no memory any more; its calls raise
        EngineError until it is unloaded. An instance in the agent's own process never ends so.
        """
        ...

    def footprint(self, model: ModelInfo) -> Footprint:
        """What an instance of the model would take, before it is loaded."""
        ...

    def prepare(self, model: ModelInfo, model_path: Path, progress: Progress) -> None:
        """Write beside the model, once, whatever makes later loads quick. Idempotent and atomic."""
        ...

    def is_prepared(self, model: ModelInfo, model_path: Path) -> bool:
        """Whether `prepare` would find nothing to do. Quick; may raise ModelError as it does."""
        ...

    def tier_of(self, order: LoadOrder) -> LoadTier:
        """From where a load would take the weights now. Quick, and a guess: it may change before
        the load.
        """
        ...

    def load(self, order: LoadOrder, progress: Progress) -> InstanceLoaded:
        """Bring an instance up, ready for its first step, or with its weights out where the order
        has it `swapped`. A load from HOST may come beside another load; of those from DISK there is
        one at a time.
        """
        ...

    def unload(self, instance_id: InstanceId) -> None:
        """Drop the instance with all its requests and give its memory back. Idempotent. Cached KV
        blocks may stay, as far as `bound_memory` allows, for the next load of the deployment with
        the same model and context.
        """
        ...

    def swap(self, instance_id: InstanceId, share: float) -> None:
        """Take weights of an instance off the device, or bring some back, until this share of them
        is there: none or all, unless the engine `swaps_parts`. Its requests, their tokens and its
        KV cache stay as they are; it is not stepped or measured until all of them are there.
        Requests come and go meanwhile, and its KV cache may be resized while it is out, during the
        call only where the engine `swaps_parts`. Called from a thread of its own, one call at a
        time, beside steps of other instances, which it must not disturb. One that is already as
        asked for stays so.

        Raises EngineError when it is not loaded or the engine does not swap, OutOfMemory when there
        is no room for the weights. One that fails to come back stays as it was and can be tried
        again.
        """
        ...

    def submit(self, instance_id: InstanceId, request: EngineRequest) -> int:
        """Queue a request; it takes part from the next step on. Returns how many of its tokens it
        need not compute: they are in the KV cache, and stay for it as far as it may use blocks now.

        Raises EngineError when the id is already there or the request can never fit the context.
        """
        ...

    def abort(self, instance_id: InstanceId, request_id: RequestId) -> None:
        """Drop a request and free its blocks. Unknown ids are ignored: it may just have ended."""
        ...

    def step(
        self, instance_id: InstanceId, prefill: Prefill, iterations: int = 1, decode: Decode = None
    ) -> StepResult:
        """Compute one iteration: one token for every request past its prefill, or for those of them
        that `decode` names, and as many prompt tokens of waiting requests as `prefill` allows. Who
        is not named keeps its tokens and its KV blocks as they are.

        A prompt longer than what is left of the budget is computed in chunks over several steps;
        the chunk that completes it yields its first token. With nothing to do, the result is empty.

        Of more `iterations` each further one is a decode of the same batch; the result has all of
        them. They end early when a request does or lacks a block, and with the first that computes
        prompt tokens.
        """
        ...

    def export_kv(
        self, instance_id: InstanceId, request_id: RequestId, first_block: int, blocks: int
    ) -> tuple[KvHeader, Iterator[KvChunk]]:
        """So many whole KV blocks of a request that runs, from one on: the layout is that of
        `mesh.runtime.kv_layout`. The request goes on, and so do steps between two chunks, each of
        which copies one block. Raises EngineError, also amid the chunks, when the request has not
        computed them, or has gone, and where the engine moves no KV (`kv_format`).
        """
        ...

    def import_kv(
        self,
        instance_id: InstanceId,
        request: EngineRequest,
        header: KvHeader,
        chunks: Iterable[KvChunk],
    ) -> Generator[None, None, int]:
        """Submit a request with the KV blocks of its first tokens, which another instance of the
        same model computed; each step takes one block at most, and other calls may come between
        two. The request takes part in iterations once the steps end, which return how many of its
        tokens it need not compute: fewer where there are not enough free blocks. `abort` and
        closing the steps give it up.

        A step raises EngineError, and then the request is not there, when the blocks are another
        model's or in another layout, are of more tokens than the request may have in the cache, or
        do not come whole and in order. Whoever receives chunks has checked their digests.
        """
        ...

    def measure(self, instance_id: InstanceId, shape: IterationShape) -> float:
        """Compute one iteration of this shape and forget it; seconds that it took.

        Costs what a real iteration of the shape costs, the reads of its KV cache included, whatever
        stands in it; running requests are not disturbed. Raises EngineError, OutOfMemory when the
        free KV blocks do not do for the shape.
        """
        ...

    def count_operators(
        self, instance_id: InstanceId, shape: IterationShape, cores: int | None = None
    ) -> CountedIteration:
        """As `measure`, with what counters tell of each operator: by names of
        `mesh.domain.operators.Role`, all layers together. `cores`: so many compute it; `None`
        stands for all. The first call, or one with other cores, may take as long as a load, and
        memory as an instance of its own, which goes back soon after the last one.

        Raises as `measure`, EngineError where the engine has no counters, or none for a part of
        the cores, OutOfMemory where there is no memory for it.
        """
        ...

    def resize_kv(self, instance_id: InstanceId, kv_blocks: int) -> KvResized:
        """Grow or shrink the KV cache between two steps, and say which blocks are in force then.
        They bound the blocks in use; cached ones may stay beyond them as `bound_memory` allows.

        Running requests keep their tokens. A shrink never goes below the blocks in use. What it
        gives back may leave the device's memory after the call; `memory` says when.
        """
        ...

    def bound_memory(self, memory_bytes: int) -> None:
        """All instances may take so much together, with the KV blocks that are cached beyond the
        sizes in force; until this is called there are none of those. As soon as a load or a resize
        wants what they take they go, the least recently used of all instances first. May be called
        from any thread.
        """
        ...

    def tell_prefixes(self) -> Mapping[InstanceId, PrefixChange]:
        """What has come to and gone from the cache of each instance and was not told in a step's
        result. An unloaded instance that left blocks is told of anew, and tells when they go. For
        the compute thread.
        """
        ...

    def kept_bytes(self) -> int:
        """What the blocks take that unloaded instances left. May be called from any thread."""
        ...

    def memory(self) -> tuple[InstanceMemory, ...]:
        """The books of every loaded instance, ordered by id. May be called from any thread."""
        ...

    def close(self) -> None:
        """Unload everything. The engine cannot be used afterwards."""
        ...
