"""One loaded model in its engine process: its requests, its KV blocks, its iterations.

A step reads plan, iterate, append. Owns the sequences and the bound on blocks; vLLM's core, which
`internals` wraps, holds the weights, the block tables and the batch. Calls come one after the
other, from `process`.
"""

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import count, islice

from mesh.domain.errors import EngineError
from mesh.domain.ids import RequestId
from mesh.domain.model import Footprint
from mesh.domain.profile import CountedIteration, IterationShape
from mesh.domain.reasons import FinishReason
from mesh.domain.request import RequestTokens
from mesh.domain.steps import (
    Decode,
    EngineRequest,
    InstanceMemory,
    LoadOrder,
    Prefill,
    PrefixChange,
    StepResult,
)
from mesh.runtime.measurable import check_measurable, made_up_tokens, no_counters
from mesh_nodes.engines.pooling import Pool, pool_of
from mesh_nodes.engines.refusals import check_runnable
from mesh_nodes.engines.vllm.counting import counted
from mesh_nodes.engines.vllm.device import device, free_bytes, total_bytes, virtual_memory
from mesh_nodes.engines.vllm.internals import Core, keep_weights_in_tensors
from mesh_nodes.engines.vllm.kv_mapped import kv_memory
from mesh_nodes.engines.vllm.kv_memory import ElasticKv, KvMemory
from mesh_nodes.engines.vllm.loader import Load, read_ahead
from mesh_nodes.engines.vllm.messages import ProcessOptions, Range
from mesh_nodes.engines.vllm.pooled import pooled_memory
from mesh_nodes.engines.vllm.sampler import sample_order
from mesh_nodes.engines.vllm.turn import Plan, Sequence, plan, sequence_of
from mesh_nodes.engines.vllm.weights import Weights

ITERATION_TOKENS_MAX = 2048
"""Prompt tokens that one iteration can carry; vLLM sets its buffers by it."""
_RANGE_BLOCKS_MIN = 4096
"""Blocks of address space reserved even for small instances: addresses cost nothing."""
MOVED_WAIT_S = 0.01
"""So long a question whether weights have moved keeps other calls of the instance waiting."""


