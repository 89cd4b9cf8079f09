"""How well a model with its weights held so foretells a text that it has not seen.

The text, of this project's own pages, lies beside this file. It is cut into windows that are
computed side by side as a node computes requests, one token an iteration, each given the text's own
token next. Before: a model in the store. After: `__main__`, which compares.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from bench.engine.workload import THREADS
from mesh.domain.ids import RequestId
from mesh.domain.model import WeightPrecision
from mesh.domain.request import SamplingParams
from mesh.memory.cache_room import CacheRoom
from mesh.memory.kv_blocks import KvBlocks
from mesh.runtime.engine import EngineRequest
from mesh_loader.store import StoredModel
from mesh_nodes.engines.openvino.batch import BatchInputs, Work
from mesh_nodes.engines.openvino.blocks import BlockPlaces
from mesh_nodes.engines.openvino.compilation import Compiler
from mesh_nodes.engines.openvino.kv_cache import KvResize, bind_kv_cache
from mesh_nodes.engines.openvino.paged_attention import BLOCK_TOKENS
from mesh_nodes.engines.openvino.precisions import PLAIN, Precisions
from mesh_nodes.engines.openvino.sequence import Sequence

TEXT = Path(__file__).with_name("text.txt")
WINDOW_TOKENS = 256
"""The first of each is given, all others are foretold."""
WINDOWS_MAX = 24


@dataclass(frozen=True, slots=True)
class Foretold:
    """By window and token."""

    lost_nats: list[float]
    """The logarithm of the probability that the text's token was given, negated."""
    choices: list[int]
    """The likeliest token."""

    @property
    def perplexity(self) -> float:
        return float(np.exp(np.mean(self.lost_nats)))

    def agreement(self, other: "Foretold") -> float:
        """The share of tokens at which both have the same likeliest."""
        return float(np.mean(np.equal(self.choices, other.choices)))


def foretelling_peer(
    stored: StoredModel, weights: WeightPrecision, precisions: Precisions
) -> Callable[[object], Foretold]:
    """What a process of its own answers, whatever it is asked."""
    return lambda _: foretold(stored, weights, THREADS, precisions)


def foretold(
    stored: StoredModel, weights: WeightPrecision, threads: int, precisions: Precisions = PLAIN
) -> Foretold:
    """Raises what a load raises."""
    compiler = Compiler(threads=threads, weights=weights, precisions=precisions)
    compiler.prepare(stored.info, stored.path, lambda phase, share: None)
    graph = compiler.compile(stored.info, stored.path, WINDOW_TOKENS + 1, lambda phase, share: None)
    request = graph.model.create_infer_request()
    inputs, windows = BatchInputs(graph.model, request), _windows(stored)
    blocks = len(windows) * -(-WINDOW_TOKENS // BLOCK_TOKENS)
    how = KvResize.ELASTIC
    cache = bind_kv_cache(how, graph.model, request, blocks=blocks, range_blocks=blocks)
    pool = KvBlocks(blocks, BlockPlaces(cache, blocks=blocks, total=blocks), CacheRoom())
    sequences = [_sequence(window, stored) for window in windows]
    lost, choices = [], []
    try:
        for at in range(1, WINDOW_TOKENS):
            for sequence in sequences:
                sequence.reserve(1, pool)
            inputs.bind([Work(sequence, 1) for sequence in sequences])
            request.infer(share_outputs=True)
            found = request.get_output_tensor(0).data
            rows = found.reshape(-1, found.shape[-1])[: len(windows)].astype(np.float64)
            rows -= rows.max(axis=1, keepdims=True)
            truth = np.array([window[at] for window in windows])
            chances = rows[np.arange(len(rows)), truth]
            lost.append(np.log(np.exp(rows).sum(axis=1)) - chances)
            choices.append(rows.argmax(axis=1))
            for sequence, token in zip(sequences, truth, strict=True):
                sequence.computed += 1
                sequence.append(int(token))
    finally:
        cache.close()
    return Foretold(np.concatenate(lost).tolist(), np.concatenate(choices).tolist())


def _windows(stored: StoredModel) -> list[list[int]]:
    tokenizer = Tokenizer.from_file(str(stored.path / "tokenizer.json"))
    ids = tokenizer.encode(TEXT.read_text(encoding="utf-8"), add_special_tokens=False).ids
    begins = range(0, len(ids) - WINDOW_TOKENS + 1, WINDOW_TOKENS)
    return [ids[begin : begin + WINDOW_TOKENS] for begin in begins][:WINDOWS_MAX]


def _sequence(window: list[int], stored: StoredModel) -> Sequence:
    return Sequence(
        EngineRequest(
            request_id=RequestId("window"),
            prompt_tokens=(window[0],),
            output_tokens=(),
            sampling=SamplingParams(max_tokens=WINDOW_TOKENS, ignore_eos=True),
            stop_token_ids=(),
        ),
        context_tokens_max=WINDOW_TOKENS + 1,
        vocabulary_tokens=stored.info.vocabulary_tokens,
    )
