"""What this process holds, exactly: /proc/self/statm would lag behind."""

import time
from collections.abc import Callable
from pathlib import Path

SETTLE_S_MAX = 20.0


def resident_bytes() -> int:
    """Memory in use, files' pages included."""
    return _bytes_of("/proc/self/smaps_rollup", "Rss:")


def mapped_bytes() -> int:
    """Addresses in use."""
    return _bytes_of("/proc/self/status", "VmSize:")


def mappings() -> int:
    return Path("/proc/self/maps").read_text(encoding="ascii").count("\n")


def wait_until(reached: Callable[[], bool]) -> None:
    """For what comes by and by; fails after SETTLE_S_MAX."""
    give_up_s = time.monotonic() + SETTLE_S_MAX
    while not reached():
        assert time.monotonic() < give_up_s, "it does not come"
        time.sleep(0.002)


def _bytes_of(path: str, field: str) -> int:
    for line in Path(path).read_text(encoding="ascii").splitlines():
        if line.startswith(field):
            return int(line.split()[1]) * 1024
    raise AssertionError(f"{path} has no {field}")
