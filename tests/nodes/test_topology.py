"""Cores and NUMA nodes, from trees of files as the kernel writes them, and on this very machine."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from mesh.domain.errors import InvalidInput
from mesh_nodes.hardware import NumaNode, cores_of, numa_node, numa_nodes, probe, usable_cpus
from tests.nodes.test_hardware import proc_of

GIB = 1 << 30
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
from mesh_nodes.hardware import NumaNode, bind, usable_cpus
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
