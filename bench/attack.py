"""Attacks a cell as a tenant with a key would, while another tenant calls it.

The cell wants keys, and its operator lets tenants deploy the attacker's folder. Beside the attempts
another tenant calls its own deployment, and `/healthz` is asked all the time. The last line is one
JSON object: `attempts`, `untyped` (answers that are no typed error and no success), `hangs`,
`healthz_p99_ms`, `calls`, `failed` and `late` of the other tenant, `ended` (processes of the cell),
and `kept_mib` (memory above that after a first round of the same attempts, ten seconds after the
last one). Exit code 1 when a target is missed.
"""

import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from statistics import quantiles
from typing import Any

import psutil
import requests

from bench import attack_attempts as attempts
from bench.attack_attempts import tiny_model
from bench.cells import deployed, keys_shown, local_cell, shown
from bench.demo_model import SOURCE, stored_model
from bench.harness import Report, Table, show_status
from mesh.cli.cell import LocalCell
from mesh.controller.keys import KeyBook
from mesh.domain.access import Role, TenantName
from mesh.domain.deployment import DeploymentSpec
from mesh.domain.errors import MeshError
from mesh.domain.ids import DeploymentName
from mesh.domain.slo import Slo
from mesh.wire.client import MeshClient

TOGETHER = 4
"""Calls of one attempt at once."""
CALL_S_MAX = 30.0
DEPLOY_S_MAX = 120.0
IDLE_CONNECTIONS = 2000
KEYLESS_BYTES = 1 << 30
PROBE_S = 0.02
CALLS_S = 0.5
BACK_S = 10.0
ALLOWED = "pkg,hf,http,https,s3"
"""What tenants may deploy by default; the operator allows the folder of the attacker as well."""
SLO = Slo(ttft_s=4.0, tpot_s=0.4)
PROMPT = "What is the capital of France?"
_REFUSED = (400, 401, 403, 404, 408, 409, 413, 415, 422, 429, 503)


class Beside:
    """What others notice: a probe of `/healthz`, and a tenant that calls its own deployment."""

    def __init__(self, url: str, key: str, name: str) -> None:
        self._url = url
        self._headers = {"authorization": f"Bearer {key}"}
        self._body = {
            "model": name,
            "messages": [{"role": "user", "content": PROMPT}],
            "max_tokens": 8,
            "temperature": 0,
            "stream": True,
        }
        self._stopping = threading.Event()
        self.healthz_s: list[float] = []
        self.calls = 0
        self.failed: list[str] = []
        self.late = 0

    @contextmanager
    def watching(self) -> Iterator[None]:
        threads = [threading.Thread(target=watch) for watch in (self._probe, self._call)]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            self._stopping.set()
            for thread in threads:
                thread.join()

    def _probe(self) -> None:
        with requests.Session() as session:
            while not self._stopping.wait(PROBE_S):
                began_s = time.monotonic()
                try:
                    session.get(f"{self._url}/healthz", timeout=CALL_S_MAX).raise_for_status()
                except requests.RequestException as error:
                    self.failed.append(f"healthz: {error}")
                self.healthz_s.append(time.monotonic() - began_s)

    def _call(self) -> None:
        with requests.Session() as session:
            while not self._stopping.wait(CALLS_S):
                self.calls += 1
                began_s = time.monotonic()
                try:
                    with session.post(
                        f"{self._url}/v1/chat/completions",
                        headers=self._headers,
                        json=self._body,
                        stream=True,
                        timeout=CALL_S_MAX,
                    ) as answer:
                        answer.raise_for_status()
                        lines = [line for line in answer.iter_lines() if line]
                        if lines[-1] != b"data: [DONE]":
                            self.failed.append(lines[-1].decode()[:200])
                except requests.RequestException as error:
                    self.failed.append(str(error)[:200])
                whole_s = time.monotonic() - began_s
                self.late += whole_s > SLO.ttft_s + 8 * SLO.tpot_s


