"""A Ray of several machines, of which each has a name and a home of its own, on loopback."""

import json
import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import psutil

PORT = 6399
START_S_MAX = 180.0
SETTINGS = {
    "RAY_raylet_start_wait_time_s": "120",
    "RAY_enable_metrics_collection": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_AUTH_MODE": "token",
    "RAY_AUTH_TOKEN": "a-token-of-32-characters-or-more-0",
}
BIN = Path(sys.executable).parent


def environment() -> dict[str, str]:
    return {**os.environ, **SETTINGS, "PATH": f"{BIN}:{os.environ['PATH']}"}


class RayMachines:
    """`folder` has a short path: Ray's sockets are below it."""

    address = f"127.0.0.1:{PORT}"

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def start(self) -> None:
        """The head, which has no device for mesh."""
        self._ray(
            *("start", "--head", "--port", str(PORT), "--num-cpus", "0"),
            *("--temp-dir", str(self._folder / "ray"), "--include-dashboard=false"),
        )

    def join(self, name: str) -> None:
        """A machine with one device."""
        resources = json.dumps({"mesh_cpu": 1})
        self._ray(
            *("start", "--address", self.address, "--num-cpus", "1", "--resources", resources),
            host=name,
        )

    def kill(self) -> None:
        """All of Ray at once; what it has not started as its own lives on."""
        for process in self._of_ray():
            with suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(self._of_ray(), timeout=10.0)

    def mesh(self, *arguments: str, s_max: float = START_S_MAX) -> subprocess.CompletedProcess[str]:
        """`mesh fleet` with these arguments, from another machine."""
        command = [str(BIN / "mesh"), "fleet", arguments[0], "--ray", self.address]
        return subprocess.run(
            [*command, *arguments[1:]],
            env=environment(),
            capture_output=True,
            text=True,
            timeout=s_max,
            check=False,
        )

    def agents(self) -> dict[str, int]:
        """The process of each agent that lives on any machine, by the node's name."""
        found = {}
        for process in psutil.process_iter(["cmdline"]):
            words = process.info["cmdline"] or []
            if "--name" in words and "node" in words and process.status() != psutil.STATUS_ZOMBIE:
                name = words[words.index("--name") + 1]
                assert name not in found, f"{name} runs twice"
                found[name] = process.pid
        return found

    def _ray(self, *arguments: str, host: str = "head") -> None:
        command = ["ray", *arguments, "--node-ip-address", "127.0.0.1"]
        done = subprocess.run(
            ["unshare", "--uts", "sh", "-c", f'hostname {host} && exec "$@"', "sh", *command],
            env={**environment(), "MESH_HOME": str(self._folder / host)},
            capture_output=True,
            text=True,
            timeout=START_S_MAX,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr

    def actors(self) -> list[psutil.Process]:
        """The processes of supplier and keepers."""
        ours = ("ray::Keeper", "ray::Supplier")
        return [each for each in self._of_ray() if _line(each).startswith(ours)]

    def _of_ray(self) -> list[psutil.Process]:
        found = psutil.process_iter(["cmdline", "status"])
        living = [each for each in found if each.info["status"] != psutil.STATUS_ZOMBIE]
        return [
            each for each in living if "site-packages/ray/" in _line(each) or "ray::" in _line(each)
        ]


def _line(process: psutil.Process) -> str:
    """The program, and the script that it runs."""
    return " ".join((process.info["cmdline"] or [])[:3])
