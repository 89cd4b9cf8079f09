"""What this machine gives the node agent: cores, memory, instruction sets, a name.

Counts what the process may use, not what the machine has: the affinity mask, the quota and memory
limits of its control groups; cores, not their threads. The composition root builds the node's hello
from it.

Two threads of a core share its multipliers: an iteration is no quicker by the second one, and waits
for the slower of both. A page lies where it is touched first, unless that memory is full: threads
that are bound to a NUMA node's CPUs (`bind`) find their weights and KV caches near. A container or
a systemd unit may allow far less than the machine has, and exceeding it means being throttled or
killed: the limits of every control group from the process's own up to the mounted root count, and
the tightest holds. What cannot be read counts as unlimited.
"""

import os
import re
import socket
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from mesh.domain.errors import InvalidInput
from mesh.domain.ids import NodeId
from mesh.domain.reasons import DeviceKind
from mesh.domain.steps import EngineCapabilities

SYS = Path("/sys/devices/system")
MEMORY_SHARE = 0.7
"""The default limit of a node's process as a share of the usable memory: weights, KV caches and the
process itself. The rest is for imports, for what else runs on the machine, and for what no book
shows: activations, and pages that an allocator keeps.
"""

ISA_FLAGS = {
    "avx2": "avx2",
    "avx_vnni": "avx_vnni",
    "avx512f": "avx512",
    "avx512_vnni": "avx512_vnni",
    "avx512_bf16": "avx512_bf16",
    "amx_int8": "amx_int8",
    "amx_bf16": "amx_bf16",
}
"""Kernel's flag -> mesh's word, for the instruction sets that decide how fast a CPU node is."""

NODE_ID_CHARS_MAX = 63


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    cpu: str
    """Model name as the kernel gives it; of a GPU, as its driver does."""
    cores: int
    """The cores that the process may keep busy, however many threads each of them has."""
    memory_bytes: int
    """What the process may use before it is killed or the machine swaps; of a GPU, all it has."""
    isa: tuple[str, ...]
    cpu_family: str = ""
    """Family and model as numbers, `25-17`: virtual machines may all have the same model name."""
    memory_share: float = MEMORY_SHARE
    """The default of `--memory`, as a share of the memory."""

    @property
    def text(self) -> str:
        """One line for people: `AMD EPYC, avx2 avx512`."""
        return ", ".join(filter(None, (self.cpu, " ".join(self.isa))))

    @property
    def budget_bytes(self) -> int:
        """The default of `--memory`."""
        return int(self.memory_bytes * self.memory_share)


def probe(proc: Path = Path("/proc"), sys: Path = SYS, *, numa: int | None = None) -> Hardware:
    """Look at this machine, or at one of its NUMA nodes, which has its part of what control groups
    allow. What the kernel does not tell is left out, never guessed.

    Raises InvalidInput where there is no such NUMA node.
    """
    limits = cgroup_limits(proc / "self")
    processors = _read(proc / "cpuinfo")
    cpus = usable_cpus()
    memory_bytes = _memory_total_bytes(_read(proc / "meminfo"))
    cpus_share = memory_share = 1.0
    if numa is not None:
        near = numa_node(numa, cpus, sys)
        cpus_share, memory_share = len(near.cpus) / len(cpus), near.memory_bytes / memory_bytes
        cpus, memory_bytes = near.cpus, near.memory_bytes
    cores = cores_of(cpus, sys)
    if limits.cpus is not None:
        # More threads than the quota would all be throttled at once, amid an iteration.
        cores = max(1, min(cores, int(limits.cpus * cpus_share)))
    if limits.memory_bytes is not None:
        memory_bytes = min(memory_bytes, int(limits.memory_bytes * memory_share))
    flags = set(_field(processors, "flags").split())
    return Hardware(
        cpu=_field(processors, "model name") or "unknown CPU",
        cores=cores,
        memory_bytes=memory_bytes,
        isa=tuple(word for flag, word in ISA_FLAGS.items() if flag in flags),
        cpu_family="-".join(filter(None, (_field(processors, n) for n in ("cpu family", "model")))),
    )


def fingerprint(
    hardware: Hardware, *, device: DeviceKind, threads: int, engine: EngineCapabilities
) -> str:
    """Equal on nodes whose iterations take equally long, so that they share profiles; in words:
    `cpu/amd-epyc-25-17/2-threads/avx2+avx512/openvino-2026.4.0`. A GPU's do not depend on threads.
    """
    parts = (
        device.value,
        " ".join((hardware.cpu, hardware.cpu_family)),
        f"{threads} threads" if device is DeviceKind.CPU else "",
        "+".join(hardware.isa),
        f"{engine.name} {engine.version} {engine.variant}",
    )
    return "/".join(filter(None, map(_slug, parts)))


def _slug(words: str) -> str:
    """Lower-case, hyphens for all that is no word, trademark signs left out."""
    plain = re.sub(r"\((r|tm|c)\)", " ", words.lower())
    return re.sub(r"[^a-z0-9._+]+", "-", plain).strip("-")


def default_node_id(
    hostname: str = "", device: DeviceKind = DeviceKind.CPU, index: int = 0
) -> NodeId:
    """A name for this machine's device: `<host>-cpu0`, lower-case letters, digits and hyphens."""
    host = (hostname or socket.gethostname()).split(".")[0].lower()
    label = re.sub(r"[^a-z0-9]+", "-", host).strip("-") or "node"
    suffix = f"-{device.value}{index}"
    return NodeId(label[: NODE_ID_CHARS_MAX - len(suffix)].rstrip("-") + suffix)


