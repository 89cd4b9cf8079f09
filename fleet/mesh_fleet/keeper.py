"""The actor of one device: it keeps that device's agent running until it is told to drain it.

Ray starts it anew on the same machine when it dies, and it adopts the agent that it finds. Before:
`supplier`, which has chosen the place. After: `agent_process`.
"""

import subprocess
import threading
import time
from collections.abc import Sequence
from socket import gethostname

from mesh.domain.values import dataclass
from mesh_fleet.agent_process import AgentProcess, folder_of

LOOK_S = 0.25
PAUSE_S_MAX = 60.0
"""The longest pause before an agent is started again that has died at once, time and again."""
STEADY_S = 30.0
"""An agent that has lived for so long is started again at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentSeen:
    """The agent of one device, as its keeper sees it."""

    host: str
    device: str
    pid: int | None
    starts: int
    """How often this keeper has started it; 0: it was found."""
    alive_s: float
    """Since it was started or found; 0 where it does not run."""
    leaving: bool
    failure: str = ""
    """Why the last agent ended."""


class Keeper:
    """`arguments`: those of `mesh node`, but for its device, name and home."""

    def __init__(self, home: str, device: str, arguments: Sequence[str]) -> None:
        self._process = AgentProcess(folder_of(home), device)
        self._device = device
        kind, index = device[:3], device[3:]
        which = ("--gpu", index) if kind == "gpu" else ()
        where = ("--home", home) if home else ()
        named = ("--device", kind, *which, "--name", f"{gethostname()}-{device}", *where)
        self._arguments = (*arguments, *named)
        self._leaving = False
        self._starts = 0
        self._lives = False
        """Whether it has been started or found, and has not been seen to have ended."""
        self._pid: int | None = None
        self._since_s = 0.0
        self._pause_s, self._start_s = 0.0, 0.0
        self._failure = ""
        self._look()
        threading.Thread(target=self._watch, name="watch", daemon=True).start()

    def seen(self) -> AgentSeen:
        return AgentSeen(
            host=gethostname(),
            device=self._device,
            pid=self._pid,
            starts=self._starts,
            alive_s=0.0 if self._pid is None else time.monotonic() - self._since_s,
            leaving=self._leaving,
            failure=self._failure,
        )

    def drain(self) -> None:
        """Have the agent end, and start none any more."""
        if not self._leaving:
            self._leaving = True
            self._process.end()

    def _watch(self) -> None:
        while True:
            time.sleep(LOOK_S)
            self._look()

    def _look(self) -> None:
        now_s = time.monotonic()
        try:
            pid = self._process.pid
            if pid is not None:
                if pid != self._pid:
                    self._lives, self._pid, self._since_s = True, pid, now_s
                    if self._leaving:
                        self._process.end()
                return
            if self._lives:
                self._note_end(now_s)
            if not self._leaving and now_s >= self._start_s:
                self._starts += 1
                self._lives, self._since_s = True, now_s
                self._process.start(self._arguments)
        except (OSError, subprocess.SubprocessError) as error:
            self._failure = str(error)

    def _note_end(self, now_s: float) -> None:
        steady = now_s - self._since_s >= STEADY_S
        self._lives, self._pid, self._failure = False, None, self._process.why_it_ended()
        self._pause_s = 0.0 if steady else min(max(2 * self._pause_s, 1.0), PAUSE_S_MAX)
        self._start_s = now_s + (self._pause_s if self._pause_s > 1.0 else 0.0)
