"""Gives any engine text: detokenises what it yields and ends requests at their stop strings.

It wraps an engine and is one, so that stopping means the same with every engine, and a stop string
ends its request before the next step. Text runs in the compute thread, between steps.
"""

import logging
import threading
import time
from collections.abc import Generator, Iterable, Iterator, Mapping
from hashlib import sha256
from pathlib import Path
from typing import TypeVar

from mesh.domain.errors import EngineError, MeshError
from mesh.domain.ids import InstanceId, RequestId
from mesh.domain.messages import InstanceLoaded, KvResized
from mesh.domain.model import Footprint, ModelInfo
from mesh.domain.profile import CountedIteration, IterationShape
from mesh.domain.reasons import FinishReason
from mesh.domain.request import RequestTokens
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
from mesh.domain.text import TextAssets
from mesh.domain.values import replace
from mesh.runtime.engine import Ended, Engine, Progress
from mesh.text.assets import read_assets
from mesh.text.detokenize import Detokenizer
from mesh.text.stops import StopMatcher
from mesh.text.tokenizer import TextCodec

log = logging.getLogger(__name__)

_Key = TypeVar("_Key")
_Kept = TypeVar("_Kept")

CODECS_MAX = 8
"""Codecs kept for models loaded before: each takes tens of MiB, and tens to hundreds of
milliseconds to build, during which no iteration of another instance can begin. Models with the same
tokenizer, as fine-tunes have it, share one."""
FOLDERS_MAX = 1024
"""Models of which it is known which codec is theirs."""


class _RequestText:
    """The text of one request. Fed with the tokens so far, it is where those left it."""

    def __init__(self, codec: TextCodec, request: EngineRequest) -> None:
        self._end_ids = frozenset(request.end_ids)
        self._min_tokens = request.sampling.min_tokens
        self._detokenizer = Detokenizer(codec, prompt=request.prompt_tokens)
        self.stops = StopMatcher(request.sampling.stop)
        self._fed = 0
        self.feed(request)

    def feed(self, request: EngineRequest) -> None:
        """The request's tokens that it was not fed with yet: they were given out elsewhere."""
        for token_id in request.output_tokens[self._fed :]:
            self._fed += 1
            self._matched(self._detokenizer.push(token_id))

    def push(self, output: RequestTokens) -> RequestTokens:
        """The tokens with the text that they make it safe to give out, all that is left with the
        last. After one that brings a stop string there are no more: it is only known here that the
        request had ended.
        """
        text, last = "", len(output.token_ids) - 1
        for n, token_id in enumerate(output.token_ids):
            finish = output.finish if n == last else None
            text += self._pushed(token_id, finish)
            if self.stops.stopped:
                return replace(
                    output,
                    token_ids=output.token_ids[: n + 1],
                    logprobs=output.logprobs[: n + 1],
                    text=text,
                    finish=FinishReason.STOP,
                )
        return replace(output, text=text)

    def _pushed(self, token_id: int, finish: FinishReason | None) -> str:
        self._fed += 1
        ends = finish is FinishReason.STOP and token_id in self._end_ids
        text = "" if ends else self._detokenizer.push(token_id)
        if finish is not None:
            text += self._detokenizer.flush()
        text = self._matched(text)
        if finish is not None and not self.stops.stopped:
            text += self.stops.flush()
        return text

    def _matched(self, text: str) -> str:
        """What may be given out of the text of the token that came last. That of the first
        `min_tokens` is no beginning of a stop string, nor all of one.
        """
        return text if self._fed <= self._min_tokens else self.stops.push(text)


