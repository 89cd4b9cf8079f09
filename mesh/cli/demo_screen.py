"""How `mesh demo` shows its answers: as they grow on a terminal, each whole when done elsewhere."""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from rich.live import Live
from rich.padding import Padding
from rich.text import Text

from mesh.cli import output
from mesh.cli.answer import Answer, told_late
from mesh.cli.output import Column, number, word
from mesh.cli.tables import seconds
from mesh.domain.errors import MeshError
from mesh.domain.ids import DeploymentName
from mesh.domain.invocation import Accepted, Finished

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
