"""A real cell for the tests of the verbs, but that its engine follows a script."""

import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from mesh.cli import children
from mesh.domain.errors import Unavailable
from mesh.wire.client import MeshClient
from mesh.wire.credentials import Credentials, show
from tests.cli.running import Ran, mesh
from tests.support.tiny_model import write_tiny_llama

READY_S_MAX = 150.0
STEP_S = "0.01"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningCell:
    address: str
    home: Path
    model: Path

    def mesh(self, *arguments: str, stdin: bytes = b"") -> Ran:
        """Run a verb against this cell."""
        environ = {"MESH_CONTROLLER": self.address, "MESH_HOME": str(self.home)}
        return mesh(*arguments, stdin=stdin, environ=environ)

    def manifest(self, name: str, *lines: str) -> bytes:
        """A manifest of the tiny model. `lines` stand under spec."""
        spec = "".join(f"  {line}\n" for line in lines)
        head = f"apiVersion: mesh/v1\nkind: Model\nmetadata: {{name: {name}}}\nspec:\n"
        return f"{head}  source: file://{self.model}\n{spec}".encode()


@pytest.fixture(scope="package")
def cell(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningCell]:
    """One cell for all tests; each test deploys under names of its own."""
    home = tmp_path_factory.mktemp("cell")
    write_tiny_llama(home / "tiny")
    with running_cell(home, node_options=("--watts", "10:50")) as cell:
        yield cell


@pytest.fixture(scope="module")
def chat(cell: RunningCell) -> Iterator[str]:
    """A deployment that most tests only look at."""
    lines = ("context_tokens_max: 256", "slo: {ttft_s: 30, tpot_s: 5}")
    ran = cell.mesh("deploy", "-", stdin=cell.manifest("chat", *lines))
    assert (ran.code, ran.out) == (0, ""), ran.err
    assert ran.err.splitlines()[-1] == "chat: deployed"
    yield "chat"
    assert cell.mesh("delete", "chat").code == 0


@contextmanager
def running_cell(
    home: Path, *options: str, node_options: Sequence[str] = (), shown: Credentials | None = None
) -> Iterator[RunningCell]:
    """With these options for its controller and its node; `shown` are an operator's, where
    they are wanted.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    at_home = ["--home", str(home)]
    begun = [
        children.start(
            "the controller",
            "mesh.controller",
            ["--listen", address, *at_home, *options],
            home / "logs" / "controller.log",
        ),
        children.start(
            "the node",
            "tests.support.scripted_node",
            [
                *("--step-s", STEP_S, "--", "--join", address, "--name", "cpu0"),
                *(*at_home, *node_options),
            ],
            home / "logs" / "node.log",
        ),
    ]
    try:
        show(shown or Credentials())
        _wait_ready(address, begun)
        show(Credentials())
        yield RunningCell(address=address, home=home, model=home / "tiny")
    finally:
        children.stop(begun)


def _wait_ready(address: str, begun: list[children.Child]) -> None:
    until_s = time.monotonic() + READY_S_MAX
    with MeshClient(address) as client:
        while time.monotonic() < until_s:
            for child in begun:
                assert child.running, child.log_path.read_text()
            try:
                if client.nodes():
                    return
            except Unavailable:
                pass
            time.sleep(0.05)
    raise AssertionError("the cell did not come up: " + begun[1].log_path.read_text())