class Attacker:
    """Sends attempts and keeps how each ended."""

    def __init__(self, cell: LocalCell, key: str, folder: Path) -> None:
        self._cell = cell
        self._key = key
        self._url = f"http://{cell.http_address}"
        self._folder = folder
        self._models = 0
        self.attempts = 0
        self.outcomes: dict[str, str] = {}
        """How the last attempt of each kind ended."""
        self.untyped: list[str] = []
        self.hangs: list[str] = []

    def deploy(self, kind: str, what: str, **how: Any) -> None:
        """A tiny model, and if it can be deployed, calls of it, several at once."""
        self._models += 1
        path = tiny_model(self._folder / f"m{self._models}", **how)
        name = DeploymentName(f"a{self._models}")
        end = self._deployed(f"file://{path}", name)
        if end == "deployed":
            content = "a" * 60 + "!"
            body = {"messages": [{"role": "user", "content": content}], "max_tokens": 4}
            end = f"deployed; {self._together(f'{kind}: {what}', name, body)}"
            with MeshClient(self._cell.address) as client:
                client.delete(name)
        self._ended(kind, what, end)

    def source(self, source: str) -> None:
        self._ended("source", source[:60], self._deployed(source, DeploymentName("source")))

    def call(self, kind: str, what: str, name: str, body: Mapping[str, object]) -> None:
        self._ended(kind, what, self._together(f"{kind}: {what}", name, body))

    def _deployed(self, source: str, name: DeploymentName) -> str:
        began_s = time.monotonic()
        spec = DeploymentSpec(name=name, source=source, context_tokens_max=512)
        try:
            with MeshClient(self._cell.address) as client:
                client.deploy(spec)
            end = "deployed"
        except MeshError as error:
            end = f"{type(error).__name__}: {error.message[:100]}"
            if type(error) is MeshError:
                self.untyped.append(f"{source[:60]}: {error.message[:200]}")
        if time.monotonic() - began_s > DEPLOY_S_MAX:
            self.hangs.append(source[:60])
        return end

    def _together(self, what: str, name: str, body: Mapping[str, object]) -> str:
        with ThreadPoolExecutor(TOGETHER) as pool:
            ends = list(pool.map(lambda _: self._ask(what, name, body), range(TOGETHER)))
        return ", ".join(sorted(set(ends)))

    def _ask(self, what: str, name: str, body: Mapping[str, object]) -> str:
        headers = {"authorization": f"Bearer {self._key}"}
        try:
            answer = requests.post(
                f"{self._url}/v1/chat/completions",
                headers=headers,
                json={"model": name, **body},
                timeout=CALL_S_MAX,
            )
        except requests.Timeout:
            self.hangs.append(what)
            return "hung"
        except requests.RequestException as error:
            self.untyped.append(f"{what}: {error}"[:300])
            return "disconnected"
        if answer.status_code != 200 and answer.status_code not in _REFUSED:
            self.untyped.append(f"{what}: {answer.status_code} {answer.text[:200]}")
        return str(answer.status_code)

    def connections(self) -> None:
        """Before any key is shown."""
        host, _, port = str(self._cell.http_address).rpartition(":")
        for protocol, at in (("HTTP", int(port)), ("gRPC", int(self._cell.address.split(":")[1]))):
            opened = attempts.idle(host, at, IDLE_CONNECTIONS)
            time.sleep(1.0)
            for connection in opened:
                connection.close()
            self._ended("connections", f"idle by {protocol}", f"{len(opened)} opened")
        slow = [attempts.slow_headers(host, int(port)) for _ in range(64)]
        time.sleep(1.0)
        for connection in slow:
            connection.close()
        self._ended("connections", "headers without end", f"{len(slow)} opened")
        said = attempts.keyless_body(host, int(port), KEYLESS_BYTES)
        self._ended("connections", "a body of 1 GiB without a key", said)

    def _ended(self, kind: str, what: str, end: str) -> None:
        self.attempts += 1
        self.outcomes[f"{kind}: {what}"] = end
        show_status(f"{self.attempts} attempts  {kind}: {what}: {end}")


