"""Builds the OpenVINO model of a decoder with paged attention from its weights.

Takes an `Architecture` and the arrays of `weights`; the result goes to `core.compile_model`.
Weights become constants over the memory of the arrays, without a copy, and keep them alive.
Tokens of all sequences lie one after the other: activations are [tokens, 1, width].
"""

from collections.abc import Mapping

import numpy as np
import openvino as ov
import openvino.opset13 as ops
from openvino import Node, Type

from mesh.domain.model import Task
from mesh.domain.operators import Role
from mesh_nodes.engines.openvino.architecture import SILU, Architecture, Encoder, Experts, Rope
from mesh_nodes.engines.openvino.four_bits import GROUP
from mesh_nodes.engines.openvino.paged_attention import (
    INPUT_IDS,
    POSITION_IDS,
    SAMPLED_INDICES,
    TOKEN_TYPES,
    AttentionInputs,
    AttentionShape,
    parameter,
)
from mesh_nodes.engines.openvino.rope import rope_tables, rotate
from mesh_nodes.engines.openvino.weights import Array, in_halves

COSINE, SINE = "cosine", "sine"
LOCAL_COSINE, LOCAL_SINE = "local_cosine", "local_sine"
ROPE_TABLES = (COSINE, SINE, LOCAL_COSINE, LOCAL_SINE)
"""Constants that the shape decides; the model decides those named as `weights` names its arrays."""


def build_graph(
    architecture: Architecture,
    weights: Mapping[str, Array],
    context_tokens_max: int,
    *,
    by_role: bool = False,
) -> ov.Model:
    """Inputs: those of `paged_attention`. Output: logits [sampled, 1, vocabulary], f32; with a task
    hidden states [sampled, 1, width], or scores [sampled, 1, 1] before their sigmoid. `by_role`:
    a decoder's nodes have names that `role_of` reads.
    """
    return _Builder(architecture, weights, context_tokens_max, by_role=by_role).model()


def role_of(name: str) -> Role | None:
    """The role that a node of a graph that was built `by_role` is named by."""
    role = name.partition(".")[0]
    return Role(role) if role in _ROLES else None


_ROLES = frozenset(role.value for role in Role)


