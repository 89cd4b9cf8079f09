"""What this machine gives the node agent: cores, memory, instruction sets, a name.

Counts what the process may use, not what the machine has: the affinity mask, the quota and memory
limits of its control groups; cores, not their threads. The composition root builds the node's hello
from it.
"""

import os
import re
import socket
from pathlib import Path

from mesh.domain.ids import NodeId
from mesh.domain.reasons import DeviceKind
from mesh.domain.steps import EngineCapabilities
from mesh.domain.values import dataclass
from mesh_nodes.cgroup import cgroup_limits
from mesh_nodes.kernel_files import read
from mesh_nodes.topology import SYS, cores_of, numa_node, usable_cpus

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
    def has_vnni(self) -> bool:
        """Whether one instruction multiplies and adds up 8 bits: AVX-512's or AVX2's."""
        return not {"avx_vnni", "avx512_vnni"}.isdisjoint(self.isa)

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
    processors = read(proc / "cpuinfo")
    cpus = usable_cpus()
    memory_bytes = _memory_total_bytes(read(proc / "meminfo"))
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
