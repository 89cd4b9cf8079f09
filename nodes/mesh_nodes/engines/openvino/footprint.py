"""What an instance will take before it is loaded, from the model's shape alone.

`measured_footprints` corrects the `estimate` by what unloads have freed, and `engine` uses the
result. The constants were fitted to resident memory after a load, a 512-token
prefill and many shapes, on four models of 0.13 to 1.2 billion parameters: what a new instance takes
was 0 to 35 % less than estimated, never more. What the first load leaves behind is the node's.
"""

from dataclasses import field

from mesh.domain.model import (
    ComputePrecision,
    Footprint,
    KvPrecision,
    ModelFormat,
    ModelInfo,
    WeightPrecision,
)
from mesh.domain.values import dataclass
from mesh_loader.encoders import TEXT_TOKENS_MAX
from mesh_nodes.engines.openvino.paged_attention import BLOCK_TOKENS
from mesh_nodes.engines.openvino.rope import token_bytes
from mesh_nodes.engines.openvino.weights import COARSE_GROUPS

_I8_BYTES = 1
"""Per parameter: the plugin's repacked matrices; what it was given stays in the page cache."""
_FOUR_BITS_BYTES = {
    WeightPrecision.I4: 0.66,
    WeightPrecision.I4_G128: 0.57,
    WeightPrecision.FILE: 0.75,
}
"""The same, each with an f32 scale. I4: for 32 of them, with an offset of 8 bits. I4_G128: for 64.
FILE: for 32, with an f32 offset; a file has less than 4 bits of none, and may have more of some."""
_F16_BYTES = 9
"""Per parameter: computing in f32, the plugin holds f32 weights twice, beside f16 of the fused."""
_IN_F16_BYTES = 5
"""Per parameter: in f16 the plugin turns weights of 8 bits and less into f16, and holds more beside
them; 4.5 were measured. In bf16 it does so as it computes."""
_AGAIN_FOUR_BITS_BYTES = 0.6
"""Per parameter of 4 bits, in a second copy; 0.51 to 0.57 were measured."""
_REPACKED_TOKENS = range(8, 65)
"""The sizes of iterations with which the second copy is there for certain; with 5 it may be."""
_IR_OVERHEAD = 1.25
"""An IR's repacked weights over the stored ones: measured with 4-bit groups."""
_GRAPH_BYTES = 72 * 2**20
"""The graph, the allocator's slack, and half of it kernels, once all sizes have occurred."""
_KERNELS_BYTES = _GRAPH_BYTES // 2
KERNEL_SIZES = 64
"""Sizes of iterations, in tokens, after which nearly all kernels are there."""
KEPT_BYTES = 56 * 2**20
"""What the process holds beside instances once it has had one: 38 MiB that stay when all have gone
(code of graph passes, kernels), and what its allocator keeps until it is trimmed."""
SCRATCH_BYTES = 32 * 2**20
"""For the activations of large iterations, which go back after each: instances compute one after
the other, so that one has them at a time. What a model takes beyond is its instances' own."""
ENGINE_BYTES = KEPT_BYTES + SCRATCH_BYTES
_REQUEST_BYTES = 2 * 2**20
"""What a further instance takes beside its logits: 0.2 MiB were measured with SmolLM2-135M."""
_PREFILL_TOKENS = max(512, TEXT_TOKENS_MAX)
"""Tokens of an iteration that activations are reckoned for: a chunk's, or an encoder's text's."""
BATCH_MAX = 128
"""Requests of an iteration; their logits are reckoned with. OpenVINO itself would take more."""
LASTING_TOKENS = BATCH_MAX
"""The activations of larger iterations, which are prefills, go back at once (`instance`)."""
_LOGIT_BYTES = 4
_ACTIVATION_BYTES_PER_INTERMEDIATE = 40
_ACTIVATION_BYTES_PER_HIDDEN = 20
"""Per token: f32 activations that live at once, the fused gate and up product foremost."""
_U8_SCALE_BYTES = 8
"""An f32 scale and zero point: u8 keys have them per channel of a block, values per token."""
_KV_ELEMENT_BYTES = {KvPrecision.F32: 4, KvPrecision.F16: 2, KvPrecision.BF16: 2, KvPrecision.U8: 1}


