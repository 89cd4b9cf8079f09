"""The limits that control groups put on this process: CPU quota and memory, versions 1 and 2.

A container or a systemd unit may allow far less than the machine has, and exceeding it means being
throttled or killed. The limits of every group from the process's own up to the mounted root count;
the tightest holds. What cannot be read counts as unlimited. `hardware` builds on this.
"""

from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from mesh.domain.values import dataclass
from mesh_nodes.kernel_files import read

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
    for line in read(path).splitlines():
        _, controllers, group = line.split(":", 2)
        yield frozenset(filter(None, controllers.split(","))), PurePosixPath(group)


def _hierarchies(path: Path) -> list[_Hierarchy]:
    """See proc(5), mountinfo: the options of the file system come last, after ` - `."""
    found: list[_Hierarchy] = []
    for line in read(path).splitlines():
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
    fields = read(folder / "cpu.max").split()
    if len(fields) != 2 or fields[0] == "max":
        return []
    return [int(fields[0]) / int(fields[1])]


def _memory_v2(folder: Path) -> list[int]:
    text = read(folder / "memory.max").strip()
    return [int(text)] if text.isdigit() else []


def _cpus_v1(folder: Path) -> list[float]:
    quota, period = read(folder / "cpu.cfs_quota_us"), read(folder / "cpu.cfs_period_us")
    if not quota or not period or int(quota) <= 0:
        return []
    return [int(quota) / int(period)]


def _memory_v1(folder: Path) -> list[int]:
    text = read(folder / "memory.limit_in_bytes").strip()
    return [int(text)] if text.isdigit() and int(text) < V1_UNLIMITED_BYTES else []


def _unescaped(field: str) -> str:
    return field.replace("\\040", " ").replace("\\011", "\t").replace("\\134", "\\")
