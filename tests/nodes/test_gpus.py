"""GPUs are told apart by what their driver says, and one that is not there is refused."""

import pytest

from mesh.domain.errors import InvalidInput, Unavailable
from mesh.domain.reasons import DeviceKind
from mesh.domain.steps import EngineCapabilities
from mesh_nodes.gpus import Gpu, Gpus, hardware_of
from mesh_nodes.hardware import Hardware, fingerprint
from tests.support.nvml import DRIVER_NOT_LOADED, FakeNvml

GIB = 1 << 30
A100 = ("NVIDIA A100-SXM4-80GB", 80 * GIB, 3 * GIB, (8, 0))
H100 = ("NVIDIA H100 80GB HBM3", 79 * GIB, 0, (9, 0))
MACHINE = Hardware(cpu="a CPU", cores=6, memory_bytes=10 * GIB, isa=("avx2",))


def gpus(*which: tuple[str, int, int, tuple[int, int]]) -> Gpus:
    return Gpus(lambda: FakeNvml(*which))


def test_every_gpu_is_listed_with_what_decides_how_fast_it_is() -> None:
    assert gpus(A100, H100).all() == (
        Gpu(index=0, uuid="GPU-1", name=A100[0], memory_bytes=80 * GIB, capability=(8, 0)),
        Gpu(index=1, uuid="GPU-2", name=H100[0], memory_bytes=79 * GIB, capability=(9, 0)),
    )


def test_memory_is_asked_for_anew_each_time() -> None:
    known = gpus(A100, H100)
    first = known.gpu(0)
    assert (known.free_bytes(first), known.used_bytes(first)) == (77 * GIB, 3 * GIB)


@pytest.mark.parametrize("index", [-1, 2])
def test_a_gpu_that_is_not_there_is_refused_with_the_number_of_those_that_are(index: int) -> None:
    with pytest.raises(InvalidInput, match=rf"--gpu {index}: this machine has 2 GPUs"):
        gpus(A100, H100).gpu(index)


def test_a_machine_without_a_driver_says_so() -> None:
    def missing() -> FakeNvml:
        raise OSError("libnvidia-ml.so.1: cannot open shared object file")

    with pytest.raises(Unavailable, match="no NVIDIA driver"):
        Gpus(missing)


def test_a_driver_that_does_not_answer_is_told_with_its_code() -> None:
    with pytest.raises(Unavailable, match=r"nvmlInit_v2 gave error 9"):
        Gpus(lambda: FakeNvml(init_code=DRIVER_NOT_LOADED))


def test_gpu_nodes_share_profiles_by_the_gpu_and_the_engine_alone() -> None:
    engine = EngineCapabilities(name="vllm", version="0.32.0", resize_kv=False)
    hardware = hardware_of(gpus(H100).gpu(0), MACHINE)
    for threads in (1, 6):
        assert (
            fingerprint(hardware, device=DeviceKind.GPU, threads=threads, engine=engine)
            == "gpu/nvidia-h100-80gb-hbm3/sm90/vllm-0.32.0"
        )
    assert (hardware.cores, hardware.memory_bytes) == (6, 79 * GIB)
