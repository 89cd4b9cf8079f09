"""Every private part of vLLM that mesh touches: its engine core, its scheduler, its KV tensors; and
its block pool, which `kv_pool` has.

`Core` is one engine in this process, without tokenizer, detokeniser or a scheduling policy of its
own: `TurnScheduler` hands on the plan that it is given. Where releases differ, `differences` does
what the installed one takes; the other private parts are listed in `_TOUCHED`, which is looked at
before the first load. Before: `instance`. After: `kv_pool`, vLLM.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from vllm import PoolingParams, SamplingParams, _custom_ops
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.models import registry
from vllm.platforms import current_platform
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.sched.output import NewRequestData, SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine.core import EngineCore
from vllm.v1.executor import Executor
from vllm.v1.request import Request, RequestStatus
from vllm.v1.worker import gpu_model_runner

from mesh.domain.request import TokenLogprobs
from mesh_nodes.engines.pooling import Pool
from mesh_nodes.engines.sampling import Floats
from mesh_nodes.engines.vllm.differences import KvSource, installed_shape
from mesh_nodes.engines.vllm.kv_pool import NULL_BLOCKS, KvPool, hasher
from mesh_nodes.engines.vllm.loader import FORMAT, LOAD, Load
from mesh_nodes.engines.vllm.pooler import EMBEDS, SCORES, SummingPooler
from mesh_nodes.engines.vllm.sampler import EXTRA, MeshSampler, SampleOrder

_TOKENS_PAST_CONTEXT = 1
"""vLLM keeps the token that a full context yields, too."""
_NO_COMPILER = 0
"""vLLM's compilation mode in which a model runs as it is written."""
_ENCODERS = {"bert": "Bert", "roberta": "Roberta", "xlm-roberta": "XLMRoberta"}
"""How the names of vLLM's classes begin."""


_TOUCHED: tuple[tuple[Any, str], ...] = (
    (Scheduler, "_make_cached_request_data"),
    (Scheduler, "_update_after_schedule"),
    (KVCacheManager, "allocate_slots"),
    (KVCacheManager, "get_block_ids"),
    (KVCacheManager, "get_blocks"),
    (KVCacheManager, "get_computed_blocks"),
    (KVCacheManager, "new_step_starts"),
    (BlockPool, "evict_blocks"),
    (BlockPool, "touch"),
    (EngineCore, "abort_requests"),
    (EngineCore, "add_request"),
    (EngineCore, "step"),
    (gpu_model_runner.GPUModelRunner, "get_model"),
    (registry, "_run_in_subprocess"),
)
"""Private parts that all known releases have."""
_SHAPE = installed_shape()


def check_parts() -> None:
    """Raises RuntimeError, with their names, where an unknown release lacks some of them."""
    lacking = [f"{owner.__name__}.{name}" for owner, name in _TOUCHED if not hasattr(owner, name)]
    if lacking:
        raise RuntimeError(f"this release of vLLM has no {', '.join(lacking)}, which mesh needs")


def register_kernels() -> None:
    """Do now what vLLM does in every worker: go through all modules for kernels that others take
    the place of on this platform. What is forked from here has it, and need not do it again.
    """
    _SHAPE.register_kernels(type(current_platform))


def inspect_models_here() -> None:
    """Have this process look at a model's class itself. vLLM asks another process, which imports
    vLLM for that, so that its own does not begin with CUDA: 26 s of the first load of each
    architecture on an H200, where an engine process begins with CUDA anyway.
    """
    registry._run_in_subprocess = lambda look: look()


