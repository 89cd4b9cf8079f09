"""What a node finds of its machine: processors, control groups, GPUs, disk and memory."""

import os
import re
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from mesh.domain.errors import InvalidInput, Unavailable
from mesh.domain.reasons import DeviceKind
from mesh.domain.steps import EngineCapabilities
from mesh_nodes.cgroup import CgroupLimits, cgroup_limits
from mesh_nodes.gpus import Gpu, Gpus, hardware_of
from mesh_nodes.hardware import Hardware, default_node_id, fingerprint, probe
from mesh_nodes.load_probe import CHUNK_BYTES, WRITTEN_BYTES, measured_rate
from mesh_nodes.topology import NumaNode, cores_of, numa_node, numa_nodes, usable_cpus
from tests.support.nvml import DRIVER_NOT_LOADED, FakeNvml

CPUINFO = """\
processor\t: 0
cpu family\t: 6
model\t\t: 143
model name\t: Intel(R) Xeon(R) Platinum 8488C
flags\t\t: fpu avx2 avx512f avx512_bf16 avx512_vnni amx_tile amx_int8 amx_bf16
"""


def proc_of(root: Path, *, quota: str = "max", memory_max: str = "max") -> Path:
    group = root / "cgroup"
    group.mkdir(parents=True)
    (group / "cpu.max").write_text(f"{quota} 100000\n")
    (group / "memory.max").write_text(f"{memory_max}\n")
    proc = root / "proc"
    (proc / "self").mkdir(parents=True)
    (proc / "self" / "cgroup").write_text("0::/\n")
    (proc / "self" / "mountinfo").write_text(f"30 1 0:1 / {group} rw - cgroup2 cgroup2 rw\n")
    (proc / "cpuinfo").write_text(CPUINFO)
    (proc / "meminfo").write_text("MemTotal:       16777216 kB\nMemFree: 1 kB\n")
    return proc


def test_names_the_cpu_and_its_instruction_sets(tmp_path: Path) -> None:
    hardware = probe(proc_of(tmp_path))
    assert hardware.cpu == "Intel(R) Xeon(R) Platinum 8488C"
    assert hardware.isa == ("avx2", "avx512", "avx512_vnni", "avx512_bf16", "amx_int8", "amx_bf16")
    assert hardware.text.endswith("8488C, avx2 avx512 avx512_vnni avx512_bf16 amx_int8 amx_bf16")


@pytest.mark.parametrize(
    ("flags", "has"), [("avx2 avx_vnni", True), ("avx512_vnni", True), ("avx2 avx512f", False)]
)
def test_tells_whether_the_cpu_has_vnni(tmp_path: Path, flags: str, has: bool) -> None:
    proc = proc_of(tmp_path)
    (proc / "cpuinfo").write_text(f"processor\t: 0\nflags\t\t: fpu {flags}\n")
    assert probe(proc).has_vnni is has


def test_without_a_limit_the_machine_and_the_affinity_mask_count(tmp_path: Path) -> None:
    hardware = probe(proc_of(tmp_path))
    assert hardware.cores == cores_of(usable_cpus())
    assert hardware.memory_bytes == 16 << 30
    assert hardware.budget_bytes == int(0.7 * (16 << 30))


def test_a_containers_limits_count_where_they_are_tighter(tmp_path: Path) -> None:
    hardware = probe(proc_of(tmp_path, quota="100000", memory_max=str(4 << 30)))
    assert hardware.cores == 1
    assert hardware.memory_bytes == 4 << 30


def test_a_quota_below_one_cpu_still_leaves_one_core(tmp_path: Path) -> None:
    assert probe(proc_of(tmp_path, quota="50000")).cores == 1


def test_this_machine_can_be_probed() -> None:
    hardware = probe()
    assert hardware.cores >= 1
    assert hardware.memory_bytes > 1 << 28
    assert hardware.cpu


ENGINE = EngineCapabilities(name="openvino", version="2026.4.0", resize_kv=True)


def printed(hardware: Hardware, threads: int = 4) -> str:
    return fingerprint(hardware, device=DeviceKind.CPU, threads=threads, engine=ENGINE)


