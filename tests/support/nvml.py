"""A management library like NVIDIA's, with the GPUs that a test wants.

It fills what it is given by reference, as the real one does, and answers with error codes.
"""

from typing import Any

INVALID_ARGUMENT = 2
NOT_SUPPORTED = 3
DRIVER_NOT_LOADED = 9


class FakeNvml:
    """`gpus`: (name, total bytes, used bytes, capability) of each."""

    def __init__(self, *gpus: tuple[str, int, int, tuple[int, int]], init_code: int = 0) -> None:
        self._gpus = gpus
        self._init_code = init_code
        self.energy_mj: int | None = None
        """`None`: the GPUs are older than their counters."""

    def nvmlInit_v2(self) -> int:  # noqa: N802
        return self._init_code

    def nvmlDeviceGetCount_v2(self, count: Any) -> int:  # noqa: N802
        count._obj.value = len(self._gpus)
        return 0

    def nvmlDeviceGetHandleByIndex_v2(self, index: int, handle: Any) -> int:  # noqa: N802
        if index >= len(self._gpus):
            return INVALID_ARGUMENT
        handle._obj.value = index + 1
        return 0

    def nvmlDeviceGetName(self, handle: Any, name: Any, size: int) -> int:  # noqa: N802
        name.value = self._gpus[handle.value - 1][0].encode()
        return 0

    def nvmlDeviceGetUUID(self, handle: Any, uuid: Any, size: int) -> int:  # noqa: N802
        uuid.value = b"GPU-%d" % handle.value
        return 0

    def nvmlDeviceGetMemoryInfo(self, handle: Any, memory: Any) -> int:  # noqa: N802
        _, total, used, _ = self._gpus[handle.value - 1]
        memory._obj.total, memory._obj.used, memory._obj.free = total, used, total - used
        return 0

    def nvmlDeviceGetTotalEnergyConsumption(self, handle: Any, energy: Any) -> int:  # noqa: N802
        if self.energy_mj is None:
            return NOT_SUPPORTED
        energy._obj.value = self.energy_mj
        return 0

    def nvmlDeviceGetCudaComputeCapability(self, handle: Any, major: Any, minor: Any) -> int:  # noqa: N802
        major._obj.value, minor._obj.value = self._gpus[handle.value - 1][3]
        return 0
