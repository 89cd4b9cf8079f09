"""Keeps in the page cache what loads would map: prepared weights, checked, within a budget.

The host tier of a CPU node (ServerlessLLM, section 4: a server's memory as a cache of models), but
without a pool of its own beside the kernel's: pages that are mapped from the cache are copied
nowhere. Those used last stay, what is loaded gives way to what is not, and what the kernel takes is
read again. It reads while the engine rests, so that no iteration and no load waits for it. Before:
`engine`, which says what is stored, and when a load begins. After: the same, which tells the cell
of what is kept.
"""

import logging
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path

from mesh.domain.errors import MeshError
from mesh_loader.page_cache import cached_share, read_through

LOOK_S = 10.0
"""Between two looks at what the kernel still has, at most."""
REST_SHARE = 9.0
"""After what had to be read again, so many times as long nothing else is."""
WAIT_S = 0.02
"""Between two questions whether the engine rests."""
KEPT_SHARE = 0.9
"""With this share of a folder's bytes in the page cache, a load takes as long as with all of them.
"""
WHOLE_SHARE = 0.99
"""With less the rest is read."""

log = logging.getLogger(__name__)


class _Broken(Exception):
    """A read is broken off: the keeper closes, or the engine has not rested since the last look."""


class PageKeeper:
    """All but `close` may be called from any thread; `_run` is the one that reads."""

    def __init__(
        self,
        budget_bytes: int,
        *,
        check: Callable[[Path, Callable[[], None]], None],
        rests: Callable[[], bool],
        loaded: Callable[[], Collection[Path]] = tuple,
    ) -> None:
        """`check` reads the files of such a folder that have not been checked, with a call to its
        second argument now and then; it raises MeshError for what no load could use. `rests`: the
        engine. `loaded`: folders of which it has instances.
        """
        self._budget_bytes = budget_bytes
        self._check = check
        self._rests = rests
        self._loaded = loaded
        self._used: dict[Path, None] = {}
        """Folders that loads have read, the last one last."""
        self._offered: tuple[Path, ...] = ()
        self._kept: frozenset[Path] = frozenset()
        self._been: set[Path] = set()
        """The folders that were kept before: reading one of them again is worth less."""
        self._bad: dict[Path, int] = {}
        """Inodes of folders that no load could use: not tried again as they are."""
        self._again_at_s = 0.0
        """Nothing is read again before."""
        self._waited_s = 0.0
        """In all, for the engine to rest."""
        self._closed = threading.Event()
        self._looks = threading.Event()
        """To be set for a look before its time."""
        self._thread: threading.Thread | None = None

    def offer(self, folders: Iterable[Path]) -> None:
        """These are stored, and a load would map them; what was never used comes in this order."""
        offered = tuple(folders)
        told = self._budget_bytes <= 0 or offered == self._offered
        if told or self._closed.is_set():
            return
        self._offered = offered
        self._looks.set()
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="mesh-page-keeper", daemon=True)
            self._thread.start()

    def use(self, folder: Path) -> None:
        """A load reads it."""
        if self._budget_bytes > 0:
            self._used.pop(folder, None)
            self._used[folder] = None

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
                if self._read_all(self._look()):
                    self._looks.wait(LOOK_S)
                self._looks.clear()
        except Exception:
            log.exception("files are no longer kept in memory")
        finally:
            self._kept = frozenset()

    def _look(self) -> list[Path]:
        """Note what is there of what is wanted; what is to be read."""
        shares = {folder: _cached_share(folder) for folder in self._missing_files()}
        self._kept = frozenset(f for f in self._kept if shares.get(f, 0.0) >= KEPT_SHARE)
        self._been.intersection_update(self._offered)
        return [f for f, share in shares.items() if f not in self._kept or share < WHOLE_SHARE]

    def _read_all(self, folders: Iterable[Path]) -> bool:
        """False where it is time to look again before all of them were read."""
        until_s = time.monotonic() + LOOK_S
        for folder in folders:
            now_s = time.monotonic()
            if folder in self._been and now_s < self._again_at_s:
                continue
            if self._looks.is_set() or now_s > until_s or not self._read(folder):
                return False
        return True

    def _read(self, folder: Path) -> bool:
        """False where it was broken off."""
        start_s, waited_s = time.monotonic(), self._waited_s
        try:
            self._await_rest()
            self._check(folder, self._await_rest)
            if _cached_share(folder) < WHOLE_SHARE:
                for path in _sizes(folder):
                    read_through(path, self._await_rest)
        except _Broken:
            return False
        except (MeshError, OSError) as error:
            log.warning("%s is not kept in memory: %s", folder, error)
            self._bad[folder] = _inode(folder)
            return True
        if _cached_share(folder) >= KEPT_SHARE:
            self._kept |= {folder}
        if folder in self._been:
            now_s = time.monotonic()
            read_s = now_s - start_s - (self._waited_s - waited_s)
            self._again_at_s = now_s + REST_SHARE * read_s
        self._been.add(folder)
        return True

    def _missing_files(self) -> Iterator[Path]:
        """Those that fit into the budget: the last used first, then in the order of the offer."""
        left_bytes, offered = self._budget_bytes, dict.fromkeys(self._offered)
        for folder in list(self._used):
            if folder not in offered:
                self._used.pop(folder, None)
        self._bad = {f: inode for f, inode in self._bad.items() if f in offered}
        loaded = set(self._loaded())
        ranked = dict.fromkeys((*reversed(list(self._used)), *offered))
        for folder in sorted(ranked, key=loaded.__contains__):
            size_bytes = sum(_sizes(folder).values())
            usable = size_bytes and self._bad.get(folder) != _inode(folder)
            if usable and size_bytes <= left_bytes:
                left_bytes -= size_bytes
                yield folder

    def _await_rest(self) -> None:
        """Raises _Broken."""
        start_s = time.monotonic()
        while not self._closed.is_set() and time.monotonic() - start_s < LOOK_S:
            if self._rests():
                self._waited_s += time.monotonic() - start_s
                return
            self._closed.wait(WAIT_S)
        raise _Broken


def _sizes(folder: Path) -> dict[Path, int]:
    """Bytes of its files; none where it has gone."""
    try:
        return {path: path.stat().st_size for path in folder.iterdir()}
    except OSError:
        return {}


def _inode(folder: Path) -> int:
    """Another where it was derived anew; 0 where it has gone."""
    try:
        return folder.stat().st_ino
    except OSError:
        return 0


def _cached_share(folder: Path) -> float:
    """The share of the folder's bytes that is in the page cache; 0 where the folder has gone."""
    sizes = _sizes(folder)
    try:
        there = sum(cached_share(path) * size for path, size in sizes.items())
    except OSError:
        return 0.0
    return there / max(sum(sizes.values()), 1)