@dataclass(slots=True, kw_only=True)
class Reached:
    """The largest iterations that an instance holds memory of, and of how many sizes they were."""

    tokens: int = 0
    """The most tokens since activations last went back."""
    rows: int = 0
    """The most rows that yielded logits, which never go back: they are the infer request's
    output.
    """
    sizes: set[int] = field(default_factory=set)
    """In tokens."""

    @property
    def repacked(self) -> bool:
        """Whether it has computed what the plugin repacks matrices for where there is no VNNI."""
        return not self.sizes.isdisjoint(_REPACKED_TOKENS)

    def note(self, tokens: int, rows: int) -> None:
        self.tokens, self.rows = max(self.tokens, tokens), max(self.rows, rows)
        self.sizes.add(tokens)

    def note_release(self) -> None:
        """What it computes from now on takes activations anew."""
        self.tokens = 0


def estimate(
    model: ModelInfo,
    *,
    weights: WeightPrecision,
    kv: KvPrecision,
    compute: ComputePrecision = ComputePrecision.F32,
    repacks: bool = False,
) -> Footprint:
    """Weights with graph and activations, what of them is shared, and the KV bytes of one block.
    Of rope tables it states the most that each token of a context limit may take.
    `weights`, `compute`: of a model that does not say how its are held, and what it is computed in.
    `repacks`: the CPU has no VNNI, and the plugin holds all matrices a second time once it has
    computed an iteration of 5 to 64 tokens.
    """
    weights_bytes = _matrices_bytes(model, model.weights or weights)
    if (model.precision or compute) is ComputePrecision.F16:
        weights_bytes = max(weights_bytes, _IN_F16_BYTES * model.parameters)
    if repacks:
        weights_bytes += again_bytes(model, model.weights or weights)
    kv_block_bytes = model.kv_bytes_per_token(_KV_ELEMENT_BYTES[kv]) * BLOCK_TOKENS
    if kv is KvPrecision.U8:
        scales = model.layers * model.kv_heads * (model.head_size + BLOCK_TOKENS)
        kv_block_bytes += scales * _U8_SCALE_BYTES
    weights_bytes += _GRAPH_BYTES + _beyond_scratch_bytes(model)
    weights_bytes += _lasting_bytes(model, tokens=LASTING_TOKENS, rows=BATCH_MAX)
    return Footprint(
        weights_bytes=int(weights_bytes),
        kv_block_bytes=kv_block_bytes,
        block_tokens=BLOCK_TOKENS,
        shared_bytes=shared_bytes(model, int(weights_bytes)),
        context_token_bytes=_context_token_bytes(model),
    )


def shared_bytes(model: ModelInfo, weights_bytes: int) -> int:
    """The part of an instance's memory, without its KV cache, that belongs to the compiled model
    and that a further instance shares: weights, graph and activations, because instances compute
    one after the other. Each instance has the logits of its own batch.
    """
    own_bytes = activation_bytes(model, tokens=0, rows=BATCH_MAX) + _REQUEST_BYTES
    return max(weights_bytes - own_bytes, 0)


def activation_bytes(model: ModelInfo, *, tokens: int, rows: int) -> int:
    """The activations of an iteration of `tokens` tokens, of which `rows` rows yield logits, or
    hidden states where the model has a task, in bytes.
    """
    token_bytes = (
        _ACTIVATION_BYTES_PER_INTERMEDIATE * _intermediate_size(model)
        + _ACTIVATION_BYTES_PER_HIDDEN * model.hidden_size
    )
    width = model.vocabulary_tokens if model.task is None else model.hidden_size
    return tokens * token_bytes + rows * width * _LOGIT_BYTES