class Instance:
    """What each call does is said at the engine port."""

    def __init__(
        self,
        order: LoadOrder,
        footprint: Footprint,
        options: ProcessOptions,
        where: Range | None = None,
        pool: int | None = None,
    ) -> None:
        """`where`: the parameters stand there, in the host's pool, which has the descriptor `pool`;
        else they are read from the store. Raises EngineError where they are not what is wanted.
        """
        if where is None:
            read_ahead(order.model_path)
        self._order = order
        self._footprint = footprint
        self._keys: Callable[[], str] = map(str, count(1)).__next__
        self._pool = pool_of(order.model, order.model_path)
        """How requests end with a vector; `None`: with text."""
        self._sequences: dict[RequestId, Sequence] = {}
        """In the order of submission; the first `batch_max` take part in a step."""
        self._range_blocks = self._blocks_reserved()
        self._kv_blocks = order.kv_blocks
        self._mover = ThreadPoolExecutor(1, "mesh-swap")
        self._move: Future[None] = Future()
        self._resident = True
        self._extra_blocks = 0
        """May be kept cached beyond those in force."""
        self._prefill_tokens_max = min(order.context_tokens_max, ITERATION_TOKENS_MAX)
        block_bytes = footprint.kv_block_bytes
        driver = virtual_memory() if options.elastic else None
        # An encoder keeps nothing: blocks without bytes.
        self._kv: KvMemory = ElasticKv(0)
        if self._pool is None or not self._pool.whole:
            self._kv = kv_memory(
                options.elastic, driver, block_bytes, order.kv_blocks, device(), free_bytes
            )
        if options.movable:
            keep_weights_in_tensors()
        # CUDA graphs keep the addresses of weights, which come back to where they were.
        places = driver if options.movable else None
        load = Load(watches=options.movable, reads=where is None, driver=places)
        self._core = Core(
            load=load,
            model_path=str(order.model_path),
            dtype=options.dtype,
            context_tokens_max=order.context_tokens_max,
            batch_max=order.batch_max,
            iteration_tokens_max=self._prefill_tokens_max + order.batch_max,
            kv_blocks=self._range_blocks,
            block_tokens=options.block_tokens,
            # It asks for a full context to fit.
            kv_bytes=(footprint.blocks_for(order.context_tokens_max) + 2) * block_bytes,
            kv_source=self._kv,
            graphs=driver is not None and self._pool is None and device().type == "cuda",
            pool=self._pool,
        )
        pooled = None if pool is None else pooled_memory(pool, device())
        self.weights = Weights(self._core.model, device(), pooled, load.beside, load.memory)
        if where is not None:
            self.weights.restore(where)
        self._core.bound(order.kv_blocks, dense=True)
        self._warm()

    def memory(self) -> InstanceMemory:
        return InstanceMemory(
            instance_id=self._order.instance_id,
            weights_bytes=self._footprint.instance_bytes(0) - self.weights.away_bytes,
            kv_blocks=self._kv_blocks,
            kv_blocks_used=self._core.pool.used,
            kv_block_bytes=self._footprint.kv_block_bytes,
            kv_blocks_cached=self._core.pool.cached,
            kv_held_bytes=self._kv.held_bytes,
        )

    def submit(self, request: EngineRequest) -> int:
        """Raises EngineError when the request can never run here."""
        check_runnable(
            self._order.instance_id,
            request,
            known=request.request_id in self._sequences,
            context_tokens_max=self._order.context_tokens_max,
            vocabulary_tokens=self._order.model.vocabulary_tokens,
        )
        draw = sample_order(request)
        sequence = sequence_of(
            request,
            key=self._keys(),
            context_tokens_max=self._order.context_tokens_max,
            told=None if draw is None else draw.told,
            whole=self._pool is not None and self._pool.whole,
        )
        given = [*request.prompt_tokens, *request.output_tokens]
        self._core.add(
            sequence.key,
            given,
            draw,
            salt=request.cache_salt,
            prompt_logprobs=sequence.prompt_top,
        )
        self._sequences[request.request_id] = sequence
        if request.cache_salt is None:
            return 0
        found_tokens = self._core.pool.found_tokens(sequence.key)
        self._adopt(sequence, self._kv_blocks - self._core.pool.used)
        return found_tokens

    def abort(self, request_id: RequestId) -> None:
        sequence = self._sequences.pop(request_id, None)
        if sequence is not None:
            self._core.drop(sequence.key)

    def step(self, prefill: Prefill, decode: Decode = None) -> StepResult:
        start_s = time.perf_counter()
        self._require_resident()
        planned = plan(
            islice(self._sequences.values(), self._order.batch_max),
            prefill=prefill,
            prefill_tokens_max=self._prefill_tokens_max,
            decode=decode,
            blocks_free=self._kv_blocks - self._core.pool.used,
            block_tokens=self._footprint.block_tokens,
            adopt=self._adopt,
        )
        decodes = [work.sequence for work in planned.work if work.sequence.decoding]
        context_tokens = sum(sequence.length for sequence in decodes)
        prefills = [work for work in planned.work if not work.sequence.decoding]
        prefill_tokens = sum(work.tokens for work in prefills)
        past_tokens = sum(work.tokens * work.sequence.computed for work in prefills)
        outputs = self._run(planned)
        return StepResult(
            outputs=outputs,
            prefill_tokens=prefill_tokens,
            prefill_past_tokens=round(past_tokens / max(prefill_tokens, 1)),
            decode_batch=len(decodes),
            context_tokens=context_tokens,
            prefill_left=tuple(
                (request_id, sequence.left)
                for request_id, sequence in self._sequences.items()
                if not sequence.decoding
            ),
            starved=tuple(planned.starved),
            kv_blocks_used=self._core.pool.used,
            elapsed_s=time.perf_counter() - start_s,
        )

    def tell_prefixes(self) -> PrefixChange | None:
        """What has come to the cache and gone from it since it was told last."""
        return self._core.pool.tell()

    def measure(self, shape: IterationShape) -> float:
        """Seconds of one iteration of made-up requests alone, in blocks that are free."""
        self._require_resident()
        check_measurable(
            self._order.instance_id,
            shape,
            context_tokens_max=self._order.context_tokens_max,
            batch_max=self._order.batch_max,
            block_tokens=self._footprint.block_tokens,
            blocks_free=self._kv_blocks - self._core.pool.used,
        )
        work = self._made_up(shape)
        try:
            # Taking the blocks and putting memory under them is no part of the iteration.
            self._kv.back(self._core.reserve(work))
            self._trim()
            start_s = time.perf_counter()
            self._core.iterate(work)
            return time.perf_counter() - start_s
        finally:
            for key in work:
                self._core.drop(key)

    def count(self, shape: IterationShape) -> CountedIteration:
        """The same, with what operators take of it."""
        if device().type != "cpu":
            raise no_counters("the vLLM engine on a GPU")
        with counted(self._core.model) as taken_s:
            elapsed_s = self.measure(shape)
        return CountedIteration(elapsed_s=elapsed_s, operators=tuple(taken_s.items()))

    def resize_kv(self, kv_blocks: int, extra_blocks: int) -> int:
        """Never above the range, which nothing of a full batch could exceed. `extra_blocks`: may
        stay cached beyond that.
        """
        blocks = min(max(kv_blocks, self._core.pool.used, 1), self._range_blocks)
        self._resize(blocks, extra_blocks)
        return blocks

    def keep_beyond(self, extra_blocks: int) -> None:
        """Lets so many blocks be cached beyond those in force from now on."""
        self._resize(self._kv_blocks, extra_blocks)

    def begin_fill(self, where: Range) -> None:
        """See `Weights.fill`; its errors are told by a sleep."""
        self.weights.fill(where)

    def sleep(self, where: Range | None = None) -> None:
        """Drop all requests, give the KV cache back, and hold the weights in the host's memory;
        parameters in this range of its pool, unless they stand in one.

        Whatever it raises, the instance is of no use any more; the same goes for `wake`.
        """
        for request_id in list(self._sequences):
            self.abort(request_id)
        if self._core.pool.used:
            raise EngineError(f"{self._core.pool.used} KV blocks are still in use")
        self._resize(0)
        # What wakes is another instance, of which nobody has been told anything.
        self._core.pool.forget_told()
        self.weights.to_host(where)
        if self.weights.device_bytes:
            raise EngineError(f"{self.weights.device_bytes} bytes are still on the device")

    def wake(self, order: LoadOrder) -> None:
        """Go on as another instance of the same model and limits, with a KV cache of its own."""
        if order.kv_blocks > self._range_blocks:
            raise EngineError(
                f"{order.instance_id} asks for {order.kv_blocks} KV blocks; what sleeps has "
                f"addresses for {self._range_blocks}"
            )
        self._order = order
        if not order.swapped:
            self._move = self._mover.submit(self.weights.to_device)
        # Beside the copy: memory under 1 GB of blocks takes about 30 ms on an H100.
        self._resize(order.kv_blocks)
        if not order.swapped:
            self._move.result()
        self._resident = not order.swapped

    def begin_swap(self, share: float, where: Range | None) -> None:
        """Begin to move weights to the device, or to the host's memory as a sleep does, beside the
        calls that follow. Requests and KV cache stay.
        """
        self._resident = False
        self._move = self._mover.submit(self.weights.move, share, where)

    def has_moved(self) -> bool:
        """Whether the weights are where they were to go; waits for MOVED_WAIT_S. Raises what the
        move has failed with: OutOfMemory leaves them where they were.
        """
        try:
            self._move.result(MOVED_WAIT_S)
        except TimeoutError:
            return False
        finally:
            self._resident = self._move.done() and self.weights.whole
        return True

    def _require_resident(self) -> None:
        if not self._resident:
            raise EngineError(f"{self._order.instance_id} has no weights here: swap it in first")

    def _adopt(self, sequence: Sequence, blocks_free: int) -> int:
        """Before it computes anything it takes what others have computed of its tokens; the blocks
        that are used with that and were not.
        """
        if sequence.request.cache_salt is None or sequence.computed > sequence.adopted:
            return 0
        used = self._core.pool.used
        sequence.adopted = sequence.computed = self._core.pool.adopt(sequence.key, blocks_free)
        return self._core.pool.used - used

    def _run(self, planned: Plan) -> tuple[RequestTokens, ...]:
        """Compute the plan, advance its sequences, let go of those that finish."""
        if not planned.work:
            return ()
        drawn = self._core.iterate({work.sequence.key: work.tokens for work in planned.work})
        self._kv.taken(self._core.taken)
        self._trim()
        outputs = []
        for work in planned.work:
            work.sequence.computed += work.tokens
            work.sequence.prompt_told = self._core.prompt_told.get(work.sequence.key, ())
            if work.sequence.left == 0:
                if self._pool is None:
                    outputs.append(self._advance(work.sequence, drawn[work.sequence.key]))
                else:
                    outputs.append(self._pooled(work.sequence, self._pool))
        return tuple(outputs)

    def _advance(self, sequence: Sequence, token_id: int) -> RequestTokens:
        request = sequence.request
        first, index = not sequence.decoding, sequence.length - len(request.prompt_tokens)
        finish = sequence.append(token_id)
        if finish is not None:
            self.abort(request.request_id)
        return RequestTokens(
            request_id=request.request_id,
            attempt=request.attempt,
            first_index=index,
            token_ids=(token_id,),
            finish=finish,
            logprobs=tuple(sequence.told),
            cached_tokens=sequence.adopted if first else 0,
            prompt_logprobs=sequence.prompt_told,
        )

    def _pooled(self, sequence: Sequence, pool: Pool) -> RequestTokens:
        """Its vector, with which it ends."""
        request = sequence.request
        self.abort(request.request_id)
        return RequestTokens(
            request_id=request.request_id,
            attempt=request.attempt,
            first_index=0,
            token_ids=(0,),
            finish=FinishReason.LENGTH,
            embedding=pool.vector(self._core.vectors[sequence.key], sequence.length),
        )

    def _trim(self) -> None:
        """Blocks that came into use may be others than those that memory is held for."""
        most = self._kv_blocks + self._extra_blocks
        if not self._kv.dense and self._kv.held_bytes > most * self._footprint.kv_block_bytes:
            self._kv.resize(most, self._core.pool.usable(), [], self._core.replace_kv)

    def _resize(self, blocks: int, extra_blocks: int = 0) -> None:
        """Where blocks in force have low numbers, nothing is kept beyond them. Raises OutOfMemory,
        EngineError, and nothing has changed.
        """
        extra_blocks = 0 if self._kv.dense else extra_blocks
        most = blocks + extra_blocks
        self._kv.check_room(most)
        moves = self._core.bound(most, dense=self._kv.dense)
        kept = self._core.pool.kept() if self._kv.dense else self._core.pool.usable()
        try:
            self._kv.resize(most, kept, moves, self._core.replace_kv)
        except EngineError:
            # It was to grow: nobody has taken any of the blocks that it did not get.
            self._core.bound(self._kv_blocks + self._extra_blocks, dense=self._kv.dense)
            raise
        self._kv_blocks, self._extra_blocks = blocks, extra_blocks

    def _made_up(self, shape: IterationShape) -> dict[str, int]:
        """Requests that make an iteration of this shape, and the tokens that each computes in it.

        The chunk is the last one of its prompt: that takes the longest, since a token comes of it.
        """
        work: dict[str, int] = {}
        for number in range(shape.decode_batch):
            work[self._add_made_up(number, shape.decode_context_tokens, 1)] = 1
        if shape.prefill_tokens:
            length = shape.prefill_past_tokens + shape.prefill_tokens
            key = self._add_made_up(shape.decode_batch, length, shape.prefill_tokens)
            work[key] = shape.prefill_tokens
        return work

    def _add_made_up(self, number: int, length: int, left: int) -> str:
        key = self._keys()
        if self._pool is not None and self._pool.whole:
            length = left
        tokens = made_up_tokens(number, length, left, self._order.model.vocabulary_tokens)
        self._core.add(key, list(tokens), None, computed=length - left)
        return key

    def _blocks_reserved(self) -> int:
        """Those that a full batch of full contexts takes, if the device could hold them, or what
        the order asks for. vLLM keeps an object for each.
        """
        useful = self._order.batch_max * self._footprint.blocks_for(self._order.context_tokens_max)
        useful = min(useful, total_bytes() // self._footprint.kv_block_bytes)
        return max(self._order.kv_blocks, useful, _RANGE_BLOCKS_MIN)

    def _warm(self) -> None:
        """One token, which makes the first real step quick."""
        key = self._add_made_up(0, 1, 1)
        self._core.iterate({key: 1})
        self._core.drop(key)
