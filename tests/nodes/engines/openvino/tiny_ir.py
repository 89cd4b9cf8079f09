"""The tiny llama as a stateful OpenVINO IR, in the form that optimum-intel exports.

Keys and values live in variables that are read, gathered by `beam_idx`, appended to and assigned;
attention is the standard operation with an explicit mask; `position_ids` come from outside.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov
import openvino.opset13 as ops
from openvino import Node
from openvino.op.util import Variable, VariableInfo
from safetensors.numpy import load_file

from mesh.domain.model import ModelFormat
from tests.nodes.engines.openvino.tiny import HEAD_SIZE, HEADS, KV_HEADS, LAYERS, TinyModel


def write_tiny_ir(folder: Path, source: TinyModel) -> TinyModel:
    """Write the llama of `source` as an IR into `folder`."""
    folder.mkdir(parents=True)
    ov.save_model(_Export(source.path).model(), folder / "openvino_model.xml")
    (folder / "config.json").write_text((source.path / "config.json").read_text())
    info = replace(
        source.info,
        format=ModelFormat.OPENVINO_IR,
        disk_bytes=(folder / "openvino_model.bin").stat().st_size,
    )
    return TinyModel(folder, info)


class _Export:
    def __init__(self, source: Path) -> None:
        self._weights = load_file(source / "model.safetensors")
        self._ids = _input("input_ids", [-1, -1], ov.Type.i64)
        self._mask = _input("attention_mask", [-1, -1], ov.Type.i64)
        self._positions = _input("position_ids", [-1, -1], ov.Type.i64)
        self._beams = _input("beam_idx", [-1], ov.Type.i32)
        self._assigned: list[Node] = []

    def model(self) -> ov.Model:
        x = ops.gather(self._constant("model.embed_tokens"), self._ids, _c(0))
        for layer in range(LAYERS):
            prefix = f"model.layers.{layer}."
            h = self._norm(x, f"{prefix}input_layernorm")
            x = ops.add(x, self._attention(layer, h))
            h = self._norm(x, f"{prefix}post_attention_layernorm")
            gate = ops.swish(self._linear(h, f"{prefix}mlp.gate_proj"))
            gated = ops.multiply(gate, self._linear(h, f"{prefix}mlp.up_proj"))
            x = ops.add(x, self._linear(gated, f"{prefix}mlp.down_proj"))
        logits = self._linear(self._norm(x, "model.norm"), "lm_head")
        logits.output(0).get_tensor().set_names({"logits"})
        inputs = [self._ids, self._mask, self._positions, self._beams]
        return ov.Model([ops.result(logits)], self._assigned, inputs, "tiny")

    def _attention(self, layer: int, h: Node) -> Node:
        prefix = f"model.layers.{layer}.self_attn."
        q = self._rotate(_split(self._linear(h, f"{prefix}q_proj"), HEADS))
        k = self._rotate(_split(self._linear(h, f"{prefix}k_proj"), KV_HEADS))
        v = _split(self._linear(h, f"{prefix}v_proj"), KV_HEADS)
        keys = _repeat(self._remember(f"past_key_values.{layer}.key", k))
        values = _repeat(self._remember(f"past_key_values.{layer}.value", v))
        attended = ops.scaled_dot_product_attention(q, keys, values, self._causal_mask())
        joined = ops.reshape(ops.transpose(attended, _c([0, 2, 1, 3])), _c([0, 0, -1]), True)
        return self._linear(joined, f"{prefix}o_proj")

    def _remember(self, name: str, new: Node) -> Node:
        info = VariableInfo()
        info.data_shape, info.data_type = (
            ov.PartialShape([-1, KV_HEADS, -1, HEAD_SIZE]),
            ov.Type.f32,
        )
        info.variable_id = name
        variable = Variable(info)
        batch = ops.gather(ops.shape_of(self._ids), _c([0]), _c(0))
        shape = ops.concat([batch, _c([KV_HEADS]), _c([0]), _c([HEAD_SIZE])], 0)
        empty = ops.broadcast(ops.constant(np.float32(0)), shape)
        past = ops.gather(ops.read_value(empty, variable), self._beams, _c(0))
        both = ops.concat([past, new], 2)
        self._assigned.append(ops.assign(both, variable))
        return both

    def _causal_mask(self) -> Node:
        """0 where a key is not after the query, very negative elsewhere: [batch, 1, T, total]."""
        total = ops.gather(ops.shape_of(self._mask), _c(1), _c(0))
        places = ops.range(_c(0), total, _c(1), "i64")
        allowed = ops.less_equal(
            places, ops.unsqueeze(ops.unsqueeze(self._positions, _c(1)), _c(3))
        )
        lowest = ops.constant(np.float32(-1e30))
        return ops.select(allowed, ops.constant(np.float32(0)), lowest)

    def _rotate(self, x: Node) -> Node:
        half = HEAD_SIZE // 2
        frequencies = (10000.0 ** (-np.arange(half) * 2 / HEAD_SIZE)).astype(np.float32)
        turned = ops.multiply(
            ops.unsqueeze(ops.convert(self._positions, "f32"), _c(2)), ops.constant(frequencies)
        )
        turned = ops.unsqueeze(ops.concat([turned, turned], 2), _c(1))
        first = ops.slice(x, _c([0]), _c([half]), _c([1]), _c([3]))
        second = ops.slice(x, _c([half]), _c([HEAD_SIZE]), _c([1]), _c([3]))
        swapped = ops.concat([ops.negative(second), first], 3)
        return ops.add(ops.multiply(x, ops.cos(turned)), ops.multiply(swapped, ops.sin(turned)))

    def _norm(self, x: Node, name: str) -> Node:
        square = ops.power(x, ops.constant(np.float32(2)))
        mean = ops.add(ops.reduce_mean(square, _c([-1]), True), ops.constant(np.float32(1e-5)))
        scaled = ops.multiply(x, ops.divide(ops.constant(np.float32(1)), ops.sqrt(mean)))
        return ops.multiply(self._constant(name), scaled)

    def _linear(self, x: Node, name: str) -> Node:
        return ops.matmul(x, self._constant(name), False, True)

    def _constant(self, name: str) -> Node:
        return ops.constant(self._weights[f"{name}.weight"].astype(np.float32))


def _input(name: str, shape: list[int], element: ov.Type) -> Node:
    node = ops.parameter(shape, element, name=name)
    node.output(0).get_tensor().set_names({name})
    return node


def _split(x: Node, heads: int) -> Node:
    return ops.transpose(ops.reshape(x, _c([0, 0, heads, HEAD_SIZE]), True), _c([0, 2, 1, 3]))


def _repeat(x: Node) -> Node:
    """Each KV head for its group of query heads."""
    group = HEADS // KV_HEADS
    wide = ops.broadcast(
        ops.unsqueeze(x, _c(2)), _c([1, 1, group, 1, 1]), broadcast_spec="BIDIRECTIONAL"
    )
    return ops.reshape(wide, _c([0, HEADS, -1, HEAD_SIZE]), True)


def _c(value: Any) -> Node:
    return ops.constant(np.array(value, np.int64))
