"""The device that vLLM sees, and the imports that its engine processes share.

Before: `forkserver`, which preloads; `instance`, which asks for room. After: vLLM and torch.
"""

import importlib

import psutil
import torch
from vllm.platforms import current_platform

from mesh_nodes.engines import host_memory
from mesh_nodes.engines.cuda_driver import CudaDriver, cuda_in_use, open_driver
from mesh_nodes.engines.vllm.differences import installed_shape

_ON_DEMAND = (
    *("vllm.model_executor.models.llama", "vllm.model_executor.models.qwen2"),
    *("vllm.model_executor.models.qwen3", "vllm.plugins.lora_resolvers"),
    *installed_shape().imported_on_demand(),
)
"""What vLLM would import in every engine process anew: 0.6 s of a load, with the worker's."""


def preload() -> None:
    """Import what the first load would. Computes nothing and starts no thread.

    Raises RuntimeError when an import has begun to use the GPU: no process forked from here could.
    """
    worker = "cpu_worker" if current_platform.is_cpu() else "gpu_worker"
    for name in (f"vllm.v1.worker.{worker}", *_ON_DEMAND):
        importlib.import_module(name)
    used = "torch has initialised it" if torch.cuda.is_initialized() else cuda_in_use()
    if used:
        raise RuntimeError(
            f"an import has begun to use CUDA, or has asked NVML ({used}): no process forked from "
            "here could use CUDA any more. See which plugins of vLLM are installed"
        )


def device() -> torch.device:
    """The device that vLLM computes on: the one that it sees."""
    return torch.device("cpu" if current_platform.is_cpu() else "cuda:0")


def virtual_memory() -> CudaDriver | None:
    """What has the device's memory come and go under addresses that stay, where it can."""
    return None if current_platform.is_cpu() else open_driver(device().index)


def touch() -> None:
    """Compute something on it: on a GPU that makes this process's context and loads kernels."""
    ones = torch.ones(64, 64, device=device())
    float((ones @ ones).sum())


def free_bytes() -> int:
    """The free memory of the device, now."""
    if current_platform.is_cpu():
        return host_memory.available_bytes()
    return int(torch.cuda.mem_get_info()[0])


def total_bytes() -> int:
    """The memory of the device in all, whoever uses it."""
    if current_platform.is_cpu():
        return int(psutil.virtual_memory().total)
    return int(torch.cuda.mem_get_info()[1])