def test_a_fingerprint_names_what_decides_how_long_an_iteration_takes(tmp_path: Path) -> None:
    assert printed(probe(proc_of(tmp_path))) == (
        "cpu/intel-xeon-platinum-8488c-6-143/4-threads/"
        "avx2+avx512+avx512_vnni+avx512_bf16+amx_int8+amx_bf16/openvino-2026.4.0"
    )


def test_other_precisions_than_the_version_s_own_are_in_the_fingerprint() -> None:
    hardware = Hardware(cpu="a CPU", cores=1, memory_bytes=1, isa=())
    engine = replace(ENGINE, variant="bf16, KV u8")
    printed = fingerprint(hardware, device=DeviceKind.CPU, threads=4, engine=engine)
    assert printed == "cpu/a-cpu/4-threads/openvino-2026.4.0-bf16-kv-u8"


def test_equal_nodes_have_one_fingerprint_and_others_another(tmp_path: Path) -> None:
    """Memory and the cores that lie idle make no difference, threads and instruction sets do."""
    hardware = probe(proc_of(tmp_path))
    smaller = replace(hardware, memory_bytes=1 << 30, cores=99)
    assert printed(smaller) == printed(hardware)
    others = [
        printed(hardware, threads=5),
        printed(replace(hardware, cpu="Intel(R) Xeon(R) Platinum 8488D")),
        printed(replace(hardware, cpu_family="6-144")),
        printed(replace(hardware, isa=("avx2",))),
    ]
    assert len({printed(hardware), *others}) == 5


def test_what_the_machine_does_not_tell_is_left_out_of_a_fingerprint() -> None:
    unknown = Hardware(cpu="unknown CPU", cores=1, memory_bytes=1, isa=())
    assert printed(unknown) == "cpu/unknown-cpu/4-threads/openvino-2026.4.0"


