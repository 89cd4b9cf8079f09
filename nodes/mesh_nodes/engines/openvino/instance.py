"""One loaded model: its compiled graph, its KV cache, and the requests that run in it.

A step reads plan, infer, choose, advance. Owns the sequences and the block pool; calls come one
after the other, from the engine's compute thread, but for `memory`, and for `enter` and `leave`,
by which the compiled graph comes and goes while all else stays.
"""

import threading
import time
from collections.abc import Generator, Iterable, Iterator
from contextlib import contextmanager
from itertools import islice

import numpy as np
import openvino as ov

from mesh.domain.errors import EngineError, OutOfMemory
from mesh.domain.ids import InstanceId, RequestId
from mesh.domain.model import Footprint
from mesh.domain.profile import IterationShape
from mesh.domain.reasons import FinishReason
from mesh.domain.request import RequestTokens, TokenLogprobs
from mesh.domain.steps import Decode, KvChunk, KvHeader, Prefill, PrefixChange
from mesh.domain.values import dataclass, replace
from mesh.memory.cache_budget import CacheBudget
from mesh.memory.kv_blocks import KvBlocks
from mesh.memory.shared_weights import SharedWeights
from mesh.runtime.engine import EngineRequest, InstanceMemory, LoadOrder, StepResult
from mesh.runtime.kv_layout import check_header, check_range, checked_chunks, chunk_of
from mesh.runtime.measurable import check_measurable
from mesh_nodes.engines import host_memory
from mesh_nodes.engines.grammars import constraint_of
from mesh_nodes.engines.openvino.batch import BatchInputs, Plan, Work, plan
from mesh_nodes.engines.openvino.blocks import BlockPlaces
from mesh_nodes.engines.openvino.compilation import CompiledGraph, engine_errors
from mesh_nodes.engines.openvino.footprint import LASTING_TOKENS, Reached
from mesh_nodes.engines.openvino.kv_cache import ElasticKvCache, KvCache, KvResize, bind_kv_cache
from mesh_nodes.engines.openvino.paged_attention import BLOCK_TOKENS
from mesh_nodes.engines.openvino.sequence import Sequence, sequences_of
from mesh_nodes.engines.pooling import pool_of
from mesh_nodes.engines.refusals import check_runnable
from mesh_nodes.engines.sampling import Floats, choose_telling

_RANGE_BLOCKS_MIN = 4096
"""Blocks of address space reserved even for small instances: addresses cost nothing."""


@dataclass(frozen=True, slots=True)
class KeptKv:
    """Implements `mesh.memory.kept_caches.KvCache`: what an unloaded instance has left."""

    cache: ElasticKvCache
    places: BlockPlaces
    pool: KvBlocks

    @property
    def held_bytes(self) -> int:
        return self.cache.held_bytes

    def suits(self, graph: CompiledGraph, range_blocks: int) -> bool:
        """Whether an instance with so many blocks may compute with it."""
        return self.places.total >= range_blocks and self.cache.suits(graph.model)

    def close(self) -> None:
        self.pool.close()
        self.cache.close()


@dataclass(frozen=True, slots=True)
class Bound:
    """A compiled graph, and what an instance computes with it by."""

    graph: CompiledGraph
    request: ov.InferRequest
    inputs: BatchInputs