class TurnScheduler(Scheduler):  # type: ignore[misc]
    """vLLM's scheduler but for its decisions: `work` says who computes how many tokens."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.work: Mapping[str, int] = {}
        self.taken: list[int] = []
        """Blocks that the last iteration took."""
        self.renumbered: set[str] = set()
        """Requests whose blocks have other numbers than the model runner knows."""

    def reserve(self, work: Mapping[str, int]) -> list[int]:
        """Take the blocks that this iteration would take; which they are."""
        for key, tokens in work.items():
            self._allocate(self.requests[key], tokens)
        manager = self.kv_cache_manager
        return [b for key in work for group in manager.get_block_ids(key) for b in group]

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        self.kv_cache_manager.new_step_starts()
        begun, going, moved, blocks = [], [], [], {}
        self.taken = []
        for key, tokens in self.work.items():
            request = self.requests[key]
            taken = self._allocate(request, tokens)
            self.taken += [block for group in taken.get_block_ids() for block in group]
            blocks[key] = taken
            if request.status == RequestStatus.WAITING:
                self.waiting.remove_request(request)
                request.status = RequestStatus.RUNNING
                self.running.append(request)
                held = self.kv_cache_manager.get_block_ids(key)
                begun.append(NewRequestData.from_request(request, held))
            elif key in self.renumbered:
                blocks[key] = self.kv_cache_manager.get_blocks(key)
                moved.append(request)
            else:
                going.append(request)
        self.renumbered.difference_update(self.work)
        self.renumbered.intersection_update(self.requests)
        work = dict(self.work)
        output = SchedulerOutput(
            scheduled_new_reqs=begun,
            scheduled_cached_reqs=self._make_cached_request_data(going, moved, work, {}, blocks),
            num_scheduled_tokens=work,
            total_num_scheduled_tokens=sum(work.values()),
            scheduled_spec_decode_tokens={},
            scheduled_encoder_inputs={},
            finished_req_ids=self.finished_req_ids,
            free_encoder_mm_hashes=[],
            new_block_ids_to_zero=_SHAPE.ids_to_zero(self),
            **_SHAPE.output_fields(),
        )
        self.prev_step_scheduled_req_ids = set(work)
        self._update_after_schedule(output)
        return output

    def _allocate(self, request: Request, tokens: int) -> Any:
        """Blocks of requests without a salt are never found again. Within a block that it has and
        does not fill there is nothing to do, which vLLM takes 10 µs to see.
        """
        within = request.num_computed_tokens % self.block_size
        runs = request.status == RequestStatus.RUNNING
        if runs and within and within + tokens < self.block_size:
            return self.kv_cache_manager.empty_kv_cache_blocks
        alone = request.cache_salt is None
        taken = self.kv_cache_manager.allocate_slots(request, tokens, delay_cache_blocks=alone)
        if taken is None:
            raise RuntimeError(f"no KV blocks for {tokens} tokens, against the plan")
        return taken


class _Zeros(TorchFunctionMode):  # type: ignore[misc]
    """Has `torch.zeros` of so many bytes come from elsewhere."""

    def __init__(self, make: Callable[[int], torch.Tensor]) -> None:
        super().__init__()
        self._make = make

    def __torch_function__(
        self, function: Any, types: Any, arguments: Any = (), options: Any = None
    ) -> Any:
        options = options or {}
        if function is torch.zeros and options.get("dtype") is torch.int8:
            return self._make(*arguments)
        return function(*arguments, **options)


def rope_within(context_tokens_max: int, config: Any) -> Any:
    """vLLM decides by the longest sequence that it is told of, which is one more than the context,
    which of longrope's factors all sequences take: up to the original context it is to be those
    for short ones.
    """
    rope = getattr(config, "rope_parameters", None) or {}
    original = getattr(config, "original_max_position_embeddings", None)
    original = rope.get("original_max_position_embeddings", original) or 0
    if rope.get("rope_type") == "longrope" and context_tokens_max <= original:
        config.rope_parameters = {**rope, "long_factor": rope["short_factor"]}
        if "short_mscale" in rope:
            config.rope_parameters["long_mscale"] = rope["short_mscale"]
    return config


def pooled_within(context_tokens_max: int, pool: Pool, config: Any) -> Any:
    """By the class that it names vLLM tells whether a model embeds or scores: it makes an embedder
    of a decoder's class that generates text.
    """
    name = config.architectures[0]
    if config.model_type in _ENCODERS:
        # vLLM asks for it, transformers leaves it out, and importers take no other.
        config.position_embedding_type = "absolute"
        kind = "ForSequenceClassification" if pool.scores else "Model"
        name = f"{_ENCODERS[config.model_type]}{kind}"
    elif name.endswith("Model"):
        name = f"{name.removesuffix('Model').removesuffix('Text')}ForCausalLM"
    config.architectures = [name]
    if pool.scores:
        config.num_labels = 1
    return rope_within(context_tokens_max, config)


def graph_rows(batch_max: int) -> list[int]:
    """The batches that have a CUDA graph each; others are padded to the next one."""
    return [*(2**i for i in range(batch_max.bit_length()) if 2**i < batch_max), batch_max]


def keep_weights_in_tensors() -> None:
    """On CPUs vLLM would hand matrices to oneDNN, which packs them out of anybody's reach. Only
    what is loaded afterwards is concerned.
    """
    _custom_ops._supports_onednn = False


def _told(tensors: Any) -> tuple[TokenLogprobs, ...]:
    """vLLM's log-probabilities of a prompt's tokens but the first: a row has the token's own in its
    first column, then those of the likeliest ones.
    """
    ids, logprobs = tensors.logprob_token_ids.tolist(), tensors.logprobs.tolist()
    return tuple(
        TokenLogprobs(
            logprob=min(told[0], 0.0),
            top=tuple((token, min(one, 0.0)) for token, one in zip(row[1:], told[1:], strict=True)),
        )
        for row, told in zip(ids, logprobs, strict=True)
    )


class Core:
    """One engine. `kv_blocks` is the most that it can ever use; requests go by `key`."""

    def __init__(
        self,
        *,
        load: Load,
        model_path: str,
        dtype: str,
        context_tokens_max: int,
        batch_max: int,
        iteration_tokens_max: int,
        kv_blocks: int,
        block_tokens: int,
        kv_bytes: int,
        kv_source: KvSource,
        graphs: bool = False,
        pool: Pool | None = None,
    ) -> None:
        """`kv_bytes` is what vLLM is told that it may take, where it asks. `graphs`: iterations of
        decodes alone are replayed as CUDA graphs. `pool`: each request ends with a vector; the one
        output that its context has room for is never computed.
        """
        self._tokens_max = context_tokens_max + _TOKENS_PAST_CONTEXT
        adapt = partial(rope_within, context_tokens_max)
        if pool is not None:
            self._tokens_max = max(context_tokens_max - 1, 1)
            adapt = partial(pooled_within, context_tokens_max, pool)
        inspect_models_here()
        compiled = {
            "mode": _NO_COMPILER,
            "cudagraph_mode": "FULL_DECODE_ONLY",
            "cudagraph_capture_sizes": graph_rows(batch_max),
        }
        config = EngineArgs(
            model=model_path,
            load_format=FORMAT,
            model_loader_extra_config={LOAD: load},
            skip_tokenizer_init=True,
            dtype=dtype,
            enforce_eager=not graphs,
            compilation_config=compiled if graphs else {},
            max_model_len=self._tokens_max,
            hf_overrides=adapt,
            runner="generate" if pool is None else "pooling",
            max_num_seqs=batch_max,
            max_num_batched_tokens=iteration_tokens_max,
            block_size=block_tokens,
            num_gpu_blocks_override=kv_blocks + NULL_BLOCKS,
            kv_cache_memory_bytes=kv_bytes,
            # Refused above what is free; the KV cache's size is given.
            gpu_memory_utilization=0.01,
            enable_prefix_caching=pool is None or not pool.whole,
            # Layers with a window keep what the others do: blocks are numbered once for all.
            disable_hybrid_kv_cache_manager=True,
            async_scheduling=False,
            disable_log_stats=True,
            use_tqdm_on_load=False,
            seed=0,
            # From 1 on kernels are tuned anew at each load.
            optimization_level=0,
            scheduler_cls=TurnScheduler,
            logits_processors=[MeshSampler] if pool is None else None,
        ).create_engine_config()
        with _SHAPE.kv_from(gpu_model_runner, kv_source, _Zeros):
            self._core = EngineCore(config, Executor.get_class(config), log_stats=False)
        self._scheduler: TurnScheduler = self._core.scheduler
        self._block_tokens = block_tokens
        self.prompt_told: dict[str, tuple[TokenLogprobs, ...]] = {}
        """What was asked about the prompts that the last iteration has completed, by request."""
        self.vectors: dict[str, Floats] = {}
        """Those of the texts that the last iteration has completed, by request: what `Pool.vector`
        takes.
        """
        self.pool = KvPool(self._scheduler)
        self._asked = None if pool is None else SCORES if pool.scores else EMBEDS
        self._types = int(getattr(config.model_config.hf_config, "type_vocab_size", 1))
        if pool is not None and not pool.scores:
            self.model.pooler = SummingPooler(pool)

    @property
    def model(self) -> torch.nn.Module:
        return self._runner().get_model()

    def add(
        self,
        key: str,
        tokens: list[int],
        draw: SampleOrder | None,
        *,
        salt: str | None = None,
        computed: int = 0,
        prompt_logprobs: int | None = None,
    ) -> None:
        """A request whose first `computed` tokens count as being in the cache. What it computes is
        found by others with its salt; without one, by nobody. `prompt_logprobs`: `prompt_told` will
        have those of its tokens, with so many likeliest ones.
        """
        params, pooled = None, None
        if self._asked is not None:
            pooled = PoolingParams(task=self._asked, use_activation=False)
            if self._asked == SCORES and self._types > 1:
                # The last token separates: those after its first occurrence are the document's.
                second = tokens.index(tokens[-1]) + 1
                pooled.extra_kwargs = {"compressed_token_type_ids": second}
        else:
            params = SamplingParams(
                temperature=0.0,
                max_tokens=self._tokens_max,
                ignore_eos=True,
                detokenize=False,
                prompt_logprobs=prompt_logprobs,
                extra_args=None if draw is None else {EXTRA: draw},
            )
        name = hasher(salt, self._block_tokens)
        request = Request(key, tokens, params, pooled, cache_salt=salt, block_hasher=name)
        self._core.add_request(request)
        request.num_computed_tokens = computed

    def drop(self, key: str) -> None:
        """Its blocks are free at once; the model runner forgets it with the next iteration."""
        self._core.abort_requests([key])

    def iterate(self, work: Mapping[str, int]) -> dict[str, int]:
        """Compute so many tokens of each; the next token of those that have no more to compute, or
        its vector in `vectors`.
        """
        self._scheduler.work = work
        answered, _ = self._core.step()
        outputs = [output for answers in answered.values() for output in answers.outputs]
        self.prompt_told = {
            output.request_id: _told(output.new_prompt_logprobs_tensors)
            for output in outputs
            if output.new_prompt_logprobs_tensors is not None
        }
        self.vectors = {
            output.request_id: output.pooling_output.float().numpy()
            for output in outputs
            if output.pooling_output is not None
        }
        return {
            output.request_id: output.new_token_ids[0] for output in outputs if output.new_token_ids
        }

    def reserve(self, work: Mapping[str, int]) -> list[int]:
        """Take the blocks that this iteration would take; which they are."""
        return self._scheduler.reserve(work)

    @property
    def taken(self) -> list[int]:
        """The blocks that the last iteration took."""
        return self._scheduler.taken

    def bound(self, blocks: int, *, dense: bool) -> list[tuple[int, int]]:
        """See `KvPool`."""
        moves = self.pool.bound(blocks, dense=dense)
        self._scheduler.renumbered |= self.pool.renumbered(moves)
        return moves

    def replace_kv(self, old: torch.Tensor, new: torch.Tensor) -> None:
        """Have attention read and write the new one from now on."""
        runner = self._runner()
        for layer in runner.compilation_config.static_forward_context.values():
            if getattr(layer, "kv_cache", None) is old:
                layer.kv_cache = new
        runner.kv_caches[:] = [new if tensor is old else tensor for tensor in runner.kv_caches]

    def _runner(self) -> Any:
        return self._core.model_executor.driver_worker.worker.model_runner
