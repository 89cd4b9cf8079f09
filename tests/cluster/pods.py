"""Containers of manifests as processes: in a network of their own, with a root that cannot be
written, as the user of the manifest, without capabilities, and with its volumes where it has them.

Their image is this environment: what `mesh` is there, runs. Linux's own `unshare` and `nsenter` do
it, which needs root here so that nobody is root there.
"""

import ctypes
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

TOOLS = ("unshare", "setpriv", "ip", "pivot_root")
CLONE_NEWNET = 0x40000000
CLONE = Path(__file__).resolve().parents[2]
OPEN = tuple(Path(path) for path in (sys.base_prefix, sys.prefix))
"""Whoever runs may come to these, though their folders may be root's alone on this machine."""


def missing() -> str:
    """Why no container can run here; empty where one can."""
    if os.geteuid() != 0:
        return "only root makes namespaces here"
    lacking = [tool for tool in TOOLS if shutil.which(tool) is None]
    if lacking:
        return f"no {', '.join(lacking)} here"
    script = "mount -t tmpfs none /mnt && ip link set lo up"
    tried = subprocess.run(
        ["unshare", "--mount", "--net", "--propagation", "private", "sh", "-ec", script],
        capture_output=True,
        check=False,
    )
    return "" if tried.returncode == 0 else "no namespaces can be made here"


class Network:
    """A network for the calling thread and the processes that it starts: a loopback, and names that
    lead there.
    """

    def __enter__(self) -> "Network":
        self._before = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
        self._libc = ctypes.CDLL(None, use_errno=True)
        if self._libc.unshare(CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), "no network namespace")
        subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
        return self

    def __exit__(self, *_: object) -> None:
        self._libc.setns(self._before, CLONE_NEWNET)
        os.close(self._before)


class Bridge:
    """Machines in namespaces of their own, each at a port of a bridge of this machine, `address`. A
    port that is down drops all that comes, either way.
    """

    def __init__(self, count: int) -> None:
        self._name, net = f"mesh{os.getpid() % 100_000}", f"10.213.{os.getpid() % 256}"
        self.address = f"{net}.254"
        self.hosts = [f"{net}.{n + 1}" for n in range(count)]
        _ip(f"link add {self._name} type bridge")
        _ip(f"addr add {self.address}/24 dev {self._name}")
        _ip(f"link set {self._name} up")
        for n, host in enumerate(self.hosts):
            _ip(f"netns add {self._name}-{n}")
            _ip(f"link add {self._name}p{n} type veth peer name eth0 netns {self._name}-{n}")
            _ip(f"link set {self._name}p{n} master {self._name} up")
            _ip(f"-n {self._name}-{n} addr add {host}/24 dev eth0")
            for link in ("lo", "eth0"):
                _ip(f"-n {self._name}-{n} link set {link} up")

    def within(self, n: int) -> tuple[str, ...]:
        """What a command on that machine begins with."""
        return ("ip", "netns", "exec", f"{self._name}-{n}")

    def cut(self, n: int) -> None:
        _ip(f"link set {self._name}p{n} down")

    def mend(self, n: int) -> None:
        _ip(f"link set {self._name}p{n} up")

    def close(self) -> None:
        for n in range(len(self.hosts)):
            _ip(f"netns del {self._name}-{n}")
        _ip(f"link del {self._name}")


def _ip(words: str) -> None:
    subprocess.run(["ip", *words.split()], check=True)


