"""Imports a model in a child process, so that converting it never disturbs who serves.

The child is `python -m mesh_loader import`; it reports by lines on its stdout. It leads a process
group of its own, which is killed on cancellation and timeout, and the kernel kills it when this
process dies. Node agents call this; `mesh pull` imports in its own process.
"""

import asyncio
import contextlib
import os
import signal
import sys
import threading
from collections.abc import Collection
from pathlib import Path

from mesh.domain.errors import Cancelled, MeshError, ModelError, Unavailable
from mesh.domain.model import WeightPrecision
from mesh.domain.values import dataclass
from mesh.runtime.engine import Progress
from mesh_loader.protocol import LINE_BYTES_MAX, parse_line
from mesh_loader.store import ModelStore, StoredModel

IMPORT_TIMEOUT_S = 2 * 3600.0
STOP_GRACE_S = 5.0
"""From SIGTERM to SIGKILL."""
STOP_POLL_S = 0.05
STDERR_BYTES_MAX = 64 << 10


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportRules:
    """What a child is told of all imports; see `ModelStore` for the first three."""

    download_bytes_per_s: float | None = None
    as_is: Collection[str] = ()
    plain: bool = False
    reach: Collection[str] = ()
    """Hosts that may have private addresses; see `Reach`."""

    def arguments(self) -> list[str]:
        rate = self.download_bytes_per_s
        return [
            *([] if rate is None else ["--download-rate", str(rate)]),
            *(["--as-is", ",".join(sorted(self.as_is))] if self.as_is else []),
            *(["--plain"] if self.plain else []),
            *(word for host in self.reach for word in ("--reach", host)),
        ]


NO_RULES = ImportRules()


async def import_in_child(
    source: str,
    store_root: Path,
    progress: Progress,
    *,
    timeout_s: float = IMPORT_TIMEOUT_S,
    rules: ImportRules = NO_RULES,
    weights: WeightPrecision | None = None,
) -> StoredModel:
    """The model of a source, imported by a child process into the store. `weights`: how it is to
    be held, see `ModelStore.import_model`.

    Raises what ModelStore.import_model raises, Unavailable when `timeout_s` is over, ModelError
    when the child dies, and whatever `progress` raises; in each case no process is left behind.
    """
    stored = ModelStore(store_root).find(source)
    if stored is not None:
        return stored
    held = [] if weights is None else ["--weights", weights]
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "mesh_loader", "import", source,
        "--store", str(store_root), "--parent", str(os.getpid()), *rules.arguments(), *held,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        limit=LINE_BYTES_MAX,
        start_new_session=True,
    )  # fmt: skip
    assert process.stderr is not None
    complaints = asyncio.create_task(_tail(process.stderr))
    try:
        async with asyncio.timeout(timeout_s):
            outcome = await _read(process, progress)
            await process.wait()
    except TimeoutError:
        raise Unavailable(
            f"the import of {source} was stopped after {timeout_s:.0f} s",
            hint="import it beforehand with `mesh pull`, which has no such limit",
        ) from None
    finally:
        await _end(process)
        last_words = await complaints
    if isinstance(outcome, MeshError):
        raise outcome
    if outcome is None:
        raise _died(source, process.returncode, last_words)
    return outcome


def import_until(
    store_root: Path,
    source: str,
    progress: Progress,
    stop: threading.Event,
    weights: WeightPrecision | None = None,
    *,
    rules: ImportRules = NO_RULES,
) -> StoredModel:
    """`import_in_child` for a thread: blocks, and ends with Cancelled soon after `stop` is set."""

    async def watched() -> StoredModel:
        task = asyncio.create_task(
            import_in_child(source, store_root, progress, rules=rules, weights=weights)
        )
        while not stop.is_set():
            done, _ = await asyncio.wait([task], timeout=STOP_POLL_S)
            if done:
                return task.result()
        task.cancel()
        await asyncio.wait([task])
        raise Cancelled(f"the import of {source} was stopped")

    return asyncio.run(watched())


async def _read(
    process: asyncio.subprocess.Process, progress: Progress
) -> StoredModel | MeshError | None:
    """The last word of the child, None if it ended without one."""
    assert process.stdout is not None
    outcome: StoredModel | MeshError | None = None
    while line := await process.stdout.readline():
        try:
            said = parse_line(line)
        except ValueError:
            continue  # a library's own print
        if isinstance(said, tuple):
            progress(*said)
        else:
            outcome = said
    return outcome


async def _tail(stream: asyncio.StreamReader) -> str:
    """The end of what the child wrote to stderr."""
    kept = b""
    while piece := await stream.read(STDERR_BYTES_MAX):
        kept = (kept + piece)[-STDERR_BYTES_MAX:]
    return kept.decode("utf-8", "replace")


async def _end(process: asyncio.subprocess.Process) -> None:
    """Stops the child and all of its group; returns when it is gone."""
    if process.returncode is None:
        _signal_group(process.pid, signal.SIGTERM)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(STOP_GRACE_S):
                await process.wait()
    _signal_group(process.pid, signal.SIGKILL)  # also what the child itself may have left
    await process.wait()


def _signal_group(leader: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, number)


def _died(source: str, exit_code: int | None, last_words: str) -> ModelError:
    lines = [line.strip() for line in last_words.splitlines() if line.strip()]
    reason = f": {lines[-1]}" if lines else ""
    if exit_code is not None and exit_code < 0:
        name = signal.Signals(-exit_code).name
        return ModelError(
            f"the import of {source} was killed by {name}{reason}",
            hint="the system kills what takes too much memory: see its log"
            if exit_code == -9
            else "",
        )
    return ModelError(f"the import of {source} ended with exit code {exit_code}{reason}")
