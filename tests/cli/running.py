"""Runs the command line for tests: in this process, or as a process of its own."""

import contextlib
import io
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

from mesh.cli.main import run

MESH = (sys.executable, "-c", "from mesh.cli.main import main; main()")


@dataclass(frozen=True, slots=True, kw_only=True)
class Ran:
    """What a command line came to."""

    code: int
    out: str
    err: str

    @property
    def error_lines(self) -> tuple[str, str]:
        """The text of `error:` and of `hint:`, which must be all that stderr holds."""
        first, second, *more = self.err.splitlines()
        assert not more, self.err
        assert first.startswith("error: "), self.err
        assert second.startswith("hint: "), self.err
        return first.removeprefix("error: "), second.removeprefix("hint: ")


def mesh(*arguments: str, stdin: bytes = b"", environ: Mapping[str, str] | None = None) -> Ran:
    """Run `mesh arguments` in this process, with pipes for its streams."""
    out, err = io.StringIO(), io.StringIO()
    with (
        mock.patch.object(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin), "utf-8")),
        mock.patch.dict("os.environ", environ or {}),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        code = run(arguments)
    return Ran(code=code, out=out.getvalue(), err=err.getvalue())


@contextlib.contextmanager
def mesh_process(
    *arguments: str, environ: Mapping[str, str], err: Path
) -> Iterator["subprocess.Popen[str]"]:
    """`mesh arguments` as a process, its stdout in a pipe and its stderr in a file. What is left of
    it afterwards is killed.
    """
    with (
        err.open("wb") as errors,
        subprocess.Popen(
            [*MESH, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env=dict(environ),
        ) as process,
    ):
        try:
            yield process
        finally:
            process.kill()
