"""The installed vLLM has the private parts that its release should have, and no use of CUDA yet.

In a process of its own, as vLLM's imports warn of much.
"""

import json
import subprocess
import sys

import pytest

from mesh_nodes.engines.vllm.differences import Part, Shape
from mesh_nodes.engines.vllm.environment import ENVIRONMENT, gpu_environment
from mesh_nodes.engines.vllm.releases import found_release
from mesh_nodes.gpus import Gpu

LOOK = """
import importlib.util, json, os, sys
from dataclasses import MISSING, fields

from mesh_nodes.engines.vllm import device, internals
from vllm.platforms import current_platform
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.worker import gpu_model_runner

wanted = {
    field.name
    for field in fields(SchedulerOutput)
    if field.default is field.default_factory is MISSING
}
told = {
    "IDS_TO_ZERO": hasattr(Scheduler, "_get_new_block_ids_to_zero"),
    "MOVE_HASHES": hasattr(BlockPool, "move_block_hashes"),
    "ONE_KV_BUFFER": hasattr(gpu_model_runner, "allocate_kv_cache"),
    "WATERMARKING": importlib.util.find_spec("vllm.v1.watermarking") is not None,
    "KERNEL_OVERRIDES": hasattr(type(current_platform), "register_triton_kernel_overrides"),
    "NO_COMMON_PREFIX": "num_common_prefix_blocks" not in wanted,
}
device.preload()
internals.check_parts()
internals.inspect_models_here()
here = internals.registry._run_in_subprocess(os.getpid) == os.getpid()
refused = []
device.cuda_in_use = lambda: "/dev/nvidia-uvm is open"
del BlockPool.touch
for check in (device.preload, internals.check_parts):
    try:
        check()
    except RuntimeError as error:
        refused.append(str(error))
print(json.dumps([told, refused, here]))
"""


@pytest.fixture(scope="module")
def looked() -> tuple[dict[str, bool], list[str], bool]:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", LOOK],
        env={"PYTHONPATH": ":".join(sys.path), **ENVIRONMENT},
        check=True,
        capture_output=True,
        text=True,
    )
    told, refused, here = json.loads(done.stdout.splitlines()[-1])
    return told, refused, here


def test_the_installed_release_has_what_the_table_says(
    looked: tuple[dict[str, bool], list[str], bool],
) -> None:
    shape = Shape(found_release().minor)
    assert looked[0] == {part.name: shape.has(part) for part in Part}


def test_a_part_that_is_gone_and_a_use_of_cuda_are_refused_by_name(
    looked: tuple[dict[str, bool], list[str], bool],
) -> None:
    in_use, gone = looked[1]
    assert "asked NVML (/dev/nvidia-uvm is open)" in in_use
    assert "has no BlockPool.touch, which mesh needs" in gone


def test_a_models_class_is_looked_at_in_the_process_that_serves_it(
    looked: tuple[dict[str, bool], list[str], bool],
) -> None:
    assert looked[2]


TOLD = """
import ctypes, json

opened = []
real = ctypes.CDLL
ctypes.CDLL = lambda name, *rest, **how: opened.append(str(name)) or real(name, *rest, **how)
from mesh_nodes.engines.vllm.told_gpu import answer_for_nvml

answer_for_nvml()
import torch
from vllm.utils.import_utils import import_pynvml

nvml = import_pynvml()
nvml.nvmlInit()
gpu = nvml.nvmlDeviceGetHandleByIndex(3)
print(json.dumps([
    nvml.nvmlDeviceGetName(gpu),
    nvml.nvmlDeviceGetCudaComputeCapability(gpu),
    nvml.nvmlDeviceGetMemoryInfo(gpu).total,
    torch.cuda._device_count_nvml(),
    [name for name in opened if "nvidia" in name],
]))
"""


def test_what_vllm_and_torch_ask_of_a_gpu_is_answered_without_nvml() -> None:
    gpu = Gpu(index=3, uuid="GPU-3", name="NVIDIA T", memory_bytes=1 << 34, capability=(9, 0))
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", TOLD],
        env={"PYTHONPATH": ":".join(sys.path), **ENVIRONMENT, **gpu_environment(gpu)},
        check=True,
        capture_output=True,
        text=True,
    )
    assert json.loads(done.stdout.splitlines()[-1]) == ["NVIDIA T", [9, 0], 1 << 34, 1, []]
