"""What an engine is given and gives back: the values that cross the engine port."""

from collections.abc import Callable, Container, Sequence
from enum import StrEnum
from pathlib import Path

from mesh.domain.ids import DeploymentName, InstanceId, ModelId, RequestId
from mesh.domain.limits import BATCH_MAX
from mesh.domain.model import ModelInfo
from mesh.domain.profile import IterationShape
from mesh.domain.ranges import Rate, Seconds
from mesh.domain.request import RequestTokens, SamplingParams
from mesh.domain.values import dataclass, replace


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineCapabilities:
    """What an engine can do beyond serving."""

    name: str
    version: str
    resize_kv: bool
    """A shrink gives memory back. Without it, one only bounds the blocks in use."""
    variant: str = ""
    """What decides how long its iterations take, where that is not as the version has it by itself.
    """
    shares_weights: bool = False
    """A load of a model that an instance with the same context limit runs takes its weights, of
    which there is one copy whatever is loaded and unloaded: see `Footprint.shared_bytes`.
    """
    as_published: bool = False
    """It holds and multiplies weights as they were published, whatever precision is asked for."""
    embeds: bool = False
    """It computes what a deployment's task asks for; without it, text alone."""
    busy_load_factor: float = 1.0
    """The factor by which a load takes longer beside iterations, as long as no such load has been
    seen.
    """
    unloads_beside: bool = False
    """`unload` may be called beside steps of other instances, from a thread of its own: it takes
    as long as moving the weights does."""
    swaps: bool = False
    """`swap` takes an instance's weights off the device and brings them back."""
    swaps_parts: bool = False
    """`swap` moves any share of the weights; else all of them."""
    loads_on_device: bool = False
    """A load without weights needs room for them on the device all the same, until it is over."""
    computes_ahead: bool = False
    """Requests may be `paused`: see EngineRequest."""
    kv_format: str = ""
    """Requests can take their KV blocks to instances of engines of an equal format
    (`Engine.export_kv`); empty where they cannot.
    """
    caches_prefixes: bool = False
    """Requests with a `cache_salt` find what others have computed."""
    loads_in_process: bool = False
    """`load` computes on the caller's thread, which takes a core from the steps beside it."""
    tensor_parallel_max: int = 1
    """Devices that one instance can span."""
    batch_max: int = BATCH_MAX
    """Requests that one iteration can carry."""


