"""Weights held as i8, as i4 and i4-g128 and, of the demo model, as its file's own 4 bits.

Times are medians of rounds in turn, A B A B …, each contender in a process of its own. Quality is
that of the demo model: perplexity of a text that ships with the benchmark, over that of f16, and
how often the likeliest next token is f16's. The last line is one JSON object; `i4_decode_ratio` and
`i4_g128_decode_ratio` are the time of a token in these over that in i8, of a model of 1.2 billion
parameters at batch 1.
"""

import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Annotated

import numpy as np
import psutil
from tokenizers import Tokenizer

from bench.demo_model import stored_model
from bench.driving import INSTANCE, no_progress, order, request
from bench.engine_contenders import THREADS
from bench.harness import Report, Table, show_status
from bench.peer import Peer
from mesh.domain.ids import ModelId
from mesh.domain.model import ComputePrecision, KvPrecision, ModelFormat, WeightPrecision
from mesh.domain.profile import IterationShape
from mesh.memory.cache_budget import CacheBudget
from mesh.memory.kv_blocks import KvBlocks
from mesh_loader.architectures import expected_tensors, shape_of
from mesh_loader.model_info import info_of_folder
from mesh_loader.safetensors_file import StoredTensor, header_bytes, write_json
from mesh_loader.store import StoredModel
from mesh_nodes.engines.openvino.batch import BatchInputs, Work
from mesh_nodes.engines.openvino.blocks import BlockPlaces
from mesh_nodes.engines.openvino.compilation import Compiler
from mesh_nodes.engines.openvino.engine import OpenVinoEngine
from mesh_nodes.engines.openvino.kv_cache import KvResize, bind_kv_cache
from mesh_nodes.engines.openvino.paged_attention import BLOCK_TOKENS
from mesh_nodes.engines.openvino.precisions import PLAIN, Precisions
from mesh_nodes.engines.openvino.sequence import Sequence

CONTEXT_TOKENS = 1024
BATCHES = (1, 4, 8, 16)
PREFILL_TOKENS = 512
SHAPES = {
    **{f"decode {n}": IterationShape(decode_batch=n, decode_context_tokens=256) for n in BATCHES},
    "prefill": IterationShape(prefill_tokens=PREFILL_TOKENS),
}
LLAMA_1B = {
    "model_type": "llama",
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "max_position_embeddings": 131072,
    "vocab_size": 128256,
    "tie_word_embeddings": True,
}
"""Llama 3.2 1B."""


def model_of_zeros(folder: Path, config: dict[str, object]) -> StoredModel:
    """Takes no disk but for what is prepared of it."""
    write_json(folder / "config.json", config)
    write_json(folder / "tokenizer.json", {})
    wanted = list(expected_tensors(shape_of(config, "config.json")))
    head = header_bytes((each.name, StoredTensor(dtype="F16", shape=each.shape)) for each in wanted)
    parameters = sum(each.elements for each in wanted)
    with (folder / "model.safetensors").open("wb") as file:
        file.write(head)
        file.truncate(len(head) + 2 * parameters)
    info = info_of_folder(
        folder,
        model_id=ModelId("of-zeros"),
        source="made for the benchmark",
        form=ModelFormat.SAFETENSORS,
        parameters=parameters,
    )
    return StoredModel(path=folder, info=info)


def timed(
    stored: StoredModel, weights: WeightPrecision, threads: int
) -> Callable[[str | None], float]:
    """A loaded model, as a `Peer` has it: the seconds of an iteration of SHAPES, or, asked None,
    the bytes of memory that it has taken beside its KV cache and the pages of files.
    """
    engine = OpenVinoEngine(threads=threads, weights=weights)
    before_bytes = _own_bytes()
    engine.prepare(stored.info, stored.path, no_progress)
    kv_blocks = engine.footprint(stored.info).blocks_for(max(BATCHES) * CONTEXT_TOKENS)
    batch_max = max(BATCHES)
    wanted = order(
        stored, kv_blocks=kv_blocks, context_tokens_max=CONTEXT_TOKENS, batch_max=batch_max
    )
    engine.load(wanted, no_progress)

    def answer(name: str | None) -> float:
        if name is not None:
            return engine.measure(INSTANCE, SHAPES[name])
        return _own_bytes() - before_bytes - sum(m.kv_held_bytes for m in engine.memory())

    return answer


def _own_bytes() -> int:
    memory = psutil.Process().memory_info()
    return int(memory.rss - memory.shared)


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
    compiler.prepare(stored.info, stored.path, no_progress)
    graph = compiler.compile(stored.info, stored.path, WINDOW_TOKENS + 1, no_progress)
    inferring = graph.model.create_infer_request()
    inputs, windows = BatchInputs(graph.model, inferring), _windows(stored)
    blocks = len(windows) * -(-WINDOW_TOKENS // BLOCK_TOKENS)
    how = KvResize.ELASTIC
    cache = bind_kv_cache(how, graph.model, inferring, blocks=blocks, range_blocks=blocks)
    pool = KvBlocks(blocks, BlockPlaces(cache, blocks=blocks, total=blocks), CacheBudget())
    sequences = [_sequence(window, stored) for window in windows]
    lost, choices = [], []
    try:
        for at in range(1, WINDOW_TOKENS):
            for sequence in sequences:
                sequence.reserve(1, pool)
            inputs.bind([Work(sequence, 1) for sequence in sequences])
            inferring.infer(share_outputs=True)
            found = inferring.get_output_tensor(0).data
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
        request("window", window[:1], WINDOW_TOKENS),
        context_tokens_max=WINDOW_TOKENS + 1,
        vocabulary_tokens=stored.info.vocabulary_tokens,
    )


