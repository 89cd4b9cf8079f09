"""Child processes of `mesh up` and `mesh demo`: started, asked, and ended for certain.

Every child leads a process group of its own, so that Ctrl-C in the terminal reaches only the
parent, which then ends the groups in order: SIGTERM, a bounded wait, SIGKILL. Should the parent be
killed itself, `tied` ends the child.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from mesh.domain.errors import HOME_HINT, StorageError, system_errors
from mesh.domain.values import dataclass

STOP_GRACE_S = 5.0
"""From SIGTERM to SIGKILL."""
POLL_S = 0.05
LOG_TAIL_LINES = 8
LOG_TAIL_BYTES = 16_384


@dataclass(frozen=True, slots=True, kw_only=True)
class Child:
    """`name` is for people: `controller`, `node cpu0`."""

    name: str
    process: subprocess.Popen[bytes]
    log_path: Path
    log_from_bytes: int = 0
    """Where its part of the log begins: what is before it was written by a process before it."""

    @property
    def running(self) -> bool:
        return self.process.poll() is None

    def fate(self) -> str:
        """How it ended, in words."""
        code = self.process.returncode
        if code is None:
            return "is running"
        return f"exited with code {code}" if code >= 0 else f"was ended by {_signal_name(-code)}"

    def log_tail(self) -> list[str]:
        """The last lines that it wrote."""
        try:
            with self.log_path.open("rb") as log:
                end_bytes = log.seek(0, os.SEEK_END)
                log.seek(max(self.log_from_bytes, end_bytes - LOG_TAIL_BYTES))
                lines = log.read().decode("utf-8", "replace").splitlines()
        except OSError:
            return []
        return [line.rstrip() for line in lines if line.strip()][-LOG_TAIL_LINES:]


def start(
    name: str, module: str, arguments: Sequence[str], log_path: Path, *, again: bool = False
) -> Child:
    """Run `python -m module arguments`, its output in `log_path`; the log of the run before is kept
    once. `again`: this run has a log, which goes on.

    Raises StorageError when the log cannot be written.
    """
    command = [sys.executable, "-P", "-m", "mesh.cli.tied", str(os.getpid()), module, *arguments]
    with system_errors(StorageError, f"cannot write {log_path}", HOME_HINT):
        log_path.parent.mkdir(parents=True, exist_ok=True)
        if log_path.exists() and not again:
            log_path.replace(log_path.with_suffix(".previous.log"))
        log = log_path.open("ab")
    with log:
        log_from_bytes = log.tell()
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            process_group=0,
        )
    return Child(name=name, process=process, log_path=log_path, log_from_bytes=log_from_bytes)


@contextmanager
def bound(cpus: frozenset[int] | None) -> Iterator[None]:
    """What this thread starts meanwhile may run on these logical CPUs alone, as under `taskset`."""
    if cpus is None:
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cpus)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def clear(child: Child) -> None:
    """Kill its process group: what it left behind, once it has ended itself."""
    _signal_group(child, signal.SIGKILL)


def stop(children: Sequence[Child], hurry: Callable[[], bool] = lambda: False) -> None:
    """End the children, the first of them before the others, and reap them all.

    The first one is the controller: it tells its clients why they end, which it could not if its
    nodes went first. Bounded by two graces; `hurry` cuts both short.
    """
    if children:
        _end(children[:1], hurry)
        _end(children[1:], hurry)


def _end(children: Sequence[Child], hurry: Callable[[], bool]) -> None:
    for child in children:
        _signal_group(child, signal.SIGTERM)
    until_s = time.monotonic() + STOP_GRACE_S
    while any(child.running for child in children):
        if time.monotonic() > until_s or hurry():
            break
        time.sleep(POLL_S)
    for child in children:
        # Also when it has ended: what it left behind goes with it.
        clear(child)
        child.process.wait()


def _signal_group(child: Child, number: signal.Signals) -> None:
    try:
        os.killpg(child.process.pid, number)
    except ProcessLookupError:
        return


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
