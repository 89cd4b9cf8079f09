"""A cell of real processes for one test: a controller and node agents, started, killed, watched.

Nodes run the scripted engine (tests/support/scripted_node.py) behind the real agent, link, store
and import. Every wait is for a condition, with a bound, and says what it waited for along with the
ends of the processes' logs.
"""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from mesh.domain.deployment import DeploymentSpec, Scaling
from mesh.domain.errors import MeshError, NotFound, Unavailable
from mesh.domain.ids import DeploymentName
from mesh.domain.invocation import Finished, Invocation, InvocationEvent, TextPrompt, Tokens
from mesh.domain.slo import Slo
from mesh.domain.views import DeploymentSnapshot, NodeSnapshot
from mesh.wire.client import MeshClient
from tests.e2e.forked import Forked

WAIT_S_MAX = 60.0
"""For any single condition. Processes start in about a second on an idle machine."""
POLL_S, POLL_S_MAX = 0.02, 0.2
"""The pause after the first look and the longest: a look costs both processes some CPU."""
LOG_TAIL_BYTES = 3000
SETTLED = ("--precision", "f32", "--kv", "f16", "--page-cache", "0")
"""The options of OpenVINO nodes, which would else take seconds to compare precisions at each first
start, and would load from where their files happen to lie.
"""
ROOT = Path(__file__).parents[2]
CONTROLLER, NODE = "tests.support.quick_controller", "tests.support.scripted_node"
FORKED = (CONTROLLER, NODE)
"""Those with OpenVINO or vLLM have threads from their imports on, and begin by themselves."""

T = TypeVar("T")


@dataclass
class Process:
    name: str
    popen: subprocess.Popen[bytes] | Forked
    log: Path
    journal: Path

    def log_text(self) -> str:
        return self.log.read_text(errors="replace")

    def kill(self) -> None:
        """As a power cut would: SIGKILL."""
        self.popen.send_signal(signal.SIGKILL)
        self.popen.wait(WAIT_S_MAX)

    def freeze(self) -> None:
        """Keep it from computing, as a stalled machine does: SIGSTOP."""
        self.popen.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self.popen.send_signal(signal.SIGCONT)

    def terminate(self) -> int:
        """Ask it to stop; its exit code. Fails when it takes longer than WAIT_S_MAX."""
        if self.popen.poll() is None:
            self.popen.send_signal(signal.SIGTERM)
        return self.popen.wait(WAIT_S_MAX)


@dataclass
class Answer:
    """One invocation in a thread of its own, as far as it has come."""

    events: list[InvocationEvent] = field(default_factory=list)
    error: MeshError | None = None
    ended: threading.Event = field(default_factory=threading.Event)
    arrivals_s: list[float] = field(default_factory=list)
    """When each new piece of output came."""

    @property
    def token_ids(self) -> list[int]:
        return [i for event in self.events if isinstance(event, Tokens) for i in event.token_ids]

    @property
    def text(self) -> str:
        return "".join(event.text for event in self.events if isinstance(event, Tokens))

    def finished(self) -> Finished:
        """How it finished; fails when it does not, or ended otherwise. Checks that no token is
        missing or came twice.
        """
        assert self.ended.wait(WAIT_S_MAX), f"no end after {len(self.token_ids)} tokens"
        if self.error is not None:
            raise self.error
        expected = 0
        for event in self.events:
            if isinstance(event, Tokens):
                assert event.first_index == expected, f"tokens after {expected}: {event}"
                expected += len(event.token_ids)
        last = self.events[-1]
        assert isinstance(last, Finished)
        assert last.output_tokens == expected
        return last


def invoked(
    client: MeshClient, name: str, prompt: str, *, max_tokens: int, **sampling: float
) -> Answer:
    """Ask in a thread; returns at once."""
    invocation = Invocation(
        deployment=DeploymentName(name),
        prompt=TextPrompt(text=prompt),
        max_tokens=max_tokens,
        ignore_eos=True,
        **sampling,  # type: ignore[arg-type]
    )
    answer = Answer()
    asked = client.invoke(invocation)
    threading.Thread(target=_collect, args=(asked, answer), daemon=True).start()
    return answer