@pytest.mark.parametrize(
    ("hostname", "node_id"),
    [
        ("alpha", "alpha-cpu0"),
        ("Rack_7.example.org", "rack-7-cpu0"),
        ("--", "node-cpu0"),
        ("h" * 90, "h" * 58 + "-cpu0"),
    ],
)
def test_the_default_name_is_a_valid_label(hostname: str, node_id: str) -> None:
    assert default_node_id(hostname) == node_id
    assert re.fullmatch(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?", node_id)


V2_OPTIONS = "cgroup2 cgroup2 rw,nsdelegate"


def _proc(root: Path, *, group: str, mounts: list[tuple[str, Path, str]]) -> Path:
    """A /proc/self: membership lines, and mounts as (root of the mount, mount point, options)."""
    folder = root / "proc"
    folder.mkdir()
    (folder / "cgroup").write_text(group)
    lines = []
    for n, (top, point, options) in enumerate(mounts):
        escaped = str(point).replace(" ", r"\040")
        lines.append(f"{40 + n} 30 0:{n} {top} {escaped} rw,nosuid - {options}\n")
    (folder / "mountinfo").write_text("29 1 8:1 / / rw - ext4 /dev/sda1 rw\n" + "".join(lines))
    return folder


def _write(folder: Path, **files: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text + "\n")


def test_version_2_takes_the_tightest_limit_on_the_way_up(tmp_path: Path) -> None:
    mount = tmp_path / "cgroup"
    _write(mount / "a", cpu__max="350000 100000", memory__max="4294967296")
    _write(mount / "a" / "b", cpu__max="max 100000", memory__max="8589934592")
    proc = _proc(tmp_path, group="0::/a/b\n", mounts=[("/", mount, V2_OPTIONS)])
    assert cgroup_limits(proc) == CgroupLimits(cpus=3.5, memory_bytes=4 << 30)


def test_version_2_in_a_container_reads_the_mounted_root(tmp_path: Path) -> None:
    """The group's path names folders of the host that the container's mount does not show."""
    mount = tmp_path / "cgroup with a space"
    _write(mount, cpu__max="200000 100000", memory__max="1073741824")
    proc = _proc(tmp_path, group="0::/docker/0123\n", mounts=[("/docker/0123", mount, V2_OPTIONS)])
    assert cgroup_limits(proc) == CgroupLimits(cpus=2.0, memory_bytes=1 << 30)


def test_version_1_reads_each_controller_where_it_is_mounted(tmp_path: Path) -> None:
    cpu, memory = tmp_path / "cpu", tmp_path / "memory"
    _write(cpu / "job", cpu__cfs_quota_us="150000", cpu__cfs_period_us="100000")
    _write(cpu, cpu__cfs_quota_us="-1", cpu__cfs_period_us="100000")
    _write(memory / "job", memory__limit_in_bytes="2147483648")
    proc = _proc(
        tmp_path,
        group="4:memory:/job\n3:cpu,cpuacct:/job\n1:name=systemd:/job\n",
        mounts=[
            ("/", cpu, "cgroup cgroup rw,cpu,cpuacct"),
            ("/", memory, "cgroup cgroup rw,memory"),
        ],
    )
    assert cgroup_limits(proc) == CgroupLimits(cpus=1.5, memory_bytes=2 << 30)


@pytest.mark.parametrize("unlimited", ["9223372036854771712", "-1"])
def test_no_limit_is_none(tmp_path: Path, unlimited: str) -> None:
    mount = tmp_path / "memory"
    _write(mount, memory__limit_in_bytes=unlimited)
    proc = _proc(tmp_path, group="4:memory:/\n", mounts=[("/", mount, "cgroup cgroup rw,memory")])
    assert cgroup_limits(proc) == CgroupLimits(cpus=None, memory_bytes=None)


def test_a_machine_without_control_groups_has_no_limits(tmp_path: Path) -> None:
    assert cgroup_limits(tmp_path / "nothing") == CgroupLimits(cpus=None, memory_bytes=None)


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


@pytest.mark.parametrize(
    ("named", "index", "physical"),
    [
        *((None, 1, 1), ("1", 0, 1), ("1,0", 0, 1), ("1,0", 1, 0), (" 0 , 1 ", 1, 1)),
        *(("GPU-2", 0, 1), ("GPU-2,GPU-1", 1, 0), ("0,7,1", 0, 0)),
    ],
)
def test_gpus_are_counted_as_cuda_counts_those_that_are_visible(
    named: str | None, index: int, physical: int
) -> None:
    assert gpus(A100, H100).visible(index, named).index == physical


@pytest.mark.parametrize(
    ("named", "index", "left"),
    [("", 0, 0), ("1", 1, 1), ("0,7,1", 1, 1), ("-1,0", 0, 0), ("MIG-1", 0, 0), ("0", -1, 1)],
)
def test_a_gpu_that_is_hidden_is_refused(named: str, index: int, left: int) -> None:
    with pytest.raises(
        InvalidInput, match=rf"CUDA_VISIBLE_DEVICES='{named}' leaves {left} of this"
    ):
        gpus(A100, H100).visible(index, named)


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


TWO_SOCKETS = {0: "0-1,4-5", 1: "2-3,6-7"}
"""Four cores with two threads each: 4 shares 0's core, 5 shares 1's, and so on."""
ALL = frozenset(range(8))


def tree(root: Path, nodes: dict[int, str], *, memory: dict[int, int] | None = None) -> Path:
    for number in range(8):
        folder = root / "cpu" / f"cpu{number}" / "topology"
        folder.mkdir(parents=True)
        (folder / "core_cpus_list").write_text(f"{number % 4},{number % 4 + 4}\n")
    for number, cpulist in nodes.items():
        folder = root / "node" / f"node{number}"
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(f"{cpulist}\n")
        kib = (memory or {}).get(number, 64 * GIB) // 1024
        (folder / "meminfo").write_text(
            f"Node {number} MemTotal:       {kib} kB\nNode {number} MemFree:  1 kB\n"
        )
    return root


def test_two_threads_of_a_core_are_one_core(tmp_path: Path) -> None:
    root = tree(tmp_path, TWO_SOCKETS)
    assert cores_of(ALL, root) == 4
    assert cores_of({0, 4}, root) == 1
    assert cores_of({0, 1, 4}, root) == 2
    assert cores_of({0, 1, 2}, tmp_path / "nothing") == 3


def test_old_kernels_call_siblings_something_else(tmp_path: Path) -> None:
    for number in range(2):
        folder = tmp_path / "cpu" / f"cpu{number}" / "topology"
        folder.mkdir(parents=True)
        (folder / "thread_siblings_list").write_text("0-1\n")
    assert cores_of({0, 1}, tmp_path) == 1


def test_a_node_has_what_is_allowed_of_its_cpus(tmp_path: Path) -> None:
    root = tree(tmp_path, TWO_SOCKETS, memory={1: 32 * GIB})
    first, second = numa_nodes(ALL, root)
    assert first == NumaNode(number=0, cpus=frozenset({0, 1, 4, 5}), memory_bytes=64 * GIB)
    assert (second.number, second.memory_bytes) == (1, 32 * GIB)
    (only,) = numa_nodes(frozenset({2, 6}), root)
    assert (only.number, only.cpus) == (1, frozenset({2, 6}))


def test_memory_without_cpus_and_cpus_without_memory_are_no_nodes(tmp_path: Path) -> None:
    root = tree(tmp_path, {0: "0-7", 1: "", 2: "6"}, memory={2: 0})
    assert [node.number for node in numa_nodes(ALL, root)] == [0]
    assert numa_nodes(ALL, tmp_path / "nothing") == ()


def test_a_node_that_is_not_there_is_named_with_those_that_are(tmp_path: Path) -> None:
    root = tree(tmp_path, TWO_SOCKETS)
    assert numa_node(1, ALL, root).number == 1
    with pytest.raises(InvalidInput, match=r"--numa 2: .*there are: 0, 1"):
        numa_node(2, ALL, root)
    with pytest.raises(InvalidInput, match="there are: none"):
        numa_node(0, ALL, tmp_path / "nothing")


def test_a_numa_node_has_its_cores_memory_and_part_of_the_limits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(ALL))
    root = tree(tmp_path / "devices", TWO_SOCKETS, memory={0: 12 * GIB, 1: 4 * GIB})
    free = proc_of(tmp_path / "free")
    assert (probe(free, root).cores, probe(free, root).memory_bytes) == (4, 16 * GIB)
    near = probe(free, root, numa=1)
    assert (near.cores, near.memory_bytes) == (2, 4 * GIB)
    held = proc_of(tmp_path / "held", quota="200000", memory_max=str(8 * GIB))
    near = probe(held, root, numa=1)
    assert (near.cores, near.memory_bytes) == (1, 2 * GIB)
    assert probe(held, root).cores == 2


