"""What engine processes find in their environment: how vLLM is to be, read while it is imported.

Part of what `internals` relies on, apart from it because the agent sets it without importing vLLM.
"""

import json
from dataclasses import asdict

from mesh_nodes.gpus import Gpu

GPU = "MESH_GPU"
"""What NVML told the agent of the GPU, which `told_gpu` answers vLLM with."""

ENVIRONMENT = {
    # The engine core in the engine process itself, and the model runner that the rest is about.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_USE_V2_MODEL_RUNNER": "0",
    # A context of the model's full length and one more, of which nothing is ever computed.
    "VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1",
    # Cores are the node's to give, and not this process's alone.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    # Tokens are chosen by mesh; vLLM would import FlashInfer for it.
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
}


def gpu_environment(gpu: Gpu) -> dict[str, str]:
    """Have vLLM see that GPU alone, in the order of the PCI bus, and not ask NVML about it."""
    return {
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "CUDA_VISIBLE_DEVICES": str(gpu.index),
        GPU: json.dumps(asdict(gpu)),
    }