class LoadTier(StrEnum):
    """From where the weights of a load come, the farthest first."""

    REMOTE = "remote"
    """The node's store lacks the model: it is imported first."""
    DISK = "disk"
    """The node's store has it, for the engine to read and to compile, or whatever else it does."""
    PREPARED = "prepared"
    """The node's store has the model, and a compiled graph of its shape, which spares the engine
    the compile.
    """
    CACHED = "cached"
    """The same as `PREPARED`, and the prepared weights were checked and lie in the page cache."""
    HOST = "host"
    """The host's memory: an instance that slept was woken, or shares the weights of one that runs.
    """

    @property
    def nearness(self) -> int:
        """The rank of the tier: a higher one leaves less to do."""
        return tuple(LoadTier).index(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadRate:
    """Seconds of a load: a fixed part, and the weights at a rate."""

    fixed_s: Seconds
    bytes_per_s: Rate

    def load_s(self, weights_bytes: int) -> float:
        return self.fixed_s + weights_bytes / self.bytes_per_s


def part_bytes(weights_bytes: int, share: float) -> int:
    """The bytes of a share of an instance's weights."""
    return round(weights_bytes * share)


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldModel:
    """A model that a node has at hand, and from which tier a load of it would come. A model may be
    held at several.
    """

    model_id: ModelId
    tier: LoadTier
    context_tokens_max: int = 0
    """The context limit of the loads that this holds for; 0 means any."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadOrder:
    """Load one instance of a model from its folder in the node's store."""

    instance_id: InstanceId
    deployment: DeploymentName
    model: ModelInfo
    model_path: Path
    kv_blocks: int
    context_tokens_max: int
    batch_max: int
    """Requests that one iteration may carry."""
    import_s: float = 0.0
    """What it took to bring the model into the store for it; 0 where that had it."""
    swapped: bool = False
    """It comes up with its weights off the device, and takes the memory of its KV cache alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KvHeader:
    """What KV blocks are of that go from one instance to another. All of it but the range of blocks
    must be the same at both.
    """

    model_id: ModelId
    layout: str
    """How an engine's pages hold the elements of a block, and of which type they are."""
    context_tokens_max: int
    block_tokens: int
    layers: int
    kv_heads: int
    head_size: int
    block_bytes: int
    """The bytes of its pages in all layers."""
    first_block: int
    blocks: int


@dataclass(frozen=True, slots=True, kw_only=True)
class KvChunk:
    """The pages of one block, keys and values of all layers."""

    block: int
    digest: bytes
    pages: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixChange:
    """Digests of keys of KV blocks that an instance has, used or cached: of those that came and of
    those that went since it was told last. See `mesh.memory.block_keys`.
    """

    came: tuple[int, ...] = ()
    went: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRequest:
    """A request as the engine sees it: token ids only.

    `output_tokens` were generated earlier (perhaps on another node): the engine recomputes their KV
    with the prompt's and continues after them. The n-th output token depends on (seed, n), not on
    which engine or attempt draws it. `attempt` is for whoever gets the tokens: they say which
    submission they are of.

    One that is `paused` computes all its tokens but the last, and yields none. Submitted again,
    with the same tokens or more, it goes on from there: still paused, or not any more.

    Requests with the same `cache_salt` share the KV blocks of their common beginning, those that
    ended before with them; None: it shares nothing, and leaves nothing behind. One that asks about
    its prompt has none: what is cached has no log-probabilities.
    """

    request_id: RequestId
    attempt: int = 1
    prompt_tokens: tuple[int, ...]
    output_tokens: tuple[int, ...] = ()
    sampling: SamplingParams
    stop_token_ids: tuple[int, ...] = ()
    """The model's own."""
    paused: bool = False
    cache_salt: str | None = None

    @property
    def end_ids(self) -> tuple[int, ...]:
        """The tokens that end it, once it has `min_tokens`."""
        own = self.sampling.stop_token_ids
        return own if self.sampling.ignore_eos else (*self.stop_token_ids, *own)


Prefill = int | tuple[tuple[RequestId, int], ...]
"""Prompt tokens of one iteration: so many at most, in the order of submission, or so many at most
of each prompt that is named.
"""
Decode = Container[RequestId] | None
"""The requests past their prompts that one iteration gives a token to; None: all of them."""


class PrefillBudget:
    """What is left of a `Prefill` while an iteration is planned."""

    def __init__(self, prefill: Prefill) -> None:
        self._named = None if isinstance(prefill, int) else dict(prefill)
        self.left = prefill if isinstance(prefill, int) else sum(tokens for _, tokens in prefill)

    def tokens_of(self, request_id: RequestId) -> int:
        """That a request may still compute of its prompt."""
        return self.left if self._named is None else self._named.get(request_id, 0)

    def spend(self, request_id: RequestId, tokens: int) -> None:
        """What a named one leaves of its share is nobody else's."""
        self.left -= tokens if self._named is None else self._named.pop(request_id, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """One iteration of one instance, or several decodes of the same batch."""

    outputs: tuple[RequestTokens, ...]
    """One for each request that has new tokens: one token of each iteration. `finish` is STOP for a
    stop token (whose id is told and whose text is empty) or a stop string, LENGTH at max_tokens or
    a full context.
    """
    prefill_tokens: int
    """Prompt tokens computed in this iteration."""
    prefill_past_tokens: int
    """Tokens that were in the cache before them; the mean over those tokens, rounded."""
    decode_batch: int
    """Requests that computed one token past their prefill."""
    context_tokens: int
    """KV tokens that those decodes attended to, summed; of several iterations the mean."""
    prefill_left: tuple[tuple[RequestId, int], ...]
    """Requests with prompt tokens to compute, and how many; of paused ones without the last."""
    starved: tuple[RequestId, ...]
    """Requests that made no progress because the instance is out of KV blocks."""
    kv_blocks_used: int
    elapsed_s: float
    iterations: int = 1
    """How many iterations computed anything; all of them are decodes where there are several."""
    prefixes: PrefixChange | None = None
    """What has changed among the instance's KV blocks since it was told last."""

    @property
    def shape(self) -> IterationShape:
        """The shape of one iteration."""
        batch = self.decode_batch
        return IterationShape(
            prefill_tokens=self.prefill_tokens,
            prefill_past_tokens=self.prefill_past_tokens,
            decode_batch=batch,
            decode_context_tokens=self.context_tokens // batch if batch else 0,
        )

    @property
    def goes_on(self) -> bool:
        """Whether the next iteration would be a decode of the same batch."""
        if self.prefill_tokens or self.prefill_left or self.starved or not self.decode_batch:
            return False
        return all(output.finish is None for output in self.outputs)


def repeated(
    step: Callable[[Prefill, Decode], StepResult],
    prefill: Prefill,
    iterations: int,
    decode: Decode = None,
) -> StepResult:
    """An engine's `step` of so many iterations by one that computes a single one."""
    results = [step(prefill, decode)]
    while len(results) < iterations and results[-1].goes_on:
        results.append(step(0, decode))
    last = results[-1]
    if len(results) == 1:
        return last
    decodes = sum(result.decode_batch > 0 for result in results)
    return replace(
        last,
        outputs=_joined(results),
        decode_batch=results[0].decode_batch,
        context_tokens=sum(result.context_tokens for result in results) // decodes,
        elapsed_s=sum(result.elapsed_s for result in results),
        iterations=decodes,
    )


def _joined(results: Sequence[StepResult]) -> tuple[RequestTokens, ...]:
    """In the order of the first iteration, in which all of the batch have a token."""
    runs: dict[RequestId, list[RequestTokens]] = {}
    for result in results:
        for output in result.outputs:
            runs.setdefault(output.request_id, []).append(output)
    return tuple(
        replace(
            run[-1],
            first_index=run[0].first_index,
            token_ids=tuple([token_id for output in run for token_id in output.token_ids]),
            text="".join([output.text for output in run]),
            logprobs=tuple([logprobs for output in run for logprobs in output.logprobs]),
        )
        for run in runs.values()
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceMemory:
    """What one loaded instance holds, in bytes and blocks."""

    instance_id: InstanceId
    weights_bytes: int
    """The bytes of its weights, and of what stays where these leave the device. Weights that
    several instances share are counted with the first of them by id.
    """
    kv_blocks: int
    kv_blocks_used: int
    kv_block_bytes: int
    kv_blocks_cached: int = 0
    """The blocks that are kept for requests to come, beside those used; they may go at any time.
    With the used ones they may exceed `kv_blocks`, where nobody else was promised the memory.
    """
    kv_held_bytes: int
    """What the KV cache takes of the device's memory now: at least what is in use. It may be less
    than `kv_blocks` come to, where memory comes with use, and more for a while after a shrink."""

    @property
    def kv_used_bytes(self) -> int:
        return self.kv_blocks_used * self.kv_block_bytes
