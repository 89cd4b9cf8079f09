"""OpenVINO's paged attention: the operation, and the inputs that every paged model has.

The operation is an extension that OpenVINO keeps private (28 inputs, positional, no documentation
beyond its source), so all knowledge of it is here, and the engine's dependency is pinned to one
minor release. `graph` builds with it; `ir` leaves a model that has the same inputs, and
`compiled_import` builds it again where OpenVINO exported one.
"""

import numpy as np
import openvino.opset13 as ops
from openvino import Node, Output, Type
from openvino.op import _PagedAttentionExtension

from mesh.domain.values import dataclass

BLOCK_TOKENS = 32
"""The CPU plugin fixes this number of tokens in a block."""

INPUT_IDS = "input_ids"
POSITION_IDS = "position_ids"
PAST_LENS = "past_lens"
SUBSEQUENCE_BEGINS = "subsequence_begins"
BLOCK_INDICES = "block_indices"
BLOCK_INDICES_BEGINS = "block_indices_begins"
MAX_CONTEXT_LEN = "max_context_len"
SAMPLED_INDICES = "sampled_tokens_indices"
"""Ours: the rows of the batch whose logits are wanted. The others are OpenVINO's names."""
TOKEN_TYPES = "token_types"
"""Ours, of an encoder that tells a query from a document: 0 or 1 for each token."""
KEY_CACHE, VALUE_CACHE = "key_cache.", "value_cache."


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionShape:
    heads: int
    kv_heads: int
    head_size: int
    scale: float = 0.0
    """The scale of the attention scores; 0 stands for the inverse root of the head size."""
    window_tokens: int = 0
    """The tokens that one attends to, itself included; 0 stands for all."""


class AttentionInputs:
    """The block tables of a model under construction, shared by all its layers."""

    def __init__(self, both_ways: Node | None = None) -> None:
        """`both_ways`: i32 [tokens], of ones, where each token of an iteration attends to those
        after it, too.
        """
        self._both_ways = both_ways
        self._past_lens = parameter(PAST_LENS, [-1], Type.i32)
        self._subsequence_begins = parameter(SUBSEQUENCE_BEGINS, [-1], Type.i32)
        self._block_indices = parameter(BLOCK_INDICES, [-1], Type.i32)
        self._block_indices_begins = parameter(BLOCK_INDICES_BEGINS, [-1], Type.i32)
        self._max_context_len = parameter(MAX_CONTEXT_LEN, [], Type.i32)
        self.parameters = [
            self._past_lens,
            self._subsequence_begins,
            self._block_indices,
            self._block_indices_begins,
            self._max_context_len,
        ]

    def attend(self, layer: int, q: Node, k: Node, v: Node, shape: AttentionShape) -> Node:
        """Attention of q [tokens, heads * head_size] over k, v [tokens, kv_heads * head_size] and
        the layer's caches, which take k and v. Returns [tokens, heads * head_size].
        """
        caches = [
            parameter(f"{KEY_CACHE}{layer}", [-1, -1, -1, -1], Type.dynamic),
            parameter(f"{VALUE_CACHE}{layer}", [-1, -1, -1, -1], Type.dynamic),
        ]
        self.parameters += caches
        tables = [
            self._past_lens,
            self._subsequence_begins,
            self._block_indices,
            self._block_indices_begins,
        ]
        scale = _constant(shape.scale or shape.head_size**-0.5, np.float32)
        window = _constant(shape.window_tokens, np.int32)
        inputs = [q, k, v, *caches, *tables, scale, window, _empty(np.float32)]
        inputs += [self._max_context_len, *_unused_inputs(self._both_ways)]
        outputs = [node.output(0) for node in inputs]
        return paged_attention(outputs, kv_heads=shape.kv_heads, head_size=shape.head_size)


def paged_attention(inputs: list[Output], *, kv_heads: int, head_size: int) -> Node:
    """The operation over its 28 inputs."""
    attention = _PagedAttentionExtension(inputs)
    # The CPU plugin sizes the caches by these; it reads them as ints and as nothing else.
    info = attention.get_rt_info()
    info["num_k_heads"] = info["num_v_heads"] = kv_heads
    info["k_head_size"] = info["v_head_size"] = head_size
    return attention


def parameter(name: str, shape: list[int], element: Type) -> Node:
    """A model input with this tensor name; -1 in the shape is a dynamic dimension."""
    node = ops.parameter(shape, element, name=name)
    node.output(0).get_tensor().set_names({name})
    return node


def _unused_inputs(token_types: Node | None = None) -> list[Node]:
    """Inputs 13 to 27, each in the form that switches its feature off. Tokens whose type is 1, as
    those of an image, attend to each other whatever their order.
    """
    zero = _constant(0, np.int32)
    none_i32, none_f32 = _empty(np.int32), _empty(np.float32)
    sinks = ops.constant(np.zeros((0, 0, 0, 0), np.float32))
    aggregation_and_rotation = [none_i32, none_i32, none_i32, none_f32]
    sparse_attention = [none_f32, zero, zero]
    eviction = [zero, none_i32, none_i32, none_i32]
    types = none_i32 if token_types is None else token_types
    token_types_and_tree_mask = [types, _empty(np.uint8), none_i32]
    return [
        *aggregation_and_rotation,
        *sparse_attention,
        sinks,
        *eviction,
        *token_types_and_tree_mask,
    ]


def _constant(value: float, element: type[np.generic]) -> Node:
    return ops.constant(np.array(value, element))


def _empty(element: type[np.generic]) -> Node:
    return ops.constant(np.zeros(0, element))
