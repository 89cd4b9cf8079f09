"""The weights in the form that the graph takes: fused, quantised or cast, under the graph's names.

`graph_weights` walks the model once and yields one array at a time, so that quantising a model
needs memory for one tensor. `prepared` writes them to disk; `graph` turns them into constants.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from functools import partial
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from mesh.domain.model import WeightPrecision
from mesh.domain.values import dataclass
from mesh_loader.encoders import score_names
from mesh_nodes.engines.openvino.architecture import Architecture, Encoder
from mesh_nodes.engines.openvino.checkpoint import Checkpoint, StoredTensor
from mesh_nodes.engines.openvino.four_bits import (
    EXACT,
    GROUP,
    Floats,
    FourBits,
    from_blocks,
    quantise_groups,
    quantise_with_offsets,
    stacked,
)

_Element = TypeVar("_Element", bound=np.generic)
_Stored = TypeVar("_Stored")
Sources = tuple[tuple[str, int], ...]
Array = npt.NDArray[np.generic]
_EIGHT_BITS = ("embedding", "head")
"""In I4 and I4_G128, too."""
COARSE_GROUPS = (128, 64)
"""The group sizes of I4_G128: the first that divides the row is taken. With 64 a token takes 1.0 to
1.1 times as long.
"""
_QUANTISED_ELEMENTS = 1 << 18
"""At once: so many of f32 stay in a core's cache from one pass over them to the next."""


@dataclass(frozen=True, slots=True)
class Matrix:
    """One matrix of the graph: the rows of these tensors of the checkpoint, one below the other."""

    name: str
    sources: Sources
    """Hugging Face name without its suffix, and rows."""
    columns: int
    bias: bool = False
    exact: bool = False
    """It is held in f32 whatever the precision: rounding would change which experts it chooses, or
    it is small.
    """


@dataclass(frozen=True, slots=True)
class Vector:
    """One norm's weights."""

    name: str
    source: str
    size: int
    offset: float = 0.0
    """This number is added to the stored weights."""


def weight_plan(architecture: Architecture) -> tuple[Matrix | Vector, ...]:
    """Every weight of the graph, in the order of its layers."""
    a = architecture
    if a.encoder is not None:
        return tuple(_encoder_plan(a, a.encoder))
    plan: list[Matrix | Vector] = [
        Matrix("embedding", ((f"{a.prefix}embed_tokens", a.vocabulary_tokens),), a.hidden_size)
    ]
    for layer in range(a.layers):
        plan += _layer_plan(a, layer)
    plan.append(Vector("norm", f"{a.prefix}norm.weight", a.hidden_size, a.norm_offset))
    if not a.tied_embeddings:
        plan.append(Matrix("head", (("lm_head", a.vocabulary_tokens),), a.hidden_size))
    return tuple(plan)