class LiveCell:
    """`root` is this cell's own; `store_home` may be shared by cells, so that a model is imported
    once for all tests.
    """

    controller: Process
    """The one that was started last."""

    def __init__(self, root: Path, store_home: Path) -> None:
        self._root = root
        self._store_home = store_home
        self._processes: list[Process] = []
        self.journals = False
        """Whether processes that start from now on write one."""
        self.address = f"127.0.0.1:{free_port()}"
        self.client = MeshClient(self.address)

    # Processes.

    def start(self, name: str, *script: str, controller: Sequence[str] = ()) -> Process:
        """Start a controller and a node beside each other; the node, once the cell has it."""
        self._start_controller(controller)
        return self.start_node(name, *script)

    def start_controller(self, *arguments: str) -> Process:
        """Start the controller and wait until it answers."""
        process = self._start_controller(arguments)
        self.wait_for("the controller to answer", self._answers)
        return process

    def _start_controller(self, arguments: Sequence[str]) -> Process:
        self.controller = self._start(
            "controller",
            CONTROLLER,
            *("--listen", self.address, "--home", str(self._root)),
            *arguments,
        )
        return self.controller

    def start_node(
        self,
        name: str,
        *script: str,
        join: bool = True,
        home: Path | None = None,
        options: Sequence[str] = (),
    ) -> Process:
        """Start a node agent; with `join`, wait until the cell has it. `script` is what its engine
        is to do, in the words of tests/support/scripted_node.py. `home`: not the shared one.
        `options`: further ones of the agent.
        """
        arguments = self._node_arguments(name, home or self._store_home)
        process = self._start(f"node-{name}", NODE, *script, "--", *arguments, *options)
        if join:
            self.wait_for(f"node {name} to join", lambda: self.node(name))
        return process

    def start_real_node(
        self, name: str, *options: str, join_s_max: float = 0.0, module: str = "mesh_nodes"
    ) -> Process:
        """The node agent as it is, with the engine of its device unless `options` say otherwise;
        waits until the cell has it, for WAIT_S_MAX unless given.
        """
        arguments = self._node_arguments(name, self._store_home)
        settled = () if "vllm" in options else SETTLED
        process = self._start(f"node-{name}", module, *arguments, *settled, *options)
        self.wait_for(f"node {name} to join", lambda: self.node(name), join_s_max)
        return process

    def _node_arguments(self, name: str, home: Path) -> tuple[str, ...]:
        return (
            *("--join", self.address, "--name", name),
            *("--home", str(home), "--memory", "1GiB", "--threads", "1"),
        )

    def close(self) -> None:
        """End everything; nothing outlives a test."""
        self.client.close()
        for process in self._processes:
            if process.popen.poll() is None:
                process.kill()

    def _start(self, name: str, module: str, *arguments: str) -> Process:
        """Run a module, its output in a log and, where wished, its decisions in a journal."""
        log = self._root / f"{name}-{len(self._processes)}.log"
        journal = log.with_suffix(".jsonl")
        if self.journals:
            arguments = (*arguments, "--journal", str(journal))
        begin = Forked if module in FORKED else _popen
        process = Process(name, begin(module, arguments, log), log, journal)
        self._processes.append(process)
        return process

    # Waiting.

    def wait_for(self, what: str, condition: Callable[[], T | None], bound_s: float = 0.0) -> T:
        """The condition's value once it is truthy. Fails after the bound, WAIT_S_MAX by default."""
        bound_s = bound_s or WAIT_S_MAX
        until_s, pause_s = time.monotonic() + bound_s, POLL_S
        while time.monotonic() < until_s:
            value = condition()
            if value:
                return value
            time.sleep(pause_s)
            pause_s = min(1.3 * pause_s, POLL_S_MAX)
        raise AssertionError(f"waited {bound_s:.0f} s in vain for {what}\n{self.logs()}")

    def logs(self) -> str:
        """The ends of all logs, for the message of a failure."""
        tails = (
            f"--- {process.log.name} (exit code {process.popen.poll()})\n"
            + process.log_text()[-LOG_TAIL_BYTES:]
            for process in self._processes
        )
        return "\n".join(tails)

    # What the cell says.

    def _answers(self) -> bool:
        try:
            self.client.status()
        except Unavailable:
            return False
        return True

    def node(self, name: str) -> NodeSnapshot | None:
        try:
            return next((node for node in self.client.nodes() if node.node_id == name), None)
        except Unavailable:
            return None

    def deployment(self, name: str) -> DeploymentSnapshot | None:
        try:
            return self.client.get(DeploymentName(name))
        except (NotFound, Unavailable):
            return None

    def instance_count(self, name: str) -> int:
        """Instances of a deployment, in whatever state; -1 when there is no such deployment."""
        found = self.deployment(name)
        return -1 if found is None else len(found.instances)

    # What clients do.

    def deploy(
        self,
        name: str,
        source: Path,
        *,
        keep_alive_s: float = 60.0,
        replicas_min: int = 0,
        replicas_max: int = 4,
        slo: Slo | None = None,
        prefix_cache: bool = True,
    ) -> str:
        spec = DeploymentSpec(
            name=DeploymentName(name),
            source=f"file://{source}",
            slo=slo or Slo(),
            prefix_cache=prefix_cache,
            scaling=Scaling(
                replicas_min=replicas_min, replicas_max=replicas_max, keep_alive_s=keep_alive_s
            ),
        )
        return self.client.deploy(spec).text

    def invoke(self, name: str, prompt: str, *, max_tokens: int, **sampling: float) -> Answer:
        """Invoke in a thread; returns at once."""
        return invoked(self.client, name, prompt, max_tokens=max_tokens, **sampling)

    def warm(self, name: str) -> None:
        """Have an instance loaded, on whichever node the cell has now."""
        self.invoke(name, "warm up", max_tokens=1).finished()

    def wait_tokens(self, answer: Answer, count: int) -> None:
        """Wait until the client has `count` tokens. Fails when the answer ends before."""

        def enough() -> bool:
            if answer.ended.is_set() and len(answer.token_ids) < count:
                raise AssertionError(f"ended early: {answer.error or answer.events[-1:]}")
            return len(answer.token_ids) >= count

        self.wait_for(f"{count} tokens", enough)


def _popen(module: str, arguments: Sequence[str], log: Path) -> "subprocess.Popen[bytes]":
    with log.open("wb") as file:
        return subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
        )


def _collect(events: Iterable[InvocationEvent], answer: Answer) -> None:
    try:
        for event in events:
            if isinstance(event, Tokens):
                answer.arrivals_s.append(time.monotonic())
            answer.events.append(event)
    except MeshError as error:
        answer.error = error
    finally:
        answer.ended.set()


def free_port() -> int:
    """A port that nothing listens on now. The cell keeps it over restarts of its controller."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
