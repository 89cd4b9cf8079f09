"""What this process holds, exactly: /proc/self/statm would lag behind."""

from pathlib import Path


def resident_bytes() -> int:
    """Memory in use, files' pages included."""
    return _bytes_of("/proc/self/smaps_rollup", "Rss:")


def mapped_bytes() -> int:
    """Addresses in use."""
    return _bytes_of("/proc/self/status", "VmSize:")


def mappings() -> int:
    """The number of mappings of files, including memory that has a descriptor. Those of malloc are
    left out: in a process that has done nothing else, they grow for hundreds of loads.
    """
    lines = Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
    return sum(line.split()[4] != "0" for line in lines)


def _bytes_of(path: str, field: str) -> int:
    for line in Path(path).read_text(encoding="ascii").splitlines():
        if line.startswith(field):
            return int(line.split()[1]) * 1024
    raise AssertionError(f"{path} has no {field}")
