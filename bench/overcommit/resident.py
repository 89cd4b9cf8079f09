"""What a process holds of the machine's memory, sampled from outside while it serves."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

SAMPLE_S = 0.05
_STATUS = "/proc/{}/status"
_WORDS = ("VmHWM", "VmRSS", "RssAnon", "RssFile")


def status_bytes(pid: int | str, word: str) -> int:
    """One size that the system tells of a process. Raises OSError or KeyError when it has none."""
    lines = Path(_STATUS.format(pid)).read_text(encoding="ascii", errors="replace").splitlines()
    return int(dict(line.split(":", 1) for line in lines)[word].split()[0]) * 1024


@dataclass(slots=True, kw_only=True)
class Resident:
    """Samples of one process against its limit."""

    limit_bytes: int
    samples: int = 0
    over: int = 0
    """Samples above the limit."""
    rss_bytes_max: int = 0
    file_bytes: int = 0
    """The pages of files in the largest sample, which the system could take back."""
    high_water_bytes: int = 0
    """The most at any time, by the system's own account."""

    def note(self, status: str) -> None:
        """One reading of /proc/PID/status. One without memory, of a process that ends, is none."""
        found = dict(line.split(":", 1) for line in status.splitlines() if ":" in line)
        if not all(word in found for word in _WORDS):
            return
        peak, rss, _, file = (int(found[word].split()[0]) * 1024 for word in _WORDS)
        self.samples += 1
        self.over += rss > self.limit_bytes
        self.high_water_bytes = max(self.high_water_bytes, peak)
        if rss > self.rss_bytes_max:
            self.rss_bytes_max, self.file_bytes = rss, file


@contextmanager
def watched(pid: int, limit_bytes: int) -> Iterator[Resident]:
    """Samples the process every SAMPLE_S until the end of the block, or of the process."""
    resident = Resident(limit_bytes=limit_bytes)
    over = threading.Event()
    status = Path(_STATUS.format(pid))

    def watch() -> None:
        while not over.wait(SAMPLE_S):
            try:
                resident.note(status.read_text(encoding="ascii", errors="replace"))
            except OSError:
                return

    watcher = threading.Thread(target=watch, name="resident", daemon=True)
    watcher.start()
    try:
        yield resident
    finally:
        over.set()
        watcher.join()
