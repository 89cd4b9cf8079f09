"""What the cell's processes hold, sampled while traffic runs."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median

import psutil

from mesh.wire.client import MeshClient

RSS_GROWTH_MAX = 0.05
"""From the second quarter of the run to the last; the first is warm-up."""
QUIET_S_MAX = 60.0
FDS_GROWTH_MAX = 8
"""Sockets come and go with clients; a leak grows with the number of calls."""


@dataclass(slots=True, kw_only=True)
class Held:
    """Samples of one process."""

    name: str
    process: psutil.Process
    rss_bytes: list[int] = field(default_factory=list)
    fds: list[int] = field(default_factory=list)

    def sample(self) -> None:
        self.rss_bytes.append(self.process.memory_info().rss)
        self.fds.append(self.process.num_fds())

    def rss_growth(self) -> float:
        """Share by which the last quarter's median lies above the second quarter's."""
        quarter = max(1, len(self.rss_bytes) // 4)
        early = median(self.rss_bytes[quarter : 2 * quarter] or self.rss_bytes)
        return median(self.rss_bytes[-quarter:]) / early - 1

    def fds_growth(self) -> int:
        quarter = max(1, len(self.fds) // 4)
        early = median(self.fds[quarter : 2 * quarter] or self.fds)
        return int(median(self.fds[-quarter:]) - early)

    def leaks(self) -> list[str]:
        found = []
        if self.rss_growth() > RSS_GROWTH_MAX:
            found.append(f"{self.name}: RSS grew by {100 * self.rss_growth():.1f} %")
        if self.fds_growth() > FDS_GROWTH_MAX:
            found.append(f"{self.name}: {self.fds_growth()} more file descriptors")
        return found


def sample(held: Sequence[Held]) -> None:
    for process in held:
        process.sample()


def leftovers(client: MeshClient) -> list[str]:
    """What is still held once the last client has gone; bounded wait for it to go."""
    until_s = time.monotonic() + QUIET_S_MAX
    while True:
        status = client.status()
        blocks = sum(i.kv_blocks_used for node in client.nodes() for i in node.instances)
        found = [
            f"{count} {what}"
            for what, count in (
                ("requests running", status.running),
                ("requests queued", status.queued),
                ("KV blocks in use", blocks),
            )
            if count
        ]
        if not found or time.monotonic() > until_s:
            return found
        time.sleep(1.0)
