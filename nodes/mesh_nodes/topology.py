"""Which logical CPUs share a core, and which memory is near to them, as the kernel's /sys tells.

Two threads of a core share its multipliers: an iteration is no quicker by the second one, and waits
for the slower of both. A page lies where it is touched first, unless that memory is full: threads
that are bound to a NUMA node's CPUs (`bind`) find their weights and KV caches near. `hardware`
counts with it.
"""

import os
import re
from collections.abc import Iterable
from pathlib import Path

from mesh.domain.errors import InvalidInput
from mesh.domain.values import dataclass
from mesh_nodes.kernel_files import read

SYS = Path("/sys/devices/system")


@dataclass(frozen=True, slots=True, kw_only=True)
class NumaNode:
    """CPUs and the memory near to them."""

    number: int
    cpus: frozenset[int]
    """Logical ones, of those that the process may use."""
    memory_bytes: int


def cores_of(cpus: Iterable[int], sys: Path = SYS) -> int:
    """How many cores these logical CPUs are; one each where the kernel does not tell."""
    return len({siblings(number, sys) for number in cpus})


def packages_of(cpus: Iterable[int], sys: Path = SYS) -> frozenset[int]:
    """The sockets that these logical CPUs are in; none where the kernel does not tell."""
    names = (sys / "cpu" / f"cpu{n}" / "topology" / "physical_package_id" for n in cpus)
    return frozenset(int(text) for name in names if (text := read(name).strip()).isdigit())


def numa_nodes(allowed: frozenset[int], sys: Path = SYS) -> tuple[NumaNode, ...]:
    """Those with CPUs that are allowed and memory, in their order. None where the kernel was built
    without.
    """
    found = []
    for folder in (sys / "node").glob("node[0-9]*"):
        total = re.search(r"MemTotal:\s+(\d+) kB", read(folder / "meminfo"))
        node = NumaNode(
            number=int(folder.name.removeprefix("node")),
            cpus=allowed & _numbers(read(folder / "cpulist")),
            memory_bytes=0 if total is None else int(total.group(1)) * 1024,
        )
        if node.cpus and node.memory_bytes:
            found.append(node)
    return tuple(sorted(found, key=lambda node: node.number))


def numa_node(number: int, allowed: frozenset[int], sys: Path = SYS) -> NumaNode:
    """Raises InvalidInput where there is none of this number to compute on."""
    found = numa_nodes(allowed, sys)
    for node in found:
        if node.number == number:
            return node
    known = ", ".join(str(node.number) for node in found) or "none"
    raise InvalidInput(
        f"--numa {number}: this process has no such NUMA node with CPUs and memory (there are: "
        f"{known})",
        hint="leave it out, or give one of those",
    )


def usable_cpus() -> frozenset[int]:
    """Logical ones, by the process's affinity."""
    return frozenset(os.sched_getaffinity(0))


def bind(node: NumaNode) -> None:
    """This thread, and all that come after it, here and in child processes, run near its memory."""
    os.sched_setaffinity(0, node.cpus)


def siblings(number: int, sys: Path = SYS) -> frozenset[int]:
    """The logical CPUs of the core that this one is of; itself where the kernel does not tell."""
    folder = sys / "cpu" / f"cpu{number}" / "topology"
    names = ("core_cpus_list", "thread_siblings_list")  # the second is what old kernels call it
    found = next(filter(None, (_numbers(read(folder / name)) for name in names)), frozenset())
    return found | {number}


def _numbers(text: str) -> frozenset[int]:
    """The numbers in a list as the kernel writes it, for example `0-3,8,10-11`."""
    ranges = re.findall(r"(\d+)(?:-(\d+))?", text)
    return frozenset(n for first, last in ranges for n in range(int(first), int(last or first) + 1))
