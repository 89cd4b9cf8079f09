"""Keeps in the page cache what loads would map: prepared weights, checked, within a budget.

The host tier of a CPU node (ServerlessLLM, section 4: a server's memory as a cache of models), but
without a pool of its own beside the kernel's: pages that are mapped from the cache are copied
nowhere. Those used last stay; what the kernel takes is read again. It reads while the engine rests,
so that no iteration and no load waits for it. Before: `engine`, which says what is stored, and when
a load begins. After: the same, which tells the cell of what is kept.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from mesh.domain.errors import MeshError
from mesh_loader.page_cache import cached_share, read_through

LOOK_S = 10.0
"""Between two looks at what the kernel still has."""
REST_SHARE = 9.0
"""After what had to be read again, so many times as long nothing is read."""
WAIT_S = 0.02
"""Between two questions whether the engine rests."""
KEPT_SHARE = 0.9
"""Of a folder's pages in the cache, with which a load takes as long as with all."""
WHOLE_SHARE = 0.99
"""With less the rest is read."""

log = logging.getLogger(__name__)


class _Closed(Exception):
    """The engine closes amid a read."""


class PageKeeper:
    """All but `close` may be called from any thread."""

    def __init__(
        self,
        budget_bytes: int,
        *,
        check: Callable[[Path, Callable[[], None]], None],
        rests: Callable[[], bool],
    ) -> None:
        """`check` reads the files of such a folder that have not been checked, with a call to its
        second argument now and then; it raises MeshError for what no load could use. `rests`: of
        the engine.
        """
        self._budget_bytes = budget_bytes
        self._check = check
        self._rests = rests
        self._used: dict[Path, None] = {}
        """Folders that loads have read, the last one last."""
        self._offered: tuple[Path, ...] = ()
        self._kept: frozenset[Path] = frozenset()
        self._bad: frozenset[Path] = frozenset()
        """Not tried again until they are no longer offered, or a load has used them."""
        self._closed = threading.Event()
        self._looks = threading.Event()
        """To be set for a look before its time."""
        self._thread: threading.Thread | None = None

    def offer(self, folders: Iterable[Path]) -> None:
        """These are stored, and a load would map them; the least recently used last, unless they
        have been used.
        """
        offered = tuple(folders)
        if self._budget_bytes <= 0 or offered == self._offered:
            return
        self._offered = offered
        self._looks.set()
        if self._thread is None and not self._closed.is_set():
            self._thread = threading.Thread(target=self._run, name="mesh-page-keeper", daemon=True)
            self._thread.start()

    def use(self, folder: Path) -> None:
        """A load reads it."""
        self._used.pop(folder, None)
        self._used[folder] = None
        self._bad -= {folder}

    def has(self, folder: Path) -> bool:
        """Whether a load would find it checked, and in memory."""
        return folder in self._kept and _cached_share(folder) >= KEPT_SHARE

    @property
    def kept(self) -> frozenset[Path]:
        """As last looked at."""
        return self._kept

    def close(self) -> None:
        """Wait for a read that is under way, which takes a millisecond or what the disk does."""
        self._closed.set()
        self._looks.set()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        try:
            while not self._closed.is_set():
                self._looks.clear()
                again_s = self._look()
                if again_s:
                    self._closed.wait(REST_SHARE * again_s)
                self._looks.wait(LOOK_S)
        except _Closed:
            pass

    def _look(self) -> float:
        """Read what is wanted and not there; seconds that were for what had been there before.
        Raises _Closed."""
        shares = {folder: _cached_share(folder) for folder in self._wanted()}
        before = self._kept
        self._kept = frozenset(f for f in before if shares.get(f, 0.0) >= KEPT_SHARE)
        again_s = 0.0
        for folder, share in shares.items():
            if folder in self._bad or (folder in self._kept and share >= WHOLE_SHARE):
                continue
            self._await_rest()
            start_s = time.monotonic()
            if self._read(folder):
                self._kept |= {folder}
            else:
                self._bad |= {folder}
            if folder in before:
                again_s += time.monotonic() - start_s
        return again_s

    def _read(self, folder: Path) -> bool:
        """Whether it is whole, and as it was written. Raises _Closed."""
        try:
            self._check(folder, self._await_rest)
            if _cached_share(folder) < WHOLE_SHARE:
                for path in _sizes(folder):
                    read_through(path, self._await_rest)
        except (MeshError, OSError) as error:
            log.warning("%s is not kept in memory: %s", folder, error)
            return False
        return True

    def _wanted(self) -> Iterator[Path]:
        """Those that fit into the budget: the last used first, then in the order of the offer."""
        left_bytes = self._budget_bytes
        offered = dict.fromkeys(self._offered)
        self._bad &= offered.keys()
        for folder in dict.fromkeys((*reversed(list(self._used)), *offered)):
            if folder not in offered:
                self._used.pop(folder, None)
                continue
            size_bytes = sum(_sizes(folder).values())
            if size_bytes <= left_bytes:
                left_bytes -= size_bytes
                yield folder

    def _await_rest(self) -> None:
        """Raises _Closed."""
        while not self._closed.is_set():
            if self._rests():
                return
            self._closed.wait(WAIT_S)
        raise _Closed


def _sizes(folder: Path) -> dict[Path, int]:
    """Bytes of its files; none where it has gone."""
    try:
        return {path: path.stat().st_size for path in folder.iterdir()}
    except OSError:
        return {}


def _cached_share(folder: Path) -> float:
    """Of all its bytes; 0 where it has gone."""
    sizes = _sizes(folder)
    try:
        there = sum(cached_share(path) * size for path, size in sizes.items())
    except OSError:
        return 0.0
    return there / max(sum(sizes.values()), 1)
