"""Times precisions on this machine, on a few layers of a model's shape, and how far logits go off.

The weights are random, the prompt is fixed, and the candidates are timed in turn, so that what else
the machine does meets all of them. `precision_choice` starts it as
`python -m mesh_nodes.engines.openvino.precision_trial TRIAL`: neither its memory nor its crash is
the node's. Its last line is JSON; what goes wrong is that line, with exit code 1.
"""

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import cache
from time import perf_counter
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import numpy.typing as npt
import openvino as ov

from mesh.domain.errors import MeshError
from mesh.domain.model import ComputePrecision, KvPrecision
from mesh.domain.profile import IterationShape
from mesh.domain.values import dataclass, replace
from mesh.memory.cache_budget import CacheBudget
from mesh.memory.kv_blocks import KvBlocks
from mesh_loader.bounded_child import end_first
from mesh_nodes.engines.openvino.architecture import Architecture
from mesh_nodes.engines.openvino.batch import BatchInputs, plan
from mesh_nodes.engines.openvino.blocks import BlockPlaces
from mesh_nodes.engines.openvino.compilation import (
    ACTIVATION_GROUP,
    CompiledGraph,
    capable,
    properties_of,
)
from mesh_nodes.engines.openvino.graph import build_graph
from mesh_nodes.engines.openvino.kv_cache import KvResize, bind_kv_cache
from mesh_nodes.engines.openvino.paged_attention import BLOCK_TOKENS
from mesh_nodes.engines.openvino.precisions import Precisions, Timed, candidates, known_of, passes
from mesh_nodes.engines.openvino.probe import probe_logits
from mesh_nodes.engines.openvino.sequence import sequences_of
from mesh_nodes.engines.openvino.weights import Array, Matrix, weight_plan

if TYPE_CHECKING:
    from cattrs import Converter

T = TypeVar("T")
_DONE = "done "


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialJob:
    """The order for a trial: the model's shape, of which a few layers, all alike, are timed, and
    the precisions that are settled already.
    """

    architecture: Architecture
    threads: int
    compute: ComputePrecision | None = None
    kv: KvPrecision | None = None

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "TrialJob":
        job = _structured(json.loads(text), cls)
        rope = replace(job.architecture.rope, short_factors=())
        return replace(job, architecture=replace(job.architecture, rope=rope, windows=()))


@cache
def _converter() -> "Converter":
    """It is imported where a trial is read: it takes 30 ms, which no other start need pay."""
    from cattrs import Converter

    return Converter(detailed_validation=False)


def _structured(content: Any, kind: type[T]) -> T:
    return _converter().structure(content, kind)


def timings_json(timed: Sequence[Timed]) -> str:
    """As one line of JSON."""
    return json.dumps([asdict(each) for each in timed])


def read_timings(content: Any) -> tuple[Timed, ...]:
    """The timings in what `timings_json` wrote. Raises KeyError, TypeError or ValueError, also if
    nothing was timed.
    """
    timed = _structured(content, tuple[Timed, ...])
    if not any(each.rounds for each in timed):
        raise ValueError("no precision was timed")
    for each in timed:
        if not all(seconds > 0.0 for kinds in each.rounds for seconds in kinds):
            raise ValueError(f"{each.precisions} took {each.rounds} s")
    return timed


def progress_line(share: float) -> str:
    """A line that says how much of the trial is done, 0 to 1."""
    return f"{_DONE}{share:.3f}"


def read_progress(line: bytes) -> float | None:
    """The share in a `progress_line`; `None` for any other line."""
    text = line.decode("ascii", "replace").strip()
    try:
        return float(text.removeprefix(_DONE)) if text.startswith(_DONE) else None
    except ValueError:
        return None