class Instance:
    """When OpenVINO fails in a step, EngineError leaves it and the step can be repeated."""

    def __init__(
        self,
        order: LoadOrder,
        graph: CompiledGraph | None,
        *,
        footprint: Footprint,
        budget: CacheBudget,
        kv_resize: KvResize = KvResize.ELASTIC,
        kept: "KeptKv | None" = None,
    ) -> None:
        """Without a graph it has no weights until it enters one. `footprint`: as booked without a
        context limit. `budget` bounds what stays cached in all instances. `kept`: what an earlier
        instance has left, with the blocks of the order in force.

        Raises OutOfMemory or EngineError.
        """
        self.order = order
        self.instance_id: InstanceId = order.instance_id
        self._vocabulary_tokens = order.model.vocabulary_tokens
        self._model_path = order.model_path
        self._context_tokens_max = order.context_tokens_max
        self._batch_max = order.batch_max
        self._stated = footprint
        self._booked = footprint = footprint.at_context(order.context_tokens_max)
        self.model = order.model
        self.reached = Reached()
        self._vectors = pool_of(order.model, order.model_path)
        """How requests end with vectors; `None` where they generate text."""
        self._budget = budget
        self._bound: Bound | None = None
        self._running = threading.Lock()
        """It is held while the instance computes, and while what it computes with changes."""
        self._binding = threading.Lock()
        """Guards the cache's memory while a request is bound to it."""
        self._closed = False
        blocks_useful = order.batch_max * -(-order.context_tokens_max // BLOCK_TOKENS)
        # Each claim looks through the whole range: seconds where a context of millions had all.
        blocks_held_max = host_memory.total_bytes() // footprint.kv_block_bytes
        useful = min(blocks_useful, blocks_held_max)
        self._range_blocks = max(order.kv_blocks, useful, _RANGE_BLOCKS_MIN)
        self._kv_resize = kv_resize
        self._cache: KvCache | None = None
        """How keys and values are kept is known once the model has been compiled."""
        if kept is not None and (graph is None or not kept.suits(graph, self._range_blocks)):
            kept.close()
            kept = None
        if kept is None:
            self._places = BlockPlaces(None, blocks=order.kv_blocks, total=self._range_blocks)
            self._pool = KvBlocks(
                order.kv_blocks,
                self._places,
                budget,
                block_bytes=footprint.kv_block_bytes,
            )
        else:
            self._cache, self._places, self._pool = kept.cache, kept.places, kept.pool
            self._range_blocks = kept.places.total
            with budget.lock:
                self._places.resize(order.kv_blocks, self._places.taken())
        budget.end_load(self.instance_id)
        self.found = self._pool.begin_again(0, None)
        """Digests of the keys of what the earlier instance has left."""
        self._sequences: dict[RequestId, Sequence] = {}
        """In the order of submission; the first `batch_max` take part in a step."""
        self._coming: dict[RequestId, Sequence] = {}
        """Those whose blocks are being imported: no step takes them yet."""
        self._books = self._count()
        try:
            if graph is not None:
                self.enter(graph)
        except BaseException:
            # The room would count it on, and spare no memory for others' cached blocks.
            self.close()
            raise

    @property
    def footprint(self) -> Footprint:
        return replace(self._booked, kv_block_bytes=self._pool.block_bytes)

    @property
    def tables_bytes(self) -> int:
        """The bytes of its rope tables."""
        return self._booked.context_token_bytes * self._context_tokens_max

    def memory(self) -> InstanceMemory:
        """As of the last call that changed it, whole, from whatever thread; but pages that go back
        by and by are counted as of now.
        """
        return replace(
            self._books,
            weights_bytes=self._pool.weights_bytes,
            kv_block_bytes=self._pool.block_bytes,
            kv_blocks_cached=self._pool.cached,
            kv_held_bytes=self._held_bytes,
        )

    @property
    def _held_bytes(self) -> int:
        return 0 if self._cache is None else self._cache.held_bytes

    @property
    def resident(self) -> bool:
        """Whether its weights are there, and it can compute."""
        return self._bound is not None

    @property
    def shared_weights(self) -> SharedWeights | None:
        """The weights that this instance shares with all that run the same compiled graph."""
        return self._pool.shared

    def shares_with(self, other: "Instance") -> bool:
        """Whether both run now what was compiled once."""
        mine, theirs = self._bound, other._bound
        return mine is not None and theirs is not None and mine.graph is theirs.graph

    @property
    def graph(self) -> CompiledGraph | None:
        """What it computes with while its weights are there."""
        return None if self._bound is None else self._bound.graph

    def twin(self, graph: CompiledGraph) -> "Instance":
        """The smallest instance of the same model over another compiled model, in no budget. Raises
        as `__init__`.
        """
        order = replace(self.order, kv_blocks=1, batch_max=1)
        return Instance(order, graph, footprint=self._stated, budget=CacheBudget())

    def move_to(self, graph: CompiledGraph) -> None:
        """Compute from the next iteration on with another compiled model of the same, which has
        run. May be called from any thread; waits for the iteration under way. Nothing happens to
        one that has left or is closed. Raises RuntimeError as OpenVINO does.
        """
        request = graph.model.create_infer_request()
        bound = Bound(graph, request, BatchInputs(graph.model, request))
        with self._running, self._binding:
            if self._bound is None or self._closed:
                return
            self._bind_cache(graph, request)
            self._bound, self.reached = bound, Reached()
            self._hold(self._booked.weights_bytes, self._share_of(graph))

    def bound_beside(self, graph: CompiledGraph) -> Bound:
        """Another compiled model of the same, once it has run, for `measure` alone. Raises
        RuntimeError as OpenVINO does.
        """
        request = graph.model.create_infer_request()
        bound = Bound(graph, request, BatchInputs(graph.model, request))
        with self._running, self._lent_to(bound), graph.first_run():
            bound.inputs.bind([])
            request.infer(share_outputs=True)
        return bound

    @contextmanager
    def _lent_to(self, bound: Bound) -> Iterator[Bound]:
        """A block in which this computes in its KV cache, if it is not what does so anyway."""
        own = self._require_bound()
        if bound is own:
            yield bound
            return
        with self._binding:
            self._bind_cache(bound.graph, bound.request)
        try:
            yield bound
        finally:
            with self._binding:
                self._bind_cache(own.graph, own.request)

    def leave(self) -> None:
        """Let the compiled graph go. Requests and KV cache stay as they are."""
        with self._running:
            self._bound = None
            if self._cache is not None:
                self._cache.unbind()
            self._hold(0, None)

    def enter(self, graph: CompiledGraph) -> None:
        """Compute with this graph from now on, once it has run: the first real step is quick then.

        Raises EngineError when the instance was unloaded meanwhile, OutOfMemory when the KV cache
        cannot be had, and RuntimeError as OpenVINO does. Then it is as it was before.
        """
        request = graph.model.create_infer_request()
        bound = Bound(graph, request, BatchInputs(graph.model, request))
        try:
            with self._binding:
                if self._closed:
                    raise EngineError(f"instance {self.instance_id} was unloaded meanwhile")
                self._bind_cache(graph, request)
            stated = replace(self._stated, context_token_bytes=graph.context_token_bytes)
            self._booked = stated.at_context(self._context_tokens_max)
            self.reached = Reached()
            self._hold(self._booked.weights_bytes, self._share_of(graph))
            self._warm(bound)
        except BaseException:
            self.leave()
            raise

    def submit(self, request: EngineRequest) -> int:
        """See the engine port. Raises EngineError when the request can never run here."""
        known = self._sequences.get(request.request_id)
        again = known is not None and not (known.paused or request.paused)
        self._check(request, known=again or request.request_id in self._coming)
        if known is not None:
            known.go_on(request)
            return known.computed
        self._sequences[request.request_id] = sequence = self._sequence(request)
        found_tokens = sequence.found_tokens(self._pool)
        sequence.adopt(self._pool)
        return found_tokens

    def export_kv(
        self, request_id: RequestId, first_block: int, blocks: int
    ) -> tuple[KvHeader, Iterator[KvChunk]]:
        """See the engine port."""
        sequence = self._sequences.get(request_id)
        computed = 0 if sequence is None else sequence.computed
        check_range(request_id, first_block, blocks, computed // BLOCK_TOKENS)

        def chunks() -> Iterator[KvChunk]:
            for block in range(first_block, first_block + blocks):
                if sequence is None or self._sequences.get(request_id) is not sequence:
                    raise EngineError(f"request {request_id} has gone from {self.instance_id}")
                # Where it lies is looked up each time: a resize may have moved it.
                yield chunk_of(block, self._kv_cache().read(sequence.block_at(block)))

        return self._header(first_block, blocks), chunks()

    def import_kv(
        self, request: EngineRequest, header: KvHeader, chunks: Iterable[KvChunk]
    ) -> Generator[None, None, int]:
        """See the engine port."""
        request_id = request.request_id
        tokens = check_header(header, self._header(0, 0), request)
        self._check(request, known=request_id in self._sequences or request_id in self._coming)
        self._coming[request_id] = sequence = self._sequence(request)
        try:
            sequence.adopt(self._pool)
            held = sequence.computed
            came = sequence.reserve(max(tokens - held, 0), self._pool)
            self._books = self._count()
            for block, pages in enumerate(checked_chunks(header, chunks)):
                if self._coming.get(request_id) is not sequence:
                    raise EngineError(f"request {request_id} has gone from {self.instance_id}")
                if held <= block * BLOCK_TOKENS < held + came:
                    # Where it lies is looked up each time: a resize may have moved it.
                    self._kv_cache().write(sequence.block_at(block), pages)
                yield
        except BaseException:
            if self._coming.get(request_id) is sequence:
                self.abort(request_id)
            raise
        if self._coming.pop(request_id, None) is not sequence:
            raise EngineError(f"request {request_id} has gone from {self.instance_id}")
        sequence.advance(came, self._pool)
        self._sequences[request_id] = sequence
        self._books = self._count()
        return sequence.computed

    def _check(self, request: EngineRequest, *, known: bool) -> None:
        """Raises EngineError when the request can never run here."""
        check_runnable(
            self.instance_id,
            request,
            known=known,
            context_tokens_max=self._context_tokens_max,
            vocabulary_tokens=self._vocabulary_tokens,
        )

    def _kv_cache(self) -> KvCache:
        """Raises EngineError where it has not been on the device yet."""
        if self._cache is None:
            raise EngineError(f"instance {self.instance_id} has no KV cache yet")
        return self._cache

    def _header(self, first_block: int, blocks: int) -> KvHeader:
        model = self.model
        return KvHeader(
            model_id=model.model_id,
            layout=self._kv_cache().layout,
            context_tokens_max=self._context_tokens_max,
            block_tokens=BLOCK_TOKENS,
            layers=model.layers,
            kv_heads=model.kv_heads,
            head_size=model.head_size,
            block_bytes=self._pool.block_bytes,
            first_block=first_block,
            blocks=blocks,
        )

    def abort(self, request_id: RequestId) -> None:
        coming = self._coming.pop(request_id, None)
        sequence = self._sequences.pop(request_id, coming)
        if sequence is not None:
            sequence.release(self._pool)
            if not (self._sequences or self._coming) and self._cache is not None:
                self._cache.rest(self._places.taken())
            self._books = self._count()

    def step(self, prefill: Prefill, decode: Decode = None) -> StepResult:
        """One iteration; see the engine port. What it did to prefixes is told when asked."""
        self._require_bound()
        start_s = time.perf_counter()
        active = list(islice(self._sequences.values(), self._batch_max))
        planned = plan(active, prefill, self._pool, decode)
        decodes = [work.sequence for work in planned.work if work.sequence.decoding]
        context_tokens = sum(sequence.computed + 1 for sequence in decodes)
        prefills = [work for work in planned.work if not work.sequence.decoding]
        prefill_tokens = sum(work.tokens for work in prefills)
        past_tokens = sum(work.tokens * work.sequence.computed for work in prefills)
        with self._running:
            outputs = self._run(self._require_bound(), planned)
        self._books = self._count()
        return StepResult(
            outputs=outputs,
            prefill_tokens=prefill_tokens,
            prefill_past_tokens=round(past_tokens / max(prefill_tokens, 1)),
            decode_batch=len(decodes),
            context_tokens=context_tokens,
            prefill_left=tuple(
                (sequence.request_id, sequence.computable)
                for sequence in self._sequences.values()
                if not sequence.decoding and sequence.computable
            ),
            starved=tuple(sequence.request_id for sequence in planned.starved),
            kv_blocks_used=self._pool.used,
            elapsed_s=time.perf_counter() - start_s,
        )

    def tell_prefixes(self) -> PrefixChange | None:
        """See the engine port."""
        return self._pool.tell()

    def measure(self, shape: IterationShape, by: Bound | None = None) -> float:
        """Seconds of one iteration; see the engine port. It is one of made-up sequences alone, in
        blocks that are free; the books, which other threads read, never show them. `by`: computed
        by that in place of its own.
        """
        self._require_bound()
        assert self._cache is not None
        check_measurable(
            self.instance_id,
            shape,
            context_tokens_max=self._context_tokens_max,
            batch_max=self._batch_max,
            block_tokens=BLOCK_TOKENS,
            blocks_free=self._pool.free,
        )
        active = sequences_of(shape, self._vocabulary_tokens)
        try:
            for sequence in active:
                sequence.reserve(sequence.left, self._pool)
                self._cache.back(np.array(sequence.blocks(), np.int64))
            planned = plan(active, shape.prefill_tokens, self._pool)
            with self._running, self._lent_to(by or self._require_bound()) as bound:
                start_s = time.perf_counter()
                self._run(bound, planned, measured=True)
                return time.perf_counter() - start_s
        finally:
            for sequence in active:
                sequence.release(self._pool)

    def resize_kv(self, kv_blocks: int) -> int:
        """See the engine port. Never above the range reserved at load, where no request of a full
        batch could use more.
        """
        blocks = min(max(kv_blocks, self._pool.used, 1), self._range_blocks)
        with self._running, self._budget.lock:
            before = self._pool.blocks
            self._pool.resize(blocks)
            cache, in_use = self._cache, self._places.taken()
            dense = cache is not None and cache.dense
            places = self._places.places_below(blocks) if dense else in_use
            try:
                if cache is not None:
                    cache.resize(blocks, in_use, places)
            except OutOfMemory:
                self._pool.resize(before)
                raise
            if not np.array_equal(in_use, places):
                renumbered = np.arange(self._range_blocks, dtype=np.int32)
                renumbered[in_use] = places
                for sequence in (*self._sequences.values(), *self._coming.values()):
                    sequence.move(renumbered)
                self._pool.move(dict(zip(in_use.tolist(), places.tolist(), strict=True)))
            self._places.resize(blocks, places)
        self._books = self._count()
        return blocks

    def leave_blocks(self) -> "KeptKv | None":
        """Drop all requests, and leave what is cached to the next instance, as far as the budget
        allows. `None` where nothing is left; all pages are back then.
        """
        for request_id in (*self._sequences, *self._coming):
            self.abort(request_id)
        cache = self._cache
        if isinstance(cache, ElasticKvCache) and not cache.dense:
            with self._binding, self._budget.lock:
                self._pool.outlive()
                taken = self._places.taken()
                if taken.size:
                    self._closed = True
                    self._places.resize(0, taken)
                    cache.keep(taken)
                    return KeptKv(cache, self._places, self._pool)
        self.close()
        return None

    def close(self) -> None:
        """Drop all requests and give the KV cache's pages back."""
        with self._binding:
            self._closed = True
            self._sequences.clear()
            self._coming.clear()
            if self._cache is not None:
                self._cache.close()
            self._pool.close()

    def _bind_cache(self, graph: CompiledGraph, request: ov.InferRequest) -> None:
        """The first graph says how the cache is made, for whatever size is in force."""
        if self._cache is not None:
            self._cache.bind(graph.model, request)
            return
        with self._budget.lock:
            self._cache = self._places.cache = bind_kv_cache(
                self._kv_resize,
                graph.model,
                request,
                blocks=self._pool.blocks,
                range_blocks=self._range_blocks,
            )
            self._pool.block_bytes = self._cache.block_bytes
            self._pool.overflows = not self._cache.dense

    def _require_bound(self) -> Bound:
        if self._bound is None:
            raise EngineError(f"instance {self.instance_id} has no weights here: swap it in first")
        return self._bound

    def _share_of(self, graph: CompiledGraph) -> SharedWeights:
        return SharedWeights(key=id(graph), size_bytes=self._booked.shared_bytes)

    def _hold(self, weights_bytes: int, shared: SharedWeights | None) -> None:
        """Sets what the books say of its weights."""
        with self._budget.lock:
            self._pool.weights_bytes, self._pool.shared = weights_bytes, shared

    def _count(self) -> InstanceMemory:
        return InstanceMemory(
            instance_id=self.instance_id,
            weights_bytes=self._pool.weights_bytes,
            kv_blocks=self._pool.blocks,
            kv_blocks_used=self._pool.used,
            kv_block_bytes=self._pool.block_bytes,
            kv_blocks_cached=self._pool.cached,
            kv_held_bytes=self._held_bytes,
        )

    def _run(
        self, bound: Bound, planned: Plan, *, measured: bool = False
    ) -> tuple[RequestTokens, ...]:
        """Compute the plan, advance its sequences, let go of those that finish. No vectors are made
        of what is `measured`.
        """
        if not planned.work:
            return ()
        with engine_errors(f"instance {self.instance_id} failed in a step"):
            bound.inputs.bind(planned.work, pools=self._vectors is not None and not measured)
            bound.request.infer(share_outputs=True)
            logits = bound.request.get_output_tensor(0).data
        yielding = [work for work in planned.work if work.yields]
        tokens = sum(work.tokens for work in planned.work)
        if self._vectors is not None and measured:
            self._note(bound, planned.work, tokens, len(yielding))
            return ()
        if self._vectors is not None:
            return self._pooled(bound, planned.work, logits.reshape(-1, logits.shape[-1]))
        # An IR may pad its head beyond the vocabulary.
        logits = logits.reshape(-1, logits.shape[-1])[:, : self._vocabulary_tokens]
        rows = len(yielding)
        for work in planned.work:
            if told := work.prompt_rows:
                work.sequence.tell_prompt(logits[rows : rows + told])
                rows += told
        chosen = choose_telling(
            logits[: len(yielding)], [work.sequence.draw() for work in yielding]
        )
        self._note(bound, planned.work, tokens, rows)
        return tuple(
            self._advance(work, token_id, logprobs)
            for work, (token_id, logprobs) in zip(yielding, chosen, strict=True)
        )

    def _note(self, bound: Bound, done: list[Work], tokens: int, rows: int) -> None:
        """An iteration of so many tokens, of which so many rows came out, is over."""
        if tokens not in self.reached.sizes:
            bound.graph.release_read()
        self.reached.note(tokens, rows)
        if tokens > LASTING_TOKENS:
            bound.graph.release_activations()
            self.reached.note_release()
        for work in done:
            work.sequence.advance(work.tokens, self._pool)

    def _pooled(self, bound: Bound, done: list[Work], states: Floats) -> tuple[RequestTokens, ...]:
        """The vectors of those that are computed whole now, which end with them; `states` [rows,
        width] are the hidden states that were asked for.
        """
        ended, rows = [], 0
        for work in done:
            if needed := len(work.sequence.pooled_rows(work.tokens)):
                work.sequence.add_states(states[rows : rows + needed])
                rows += needed
            if work.yields:
                ended.append(work.sequence)
        self._note(bound, done, sum(work.tokens for work in done), rows)
        outputs = tuple(
            RequestTokens(
                request_id=sequence.request_id,
                attempt=sequence.attempt,
                first_index=0,
                token_ids=(0,),
                finish=FinishReason.LENGTH,
                embedding=sequence.vector(),
            )
            for sequence in ended
        )
        for sequence in ended:
            self.abort(sequence.request_id)
        return outputs

    def _advance(
        self, work: Work, token_id: int, logprobs: tuple[TokenLogprobs, ...]
    ) -> RequestTokens:
        sequence = work.sequence
        first, sequence.decoding = not sequence.decoding, True
        index, finish = sequence.append(token_id)
        if finish is not None:
            self.abort(sequence.request_id)
        return RequestTokens(
            request_id=sequence.request_id,
            attempt=sequence.attempt,
            first_index=index,
            token_ids=(token_id,),
            finish=finish,
            logprobs=logprobs,
            cached_tokens=sequence.adopted_tokens if first else 0,
            prompt_logprobs=() if index else tuple(sequence.prompt_logprobs),
        )

    def _sequence(self, request: EngineRequest) -> Sequence:
        return Sequence(
            request,
            context_tokens_max=self._context_tokens_max,
            vocabulary_tokens=self._vocabulary_tokens,
            constraint=constraint_of(request, self._model_path, self._vocabulary_tokens),
            pool=self._vectors,
        )

    def _warm(self, bound: Bound) -> None:
        """Compute one token of nobody's. It touches neither sequences nor blocks: requests may come
        and go meanwhile.
        """
        with bound.graph.first_run():
            bound.inputs.bind([])
            bound.request.infer(share_outputs=True)
        self.reached.note(1, 1)
        self._bound = bound