def _layer_plan(a: Architecture, layer: int) -> list[Matrix | Vector]:
    ours, theirs = f"layers.{layer}", f"{a.prefix}layers.{layer}"
    attention = f"{theirs}.self_attn"
    query_rows, kv_rows = a.attention_heads * a.head_size, a.kv_heads * a.head_size
    qkv: Sources = (
        (f"{attention}.q_proj", query_rows),
        (f"{attention}.k_proj", kv_rows),
        (f"{attention}.v_proj", kv_rows),
    )
    if a.fused:
        qkv = ((f"{attention}.qkv_proj", query_rows + 2 * kv_rows),)
    output = ((f"{attention}.o_proj", a.hidden_size),)
    norms = {"input_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}
    if a.norms_around:
        norms |= {
            "attended_norm": "post_attention_layernorm",
            "mlp_norm": "pre_feedforward_layernorm",
            "fed_norm": "post_feedforward_layernorm",
        }
    plan: list[Matrix | Vector] = [
        Vector(f"{ours}.{name}", f"{theirs}.{source}.weight", a.hidden_size, a.norm_offset)
        for name, source in norms.items()
    ]
    plan.append(Matrix(f"{ours}.qkv", qkv, a.hidden_size, a.qkv_bias))
    plan.append(Matrix(f"{ours}.output", output, query_rows, a.output_bias))
    if a.is_mixture(layer):
        plan += _mixture_plan(a, ours, f"{theirs}.mlp")
    else:
        plan += _mlp_plan(a, ours, f"{theirs}.mlp", a.intermediate_size)
    if a.qk_norm:
        plan += [
            Vector(f"{ours}.{x}_norm", f"{attention}.{x}_norm.weight", a.head_size, a.norm_offset)
            for x in ("q", "k")
        ]
    return plan


def _encoder_plan(a: Architecture, encoder: Encoder) -> Iterator[Matrix | Vector]:
    hidden, inner = a.hidden_size, a.intermediate_size
    tables = f"{a.prefix}embeddings"
    for name, table, rows in (
        ("embedding", "word", a.vocabulary_tokens),
        ("positions", "position", encoder.positions),
        ("types", "token_type", encoder.types),
    ):
        source = (f"{tables}.{table}_embeddings", rows)
        yield Matrix(name, (source,), hidden, exact=name != "embedding")
    yield from _norm_plan("embedded_norm", f"{tables}.LayerNorm", hidden)
    for layer in range(a.layers):
        ours, theirs = f"layers.{layer}", f"{a.prefix}encoder.layer.{layer}"
        qkv = tuple((f"{theirs}.attention.self.{x}", hidden) for x in ("query", "key", "value"))
        yield Matrix(f"{ours}.qkv", qkv, hidden, bias=True)
        output = ((f"{theirs}.attention.output.dense", hidden),)
        yield Matrix(f"{ours}.output", output, hidden, bias=True)
        attention = f"{theirs}.attention.output.LayerNorm"
        yield from _norm_plan(f"{ours}.attended_norm", attention, hidden)
        up = ((f"{theirs}.intermediate.dense", inner),)
        yield Matrix(f"{ours}.up", up, hidden, bias=True)
        yield Matrix(f"{ours}.down", ((f"{theirs}.output.dense", hidden),), inner, bias=True)
        yield from _norm_plan(f"{ours}.fed_norm", f"{theirs}.output.LayerNorm", hidden)
    if encoder.scores:
        dense, out = score_names(a.kind)
        yield Matrix("scored", ((dense, hidden),), hidden, bias=True, exact=True)
        yield Matrix("score", ((out, 1),), hidden, bias=True, exact=True)


def _norm_plan(ours: str, theirs: str, size: int) -> Iterator[Vector]:
    yield Vector(ours, f"{theirs}.weight", size)
    yield Vector(f"{ours}.bias", f"{theirs}.bias", size)


def _mlp_plan(a: Architecture, ours: str, theirs: str, size: int) -> list[Matrix | Vector]:
    gate_up: Sources = ((f"{theirs}.gate_proj", size), (f"{theirs}.up_proj", size))
    if a.fused:
        gate_up = ((f"{theirs}.gate_up_proj", 2 * size),)
    down = ((f"{theirs}.down_proj", a.hidden_size),)
    return [
        Matrix(f"{ours}.gate_up", gate_up, a.hidden_size, a.mlp_bias),
        Matrix(f"{ours}.down", down, size, a.mlp_bias),
    ]


def _mixture_plan(a: Architecture, ours: str, theirs: str) -> list[Matrix | Vector]:
    """The experts' matrices one below the other, as many as there are experts."""
    assert a.experts is not None
    size, shared = a.experts.intermediate_size, a.experts.shared_intermediate_size
    router = ((f"{theirs}.gate", a.experts.count),)
    plan: list[Matrix | Vector] = [Matrix(f"{ours}.router", router, a.hidden_size, exact=True)]
    for name, rows, columns in (
        ("gate", size, a.hidden_size),
        ("up", size, a.hidden_size),
        ("down", a.hidden_size, size),
    ):
        sources = tuple((f"{theirs}.experts.{n}.{name}_proj", rows) for n in range(a.experts.count))
        plan.append(Matrix(f"{ours}.experts.{name}", sources, columns))
    if shared:
        gate = ((f"{theirs}.shared_expert_gate", 1),)
        plan.append(Matrix(f"{ours}.shared.router", gate, a.hidden_size, exact=True))
        plan += _mlp_plan(a, f"{ours}.shared", f"{theirs}.shared_expert", shared)
    return plan


def in_halves(
    stored: Mapping[str, _Stored], halve: Callable[[_Stored], Iterable[_Stored]]
) -> dict[str, _Stored]:
    """By the graph's names: gate and up, which are stored one below the other, each by itself."""
    found: dict[str, _Stored] = {}
    for name, both in stored.items():
        if ".gate_up" in name:
            names = (name.replace(".gate_up", half) for half in (".gate", ".up"))
            found |= zip(names, halve(both), strict=True)
        else:
            found[name] = both
    return found


def graph_weights(
    architecture: Architecture, checkpoint: Checkpoint, precision: WeightPrecision, threads: int = 1
) -> Iterator[tuple[str, Array]]:
    """Name and array of every weight in the plan: `X` and, as the case may be, `X.scale` [rows, 1],
    `X.bias`; of 4 bits what `FourBits` says, as `X`, `X.scale` and `X.offset`, which in I4 is
    itself int8 [rows, groups] with `X.offset.scale` [rows, 1]. Matrices are
    quantised on so many threads.

    Raises TornModel when a tensor is missing or of a wrong shape.
    """
    with ThreadPoolExecutor(threads, "mesh-quantise") as pool:
        for weight in weight_plan(architecture):
            if isinstance(weight, Vector):
                vector = checkpoint.tensor(weight.source, (weight.size,)).as_f32()
                yield weight.name, vector + np.float32(weight.offset)
                continue
            parts = [
                checkpoint.tensor(f"{source}.weight", (rows, weight.columns))
                for source, rows in weight.sources
            ]
            if weight.exact:
                yield weight.name, _stack([part.as_f32() for part in parts])
            elif precision is WeightPrecision.F16:
                yield weight.name, _stack([part.as_f16() for part in parts])
            elif four_bits := _four_bits(weight, checkpoint, parts, precision, pool):
                yield weight.name, four_bits.nibbles
                yield f"{weight.name}.scale", four_bits.scale
                yield from _offsets(f"{weight.name}.offset", four_bits.offset, precision)
            else:
                values, scales = _quantised(parts, pool, threads)
                yield weight.name, values
                yield f"{weight.name}.scale", scales
            if weight.bias:
                biases = [checkpoint.tensor(f"{of}.bias", (rows,)) for of, rows in weight.sources]
                yield f"{weight.name}.bias", _stack([bias.as_f32() for bias in biases])


def _four_bits(
    weight: Matrix,
    checkpoint: Checkpoint,
    parts: list[StoredTensor],
    precision: WeightPrecision,
    pool: Executor,
) -> FourBits | None:
    """None where the matrix is not held so: the embedding, whose rows are looked up, and the head,
    to which tokens are most sensitive, but in FILE; there what is not of 4 bits in its file.
    """
    quantise = _quantiser(weight, precision)
    if quantise is not None:
        at_once = _rows_at_once(weight.columns)
        jobs = [
            pool.submit(_in_groups, quantise, part, slice(first, first + at_once))
            for part in parts
            for first in range(0, len(part.data), at_once)
        ]
        return stacked([job.result() for job in jobs])
    if precision is WeightPrecision.FILE:
        found = [checkpoint.blocks(f"{source}.weight") for source, _ in weight.sources]
        blocks = [each for each in found if each is not None and each[0] in EXACT]
        if len(blocks) == len(found):
            return stacked([from_blocks(kind, data) for kind, data in blocks])
    return None


def _quantiser(weight: Matrix, precision: WeightPrecision) -> Callable[[Floats], FourBits] | None:
    if weight.name in _EIGHT_BITS:
        return None
    if precision is WeightPrecision.I4_G128:
        groups = (group for group in COARSE_GROUPS if weight.columns % group == 0)
        group = next(groups, None)
        return None if group is None else partial(quantise_groups, group=group)
    if precision is WeightPrecision.I4 and weight.columns % GROUP == 0:
        # Of a mixture's experts the plugin recognises no offsets.
        return quantise_groups if ".experts." in weight.name else quantise_with_offsets
    return None


def _offsets(
    name: str, offset: Floats | None, precision: WeightPrecision
) -> Iterator[tuple[str, Array]]:
    """A file's as they are. Of I4 they are an eighth of all bytes in f32, and what rounding them
    to 8 bits adds to the error is a small part of that of 4 bits.
    """
    if offset is None:
        return
    if precision is WeightPrecision.FILE:
        yield name, offset
        return
    scale = np.abs(offset).max(axis=1, keepdims=True) / np.float32(127.0)
    scale[scale == 0.0] = 1.0
    yield name, np.rint(offset / scale).astype(np.int8)
    yield f"{name}.scale", scale


def _rows_at_once(columns: int) -> int:
    return max(1, _QUANTISED_ELEMENTS // columns)


def _in_groups(
    quantise: Callable[[Floats], FourBits], tensor: StoredTensor, rows: slice
) -> FourBits:
    weights = np.empty(tensor.data[rows].shape, np.float32)
    tensor.read_f32(rows, weights)
    return quantise(weights)


def _quantised(
    parts: list[StoredTensor], pool: Executor, threads: int
) -> tuple[npt.NDArray[np.int8], npt.NDArray[np.float32]]:
    """The parts, one below the other: int8 [rows, columns] and scale [rows, 1]."""
    rows, columns = sum(len(part.data) for part in parts), parts[0].data.shape[1]
    values, scales = np.empty((rows, columns), np.int8), np.empty((rows, 1), np.float32)
    share, begin = -(-rows // threads), 0
    jobs: list[Future[None]] = []
    for part in parts:
        for first in range(0, len(part.data), share):
            taken = slice(first, min(first + share, len(part.data)))
            put = slice(begin + taken.start, begin + taken.stop)
            jobs.append(pool.submit(_quantise, part, taken, values[put], scales[put]))
        begin += len(part.data)
    for job in jobs:
        job.result()
    return values, scales


def _quantise(
    tensor: StoredTensor, rows: slice, values: npt.NDArray[np.int8], scales: npt.NDArray[np.float32]
) -> None:
    """These rows of the tensor; a row of zeros has scale 1."""
    columns = values.shape[1]
    at_once = _rows_at_once(columns)
    buffer = np.empty((min(at_once, len(values)), columns), np.float32)
    for begin in range(0, len(values), at_once):
        part = slice(begin, min(begin + at_once, len(values)))
        weights = buffer[: part.stop - part.start]
        tensor.read_f32(slice(rows.start + part.start, rows.start + part.stop), weights)
        largest = np.maximum(weights.max(axis=1), -weights.min(axis=1))
        scale = (largest / np.float32(127.0))[:, np.newaxis]
        scale[scale == 0.0] = 1.0
        np.divide(weights, scale, out=weights)
        np.rint(weights, out=weights)
        np.copyto(values[part], weights, casting="unsafe")
        scales[part] = scale


def _stack(parts: list[npt.NDArray[_Element]]) -> npt.NDArray[_Element]:
    return parts[0] if len(parts) == 1 else np.concatenate(parts)
