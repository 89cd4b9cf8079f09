"""Processes that begin as forks of one that has imported what they need, and has done nothing else.

A controller and a node take a second of CPU for their imports, and tests start about a hundred.
`multiprocessing`'s fork server, one a test process, imports once; each fork runs its module as
`python -m` does, with its own log, and is killed, stopped and waited for like any process.
"""

import multiprocessing
import os
import runpy
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

PRELOADED = ["mesh.controller.main", "mesh_nodes.main", "tests.support.scripted_engine"]
_CONTEXT = multiprocessing.get_context("forkserver")


class Forked:
    """What tests use of a `subprocess.Popen`."""

    def __init__(self, module: str, arguments: Sequence[str], log: Path) -> None:
        log.touch()  # tests read it at once
        _CONTEXT.set_forkserver_preload(PRELOADED)
        self._process = _CONTEXT.Process(
            target=_run, args=(module, arguments, log, dict(os.environ))
        )
        self._process.start()
        assert self._process.pid is not None
        self.pid: int = self._process.pid

    def poll(self) -> int | None:
        """Its exit code, once there is one; of a killed one, the signal's number below zero."""
        return self._process.exitcode

    def wait(self, timeout: float) -> int:
        """Raises TimeoutExpired."""
        self._process.join(timeout)
        code = self._process.exitcode
        if code is None:
            raise subprocess.TimeoutExpired(str(self._process), timeout)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)


def _run(module: str, arguments: Sequence[str], log: Path, environ: dict[str, str]) -> None:
    with log.open("ab") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    sys.stdout = sys.stderr = open(1, "w", buffering=1, encoding="utf-8", closefd=False)  # noqa: SIM115
    os.environ.clear()
    os.environ.update(environ)
    sys.argv[1:] = arguments
    runpy.run_module(module, run_name="__main__", alter_sys=True)
