"""What vLLM and torch ask NVML about their GPU while they are imported, answered without NVML.

NVML opens the driver's devices and starts a thread, which `nvmlShutdown` does not undo: every
process that is forked after that dies of a segmentation fault when it first uses CUDA (seen with
driver 580 on an H100). So the agent, which forks nothing, asks NVML and puts the answers into the
environment of the forkserver, which never asks. Before: `forkserver`. After: torch, and vLLM's copy
of the bindings of NVML.
"""

import json
import os
import sys
from importlib.machinery import PathFinder
from importlib.util import module_from_spec
from types import ModuleType, SimpleNamespace

import torch

from mesh_nodes.engines.vllm.environment import GPU

_BINDINGS = "vllm.third_party.pynvml"


def answer_for_nvml() -> None:
    """Do this before vLLM is imported, which asks. It does nothing where the agent told no GPU."""
    words = os.environ.get(GPU)
    if words is None:
        return
    gpu = json.loads(words)
    torch.cuda._device_count_nvml = lambda: 1
    bindings = _bindings()
    answers = {
        "nvmlInit": None,
        "nvmlShutdown": None,
        "nvmlDeviceGetCount": 1,
        "nvmlDeviceGetHandleByIndex": gpu["index"],
        "nvmlDeviceGetHandleByUUID": gpu["index"],
        "nvmlDeviceGetIndex": gpu["index"],
        "nvmlDeviceGetUUID": gpu["uuid"],
        "nvmlDeviceGetName": gpu["name"],
        "nvmlDeviceGetCudaComputeCapability": tuple(gpu["capability"]),
        "nvmlDeviceGetMemoryInfo": SimpleNamespace(total=gpu["memory_bytes"]),
    }
    for name, answer in answers.items():
        setattr(bindings, name, lambda *_, answer=answer: answer)


def _bindings() -> ModuleType:
    """They are imported without `vllm` itself, which would ask at once."""
    name, places = "", None
    for part in _BINDINGS.split("."):
        name = f"{name}.{part}".strip(".")
        spec = PathFinder.find_spec(name, places)
        if spec is None or spec.loader is None:
            raise RuntimeError(f"this release of vLLM has no {name}, which mesh needs")
        places = spec.submodule_search_locations
        if "." in name:
            sys.modules[name] = module_from_spec(spec)
            spec.loader.exec_module(sys.modules[name])
    return sys.modules[_BINDINGS]
