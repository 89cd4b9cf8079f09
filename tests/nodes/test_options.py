"""The node agent's arguments: defaults, environment, and what is refused."""

from dataclasses import replace
from pathlib import Path

import pytest

from mesh.domain.errors import InvalidInput
from mesh.domain.model import ComputePrecision, KvPrecision
from mesh.domain.reasons import DeviceKind
from mesh.domain.source_rules import read_source_rules
from mesh.runtime.options import as_arguments
from mesh_nodes.gpus import Gpus
from mesh_nodes.hardware import Hardware, default_node_id
from mesh_nodes.options import OPTIONS, EngineName, NodeOptions, read_options
from tests.support.nvml import FakeNvml

MACHINE = Hardware(cpu="a CPU", cores=6, memory_bytes=10_000_000_000, isa=())


GPU = ("a GPU", 8 << 30, 0, (8, 0))


def _read(*arguments: str, **environ: str) -> NodeOptions:
    return read_options(arguments, environ, MACHINE, lambda: Gpus(lambda: FakeNvml(GPU, GPU)))


def test_without_arguments_the_machine_decides() -> None:
    options = _read()
    assert options.join == "127.0.0.1:7070"
    assert options.name == default_node_id()
    assert (options.device, options.engine) == (DeviceKind.CPU, EngineName.OPENVINO)
    assert (options.gpu, options.hardware) == (None, MACHINE)
    assert options.memory_bytes == 7_000_000_000
    assert options.threads == 6
    assert options.home.is_absolute()
    assert options.journal is None
    assert options.parent_pid is None


def test_the_environment_gives_defaults_and_arguments_win(tmp_path: Path) -> None:
    environ = {"MESH_CONTROLLER": "a:1", "MESH_HOME": str(tmp_path)}
    assert _read(**environ).join == "a:1"
    assert _read(**environ).home == tmp_path
    options = _read("--join", "b:2", "--home", "here", **environ)
    assert options.join == "b:2"
    assert _read("--join", "b:2,c:3").join == "b:2,c:3"
    assert options.home == Path.cwd() / "here"


def test_everything_can_be_given() -> None:
    options = _read(
        *("--join", "[::1]:7070", "--name", "cpu-7", "--device", "gpu", "--memory", "4GiB"),
        *("--threads", "3", "--journal", "j.jsonl", "--parent-pid", "77"),
    )
    assert (options.join, options.name, options.device) == ("[::1]:7070", "cpu-7", DeviceKind.GPU)
    assert (options.memory_bytes, options.threads) == (4 << 30, 3)
    assert (options.journal, options.parent_pid) == (Path("j.jsonl"), 77)


