"""What the hardware probe makes of /proc, and of this very machine."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from mesh.domain.reasons import DeviceKind
from mesh.domain.steps import EngineCapabilities
from mesh_nodes.hardware import Hardware, cores_of, default_node_id, fingerprint, probe, usable_cpus

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
