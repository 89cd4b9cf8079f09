"""A PostgreSQL server of a test's own: in a temporary folder, on loopback, without privileges."""

import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

PASSWORD = "not a secret"
USER = "mesh"
START_S_MAX = 60.0
_NOBODY = 65534


def binaries() -> Path | None:
    """The folder of `initdb`, where PostgreSQL is installed; on Debian it is on no PATH."""
    found = shutil.which("initdb")
    folders = sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)
    return Path(found).resolve().parent if found else next(iter(folders), None)


class PostgresServer:
    """The server is started by `start`, and stopped as a crash or a hang would stop it. Without
    fsync: no test takes its machine's power away. `beside`: an address of this machine at which
    those of its network reach the server, too.
    """

    def __init__(self, folder: Path, beside: str = "") -> None:
        self._bin = folder
        self._listen = ",".join(["127.0.0.1", *filter(None, [beside])])
        self._home = Path(tempfile.mkdtemp(prefix="mesh-postgres-"))
        self._as: dict[str, Any] = {"user": _NOBODY, "group": _NOBODY} if os.geteuid() == 0 else {}
        if self._as:
            os.chown(self._home, _NOBODY, _NOBODY)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        secret = self._home / "password"
        secret.write_text(PASSWORD)
        secret.chmod(0o644)
        self._run("initdb", "-N", "-U", USER, "-A", "scram-sha-256", "--pwfile", str(secret))
        with Path(self._data, "pg_hba.conf").open("a") as rules:
            rules.write("host all all samenet scram-sha-256\n" if beside else "")
        self._process: subprocess.Popen[bytes] | None = None

    def url(self, cell: str = "mesh", *, password: str = PASSWORD, database: str = USER) -> str:
        shown = password.replace(" ", "%20")
        return f"postgresql://{USER}:{shown}@127.0.0.1:{self.port}/{database}?cell={cell}"

    def start(self) -> None:
        """Until it takes connections."""
        options = (f"listen_addresses={self._listen}", "unix_socket_directories=", "fsync=off")
        arguments = [part for option in options for part in ("-c", option)]
        with (self._home / "log").open("ab") as log:
            self._process = subprocess.Popen(
                [self._bin / "postgres", "-D", self._data, "-p", str(self.port), *arguments],
                stdout=log,
                stderr=log,
                cwd=self._home,
                **self._as,
            )
        until_s = time.monotonic() + START_S_MAX
        asking = str(self._bin / "pg_isready")
        ask = [asking, "-q", "-h", "127.0.0.1", "-p", str(self.port)]
        while subprocess.run(ask, check=False).returncode != 0:
            assert time.monotonic() < until_s, (self._home / "log").read_text()
            time.sleep(0.05)

    def stop(self) -> None:
        """At once: sessions are cut."""
        if self._process is not None:
            self._process.send_signal(signal.SIGQUIT)
            self._process.wait(START_S_MAX)
        self._process = None

    def hang(self, *, stopped: bool) -> None:
        """All of its processes stop to run, or go on."""
        assert self._process is not None
        children = Path(f"/proc/{self._process.pid}/task/{self._process.pid}/children")
        for pid in (self._process.pid, *map(int, children.read_text().split())):
            with suppress(ProcessLookupError):  # a session's may have ended by now
                os.kill(pid, signal.SIGSTOP if stopped else signal.SIGCONT)

    def close(self) -> None:
        self.stop()
        shutil.rmtree(self._home)

    @property
    def _data(self) -> str:
        return str(self._home / "data")

    def _run(self, program: str, *arguments: str) -> None:
        subprocess.run(
            [self._bin / program, "-D", self._data, *arguments],
            check=True,
            capture_output=True,
            cwd=self._home,
            **self._as,
        )