def _memory_total_bytes(meminfo: str) -> int:
    found = re.search(r"^MemTotal:\s+(\d+) kB", meminfo, re.MULTILINE)
    if found is not None:
        return int(found.group(1)) * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _field(cpuinfo: str, name: str) -> str:
    found = re.search(rf"^{name}\s*:\s*(.*)$", cpuinfo, re.MULTILINE)
    return "" if found is None else found.group(1).strip()


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


@dataclass(frozen=True, slots=True, kw_only=True)
class NumaNode:
    """CPUs and the memory near to them."""

    number: int
    cpus: frozenset[int]
    """Logical ones, of those that the process may use."""
    memory_bytes: int


def cores_of(cpus: Iterable[int], sys: Path = SYS) -> int:
    """How many cores these logical CPUs are; one each where the kernel does not tell."""
    return len({_siblings(number, sys) for number in cpus})


def numa_nodes(allowed: frozenset[int], sys: Path = SYS) -> tuple[NumaNode, ...]:
    """Those with CPUs that are allowed and memory, in their order. None where the kernel was built
    without.
    """
    found = []
    for folder in (sys / "node").glob("node[0-9]*"):
        total = re.search(r"MemTotal:\s+(\d+) kB", _read(folder / "meminfo"))
        node = NumaNode(
            number=int(folder.name.removeprefix("node")),
            cpus=allowed & _numbers(_read(folder / "cpulist")),
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


def _siblings(number: int, sys: Path) -> frozenset[int]:
    folder = sys / "cpu" / f"cpu{number}" / "topology"
    names = ("core_cpus_list", "thread_siblings_list")  # the second is what old kernels call it
    found = next(filter(None, (_numbers(_read(folder / name)) for name in names)), frozenset())
    return found | {number}


def _numbers(text: str) -> frozenset[int]:
    """The numbers in a list as the kernel writes it, for example `0-3,8,10-11`."""
    ranges = re.findall(r"(\d+)(?:-(\d+))?", text)
    return frozenset(n for first, last in ranges for n in range(int(first), int(last or first) + 1))


V1_UNLIMITED_BYTES = 1 << 60
"""Version 1 writes `no limit` as the largest multiple of a page below 2^63."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CgroupLimits:
    """The limits that apply to this process; a limit is `None` where the control groups set
    none.
    """

    cpus: float | None
    """CPU seconds per second."""
    memory_bytes: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Hierarchy:
    """A mounted hierarchy: where it is, and which group of it is the mounted root."""

    mount: Path
    root: PurePosixPath
    controllers: frozenset[str]
    """Empty for version 2."""


def cgroup_limits(proc_self: Path = Path("/proc/self")) -> CgroupLimits:
    """What the control groups of the process under `proc_self` allow it."""
    cpus: list[float] = []
    memory: list[int] = []
    hierarchies = _hierarchies(proc_self / "mountinfo")
    for controllers, group in _memberships(proc_self / "cgroup"):
        for hierarchy in hierarchies:
            if hierarchy.controllers != controllers and not (hierarchy.controllers & controllers):
                continue
            for folder in _folders(hierarchy, group):
                if hierarchy.controllers:
                    cpus += _cpus_v1(folder)
                    memory += _memory_v1(folder)
                else:
                    cpus += _cpus_v2(folder)
                    memory += _memory_v2(folder)
    return CgroupLimits(cpus=min(cpus, default=None), memory_bytes=min(memory, default=None))


def _memberships(path: Path) -> Iterator[tuple[frozenset[str], PurePosixPath]]:
    """The groups that the process is in; no controllers stands for version 2."""
    for line in _read(path).splitlines():
        _, controllers, group = line.split(":", 2)
        yield frozenset(filter(None, controllers.split(","))), PurePosixPath(group)


def _hierarchies(path: Path) -> list[_Hierarchy]:
    """See proc(5), mountinfo: the options of the file system come last, after ` - `."""
    found: list[_Hierarchy] = []
    for line in _read(path).splitlines():
        mount, _, system = line.partition(" - ")
        fields, kind = mount.split(), system.split()
        if len(fields) < 5 or len(kind) < 3:
            continue
        if kind[0] == "cgroup2":
            controllers = frozenset[str]()
        elif kind[0] == "cgroup":
            controllers = frozenset(kind[2].split(","))
        else:
            continue
        found.append(
            _Hierarchy(
                mount=Path(_unescaped(fields[4])),
                root=PurePosixPath(_unescaped(fields[3])),
                controllers=controllers,
            )
        )
    return found


def _folders(hierarchy: _Hierarchy, group: PurePosixPath) -> Iterator[Path]:
    """The group's folder and those above it. A group outside the mount (as a container may see
    its own) leaves the mounted root, which is then the container's group.
    """
    below = PurePosixPath()
    if group.is_relative_to(hierarchy.root) and ".." not in group.parts:
        below = group.relative_to(hierarchy.root)
    for part in (below, *below.parents):
        yield hierarchy.mount / part


def _cpus_v2(folder: Path) -> list[float]:
    fields = _read(folder / "cpu.max").split()
    if len(fields) != 2 or fields[0] == "max":
        return []
    return [int(fields[0]) / int(fields[1])]


def _memory_v2(folder: Path) -> list[int]:
    text = _read(folder / "memory.max").strip()
    return [int(text)] if text.isdigit() else []


def _cpus_v1(folder: Path) -> list[float]:
    quota, period = _read(folder / "cpu.cfs_quota_us"), _read(folder / "cpu.cfs_period_us")
    if not quota or not period or int(quota) <= 0:
        return []
    return [int(quota) / int(period)]


def _memory_v1(folder: Path) -> list[int]:
    text = _read(folder / "memory.limit_in_bytes").strip()
    return [int(text)] if text.isdigit() and int(text) < V1_UNLIMITED_BYTES else []


def _unescaped(field: str) -> str:
    return field.replace("\\040", " ").replace("\\011", "\t").replace("\\134", "\\")