def test_a_numa_nodes_cores_and_memory_are_a_nodes_defaults_and_its_name_tells_it() -> None:
    half = replace(MACHINE, cores=MACHINE.cores // 2, memory_bytes=MACHINE.memory_bytes // 2)
    asked: list[int] = []

    def near(number: int) -> Hardware:
        asked.append(number)
        return half

    assert _read().numa is None
    options = read_options(["--numa", "1"], {}, MACHINE, near=near)
    assert (options.numa, asked) == (1, [1])
    assert options.name.endswith("-cpu1")
    assert (options.threads, options.memory_bytes) == (half.cores, half.budget_bytes)
    options = read_options(["--numa", "1", "--threads", "1", "--name", "n"], {}, MACHINE, near=near)
    assert (options.name, options.threads) == ("n", 1)


def test_precisions_are_found_by_the_clock_unless_they_are_given() -> None:
    assert (_read().precision, _read("--precision", "auto").kv) == (None, None)
    options = _read("--precision", "bf16", "--kv", "u8")
    assert (options.precision, options.kv) == (ComputePrecision.BF16, KvPrecision.U8)
    with pytest.raises(InvalidInput, match="--kv u8: vllm computes in what"):
        _read("--engine", "vllm", "--kv", "u8")


@pytest.mark.parametrize(
    ("given", "expected"), [((), 1 << 30), (("--prefetch-memory", "64MiB"), 64 << 20)]
)
def test_a_quarter_of_memory_is_for_prefetches(given: tuple[str, ...], expected: int) -> None:
    assert _read("--memory", "4GiB", *given).prefetch_bytes == expected
    assert _read("--prefetch-memory", "0").prefetch_bytes == 0


def test_half_of_what_the_memory_leaves_is_for_files_that_openvinos_loads_read() -> None:
    assert _read().page_cache_bytes == 1_500_000_000
    assert _read("--memory", "2GB", "--page-cache", "5GB").page_cache_bytes == 5_000_000_000
    assert _read("--page-cache", "0").page_cache_bytes == 0
    assert _read("--engine", "vllm").page_cache_bytes == 0
    with pytest.raises(InvalidInput, match="--page-cache 1GB: vllm keeps no files in memory"):
        _read("--engine", "vllm", "--page-cache", "1GB")


def test_a_gpu_node_is_its_gpu(tmp_path: Path) -> None:
    options = _read("--device", "gpu", "--gpu", "1")
    assert options.name == default_node_id(device=DeviceKind.GPU, index=1)
    assert options.engine is EngineName.VLLM
    assert options.gpu is not None
    assert options.gpu.index == 1
    assert (options.hardware.cpu, options.hardware.isa) == ("a GPU", ("sm80",))
    assert options.memory_bytes == int((8 << 30) * 0.9)
    assert options.threads == 6


def test_models_sleep_on_gpu_nodes_in_half_of_the_hosts_memory() -> None:
    options = _read("--device", "gpu")
    assert (options.asleep_max, options.asleep_bytes_max) == (2, 5_000_000_000)
    options = _read("--device", "gpu", "--asleep", "5", "--asleep-memory", "6GB")
    assert (options.asleep_max, options.asleep_bytes_max) == (5, 6_000_000_000)
    for arguments in (["--device", "gpu", "--asleep", "0"], ["--asleep", "0"], []):
        assert _read(*arguments).asleep_max == 0


def test_imports_are_bounded_when_asked() -> None:
    assert _read().download_bytes_per_s is None
    assert _read("--download-rate", "50MiB").download_bytes_per_s == 50 << 20


def test_a_cpu_node_may_compute_with_vllm() -> None:
    assert _read("--engine", "vllm").engine is EngineName.VLLM


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--join", "localhost"], "'localhost' is no address"),
        (["--join", "localhost:0"], "no controller listens on port 0"),
        (["--join", "localhost:70707"], "'localhost:70707' is no address"),
        (["--join", "::1:7070"], "'::1:7070' is no address"),
        (["--join", "a:1,"], "'' is no address"),
        (["--join", "a:1,b:0"], "--join b:0: no controller listens on port 0"),
        (["--join", "a:1,b:1,a:1"], "a:1 is there twice"),
        (["--name", "Not A Label"], "--name 'Not A Label'"),
        (["--name", "n" * 64], "--name has 64 characters"),
        (["--device", "tpu"], "invalid choice: 'tpu'"),
        (["--device", "gpu", "--engine", "openvino"], "openvino does not compute on a GPU"),
        (["--device", "gpu", "--gpu", "2"], "--gpu 2: this machine has 2 GPUs"),
        (["--engine", "tgi"], "invalid choice: 'tgi'"),
        (["--memory", "lots"], "'lots' is not a size"),
        (["--memory", "0"], "--memory 0 is 0 B"),
        (["--memory", "64GiB"], "this process may use 9.3 GiB"),
        (["--memory", "4GiB", "--prefetch-memory", "5GiB"], "--prefetch-memory 5GiB is 5.0 GiB"),
        (["--page-cache", "4GB"], "--page-cache 4GB is 3.7 GiB; beside --memory"),
        (["--threads", "0"], "--threads 0"),
        (["--watts", "60"], "--watts '60' is not IDLE:BUSY"),
        (["--watts", "60:nan"], "--watts '60:nan' is not IDLE:BUSY"),
        (["--watts", "90:60"], "--watts '90:60' is not IDLE:BUSY"),
        (["--download-rate", "1KiB"], "--download-rate 1KiB is 1.0 KiB a second; at least"),
        (["--threads", "two"], "invalid int value: 'two'"),
        (["--asleep", "2"], "--asleep 2: on a CPU the device's memory is the host's"),
        (["--asleep-memory", "1GB"], "--asleep-memory 1GB: on a CPU the device's memory is the"),
        (["--device", "gpu", "--asleep", "-1"], "--asleep -1 is not from 0 to 64"),
        (["--device", "gpu", "--asleep-memory", "11GB"], "--asleep-memory 11GB is 10.2 GiB"),
        (["--jion", "a:1"], "unrecognized arguments: --jion"),
    ],
)
def test_what_cannot_be_meant_is_refused_by_name(arguments: list[str], said: str) -> None:
    with pytest.raises(InvalidInput) as raised:
        _read(*arguments)
    assert said in raised.value.message


def test_what_is_passed_on_between_programs_is_read_as_it_was_given(tmp_path: Path) -> None:
    given = {
        "name": "n1",
        "memory": 1 << 20,
        "threads": 3,
        "precision": "f32",
        "sources": ("tenant=pkg", "admin=all"),
        "journal": tmp_path / "j",
        "home": tmp_path,
        "numa": None,
    }
    arguments = as_arguments(OPTIONS, given)
    assert "--numa" not in arguments
    options = read_options(arguments, {}, MACHINE)
    assert (options.name, options.memory_bytes, options.threads) == ("n1", 1 << 20, 3)
    assert (options.precision, options.home) == (ComputePrecision.F32, tmp_path)
    assert options.journal == tmp_path / "j"
    assert options.sources == read_source_rules(("tenant=pkg", "admin=all"))