WEIGHTS_BYTES = 64 << 20
"""As many layers are computed as have this size, but one at least and four at most: more than
caches keep.
"""
LAYERS_MAX = 4
VOCABULARY_TOKENS = 1024
"""The head, the same in all, would only take time."""
CONTEXT_TOKENS = 2048
SHAPES = (
    IterationShape(decode_batch=1, decode_context_tokens=512),
    IterationShape(decode_batch=8, decode_context_tokens=512),
    IterationShape(prefill_tokens=128),
    IterationShape(prefill_tokens=128, prefill_past_tokens=1024),
)
"""Each counts as much as another."""
ROUNDS = 5
"""The trial is made so many times over, so that the spread of its results is known."""
TIMES = 2
"""An iteration is timed so often in a round, all candidates in turn; the shortest time counts."""
COMPILED_SHARE = 0.4
"""Compiling the candidates, and their first iterations, take this share of the trial's time."""
_BLOCKS = 8 * 512 // BLOCK_TOKENS + 8
_EXACT = Precisions(compute=ComputePrecision.F32, kv=KvPrecision.F32)


class _Runner:
    """A compiled graph with a KV cache of its own."""

    def __init__(self, graph: CompiledGraph) -> None:
        self._request = graph.model.create_infer_request()
        self._inputs = BatchInputs(graph.model, self._request)
        self._cache = bind_kv_cache(
            KvResize.ELASTIC, graph.model, self._request, blocks=_BLOCKS, range_blocks=_BLOCKS
        )
        places = BlockPlaces(self._cache, blocks=_BLOCKS, total=_BLOCKS)
        self._pool = KvBlocks(_BLOCKS, places, CacheBudget())

    def run(self, shape: IterationShape) -> float:
        """Compute one iteration; how long it took, in seconds."""
        active = sequences_of(shape, VOCABULARY_TOKENS)
        for sequence in active:
            sequence.reserve(sequence.left, self._pool)
            self._cache.back(np.array(sequence.blocks(), np.int64))
        self._inputs.bind(plan(active, shape.prefill_tokens, self._pool).work)
        start_s = perf_counter()
        self._request.infer(share_outputs=True)
        taken_s = perf_counter() - start_s
        for sequence in active:
            sequence.release(self._pool)
        return taken_s

    def close(self) -> None:
        self._cache.close()


def tried(job: TrialJob, tell: Callable[[float], None] = lambda share: None) -> tuple[Timed, ...]:
    """Each candidate but those that compute as one does that is too far off, which is not timed
    itself, either; what is known to serve comes first. `tell` is called with the share of the trial
    that is done. Raises RuntimeError or OutOfMemory."""
    core, architecture = ov.Core(), cut(job.architecture)
    weights = _weights(architecture)

    def compiled(precisions: Precisions, group: int) -> CompiledGraph:
        properties = properties_of(precisions, job.threads, group)
        graph = build_graph(architecture, weights, CONTEXT_TOKENS)
        return CompiledGraph(core.compile_model(graph, "CPU", properties), weights, ())

    exact = _logits(compiled(_EXACT, 0))
    graphs = dict[Precisions, CompiledGraph]()
    found, good = list[Timed](), list[Timed]()
    possible = candidates(capable(core), job.compute, job.kv)
    for number, precisions in enumerate(possible):
        tell(COMPILED_SHARE * number / len(possible))
        if any(precisions.compute is each.precisions.compute for each in found if each not in good):
            continue
        graph = graphs[precisions] = compiled(precisions, ACTIVATION_GROUP)
        found.append(Timed(precisions=precisions, error=_error(graph, exact)))
        if passes(found[-1].error, known_of(found).error):
            good.append(found[-1])
    timed = _rounds([graphs[each.precisions] for each in good], tell)
    rounds = dict(zip(good, timed, strict=True))
    return tuple(replace(each, rounds=rounds.get(each, ())) for each in found)


