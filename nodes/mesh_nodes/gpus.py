"""What GPUs this machine has, as NVIDIA's management library tells: names, memory, capability.

The library comes with the driver and is called directly, so that a node needs no package to find
out, and takes no context on a device that it only looks at. Before: the composition root, for a GPU
node's options and books. After: NVML.
"""

import ctypes
from collections.abc import Callable
from typing import Any

from mesh.domain.errors import InvalidInput, Unavailable
from mesh.domain.values import dataclass
from mesh_nodes.hardware import Hardware

MEMORY_SHARE = 0.9
"""The default limit of a node as a share of its GPU's memory. Nothing else ought to run on the GPU.
"""
_NAME_BYTES = 96
_UUID_BYTES = 96


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    index: int
    """In the order of the PCI bus, as CUDA_DEVICE_ORDER=PCI_BUS_ID has it, too."""
    uuid: str
    name: str
    memory_bytes: int
    capability: tuple[int, int]
    """CUDA compute capability, major and minor."""


class _Memory(ctypes.Structure):
    """nvmlMemory_t."""

    _fields_ = (
        ("total", ctypes.c_ulonglong),
        ("free", ctypes.c_ulonglong),
        ("used", ctypes.c_ulonglong),
    )


class Gpus:
    """`library` is NVML's; for as long as this object lives, it is open."""

    def __init__(
        self, library: Callable[[], Any] = lambda: ctypes.CDLL("libnvidia-ml.so.1")
    ) -> None:
        """Raises Unavailable when the machine has no NVIDIA driver, or it does not answer."""
        try:
            self._nvml = library()
        except OSError as error:
            raise Unavailable(
                "this machine has no NVIDIA driver: its library libnvidia-ml.so.1 is not there",
                hint="start the node with --device cpu, or install the driver",
            ) from error
        self._ask("nvmlInit_v2")

    def all(self) -> tuple[Gpu, ...]:
        count = ctypes.c_uint()
        self._ask("nvmlDeviceGetCount_v2", ctypes.byref(count))
        return tuple(self._gpu(index) for index in range(count.value))

    def gpu(self, index: int) -> Gpu:
        """Raises InvalidInput when there is no such GPU."""
        known = self.all()
        if not 0 <= index < len(known):
            raise InvalidInput(
                f"--gpu {index}: this machine has {len(known)} GPUs, numbered from 0",
                hint="`nvidia-smi -L` lists them",
            )
        return known[index]

    def visible(self, index: int, named: str | None) -> Gpu:
        """The GPU of this number among those that CUDA_VISIBLE_DEVICES names, in its order: whoever
        set that has given the others to somebody else. Without it, among all.

        Raises InvalidInput when there is no such GPU.
        """
        if named is None:
            return self.gpu(index)
        known, found = self.all(), list[Gpu]()
        for word in map(str.strip, named.split(",")):
            gpu = next((one for one in known if _is_named(one, word)), None)
            if gpu is None:
                break  # CUDA ignores this one and all that follow
            found.append(gpu)
        if not 0 <= index < len(found):
            raise InvalidInput(
                f"--gpu {index}: CUDA_VISIBLE_DEVICES={named!r} leaves {len(found)} of this "
                f"machine's {len(known)} GPUs, numbered from 0 in its order",
                hint="name one of those, or set the variable otherwise: numbers are those of "
                "`nvidia-smi -L`",
            )
        return found[index]

    def free_bytes(self, gpu: Gpu) -> int:
        """The free memory of the GPU, now."""
        return int(self._memory(self._handle(gpu.index)).free)

    def used_bytes(self, gpu: Gpu) -> int:
        """By whomever, now."""
        return int(self._memory(self._handle(gpu.index)).used)

    def energy_j(self, gpu: Gpu) -> float:
        """What the GPU has taken since its driver was loaded. Raises Unavailable where it does not
        count that.
        """
        millijoules = ctypes.c_ulonglong()
        handle = self._handle(gpu.index)
        self._ask("nvmlDeviceGetTotalEnergyConsumption", handle, ctypes.byref(millijoules))
        return millijoules.value / 1e3

    def _gpu(self, index: int) -> Gpu:
        handle = self._handle(index)
        name = ctypes.create_string_buffer(_NAME_BYTES)
        uuid = ctypes.create_string_buffer(_UUID_BYTES)
        major, minor = ctypes.c_int(), ctypes.c_int()
        self._ask("nvmlDeviceGetName", handle, name, _NAME_BYTES)
        self._ask("nvmlDeviceGetUUID", handle, uuid, _UUID_BYTES)
        self._ask(
            "nvmlDeviceGetCudaComputeCapability", handle, ctypes.byref(major), ctypes.byref(minor)
        )
        return Gpu(
            index=index,
            uuid=uuid.value.decode(),
            name=name.value.decode(),
            memory_bytes=int(self._memory(handle).total),
            capability=(major.value, minor.value),
        )

    def _handle(self, index: int) -> ctypes.c_void_p:
        handle = ctypes.c_void_p()
        self._ask("nvmlDeviceGetHandleByIndex_v2", index, ctypes.byref(handle))
        return handle

    def _memory(self, handle: ctypes.c_void_p) -> _Memory:
        memory = _Memory()
        self._ask("nvmlDeviceGetMemoryInfo", handle, ctypes.byref(memory))
        return memory

    def _ask(self, function: str, *arguments: Any) -> None:
        code = getattr(self._nvml, function)(*arguments)
        if code != 0:
            raise Unavailable(
                f"the NVIDIA driver does not answer: {function} gave error {code}",
                hint="`nvidia-smi` shows what is wrong with it",
            )


def _is_named(gpu: Gpu, word: str) -> bool:
    return word == str(gpu.index) or (word.startswith("GPU-") and gpu.uuid.startswith(word))


def hardware_of(gpu: Gpu, machine: Hardware) -> Hardware:
    """The node's hardware, where the node is this GPU: its name and memory, the machine's cores."""
    return Hardware(
        cpu=gpu.name,
        cores=machine.cores,
        memory_bytes=gpu.memory_bytes,
        isa=(f"sm{gpu.capability[0]}{gpu.capability[1]}",),
        memory_share=MEMORY_SHARE,
    )
