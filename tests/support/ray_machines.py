"""A Ray of several machines, of which each has a name and a home of its own, on loopback."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

import psutil

PORT = 6399
START_S_MAX = 180.0
STARTS_MAX = 3
SETTINGS = {
    "RAY_raylet_start_wait_time_s": "40",
    "RAY_enable_metrics_collection": "0",
    "RAY_memory_monitor_refresh_ms": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_AUTH_MODE": "token",
    "RAY_AUTH_TOKEN": "a-token-of-32-characters-or-more-0",
}
ALIKE = ("--node-ip-address", "127.0.0.1", "--include-log-monitor", "false")
BIN = Path(sys.executable).parent


def environment() -> dict[str, str]:
    return {**os.environ, **SETTINGS, "PATH": f"{BIN}:{os.environ['PATH']}"}


def started(folder: Path, host: str, *options: str, **environ: str) -> "subprocess.Popen[str]":
    """Begin `ray start` on a machine of that name. Its home, and what Ray keeps, is its own: where
    machines share a folder and start at once they take each other's sockets.
    """
    command = ["ray", "start", "--temp-dir", str(folder / host), *options, *ALIKE]
    own = {"MACHINE": host, "MESH_HOME": str(folder / f"{host}-home")}
    return subprocess.Popen(
        ["unshare", "--uts", "sh", "-c", f'hostname {host} && exec "$@"', "sh", *command],
        env={**environment(), **own, **environ},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


class RayMachines:
    """`folder` has a short path: Ray's sockets are below it. Each of the machines has a device."""

    address = f"127.0.0.1:{PORT}"

    def __init__(self, folder: Path, names: Collection[str]) -> None:
        self.folder, self._names = folder, names

    def start(self) -> None:
        """Start the head, which has no device for mesh, and then the machines."""
        self.start_head()
        for name in self._names:
            self.start_machine(name)

    def start_machine(self, name: str, **environ: str) -> None:
        joining = ("--address", self.address, "--num-cpus", "1")
        self._start(name, *joining, "--resources", json.dumps({"mesh_cpu": 1}), **environ)

    def start_head(self, *options: str, **environ: str) -> None:
        plain = ("--head", "--port", str(PORT), "--num-cpus", "0", "--include-dashboard", "false")
        self._start("head", *plain, *options, **environ)

    def live(self) -> bool:
        """Whether the head and all machines run."""
        raylets = [each for each in self._of_ray() if _line(each).split()[0].endswith("/raylet")]
        return len(raylets) > len(self._names)

    def kill(self) -> None:
        """All of Ray at once; what it has not started as its own lives on."""
        for process in self._of_ray():
            with suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(self._of_ray(), timeout=10.0)

    def lose(self, name: str) -> None:
        """All processes of a machine at once, as when its power fails."""
        for process in psutil.process_iter(["environ"]):
            if (process.info["environ"] or {}).get("MACHINE") == name:
                with suppress(psutil.NoSuchProcess):
                    process.kill()

    def clear(self) -> None:
        """End Ray, and what it has left."""
        self.kill()
        for pid in self.agents().values():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def mesh(self, *arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
        """`mesh fleet` with these arguments, from another machine."""
        command = [str(BIN / "mesh"), "fleet", arguments[0], "--ray", self.address]
        return subprocess.run(
            [*command, *arguments[1:]],
            env={**environment(), **environ},
            capture_output=True,
            text=True,
            timeout=START_S_MAX,
            check=False,
        )

    def agents(self) -> dict[str, int]:
        """The process of each agent that lives on any machine, by the node's name."""
        found = {}
        running = {
            process.pid: (words[words.index("--name") + 1], process.info["ppid"])
            for process in psutil.process_iter(["cmdline", "ppid", "status"])
            if process.info["status"] != psutil.STATUS_ZOMBIE
            and {"node", "--name"} <= set(words := process.info["cmdline"] or [])
        }
        for pid, (name, parent) in running.items():
            if parent in running:
                continue  # it has been forked from an agent, to become something else
            assert name not in found, f"{name} runs twice"
            found[name] = pid
        return found

    def _start(self, host: str, *options: str, **environ: str) -> None:
        """Again where its raylet has ended: its agents must begin within 15 s, which is little on a
        busy machine.
        """
        for _ in range(STARTS_MAX):
            process = started(self.folder, host, *options, **environ)
            said, _ = process.communicate(timeout=START_S_MAX)
            if process.returncode == 0:
                return
        raise AssertionError(said)

    def actors(self) -> list[psutil.Process]:
        """The processes of supplier and keepers."""
        ours = ("ray::Keeper", "ray::Supplier")
        return [each for each in self._of_ray() if _line(each).startswith(ours)]

    def _of_ray(self) -> list[psutil.Process]:
        found = psutil.process_iter(["cmdline", "status"])
        living = [each for each in found if each.info["status"] != psutil.STATUS_ZOMBIE]
        return [
            each
            for each in living
            if ("site-packages/ray/" in _line(each) or "ray::" in _line(each))
            and "multiprocessing" not in _line(each)  # the tests' own, told where Ray's modules are
        ]


def _line(process: psutil.Process) -> str:
    """The program, and the script that it runs."""
    return " ".join((process.info["cmdline"] or [])[:3])
