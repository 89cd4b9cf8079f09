"""Runs another program within a bounded time, and never leaves it behind.

Used for pip, for the exporter of foreign architectures, and for what engines derive from models.
The program shares the caller's process group, so a signal to the group reaches it, and the kernel
kills it when the caller dies, even by kill -9.
"""

import contextlib
import ctypes
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from mesh.domain.errors import InvalidInput, Unavailable
from mesh.domain.values import dataclass

POLL_S = 0.1
STOP_GRACE_S = 5.0
OUTPUT_BYTES_MAX = 64 << 10
PIECES_MAX = 64
"""Read at once: a program that writes without a pause is looked after in between."""

# Asks for SIGKILL at the parent's death (PR_SET_PDEATHSIG = 1), makes sure that the parent has not
# died before that took effect, and becomes the program. A preexec_fn could deadlock under threads.
BIND_TO_PARENT = (
    "import ctypes, os, sys\n"
    "ctypes.CDLL(None).prctl(1, 9, 0, 0, 0)\n"
    "os.getppid() == int(sys.argv[1]) or os._exit(1)\n"
    "os.execv(sys.argv[2], sys.argv[2:])\n"
)

OOM_SCORE = 1000
_PR_SET_PDEATHSIG = 1


def end_first() -> None:
    """For a program that is run here: of all processes the system ends this one first when memory
    runs out, and not the node.
    """
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text(str(OOM_SCORE), encoding="ascii")


def die_with_parent(parent_pid: int, number: signal.Signals = signal.SIGTERM) -> None:
    """Have the kernel send this process that signal when its parent ends, also by kill -9: a
    process without its parent would serve on for nobody. Linux only.

    `parent_pid` is what the parent said of itself: when it ended before this call, no signal would
    ever come. Raises Unavailable then, and InvalidInput for a number that is no process id.
    """
    if parent_pid < 1:
        raise InvalidInput(f"--parent-pid {parent_pid} is not the id of a process")
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, int(number), 0, 0, 0) != 0:
        error = ctypes.get_errno()
        raise Unavailable(f"cannot tie this process to process {parent_pid}: {os.strerror(error)}")
    if os.getppid() != parent_pid:
        raise Unavailable(
            f"process {parent_pid} is not the parent of this one (it is {os.getppid()})",
            hint="it has probably ended; --parent-pid is for a process that starts a node itself",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """How the program ended. `output` is the end of what it wrote, stdout and stderr together."""

    exit_code: int | None
    """The program's exit code, or `None` when it was stopped because its time was up."""
    output: str


def run_bounded(
    argv: Sequence[str],
    *,
    timeout_s: float,
    environment: Mapping[str, str],
    on_wait: Callable[[], None],
    on_line: Callable[[bytes], None] = lambda line: None,
    on_begin: Callable[[int], None] = lambda pid: None,
) -> Finished:
    """Runs a program to its end, at most `timeout_s`; `argv[0]` is an absolute path.

    `on_begin` is called with the program's process id, then `on_wait` every POLL_S or so, `on_line`
    with each line of what the program has written since; what they raise stops the program and is
    raised on.
    """
    give_up_s = time.monotonic() + timeout_s
    # A pipe and not a temporary file: there may be no folder in which one can be written.
    process = subprocess.Popen(
        [sys.executable, "-c", BIND_TO_PARENT, str(os.getpid()), *argv],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env={**os.environ, **environment},
    )
    assert process.stdout is not None
    with process.stdout as stdout:
        os.set_blocking(stdout.fileno(), False)
        output = _Output(stdout.fileno())
        exit_code: int | None = None
        try:
            on_begin(process.pid)
            while exit_code is None and time.monotonic() < give_up_s:
                on_wait()
                if output.open:
                    select.select([stdout], [], [], POLL_S)
                    exit_code = process.poll()
                else:
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        exit_code = process.wait(POLL_S)
                for line in output.lines():
                    on_line(line)
        finally:
            _stop(process)
        for line in output.lines():
            on_line(line)
    return Finished(exit_code=exit_code, output=output.end.decode("utf-8", "replace"))


class _Output:
    """What comes through the pipe: its whole lines, each once, and its end."""

    def __init__(self, descriptor: int) -> None:
        self.open = True
        self.end = b""
        self._descriptor = descriptor
        self._begun = b""
        """A line whose end has not come yet."""

    def lines(self) -> list[bytes]:
        """The whole lines that have come since; one that grows too long is cut."""
        pieces: list[bytes] = []
        while len(pieces) < PIECES_MAX and (piece := self._piece()):
            pieces.append(piece)
        come = b"".join(pieces)
        self.end = (self.end + come)[-OUTPUT_BYTES_MAX:]
        whole, newline, self._begun = (self._begun + come).rpartition(b"\n")
        self._begun = self._begun[-OUTPUT_BYTES_MAX:]
        return (whole + newline).splitlines(keepends=True)

    def _piece(self) -> bytes:
        try:
            piece = os.read(self._descriptor, OUTPUT_BYTES_MAX)
        except BlockingIOError:
            return b""
        self.open = bool(piece)
        return piece


def _stop(process: "subprocess.Popen[bytes]") -> None:
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(STOP_GRACE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
