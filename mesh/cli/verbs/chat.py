"""`mesh chat`: a conversation with a deployment, on a terminal or down a pipe.

It owns the history, which the model sees again with every question. On a terminal a question that
fails is forgotten and the talk goes on; down a pipe it ends the command, since what follows was
meant to come after an answer.
"""

import sys
from typing import Unpack

import click

from mesh.cli import output
from mesh.cli.answer import Answer, receive
from mesh.cli.options import Sampling, controller_option, decoded, sampling_options, timeout_option
from mesh.cli.verbs.invoke import say_late
from mesh.domain.errors import MeshError, Unavailable
from mesh.domain.ids import DeploymentName
from mesh.domain.invocation import ChatPrompt, Invocation
from mesh.domain.text import ChatMessage
from mesh.wire.client import MeshClient

PROMPT = "> "
TIMEOUT_S = 300.0
LINE_BYTES_MAX = 2 * 1024 * 1024
HELP = "/system TEXT sets what the model is told first, /reset forgets the talk, /quit ends it"


@click.command()
@click.argument("name")
@click.option("--system", metavar="TEXT", help="What the model is told before the conversation.")
@sampling_options
@timeout_option(TIMEOUT_S, "Give up on an answer after that.")
@controller_option
def chat(
    name: str, system: str | None, timeout_s: float, address: str, **sampling: Unpack[Sampling]
) -> None:
    """Talk with a deployment: a line a question. /system TEXT, /reset, /quit."""
    terminal = sys.stdin.isatty()
    with MeshClient(address) as client:
        client.get(DeploymentName(name))  # so that a wrong name shows before the first question
        talk = Conversation(client, DeploymentName(name), timeout_s, sampling, system)
        if terminal:
            output.message(HELP)
        while (line := read_line(terminal)) is not None:
            if line.strip() == "/quit":
                return
            if line.strip():
                _turn(talk, line, terminal)


def _turn(talk: "Conversation", line: str, terminal: bool) -> None:
    command, _, rest = line.strip().partition(" ")
    if command == "/reset":
        talk.reset()
        output.message("the talk so far is forgotten")
    elif command == "/system":
        talk.system = rest.strip()
        output.message("the model is told so from now on" if talk.system else "told nothing first")
    elif command.startswith("/") and command[1:].isalpha():
        output.message(f"{command} is no command: {HELP}")
    else:
        try:
            talk.ask(line)
        except KeyboardInterrupt:
            if not terminal:
                raise
            output.message("stopped; the question is forgotten")
        except MeshError as error:
            if not terminal or isinstance(error, Unavailable):
                raise
            output.error(error)


class Conversation:
    """The history, and how the next question is asked."""

    def __init__(
        self,
        client: MeshClient,
        deployment: DeploymentName,
        timeout_s: float,
        sampling: Sampling,
        system: str | None,
    ) -> None:
        self._client = client
        self._deployment = deployment
        self._timeout_s = timeout_s
        self._sampling = sampling
        self._history: list[ChatMessage] = []
        self.system = system or ""

    def reset(self) -> None:
        self._history.clear()

    def ask(self, question: str) -> None:
        """Print the answer as it comes, and remember both; a question that fails is not."""
        asked = [*self._history, ChatMessage(role="user", content=question)]
        told = [ChatMessage(role="system", content=self.system)] if self.system else []
        answer = Answer()
        invocation = Invocation(
            deployment=self._deployment,
            prompt=ChatPrompt(messages=(*told, *asked)),
            **self._sampling,
        )
        try:
            receive(
                self._client.invoke(invocation, timeout_s=self._timeout_s),
                answer,
                on_accepted=say_late,
                on_text=lambda piece: output.text(piece, end=""),
            )
        finally:
            if answer.pieces:
                output.text("")
        self._history = [*asked, ChatMessage(role="assistant", content=answer.text)]


def read_line(terminal: bool) -> str | None:
    """The next line without its end, or None at the end. Raises InvalidInput when not UTF-8."""
    if terminal and sys.stdout.isatty():
        try:
            return input(PROMPT)
        except EOFError:
            output.text("")
            return None
        except KeyboardInterrupt:
            output.text("")  # or the shell would go on in the middle of this line
            raise
    if terminal:
        # Standard output goes elsewhere: the prompt is no data.
        sys.stderr.write(PROMPT)
        sys.stderr.flush()
    raw = sys.stdin.buffer.readline(LINE_BYTES_MAX)
    return decoded(raw, "standard input").rstrip("\r\n") if raw else None
