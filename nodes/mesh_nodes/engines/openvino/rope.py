"""Rotary position embedding: cosine and sine tables, and the rotation of queries and keys.

The tables are computed here once per load, in double precision, up to the instance's context limit;
the graph only gathers rows from them. `graph` calls both functions.
"""

import numpy as np
import numpy.typing as npt
import openvino as ov
import openvino.opset13 as ops
from openvino import Node

from mesh.domain.errors import UnsupportedModel
from mesh_nodes.engines.openvino.architecture import Rope

PIECE_TOKENS = 8192
"""The tables are computed for this many positions at once: in double precision a context of
millions would take gigabytes.
"""
_ELEMENT_BYTES = 4


def inverse_frequencies(rope: Rope, head_size: int) -> npt.NDArray[np.float64]:
    """Radians per position of each rotated pair, [head_size / 2].

    Linear scaling: Chen et al. 2023, position interpolation. llama3: long wavelengths are divided
    by the factor, short ones kept, those between blended (Llama 3.1's published configuration).
    """
    base = 1.0 / rope.theta ** (np.arange(0, head_size, 2, dtype=np.float64) / head_size)
    if rope.scaling == "linear":
        return base / rope.factor
    if rope.scaling == "llama3":
        turns = rope.original_context_tokens * base / (2 * np.pi)
        low, high = rope.low_frequency_factor, rope.high_frequency_factor
        kept = np.clip((turns - low) / (high - low), 0.0, 1.0)
        return base * (kept + (1.0 - kept) / rope.factor)
    if rope.scaling == "longrope":
        return base / np.array(rope.short_factors, np.float64)
    return base


def rope_tables(rope: Rope, head_size: int, context_tokens_max: int) -> tuple[ov.Tensor, ov.Tensor]:
    """Cosines and sines, each [context_tokens_max, head_size] (the half repeated), in memory of
    OpenVINO's: it would copy an array with the interpreter locked, gigabytes in seconds in which
    the node answers nobody.

    Raises UnsupportedModel for longrope beyond the original context: which of its factors hold
    changes there with a sequence's length, and what was cached would have to be rotated anew.
    """
    if rope.scaling == "longrope" and context_tokens_max > rope.original_context_tokens:
        raise UnsupportedModel(
            f"the OpenVINO engine does not run longrope over a context of {context_tokens_max} "
            f"tokens, more than the {rope.original_context_tokens} that its short factors hold for",
            hint=f"set spec.context_tokens_max to {rope.original_context_tokens}, "
            "or deploy it on vLLM nodes",
        )
    frequencies = inverse_frequencies(rope, head_size)
    shape = ov.Shape([context_tokens_max, 2 * len(frequencies)])
    tables = ov.Tensor(ov.Type.f32, shape), ov.Tensor(ov.Type.f32, shape)
    cosines, sines = (table.data for table in tables)
    for begin in range(0, context_tokens_max, PIECE_TOKENS):
        rows = slice(begin, min(begin + PIECE_TOKENS, context_tokens_max))
        angles = np.outer(np.arange(rows.start, rows.stop), frequencies)
        angles = np.concatenate([angles, angles], axis=1)
        cosines[rows] = np.cos(angles) * rope.table_factor
        sines[rows] = np.sin(angles) * rope.table_factor
    return tables


def token_bytes(rotary_size: int) -> int:
    """What both tables take for each token of the context limit."""
    return 2 * _ELEMENT_BYTES * rotary_size


def rotate(x: Node, cosine: Node, sine: Node, head_size: int) -> Node:
    """Half rotation of x [tokens, heads, 1, head_size]; the pattern that the CPU plugin fuses."""
    half = head_size // 2
    axis, stride = _index(3), _index(1)
    first = ops.slice(x, _index(0), _index(half), stride, axis)
    second = ops.slice(x, _index(half), _index(2**31 - 1), stride, axis)
    minus = ops.constant(np.full((1, 1, 1, 1), -1.0, np.float32))
    rotated = ops.concat([ops.multiply(second, minus), first], -1)
    return ops.add(ops.multiply(x, cosine), ops.multiply(rotated, sine))


def _index(value: int) -> Node:
    return ops.constant(np.array([value], np.int64))
