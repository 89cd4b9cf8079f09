"""Which blocks of a KV cache hold pages, and how pages of free ones go back to the system.

Giving back a gigabyte takes tens of milliseconds, which no iteration should wait for. So the
compute thread only marks blocks, and a thread that lives while there is something to do gives their
pages back in slices; until then they count as held. A block that is claimed meanwhile keeps its
pages. `kv_cache` owns the memory itself.
"""

import logging
import threading
import time
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from mesh_nodes.engines.openvino.blocks import Blocks, runs

log = logging.getLogger(__name__)


class HeldBlocks:
    """`count` and `trim` are for any thread; the rest is for the compute thread."""

    def __init__(
        self,
        blocks: int,
        *,
        slice_blocks: int,
        shared_blocks: int,
        free_pages: Callable[[int, int], None],
    ) -> None:
        """`free_pages(first, end)` frees the pages that these blocks cover wholly; it is called
        from the thread. `shared_blocks`: how far a block's pages reach into the next blocks; 0
        where blocks cover whole pages.
        """
        self.count = 0
        self._slice_blocks = slice_blocks
        self._shared_blocks = shared_blocks
        self._free_pages = free_pages
        self._held = np.zeros(blocks, np.bool_)
        self._surplus = np.zeros(blocks, np.bool_)
        """Blocks whose pages are to be given back from `_due_s` on."""
        self._due_s = 0.0
        self._resting = np.zeros(0, np.int64)
        """The blocks of the surplus that keep their pages if they are claimed before these are due.
        """
        self._in_hand = (0, 0)
        """What the thread is giving back: first block and end."""
        self._closed = False
        self._thread: threading.Thread | None = None
        self._state = threading.Condition()

    def claim(self, free: Blocks, count: int) -> Blocks:
        """Choose `count` of these free blocks to be written: those that hold pages before others,
        so that never more do than may be taken, and the slice in hand last; low before high.
        """
        with self._state:
            self._end_rest()
            held, surplus = self._held[free], self._surplus[free]
            busy = self._busy(free)
            chosen = free[held & ~surplus][:count]
            for wanted in (surplus & ~busy, ~held & ~busy, (surplus | ~held) & busy):
                if chosen.size < count:
                    chosen = np.append(chosen, free[wanted][: count - chosen.size])
            self.hold(chosen)
            return chosen

    def hold(self, blocks: Blocks) -> None:
        """These are about to be written. Waits for the slice in hand where it has one of them."""
        with self._state:
            self._state.wait_for(lambda: not self._busy(blocks).any())
            self.count += int(np.count_nonzero(~self._held[blocks]))
            self._held[blocks] = True
            self._surplus[blocks] = False

    def trim(self, in_use: Blocks, *, keep: int, after_s: float = 0.0) -> None:
        """Give back pages of free blocks, the highest first, until `keep` blocks hold some: not
        before `after_s` have passed, nor if a block is claimed until then, unless an earlier trim
        asks for it.
        """
        due_s = time.monotonic() + after_s
        with self._state:
            lasting = self._held & ~self._surplus
            excess = int(np.count_nonzero(lasting)) - keep
            lasting[in_use] = False
            free = np.flatnonzero(lasting)
            waiting = self._surplus.any()
            chosen = free[max(free.size - excess, 0) :]
            self._surplus[chosen] = True
            self._resting = chosen[: 0 if waiting or not after_s else None]
            self._due_s = min(self._due_s, due_s) if waiting else due_s
            if self._thread is None and self._surplus.any():
                self._thread = threading.Thread(
                    target=self._work_off, name="mesh-kv-pages", daemon=True
                )
                self._thread.start()
            self._state.notify_all()

    def close(self) -> None:
        """Hold nothing, and let the thread end: it touches no page after this."""
        with self._state:
            self._closed = True
            self._state.notify_all()
            thread = self._thread
        if thread is not None:
            thread.join()
        self.count = 0

    def _end_rest(self) -> None:
        if time.monotonic() < self._due_s:
            self._surplus[self._resting] = False
            self._state.notify_all()
        self._resting = self._resting[:0]

    def _busy(self, blocks: Blocks) -> npt.NDArray[np.bool_]:
        """Which of them are in the slice in hand."""
        first, end = self._in_hand
        return (blocks >= first) & (blocks < end)

    def _work_off(self) -> None:
        while (blocks := self._next_slice()) is not None:
            given = self._free_all_pages(blocks)
            with self._state:
                self._in_hand = (0, 0)
                self._surplus[blocks] = False
                if given:
                    self._held[blocks] = False
                    self.count -= blocks.size
                self._state.notify_all()

    def _next_slice(self) -> Blocks | None:
        """The highest blocks of the surplus, once they are due; None when there is none left."""
        with self._state:
            while not self._closed and self._surplus.any():
                wait_s = self._due_s - time.monotonic()
                if wait_s > 0:
                    self._state.wait(wait_s)
                    continue
                last = int(np.flatnonzero(self._surplus)[-1])
                first = max(last + 1 - self._slice_blocks, 0)
                blocks = np.flatnonzero(self._surplus[first : last + 1]) + first
                self._in_hand = self._reach(int(blocks[0]), last + 1)
                return blocks
            self._thread = None
            return None

    def _free_all_pages(self, blocks: Blocks) -> bool:
        try:
            for begin, end in runs(blocks):
                self._free_pages(*self._reach(int(blocks[begin]), int(blocks[end - 1]) + 1))
        except OSError:
            log.exception("KV pages stay held")
            return False
        return True

    def _reach(self, first: int, end: int) -> tuple[int, int]:
        """With the neighbours that hold nothing, as far as pages are shared with them."""
        lower, upper = first, end
        while first - lower < self._shared_blocks and lower > 0 and not self._held[lower - 1]:
            lower -= 1
        while upper - end < self._shared_blocks and upper < len(self._held):
            if self._held[upper]:
                break
            upper += 1
        return lower, upper