def unmet_bytes(model: ModelInfo, reached: Reached) -> int:
    """What may come on top of what an instance has held: activations of larger iterations than it
    has computed, those that outlast none, and kernels for sizes that it has not met.
    """
    sizes_left = max(KERNEL_SIZES - len(reached.sizes), 0)
    kernels_bytes = _KERNELS_BYTES * sizes_left // KERNEL_SIZES
    most = _lasting_bytes(model, tokens=LASTING_TOKENS, rows=BATCH_MAX)
    met = _lasting_bytes(model, tokens=reached.tokens, rows=reached.rows)
    return kernels_bytes + max(most - met, 0) + _beyond_scratch_bytes(model)


def _lasting_bytes(model: ModelInfo, *, tokens: int, rows: int) -> int:
    """What the activations of such an iteration leave taken."""
    return activation_bytes(model, tokens=min(tokens, LASTING_TOKENS), rows=rows)


def _beyond_scratch_bytes(model: ModelInfo) -> int:
    """What the activations that go back take over the node's scratch."""
    passing_bytes = activation_bytes(model, tokens=_PREFILL_TOKENS - LASTING_TOKENS, rows=0)
    return max(passing_bytes - SCRATCH_BYTES, 0)


def _context_token_bytes(model: ModelInfo) -> int:
    """An IR has no tables. Gemma 3's layers with a window have their own."""
    if model.format is ModelFormat.OPENVINO_IR:
        return 0
    return token_bytes(model.head_size) * (2 if model.architecture.startswith("gemma3") else 1)


def _matrices_bytes(model: ModelInfo, weights: WeightPrecision) -> float:
    if model.format is ModelFormat.SAFETENSORS:
        if not weights.quantised:
            return _F16_BYTES * model.parameters
        # The embedding and the head.
        eight_bits = min(2 * model.vocabulary_tokens * model.hidden_size, model.parameters)
        four_bits = _FOUR_BITS_BYTES.get(weights, _I8_BYTES)
        if not _has_four_bits(model, weights):
            four_bits = _I8_BYTES
        return _I8_BYTES * eight_bits + four_bits * (model.parameters - eight_bits)
    # An IR brings its own precision: what is not compressed below f16 is computed from f32.
    stored_bytes = model.disk_bytes / model.parameters
    return model.parameters * (_F16_BYTES if stored_bytes >= 2 else _IR_OVERHEAD * stored_bytes)


def again_bytes(model: ModelInfo, weights: WeightPrecision) -> int:
    """What a second copy of the matrices takes, the embedding apart: a byte a parameter (101 MiB of
    SmolLM2-135M), also where they are held in 16 bits.
    """
    parameters = model.parameters - model.vocabulary_tokens * model.hidden_size
    if model.format is ModelFormat.OPENVINO_IR:
        return int(parameters * min(model.disk_bytes / model.parameters, _I8_BYTES))
    four_bits = _has_four_bits(model, weights)
    return int(parameters * (_AGAIN_FOUR_BITS_BYTES if four_bits else _I8_BYTES))


def _has_four_bits(model: ModelInfo, weights: WeightPrecision) -> bool:
    if weights is WeightPrecision.I4_G128:
        # Else no group divides the rows of most matrices, which then have 8 bits.
        return model.hidden_size % min(COARSE_GROUPS) == 0
    return weights in _FOUR_BITS_BYTES


def _intermediate_size(model: ModelInfo) -> int:
    """The MLP's width, which ModelInfo does not have, from what the other shapes leave; of a
    mixture that of all experts that a token takes.
    """
    query, kv = model.attention_heads * model.head_size, model.kv_heads * model.head_size
    attention = 2 * model.hidden_size * (query + kv)
    embedding = model.vocabulary_tokens * model.hidden_size
    per_layer = (model.active_parameters - embedding) // model.layers - attention
    return max(per_layer // (3 * model.hidden_size), model.hidden_size)