def _rounds(
    graphs: Sequence[CompiledGraph], tell: Callable[[float], None]
) -> list[tuple[tuple[float, ...], ...]]:
    """For each graph the shortest time by round and shape, in seconds. The graphs take turns."""
    made = [_Runner(graph) for graph in graphs]
    found: list[list[tuple[float, ...]]] = [[] for _ in made]
    for shape in SHAPES:
        for each in made:
            each.run(shape)  # It builds the kernels.
    for number in range(ROUNDS):
        tell(COMPILED_SHARE + (1.0 - COMPILED_SHARE) * number / ROUNDS)
        times = [_shortest(made, shape) for shape in SHAPES]
        for rounds, seconds in zip(found, zip(*times, strict=True), strict=True):
            rounds.append(seconds)
    for each in made:
        each.close()
    return [tuple(rounds) for rounds in found]


def _shortest(made: Sequence[_Runner], shape: IterationShape) -> list[float]:
    """For each runner the shortest of its times. The first time is left out: a change of shape
    costs the plugin some milliseconds, which a decode that follows another one does not pay.
    """
    for each in made:
        each.run(shape)
    times = [[each.run(shape) for each in made] for _ in range(TIMES)]
    return [min(taken) for taken in zip(*times, strict=True)]


def cut(architecture: Architecture) -> Architecture:
    """A few layers of it."""
    a = replace(architecture, vocabulary_tokens=VOCABULARY_TOKENS, tied_embeddings=True)
    one = sum(each.size for each in _weights(replace(a, layers=1)).values())
    layers = min(max(WEIGHTS_BYTES // one, 1), LAYERS_MAX)
    return replace(a, layers=layers)


def error_of(found: npt.NDArray[np.float32], exact: npt.NDArray[np.float32]) -> float:
    """The error of logits [iterations, vocabulary], as far as both runs were given the same tokens:
    the root mean square, over the spread of the exact ones.
    """
    same = found.argmax(axis=1) == exact.argmax(axis=1)
    rows = len(same) if same.all() else int(same.argmin()) + 1
    off = found[:rows] - exact[:rows]
    return float(np.sqrt(np.mean(off**2)) / exact[:rows].std())


def _error(graph: CompiledGraph, exact: npt.NDArray[np.float32]) -> float:
    """Not a number where the plugin cannot compute what it has compiled."""
    try:
        return error_of(_logits(graph), exact)
    except RuntimeError:
        return float("nan")


def _logits(graph: CompiledGraph) -> npt.NDArray[np.float32]:
    return probe_logits(
        graph, vocabulary_tokens=VOCABULARY_TOKENS, context_tokens_max=CONTEXT_TOKENS
    )


def _weights(architecture: Architecture) -> Mapping[str, Array]:
    """Random, of 8 bits, as `graph_weights` names them; each matrix keeps the spread of what it
    multiplies, but queries and keys are twice as large: attention that looks at everything alike
    would hide what a cache has lost.
    """
    draw = np.random.default_rng(0)
    weights: dict[str, Array] = {}
    for each in weight_plan(architecture):
        if not isinstance(each, Matrix):
            weights[each.name] = np.ones(each.size, np.float32)
            continue
        rows = sum(count for _, count in each.sources)
        weights[each.name] = draw.integers(-127, 128, (rows, each.columns), np.int8)
        scale = (2.0 if each.name.endswith("qkv") else 1.0) / (73.0 * each.columns**0.5)
        weights[f"{each.name}.scale"] = np.full((rows, 1), scale, np.float32)
        if each.bias:
            weights[f"{each.name}.bias"] = np.zeros(rows, np.float32)
    return weights


def main() -> int:
    end_first()

    def tell(share: float) -> None:
        sys.stdout.write(f"{progress_line(share)}\n")
        sys.stdout.flush()

    try:
        sys.stdout.write(f"{timings_json(tried(TrialJob.from_json(sys.argv[1]), tell))}\n")
    except (MeshError, OSError, RuntimeError, ValueError) as error:
        sys.stderr.write(f"{error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
