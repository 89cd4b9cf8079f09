"""A contender in a process of its own at the other end of a pipe: idle until it is asked.

It says `ready` once it has loaded, then answers every line with one JSON line.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

STOP_S_MAX = 30.0


class Peer:
    """`python` with these arguments. Raises SystemExit when it ends before it should."""

    def __init__(
        self, name: str, arguments: Sequence[str], environment: Mapping[str, str] | None = None
    ) -> None:
        self._name = name
        self._process = subprocess.Popen(
            [sys.executable, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **(environment or {})},
        )
        while self._line() != "ready\n":
            """What a library says while it loads."""

    def ask(self) -> Any:
        assert self._process.stdin is not None
        self._process.stdin.write("go\n")
        self._process.stdin.flush()
        return json.loads(self._line())

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(timeout=STOP_S_MAX)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _line(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"error: {self._name} ended; what it wrote says why")
        return line


def serve(answer: Callable[[], object]) -> None:
    """The peer's side: one answer for every line of stdin, until it ends."""
    print("ready", flush=True)
    for _ in sys.stdin:
        print(json.dumps(answer()), flush=True)
