"""The process of a node agent on this machine: started, found again, ended.

It is nobody's child, so that it outlives whoever started it, and it holds a lock on its file for as
long as it lives. So nobody starts a second one for the same device, and whoever comes later finds
the first one. Before: `keeper`, which wants an agent to run. After: `mesh node`.
"""

import fcntl
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from mesh.runtime.options import HOME

START_S_MAX = 30.0
LOG_BYTES_MAX = 8 * 1024 * 1024
"""A log that is larger is put aside when an agent starts: two of them are kept."""


def folder_of(home: str) -> Path:
    """Where this machine keeps the files of its agents."""
    assert HOME.environ is not None
    return Path(home or os.environ.get(HOME.environ) or str(HOME.default)).expanduser() / "fleet"


class AgentProcess:
    """The agent of one device, such as `cpu0`; its files are in `folder`."""

    def __init__(self, folder: Path, device: str) -> None:
        self._file = folder / f"{device}.pid"
        self.log = folder / f"{device}.log"
        self._logged_bytes = 0

    @property
    def pid(self) -> int | None:
        """The living process, or `None`. Raises OSError."""
        try:
            opened = os.open(self._file, os.O_RDONLY)
        except FileNotFoundError:
            return None
        try:
            fcntl.flock(opened, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            # Its number is written a moment after the lock is taken.
            return int(os.read(opened, 32) or 0) or None
        finally:
            os.close(opened)
        return None

    def start(self, arguments: Sequence[str]) -> None:
        """Start `mesh node` with these arguments, unless it runs. Raises OSError, or
        subprocess.SubprocessError where this machine is too slow even for that.
        """
        self._file.parent.mkdir(parents=True, exist_ok=True)
        with suppress(FileNotFoundError):
            if self.log.stat().st_size > LOG_BYTES_MAX:
                self.log.replace(self.log.with_suffix(".log.1"))
        with self.log.open("ab") as log:
            self._logged_bytes = log.tell()
            subprocess.run(
                [sys.executable, "-m", "mesh_fleet.agent_process", str(self._file), *arguments],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                timeout=START_S_MAX,
                check=True,
            )

    def end(self) -> None:
        """Have it drain and end, as `mesh node --grace-s` says."""
        pid = self.pid
        if pid is not None:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)

    def why_it_ended(self) -> str:
        """What the agent that was started last has said as it failed."""
        with suppress(OSError), self.log.open("rb") as log:
            log.seek(self._logged_bytes)
            for line in reversed(log.read(LOG_BYTES_MAX).decode(errors="replace").splitlines()):
                if line.startswith("error: "):
                    return line.removeprefix("error: ")
        return "it was killed, or asked to end"


def main(file: Path, arguments: Sequence[str]) -> None:
    """Become the agent of the file's device, as a process that has no parent of its own."""
    opened = os.open(file, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return
    os.ftruncate(opened, 0)
    if os.fork():
        return
    os.setsid()
    os.write(opened, str(os.getpid()).encode())
    os.set_inheritable(opened, True)  # the lock is held until the agent ends
    if not os.environ.get("CUDA_VISIBLE_DEVICES", "all"):
        del os.environ["CUDA_VISIBLE_DEVICES"]  # Ray's actors see no device unless they ask for it
    os.execv(sys.executable, [sys.executable, "-m", "mesh", "node", *arguments])


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
