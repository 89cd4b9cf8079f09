"""What a GPU node's options make of its engine, with a stand-in for vLLM and for the driver."""

from typing import Any

import pytest

from mesh_nodes.engines import choosing, vllm
from mesh_nodes.engines.vllm import GPU_PROCESS_BYTES, VllmRelease
from mesh_nodes.gpus import Gpus
from mesh_nodes.hardware import Hardware
from mesh_nodes.options import read_options
from tests.support.nvml import FakeNvml

MACHINE = Hardware(cpu="a CPU", cores=6, memory_bytes=10_000_000_000, isa=())
ASLEEP = ("one", "two")


class Recorded:
    """Says what it was made with."""

    given: dict[str, Any]

    def __init__(self, **given: Any) -> None:
        Recorded.given = given

    def await_ready(self) -> None: ...

    def fill_spare(self) -> None:
        Recorded.given["spare"] = True

    def in_host_memory(self) -> tuple[str, ...]:
        return ASLEEP


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Gpus:
    """One, of which others use 1 GiB."""
    gpus = Gpus(lambda: FakeNvml(("a GPU", 8 << 30, 1 << 30, (8, 0))))
    monkeypatch.setattr(choosing, "Gpus", lambda: gpus)
    monkeypatch.setattr(vllm, "VllmEngine", Recorded)
    release = VllmRelease(package="vllm", version="0.32.0")
    monkeypatch.setattr(vllm, "installed_release", lambda: release)
    return gpus


@pytest.mark.parametrize(
    ("arguments", "asleep_max", "asleep_bytes_max"),
    [((), 2, 5_000_000_000), (("--asleep", "3", "--asleep-memory", "4GB"), 3, 4_000_000_000)],
)
def test_a_gpu_node_lets_models_sleep_and_counts_what_their_processes_hold(
    gpus: Gpus, arguments: tuple[str, ...], asleep_max: int, asleep_bytes_max: int
) -> None:
    options = read_options(["--device", "gpu", *arguments], {}, MACHINE, lambda: gpus)
    built = choosing.build_engine(options)
    given = Recorded.given
    assert (given["asleep_max"], given["asleep_bytes_max"]) == (asleep_max, asleep_bytes_max)
    assert (given["spare_max"], given["gpu_index"]) == (1, 0)
    assert given["available_bytes"]() == 7 << 30
    assert built.resident_bytes() == 0, "what others use is not its own"
    assert built.kept_bytes == (asleep_max + 1) * GPU_PROCESS_BYTES
    assert "spare" not in given, "what waits is in kept_bytes already"
    built.base_read()
    assert "spare" in given
    assert built.nearer([]) == ASLEEP  # type: ignore[comparison-overlap]