REPEATS = 7
"""An iteration is repeated this often in a round: the shortest counts."""
I8, I4, I4_G128 = WeightPrecision.I8, WeightPrecision.I4, WeightPrecision.I4_G128
F16, FILE = WeightPrecision.F16, WeightPrecision.FILE
PRECISIONS = tuple(
    Precisions(compute=compute, kv=kv)
    for compute, kv in (
        (ComputePrecision.F32, KvPrecision.U8),
        (ComputePrecision.BF16, KvPrecision.BF16),
    )
)
"""Beside the plain ones, in f32 where the CPU has no bf16."""
MIB = 2**20

Seconds = dict[WeightPrecision, dict[str, float]]


def measured(
    stored: StoredModel, kinds: tuple[WeightPrecision, ...], rounds: int
) -> tuple[Seconds, dict[WeightPrecision, float]]:
    """Seconds by shape of iteration, and bytes. Raises Unavailable."""
    with ExitStack() as stack:
        peers = {}
        for kind in kinds:
            peers[kind] = stack.enter_context(Peer(kind, timed, stored, kind, THREADS))
            peers[kind].wait_ready()
        times: dict[WeightPrecision, dict[str, list[float]]]
        times = {kind: {name: [] for name in SHAPES} for kind in kinds}
        for number in range(rounds + 1):  # all kernels are there after the first
            for name in SHAPES:
                for kind, peer in peers.items():
                    show_status(f"round {number}: {kind}, {name}")
                    taken_s = min(peer.ask(name) for _ in range(REPEATS))
                    times[kind][name] += [taken_s] if number else []
        taken_bytes = {kind: peer.ask() for kind, peer in peers.items()}
    medians = {k: {name: median(s) for name, s in by.items()} for k, by in times.items()}
    return medians, taken_bytes


def foretelling(stored: StoredModel) -> dict[str, Foretold]:
    """By weights, and of i8 by precision, too."""
    kinds = {str(kind): (kind, PLAIN) for kind in (F16, I8, I4, I4_G128, FILE)}
    kinds |= {f"i8, {each}": (I8, each) for each in PRECISIONS}
    found = {}
    for name, (kind, precisions) in kinds.items():
        show_status(f"quality: {name}")
        with Peer(name, foretelling_peer, stored, kind, precisions) as peer:
            peer.wait_ready()
            found[name] = peer.ask()
    return found


def _decode_ratio(measured_: tuple[Seconds, object] | None, kind: WeightPrecision) -> float | None:
    if measured_ is None:
        return None
    seconds = measured_[0]
    return round(seconds[kind]["decode 1"] / seconds[I8]["decode 1"], 3)


def _in_ms(seconds: Seconds) -> dict[str, dict[str, float]]:
    return {k: {name: round(1e3 * s, 2) for name, s in by.items()} for k, by in seconds.items()}


def _in_mib(taken_bytes: dict[WeightPrecision, float]) -> dict[str, int]:
    return {k: round(b / MIB) for k, b in taken_bytes.items()}


def shown(title: str, seconds: Seconds, taken_bytes: dict[WeightPrecision, float]) -> Table:
    rows = []
    for kind, by_name in seconds.items():
        cells = [f"{1e3 * s:.1f} ({s / seconds[I8][n]:.2f})" for n, s in by_name.items()]
        rows.append((kind.value, f"{taken_bytes[kind] / MIB:.0f}", *cells))
    headings = ("weights", "MiB", *(f"{name} ms" for name in SHAPES))
    return Table(headings=headings, rows=rows, title=title)


def run(
    *, rounds: int = 5, large: Annotated[bool, "measure the demo model alone"] = True
) -> Report:
    stored = stored_model()
    quality = foretelling(stored)
    small = measured(stored, (I8, I4, I4_G128, FILE), rounds)
    tables = [shown(f"{stored.info.parameters / 1e6:.0f} M parameters, {THREADS} threads", *small)]
    big = None
    if large:
        with tempfile.TemporaryDirectory() as folder:
            zeros = model_of_zeros(Path(folder), LLAMA_1B)
            big = measured(zeros, (I8, I4, I4_G128), rounds)
        tables.append(shown(f"1.2 billion parameters, {THREADS} threads", *big))
    exact = quality[str(F16)]
    ratios = {kind: one.perplexity / exact.perplexity for kind, one in quality.items()}
    agreements = {kind: one.agreement(exact) for kind, one in quality.items()}
    rows = [
        (kind, f"{one.perplexity:.3f}", f"{ratios[kind]:.4f}", f"{100 * agreements[kind]:.1f} %")
        for kind, one in quality.items()
    ]
    headings = ("weights", "perplexity", "over f16's", "f16's next token")
    return Report(
        figures={
            "i4_decode_ratio": _decode_ratio(big, I4),
            "i4_g128_decode_ratio": _decode_ratio(big, I4_G128),
            "perplexity_ratio": {kind: round(ratio, 4) for kind, ratio in ratios.items()},
            "next_token_agreement": {kind: round(share, 4) for kind, share in agreements.items()},
            "small_ms": _in_ms(small[0]),
            "large_ms": None if big is None else _in_ms(big[0]),
            "small_mib": _in_mib(small[1]),
            "large_mib": None if big is None else _in_mib(big[1]),
        },
        shown=(*tables, Table(headings=headings, rows=rows)),
    )