class Pods:
    """`volumes` are folders by the names of volumes, `secrets` values by `NAME/KEY`, `names` those
    that lead to the loopback.
    """

    def __init__(
        self,
        folder: Path,
        *,
        volumes: Mapping[str, Path],
        secrets: Mapping[str, str],
        names: Sequence[str],
    ) -> None:
        self._folder = folder
        self._volumes = volumes
        self._secrets = secrets
        folder.mkdir()
        self._hosts = folder / "hosts"
        self._hosts.write_text("".join(f"127.0.0.1 {name}\n" for name in ("localhost", *names)))
        self.log = folder / "log"
        self._started: list[subprocess.Popen[bytes]] = []

    def run(
        self, name: str, pod: Mapping[str, Any], container: Mapping[str, Any], after: str = ""
    ) -> "subprocess.Popen[bytes]":
        """Start a container of a pod of this name. `after` is a shell's word in place of it."""
        variables = {v["name"]: self._value(v, name) for v in container.get("env", ())}
        words = [*container.get("command", ("mesh",)), *container.get("args", ())]
        words = [re.sub(r"\$\((\w+)\)", lambda found: variables[found[1]], word) for word in words]
        command = ["sh", "-c", after] if after else words
        user = {**pod["securityContext"], **container["securityContext"]}
        assert user["readOnlyRootFilesystem"]
        assert not user["allowPrivilegeEscalation"]
        script = self._root(container) + self._entered(user, command)
        with self.log.open("ab") as log:
            process = subprocess.Popen(
                ["unshare", "--mount", "--propagation", "private", "sh", "-ec", script],
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
                env={**variables, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"},
            )
        self._started.append(process)
        return process

    def close(self) -> None:
        for process in self._started:
            process.kill()
            process.wait()

    def _value(self, variable: Mapping[str, Any], name: str) -> str:
        if "value" in variable:
            return str(variable["value"])
        source = variable["valueFrom"]
        if "fieldRef" in source:
            assert source["fieldRef"]["fieldPath"] == "metadata.name"
            return name
        wanted = source["secretKeyRef"]
        return self._secrets[f"{wanted['name']}/{wanted['key']}"]

    def _root(self, container: Mapping[str, Any]) -> str:
        """A script that makes this machine's files the root, which cannot be written, but for the
        container's volumes.
        """
        root = tempfile.mkdtemp(dir=self._folder, prefix="root-")
        mounts = {Path(m["mountPath"]): m for m in container.get("volumeMounts", ())}
        mounts.setdefault(Path("/tmp"), {"name": "tmp"})
        hosts = Path("/etc/hosts")
        lines = [f"mount -t tmpfs none {root}"]
        self._fill(lines, Path("/"), root, [*mounts, hosts])
        for path, mount in mounts.items():
            source = self._volumes.get(mount["name"])
            if source is None:
                source = Path(tempfile.mkdtemp(dir=self._folder, prefix="empty-"))
                source.chmod(0o777)
            how = "bind,ro" if mount.get("readOnly") else "bind"
            lines += [
                f"mkdir -p {root}{path}",
                f"mount -o {how} {shlex.quote(str(source))} {root}{path}",
            ]
        for path in (CLONE, *OPEN):
            # What runs may lie in a folder that is empty in a container, as /tmp is.
            if any(path.is_relative_to(mount) for mount in mounts):
                quoted = shlex.quote(f"{root}{path}")
                lines += [
                    f"mkdir -p {quoted}",
                    f"mount -o rbind,ro {shlex.quote(str(path))} {quoted}",
                ]
        lines += [f"touch {root}{hosts}", f"mount -o bind,ro {self._hosts} {root}{hosts}"]
        lines += [f"mkdir {root}/.before", f"mount -o remount,ro {root}", f"cd {root}"]
        lines += ["pivot_root . .before", "cd /", "umount -l /.before"]
        return "\n".join(lines) + "\n"

    def _fill(self, lines: list[str], folder: Path, root: str, apart: Sequence[Path]) -> None:
        """Bind what is in a folder of this machine, but for what leads to the paths `apart`."""
        for entry in sorted(folder.iterdir()):
            to, quoted = f"{root}{entry}", shlex.quote(str(entry))
            if entry in apart:
                continue
            if any(path != entry and path.is_relative_to(entry) for path in (*apart, *OPEN)):
                lines.append(f"mkdir -p {to}")
                self._fill(lines, entry, root, apart)
            elif entry.is_symlink():
                lines.append(f"cp -P {quoted} {shlex.quote(to)}")
            elif entry.is_dir():
                how = "rbind" if entry.name in ("proc", "sys", "dev") else "rbind,ro"
                lines += [f"mkdir {shlex.quote(to)}", f"mount -o {how} {quoted} {shlex.quote(to)}"]
            elif entry.is_file():
                lines += [f": > {shlex.quote(to)}", f"mount -o bind,ro {quoted} {shlex.quote(to)}"]

    def _entered(self, user: Mapping[str, Any], command: Sequence[str]) -> str:
        who = f"--reuid={user['runAsUser']} --regid={user['runAsGroup']} --clear-groups"
        bare = "--no-new-privs --inh-caps=-all --bounding-set=-all"
        return f"exec setpriv {who} {bare} {shlex.join(command)}\n"