def test_threads_and_children_stay_where_a_process_was_bound() -> None:
    """Bound to one of this machine's CPUs, in a process of its own."""
    program = """
import subprocess, sys, threading
from mesh_nodes.topology import NumaNode, bind, usable_cpus
one = min(usable_cpus())
bind(NumaNode(number=0, cpus=frozenset({one}), memory_bytes=1))
seen = [usable_cpus()]
thread = threading.Thread(target=lambda: seen.append(usable_cpus()))
thread.start(); thread.join()
child = subprocess.check_output(
    [sys.executable, "-c", "import os; print(len(os.sched_getaffinity(0)))"], text=True
)
assert seen == [frozenset({one})] * 2 and child.strip() == "1", (seen, child)
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=30)


def test_this_machine_has_cores_and_its_nodes_share_its_cpus() -> None:
    there = numa_nodes(usable_cpus())
    assert 1 <= cores_of(usable_cpus()) <= len(usable_cpus())
    assert frozenset().union(*(node.cpus for node in there)) <= usable_cpus()


PHYSICAL = (1e6, 1e11)
"""Bytes per second that any machine lies between."""


def test_a_store_without_models_is_measured_by_a_file_of_its_own(tmp_path: Path) -> None:
    rate = measured_rate(tmp_path, lambda: 0.25)
    assert rate.fixed_s == 0.25
    assert PHYSICAL[0] < rate.bytes_per_s < PHYSICAL[1]
    assert list(tmp_path.iterdir()) == []


def test_a_store_with_models_is_only_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mesh_nodes.load_probe.tempfile", None)
    weights = tmp_path / "models" / "sha256-0" / "model.safetensors"
    weights.parent.mkdir(parents=True)
    weights.write_bytes(b"\1" * (WRITTEN_BYTES + CHUNK_BYTES // 2))
    assert PHYSICAL[0] < measured_rate(tmp_path, lambda: 0.0).bytes_per_s < PHYSICAL[1]


def test_a_slow_disk_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def slow(descriptor: int, buffers: list[bytes], offset: int) -> int:
        time.sleep(0.2)
        return CHUNK_BYTES

    monkeypatch.setattr("mesh_nodes.load_probe.os.preadv", slow)
    rate = measured_rate(tmp_path, lambda: 0.0)
    assert rate.bytes_per_s < CHUNK_BYTES / 0.2