class TextEngine:
    """Implements the Engine protocol around `inner`; see there for who may call what."""

    def __init__(self, inner: Engine) -> None:
        self._inner = inner
        self._codecs: dict[InstanceId, TextCodec] = {}
        self._recent: dict[TextAssets, TextCodec] = {}
        """By what it is made of, with a digest for the tokenizer; the latest last. Only loads use
        it, and the next one.
        """
        self._assets: dict[Path, TextAssets] = {}
        """The same by the model's folder, whose files never change."""
        self._choosing = threading.Lock()
        self._texts: dict[InstanceId, dict[RequestId, _RequestText]] = {}

    @property
    def capabilities(self) -> EngineCapabilities:
        return self._inner.capabilities

    def watch(self, ended: Ended) -> None:
        self._inner.watch(ended)

    def footprint(self, model: ModelInfo) -> Footprint:
        return self._inner.footprint(model)

    def prepare(self, model: ModelInfo, model_path: Path, progress: Progress) -> None:
        self._inner.prepare(model, model_path, progress)

    def is_prepared(self, model: ModelInfo, model_path: Path) -> bool:
        return self._inner.is_prepared(model, model_path)

    def tier_of(self, order: LoadOrder) -> LoadTier:
        return self._inner.tier_of(order)

    def load(self, order: LoadOrder, progress: Progress) -> InstanceLoaded:
        start_s = time.perf_counter()
        codec = self._codec(order.model_path)
        codec_s = time.perf_counter() - start_s
        loaded = self._inner.load(order, progress)
        self._codecs[order.instance_id] = codec
        self._texts[order.instance_id] = {}
        return replace(loaded, elapsed_s=codec_s + loaded.elapsed_s)

    def unload(self, instance_id: InstanceId) -> None:
        self._codecs.pop(instance_id, None)
        self._texts.pop(instance_id, None)
        self._inner.unload(instance_id)

    def swap(self, instance_id: InstanceId, share: float) -> None:
        self._inner.swap(instance_id, share)

    def submit(self, instance_id: InstanceId, request: EngineRequest) -> int:
        text = self._text_of(instance_id, request)
        found_tokens = self._inner.submit(instance_id, request)
        self._enter(instance_id, request, text)
        return found_tokens

    def export_kv(
        self, instance_id: InstanceId, request_id: RequestId, first_block: int, blocks: int
    ) -> tuple[KvHeader, Iterator[KvChunk]]:
        return self._inner.export_kv(instance_id, request_id, first_block, blocks)

    def import_kv(
        self,
        instance_id: InstanceId,
        request: EngineRequest,
        header: KvHeader,
        chunks: Iterable[KvChunk],
    ) -> Generator[None, None, int]:
        text = self._text_of(instance_id, request)
        came = yield from self._inner.import_kv(instance_id, request, header, chunks)
        self._enter(instance_id, request, text)
        return came

    def _text_of(self, instance_id: InstanceId, request: EngineRequest) -> "_RequestText":
        """Before the inner engine has the request, since it may fail. Raises EngineError."""
        codec = self._codecs.get(instance_id)
        if codec is None:
            raise EngineError(f"{instance_id} is not loaded")
        return self._texts[instance_id].get(request.request_id) or _RequestText(codec, request)

    def _enter(self, instance_id: InstanceId, request: EngineRequest, text: "_RequestText") -> None:
        text.feed(request)
        self._texts[instance_id][request.request_id] = text

    def abort(self, instance_id: InstanceId, request_id: RequestId) -> None:
        self._inner.abort(instance_id, request_id)
        self._texts.get(instance_id, {}).pop(request_id, None)

    def step(
        self, instance_id: InstanceId, prefill: Prefill, iterations: int = 1, decode: Decode = None
    ) -> StepResult:
        result = self._inner.step(instance_id, prefill, iterations, decode)
        if not result.outputs:
            return result
        outputs = tuple([self._worded(instance_id, output) for output in result.outputs])
        if all(a.finish is b.finish for a, b in zip(result.outputs, outputs, strict=True)):
            return replace(result, outputs=outputs)
        (books,) = (m for m in self._inner.memory() if m.instance_id == instance_id)
        return replace(result, outputs=outputs, kv_blocks_used=books.kv_blocks_used)

    def _worded(self, instance_id: InstanceId, output: RequestTokens) -> RequestTokens:
        """The tokens with their text, up to the one that brings a stop string. A request ends
        where the model's own tokenizer fails on its tokens.
        """
        texts = self._texts[instance_id]
        try:
            worded = texts[output.request_id].push(output)
        except MeshError as error:
            log.error("%s of %s ends: %s", output.request_id, instance_id, error.message)
            worded = replace(output, finish=FinishReason.FAILED)
        if worded.finish is not None:
            del texts[output.request_id]
            if output.finish is None:
                self._inner.abort(instance_id, output.request_id)
        return worded

    def measure(self, instance_id: InstanceId, shape: IterationShape) -> float:
        return self._inner.measure(instance_id, shape)

    def count_operators(
        self, instance_id: InstanceId, shape: IterationShape, cores: int | None = None
    ) -> CountedIteration:
        return self._inner.count_operators(instance_id, shape, cores)

    def resize_kv(self, instance_id: InstanceId, kv_blocks: int) -> KvResized:
        return self._inner.resize_kv(instance_id, kv_blocks)

    def bound_memory(self, memory_bytes: int) -> None:
        self._inner.bound_memory(memory_bytes)

    def tell_prefixes(self) -> Mapping[InstanceId, PrefixChange]:
        return self._inner.tell_prefixes()

    def kept_bytes(self) -> int:
        return self._inner.kept_bytes()

    def memory(self) -> tuple[InstanceMemory, ...]:
        return self._inner.memory()

    def close(self) -> None:
        self._inner.close()
        self._codecs.clear()
        self._recent.clear()
        self._assets.clear()
        self._texts.clear()

    def _codec(self, model_path: Path) -> TextCodec:
        """Reading takes a while, and no other load waits for it."""
        with self._choosing:
            key = self._assets.get(model_path)
            codec = None if key is None else self._recent.get(key)
        if key is None or codec is None:
            # Chats are rendered elsewhere: no template of a tenant's is compiled in a node.
            assets = replace(read_assets(model_path), chat_template=None)
            key = replace(assets, tokenizer_json=sha256(assets.tokenizer_json).digest())
            with self._choosing:
                codec = self._recent.get(key)
            codec = codec or TextCodec(assets)
        with self._choosing:
            _keep_last(self._recent, key, codec, CODECS_MAX)
            _keep_last(self._assets, model_path, key, FOLDERS_MAX)
        return codec


def _keep_last(kept: dict[_Key, _Kept], key: _Key, value: _Kept, most: int) -> None:
    kept.pop(key, None)
    kept[key] = value
    while len(kept) > most:
        del kept[next(iter(kept))]