class _Builder:
    def __init__(
        self,
        architecture: Architecture,
        weights: Mapping[str, Array],
        context_tokens_max: int,
        *,
        by_role: bool = False,
    ) -> None:
        self._a = architecture
        self._marked: set[str] | None = set() if by_role else None
        self._weights = in_halves(weights, lambda both: np.split(both, 2))
        self._constants = dict[str, Node]()
        self._matrices = dict[str, Node]()
        self._summed: tuple[Node, Node] | None = None
        """The input of the last matrix with offsets, and its groups' sums: gate and up share both.
        """
        self._input_ids = parameter(INPUT_IDS, [-1], Type.i64)
        self._position_ids = parameter(POSITION_IDS, [-1], Type.i64)
        self._sampled = parameter(SAMPLED_INDICES, [-1], Type.i64)
        if architecture.encoder is not None:
            one = ops.constant(np.array(1, np.int32))
            self._attention = AttentionInputs(ops.broadcast(one, ops.shape_of(self._input_ids)))
            return
        self._attention = AttentionInputs()
        self._rotary_size = architecture.rotary_size or architecture.head_size
        self._rotation = self._rotation_of(architecture.rope, COSINE, SINE, context_tokens_max)
        self._local_rotation = self._rotation
        if architecture.local_rope is not None:
            self._local_rotation = self._rotation_of(
                architecture.local_rope, LOCAL_COSINE, LOCAL_SINE, context_tokens_max
            )

    def model(self) -> ov.Model:
        encoder, further = self._a.encoder, []
        if encoder is not None:
            types = None
            if self._a.task is Task.RERANK and encoder.types > 1:
                types = parameter(TOKEN_TYPES, [-1], Type.i64)
                further.append(types)
            output = self._encoded(encoder, types)
        else:
            output = self._decoded()
        output.output(0).get_tensor().set_names({"logits"})
        inputs = [self._input_ids, self._position_ids, self._sampled, *further]
        inputs += self._attention.parameters
        return ov.Model([ops.result(output)], inputs, f"{self._a.kind}_paged")

    def _encoded(self, encoder: Encoder, types: Node | None) -> Node:
        x = ops.unsqueeze(self._embedded(), _shape(1))
        before = ops.constant(np.array(encoder.positions_before, np.int64))
        positions = ops.add(self._position_ids, before)
        kinds = _shape(0) if types is None else types
        for table, rows in (("positions", positions), ("types", kinds)):
            x = ops.add(x, ops.unsqueeze(_gather(self._matrix(table), rows), _shape(1)))
        x = self._layer_norm(x, "embedded_norm")
        for layer in range(self._a.layers):
            prefix = f"layers.{layer}"
            width = self._a.hidden_size
            fused = self._linear(x, f"{prefix}.qkv")
            split = ops.variadic_split(fused, _scalar(2), _shape(width, width, width))
            q, k, v = (ops.reshape(each, _shape(-1, width), False) for each in split.outputs())
            attended = self._attended(layer, q, k, v)
            x = self._layer_norm(ops.add(x, attended), f"{prefix}.attended_norm")
            fed = self._activated(self._linear(x, f"{prefix}.up"))
            x = ops.add(x, self._linear(fed, f"{prefix}.down"))
            x = self._layer_norm(x, f"{prefix}.fed_norm")
        x = _gather(x, self._sampled)
        if self._a.task is Task.RERANK:
            x = self._linear(ops.tanh(self._linear(x, "scored")), "score")
        return x

    def _activated(self, x: Node) -> Node:
        match self._a.activation:
            case "relu":
                return ops.relu(x)
            case "gelu":
                return ops.gelu(x, "erf")
            case _:
                return ops.gelu(x, "tanh")

    def _layer_norm(self, x: Node, name: str) -> Node:
        """Over the last axis, with a bias, spelled as OpenVINO has it."""
        normed = ops.mvn(x, _shape(-1), True, self._a.norm_epsilon, "INSIDE_SQRT")
        weights, biases = (self._weights[n].reshape(1, 1, -1) for n in (name, f"{name}.bias"))
        scaled = ops.multiply(normed, _named(name, ops.constant(weights)))
        return ops.add(scaled, _named(f"{name}.bias", ops.constant(biases)))

    def _decoded(self) -> Node:
        x = ops.unsqueeze(self._embedded(), _shape(1))
        if self._a.embedding_scale != 1.0:
            x = ops.multiply(x, _number(self._a.embedding_scale))
        self._mark(Role.EMBEDDING, x)
        for layer in range(self._a.layers):
            attended, prefix = self._attend(layer, x), f"layers.{layer}"
            if self._a.norms_around:
                attended = self._norm(attended, f"{prefix}.attended_norm", rank=3)
            x = self._mark(Role.RESIDUAL, ops.add(x, attended))
            fed = self._norm(x, f"{prefix}.mlp_norm", rank=3)
            feed = self._mixture if self._a.is_mixture(layer) else self._mlp
            fed = feed(prefix, fed)
            if self._a.norms_around:
                fed = self._norm(fed, f"{prefix}.fed_norm", rank=3)
            x = self._mark(Role.RESIDUAL, ops.add(x, fed))
        x = self._norm(_gather(x, self._sampled), "norm", rank=3)
        if self._a.task is not None:
            return x
        logits = self._linear(x, "embedding" if self._a.tied_embeddings else "head")
        if self._a.logit_cap:
            cap = _number(self._a.logit_cap)
            logits = ops.multiply(ops.tanh(ops.divide(logits, cap)), cap)
        return self._mark(Role.HEAD, logits)

    def _mark(self, role: Role, output: Node) -> Node:
        """Name what has come into the graph since the last mark and leads to this node."""
        left = [] if self._marked is None else [output]
        while left and self._marked is not None:
            node = left.pop()
            if node.get_name() in self._marked:
                continue
            self._marked.add(node.get_name())
            if node.get_type_name() not in ("Constant", "Parameter"):
                node.set_friendly_name(f"{role}.{len(self._marked)}")
            left += [source.get_node() for source in node.input_values()]
        return output

    def _embedded(self) -> Node:
        """[tokens, width]. Of 4 bits only these rows are unpacked, two weights from a byte."""
        nibbles = self._weights["embedding"]
        if nibbles.dtype != np.uint8:
            return _gather(self._matrix("embedding"), self._input_ids)
        rows = self._rows_of_tokens("embedding")
        upper = ops.floor(ops.multiply(rows, _number(1 / 16)))
        lower = ops.subtract(rows, ops.multiply(upper, _number(16)))
        pairs = [ops.unsqueeze(_signed(half), _shape(3)) for half in (lower, upper)]
        groups = ops.reshape(ops.concat(pairs, 3), _shape(-1, nibbles.shape[1], GROUP), False)
        embedded = ops.multiply(groups, self._rows_of_tokens("embedding.scale"))
        if "embedding.offset" in self._weights:
            offset = ops.unsqueeze(self._rows_of_tokens("embedding.offset"), _shape(2))
            embedded = ops.add(embedded, offset)
        return ops.reshape(embedded, _shape(-1, self._a.hidden_size), False)

    def _rows_of_tokens(self, name: str) -> Node:
        return ops.convert(_gather(self._constant(name), self._input_ids), "f32")

    def _attend(self, layer: int, x: Node) -> Node:
        a, prefix = self._a, f"layers.{layer}"
        fused = self._linear(self._norm(x, f"{prefix}.input_norm", rank=3), f"{prefix}.qkv")
        widths = [a.attention_heads * a.head_size, a.kv_heads * a.head_size]
        split = ops.variadic_split(fused, _scalar(2), _shape(widths[0], widths[1], widths[1]))
        self._mark(Role.QKV, split)
        window = a.window(layer)
        rotation = self._local_rotation if window else self._rotation
        q = self._heads(split.output(0), a.attention_heads, f"{prefix}.q_norm", rotation)
        k = self._heads(split.output(1), a.kv_heads, f"{prefix}.k_norm", rotation)
        v = ops.reshape(split.output(2), _shape(-1, widths[1]), False)
        return self._attended(layer, q, k, v)

    def _attended(self, layer: int, q: Node, k: Node, v: Node) -> Node:
        """The projected output of the attention of q, k and v [tokens, …]: [tokens, 1, width]."""
        a = self._a
        shape = AttentionShape(
            heads=a.attention_heads,
            kv_heads=a.kv_heads,
            head_size=a.head_size,
            scale=a.attention_scale,
            window_tokens=a.window(layer),
        )
        attended = self._attention.attend(layer, q, k, v, shape)
        width = a.attention_heads * a.head_size
        attended = ops.reshape(attended.output(0), _shape(-1, 1, width), False)
        self._mark(Role.ATTENTION, attended)
        return self._mark(Role.OUTPUT, self._linear(attended, f"layers.{layer}.output"))

    def _heads(self, x: Node, heads: int, norm: str, rotation: tuple[Node, Node]) -> Node:
        """Queries or keys of [tokens, 1, heads * size], normed and rotated, as [tokens, …]."""
        size, rotated = self._a.head_size, self._rotary_size
        x = ops.reshape(x, _shape(-1, 1, heads, size), False)
        if self._a.qk_norm:
            x = self._norm(x, norm, rank=4)
        x = ops.transpose(x, _shape(0, 2, 1, 3))
        if rotated == size:
            x = rotate(x, *rotation, size)
        else:
            split = ops.variadic_split(x, _scalar(3), _shape(rotated, size - rotated))
            x = ops.concat([rotate(split.output(0), *rotation, rotated), split.output(1)], 3)
        x = ops.transpose(x, _shape(0, 2, 1, 3))
        return self._mark(Role.ROPE, ops.reshape(x, _shape(-1, heads * size), False))

    def _mlp(self, prefix: str, x: Node) -> Node:
        """The MLP of the normed input. Two products: the plugin takes the activation into that of
        the gate, and no rows of both have to be cut apart.
        """
        gate, up = (
            self._mark(Role.GATE_UP, self._linear(x, f"{prefix}.{name}")) for name in ("gate", "up")
        )
        gated = self._mark(Role.ACTIVATION, self._gated(gate, up))
        return self._mark(Role.DOWN, self._linear(gated, f"{prefix}.down"))

    def _gated(self, gate: Node, up: Node) -> Node:
        silu = self._a.activation == SILU
        return ops.multiply(ops.swish(gate) if silu else ops.gelu(gate, "tanh"), up)

    def _mixture(self, prefix: str, x: Node) -> Node:
        """The mixture of experts of the normed input. It is spelled as if every expert computed
        every token, which the plugin recognises (`ConvertTiledMoeBlockToGatherMatmuls`): only the
        chosen experts are read.
        """
        experts = self._a.experts
        assert experts is not None
        tokens = ops.reshape(x, _shape(-1, self._a.hidden_size), False)
        tiled = ops.tile(tokens, _shape(experts.count, 1))
        tiled = ops.reshape(tiled, _shape(experts.count, -1, self._a.hidden_size), False)
        gate = self._experts_matmul(tiled, f"{prefix}.experts.gate")
        # Not ops.swish, whose second input the plugin does not look for.
        gate = ops.multiply(gate, ops.sigmoid(gate))
        up = self._experts_matmul(tiled, f"{prefix}.experts.up")
        down = self._experts_matmul(ops.multiply(gate, up), f"{prefix}.experts.down")
        each = ops.reshape(down, _shape(experts.count, -1, 1, self._a.hidden_size), False)
        shares = self._mark(Role.GATE, self._shares(tokens, f"{prefix}.router", experts))
        mixed = ops.reduce_sum(ops.multiply(each, shares), _shape(0), False)
        self._mark(Role.EXPERTS, mixed)
        if experts.shared_intermediate_size:
            share = ops.sigmoid(self._linear(x, f"{prefix}.shared.router"))
            mixed = ops.add(mixed, ops.multiply(share, self._mlp(f"{prefix}.shared", x)))
        return self._mark(Role.SHARED_EXPERT, mixed)

    def _experts_matmul(self, x: Node, name: str) -> Node:
        """Multiplies [experts, tokens, columns] by the matrix of each expert."""
        assert self._a.experts is not None
        return ops.matmul(x, self._matrix(name, self._a.experts.count), False, True)

    def _shares(self, tokens: Node, router: str, experts: Experts) -> Node:
        """What each expert has of each token, 0 where it is not chosen: [experts, tokens, 1, 1]."""
        odds = ops.softmax(ops.matmul(tokens, self._matrix(router), False, True), 1)
        chosen = ops.topk(odds, _scalar(experts.chosen), -1, "max", "value", "i64")
        shares, places = chosen.output(0), chosen.output(1)
        if experts.normalised:
            shares = ops.divide(shares, ops.reduce_sum(shares, _shape(-1), True)).output(0)
        count = _shape(experts.count)
        token_count = ops.gather(ops.shape_of(places), _shape(0), _scalar(0))
        zeros = ops.constant(np.zeros(1, np.float32))
        nothing = ops.broadcast(zeros, ops.concat([token_count, count], 0))
        of_all = ops.scatter_elements_update(nothing, places, shares, _shape(1))
        of_all = ops.transpose(of_all, _shape(1, 0))
        of_all = ops.reshape(of_all, ops.concat([count, token_count, _shape(-1)], 0), True)
        return ops.unsqueeze(of_all, _shape(-1))

    def _norm(self, x: Node, name: str, *, rank: int) -> Node:
        """RMS norm over the last axis, spelled as the CPU plugin fuses it."""
        ones = (1,) * rank
        square = ops.power(x, ops.constant(np.full(ones, 2.0, np.float32)))
        mean = ops.reduce_mean(square, _shape(-1), True)
        epsilon = ops.constant(np.full(ones, self._a.norm_epsilon, np.float32))
        root = ops.sqrt(ops.add(mean, epsilon))
        scaled = ops.multiply(x, ops.divide(ops.constant(np.ones(ones, np.float32)), root))
        weights = self._weights[name].reshape(*ones[1:], -1)
        return self._mark(Role.NORM, ops.multiply(_named(name, ops.constant(weights)), scaled))

    def _linear(self, x: Node, name: str) -> Node:
        y = ops.matmul(x, self._matrix(name), False, True)
        offset = self._weights.get(f"{name}.offset")
        if offset is not None:
            y = ops.add(y, self._of_offsets(x, f"{name}.offset", offset))
        bias = self._weights.get(f"{name}.bias")
        if bias is None:
            return y
        return ops.add(y, _named(f"{name}.bias", ops.constant(bias.reshape(1, 1, -1))))

    def _of_offsets(self, x: Node, name: str, offset: Array) -> Node:
        """What a weight of a group adds to all of it: its share in the sum of the group's inputs.
        The plugin multiplies by 4 bits and whole zero points only as quickly as it does in i8.
        """
        if self._summed is None or self._summed[0] is not x:
            groups = ops.reshape(x, _shape(0, 0, offset.shape[1], GROUP), True)
            self._summed = x, ops.reduce_sum(groups, _shape(3), False)
        return ops.matmul(self._summed[1], self._matrix(name), False, True)

    def _matrix(self, name: str, experts: int = 0) -> Node:
        """f32 [rows, columns], decompressed in the graph from what is stored; of experts
        [experts, rows of each, columns].
        """
        values = self._weights[name]
        if values.dtype == np.uint8:
            return self._matrix_of_four_bits(name, values, experts)
        if name not in self._matrices:
            self._matrices[name] = self._decompressed(name, values, experts)
        return self._matrices[name]

    def _decompressed(self, name: str, values: Array, experts: int) -> Node:
        stored = self._constant(name, experts)
        if values.dtype == np.float32:
            return stored
        matrix = ops.convert(stored, "f32")
        if f"{name}.scale" not in self._weights:
            return matrix
        return ops.multiply(matrix, self._constant(f"{name}.scale", experts))

    def _constant(self, name: str, experts: int = 0) -> Node:
        """One for all that compute with it."""
        if name not in self._constants:
            values = self._weights[name]
            if experts:
                values = values.reshape(experts, -1, *values.shape[1:])
            constant = ops.constant(values, shared_memory=True)
            self._constants[name] = _named(name, constant)
        return self._constants[name]

    def _matrix_of_four_bits(self, name: str, nibbles: Array, experts: int) -> Node:
        """The matrix as the plugin fuses it. `FourBits` describes `nibbles`, their scale and their
        offset.
        """
        rows, groups, half = nibbles.shape
        outer = [experts, rows // experts] if experts else [rows]
        tensor = ov.Tensor(nibbles, ov.Shape([*outer, groups, 2 * half]), Type.i4)
        stored = _named(name, ov.op.Constant(tensor))
        scale = self._constant(f"{name}.scale", experts)
        matrix = ops.multiply(ops.convert(stored, "f32"), scale)
        return ops.reshape(matrix, _shape(*outer, groups * 2 * half), False)

    def _rotation_of(
        self, rope: Rope, cosine: str, sine: str, context_tokens_max: int
    ) -> tuple[Node, Node]:
        cosines, sines = rope_tables(rope, self._rotary_size, context_tokens_max)
        return self._rows_at_positions(cosine, cosines), self._rows_at_positions(sine, sines)

    def _rows_at_positions(self, name: str, table: ov.Tensor) -> Node:
        rows = _gather(_named(name, ov.op.Constant(table)), self._position_ids)
        return ops.reshape(rows, _shape(-1, 1, 1, self._rotary_size), False)


def _named(name: str, constant: Node) -> Node:
    """By these names `exported` finds the constants again in what was compiled."""
    constant.set_friendly_name(name)
    return constant


def _gather(x: Node, indices: Node) -> Node:
    return ops.gather(x, indices, _scalar(0))


def _number(value: float) -> Node:
    return ops.constant(np.array(value, np.float32))


def _signed(nibble: Node) -> Node:
    """f32 of 0 to 15 as the 4-bit numbers of -8 to 7 that they stand for."""
    negative = ops.floor(ops.multiply(nibble, _number(1 / 8)))
    return ops.subtract(nibble, ops.multiply(negative, _number(16)))


def _scalar(value: int) -> Node:
    return ops.constant(np.array(value, np.int64))


def _shape(*sizes: int) -> Node:
    return ops.constant(np.array(sizes, np.int64))