def attack(attacker: Attacker, name: str) -> None:
    for what, template in attempts.TEMPLATES.items():
        attacker.deploy("template", what, template=template)
    for what, tokenizer in attempts.TOKENIZERS.items():
        attacker.deploy("tokenizer", what, tokenizer=tokenizer)
    for what, config in attempts.CONFIGS.items():
        attacker.deploy("configuration", what, config=config)
    for what, damage in attempts.DAMAGES.items():
        attacker.deploy("file", what, damage=damage)
    for source in attempts.SOURCES:
        attacker.source(source)
    hello = attempts.HELLO
    for what, grammar in attempts.GRAMMARS.items():
        attacker.call("grammar", what, name, hello | {"structured_outputs": grammar})
        if "json" in grammar:
            function = {"name": "f", "parameters": grammar["json"]}
            tools = [{"type": "function", "function": function}]
            required = {**hello, "tools": tools, "tool_choice": "required"}
            attacker.call("tool", what, name, required)
    for what, body in attempts.BODIES.items():
        attacker.call("body", what, name, body)
    attacker.connections()


def rss_mib(processes: Mapping[str, psutil.Process]) -> dict[str, float]:
    """The memory of each of the cell's processes, and of its children together."""
    found: dict[str, float] = {}
    for name, process in processes.items():
        children = f"children of {name}"
        found |= {name: 0.0, children: 0.0}
        with suppress(psutil.NoSuchProcess):
            found[name] = process.memory_info().rss / (1 << 20)
            for child in process.children(recursive=True):
                found[children] += child.memory_info().rss / (1 << 20)
    return found


def attacked(folder: Path) -> tuple[Attacker, Beside, list[str], dict[str, float]]:
    """The attacker, what others noticed, the processes that ended, and the MiB that each kept."""
    home = folder / "home"
    with closing(KeyBook(home / "controller")) as book:
        other, own = (
            book.create(Role.TENANT, TenantName(tenant))[0] for tenant in ("other", "attacker")
        )
    sources = (f"tenant={ALLOWED},file://{folder}",)
    with (
        keys_shown(home),
        local_cell(home=home, http="127.0.0.1:0", keys=True, sources=sources) as cell,
    ):
        for key, name in ((other, "other"), (own, "own")):
            with shown(key):
                spec = DeploymentSpec(
                    name=DeploymentName(name), source=SOURCE, context_tokens_max=1024, slo=SLO
                )
                deployed(cell.address, [spec])
        processes = {child.name: psutil.Process(child.process.pid) for child in cell.children}
        beside = Beside(f"http://{cell.http_address}", other, "other")
        attacker = Attacker(cell, own, folder / "models")
        with shown(own), beside.watching():
            # Caches fill, and processes start, with the first round; the second one has to give
            # back all that it takes.
            attack(attacker, "own")
            time.sleep(BACK_S)
            before_mib = rss_mib(processes)
            attack(attacker, "own")
            time.sleep(BACK_S)
            after_mib = rss_mib(processes)
            kept_mib = {name: after_mib[name] - before_mib[name] for name in after_mib}
        ended = [
            name
            for name, process in processes.items()
            if not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
        ]
    return attacker, beside, ended, kept_mib


def run() -> Report:
    stored_model()
    with tempfile.TemporaryDirectory() as folder:
        attacker, beside, ended, kept_mib = attacked(Path(folder))
    lists: Mapping[str, list[str]] = {
        "untyped": attacker.untyped,
        "hung": attacker.hangs,
        "other tenant": beside.failed,
        "ended": ended,
        "kept": [f"{name}: {mib:.1f} MiB" for name, mib in kept_mib.items()],
    }
    return Report(
        figures={
            "attempts": attacker.attempts,
            "untyped": len(attacker.untyped),
            "hangs": len(attacker.hangs),
            "healthz_p99_ms": round(1e3 * quantiles(beside.healthz_s, n=100)[98], 1),
            "calls": beside.calls,
            "failed": len(beside.failed),
            "late": beside.late,
            "ended": len(ended),
            "kept_mib": round(sum(kept_mib.values()), 1),
        },
        shown=(
            Table(headings=("attempt", "end"), rows=list(attacker.outcomes.items()), words=2),
            *(f"{what}: {line}" for what, lines in lists.items() for line in lines[:20]),
        ),
        # Caches that have a bound fill; what an attempt took does not come to as little.
        targets={
            **dict.fromkeys(("untyped", "hangs", "failed", "late", "ended"), "== 0"),
            "healthz_p99_ms": "<= 50",
            "kept_mib": "<= 64",
        },
    )
