"""`mesh invoke`: one prompt, one answer, printed as it is generated."""

import sys
from contextlib import ExitStack
from typing import Unpack

import click

from mesh.cli import output
from mesh.cli.answer import Answer, receive, told_late
from mesh.cli.options import (
    Sampling,
    checked_text,
    controller_option,
    decoded,
    format_option,
    sampling_options,
    timeout_option,
)
from mesh.cli.output import Format
from mesh.cli.progress import progress
from mesh.domain.errors import InvalidInput, system_errors
from mesh.domain.grammar import Grammar, GrammarKind
from mesh.domain.ids import DeploymentName
from mesh.domain.invocation import Accepted, ChatPrompt, Invocation, TextPrompt
from mesh.domain.text import ChatMessage
from mesh.text.grammars import choice_grammar, json_grammar
from mesh.wire.client import MeshClient

PROMPT_BYTES_MAX = 2 * 1024 * 1024
"""Far above any context; a larger prompt would not fit a message of the wire."""
STANDARD_INPUT = "-"


def read_prompt(argument: str | None, file: str | None) -> str:
    """Raises InvalidInput when it cannot be read or is not UTF-8, and click.UsageError when it is
    given twice or not at all.
    """
    if argument is not None and file is not None:
        raise click.UsageError("the prompt is given twice: as PROMPT and by --file")
    if argument is not None and argument != STANDARD_INPUT:
        return checked_text(argument, "the prompt")
    if file is not None and file != STANDARD_INPUT:
        return decoded(_bounded(_read(file), file), file)
    if argument is None and file is None and sys.stdin.isatty():
        raise click.UsageError("no prompt: give PROMPT, --file, or - for standard input")
    raw = sys.stdin.buffer.read(PROMPT_BYTES_MAX + 1)
    return decoded(_bounded(raw, "standard input"), "standard input").removesuffix("\n")


def _read(path: str) -> bytes:
    hint = "name a file with the prompt, or - for standard input"
    with system_errors(InvalidInput, path, hint), open(path, "rb") as file:
        return file.read(PROMPT_BYTES_MAX + 1)


def _bounded(raw: bytes, what: str) -> bytes:
    if len(raw) > PROMPT_BYTES_MAX:
        raise InvalidInput(
            f"{what} holds more than the {PROMPT_BYTES_MAX} bytes of a prompt",
            hint="shorten it: no model's context holds that many tokens",
        )
    return raw


TIMEOUT_S = 300.0


@click.command()
@click.argument("name")
@click.argument("prompt", required=False)
@click.option("--file", metavar="FILE", help="Read the prompt from a file.")
@click.option("--stream/--no-stream", default=True, help="Print the answer as it comes, or whole.")
@click.option("--raw", is_flag=True, help="Continue the prompt as it is: no chat template.")
@click.option("--stats", is_flag=True, help="Then say on stderr how the SLO was kept.")
@click.option("--logprobs", type=int, help="Show each token's, and of so many likeliest; 0 to 20.")
@click.option("--json-schema", metavar="FILE", help="Keep the answer to a JSON schema.")
@click.option("--regex", help="Keep the answer to a regular expression.")
@click.option("--choice", metavar="TEXT", multiple=True, help="One of these. Repeatable.")
@sampling_options
@timeout_option(TIMEOUT_S, "Give up, and free the request's place, after that.")
@format_option
@controller_option
def invoke(
    name: str,
    prompt: str | None,
    file: str | None,
    stream: bool,
    raw: bool,
    stats: bool,
    logprobs: int | None,
    json_schema: str | None,
    regex: str | None,
    choice: tuple[str, ...],
    timeout_s: float,
    form: Format,
    address: str,
    **sampling: Unpack[Sampling],
) -> None:
    """Ask a deployment. PROMPT - (or none, in a pipe) reads standard input."""
    words = read_prompt(prompt, file)
    invocation = Invocation(
        deployment=DeploymentName(name),
        prompt=TextPrompt(text=words)
        if raw
        else ChatPrompt(messages=(ChatMessage(role="user", content=words),)),
        logprobs=logprobs,
        grammar=_grammar(json_schema, regex, choice),
        **sampling,
    )
    answer = Answer()
    with MeshClient(address) as client:
        _run(client, invocation, timeout_s, answer, live=stream and form is Format.TABLE)
    if form is not Format.TABLE:
        output.structured({"deployment": name, **answer.plain()}, form)
    elif not stream:
        output.text(answer.text)
    if form is Format.TABLE and logprobs is not None:
        _show_logprobs(answer)
    if stats:
        output.message(answer.stats())


def _grammar(json_schema: str | None, regex: str | None, choice: tuple[str, ...]) -> Grammar | None:
    if sum((json_schema is not None, regex is not None, bool(choice))) > 1:
        raise click.UsageError("give one of --json-schema, --regex and --choice")
    if json_schema is not None:
        return json_grammar(read_prompt(None, json_schema))
    if regex is not None:
        return Grammar(kind=GrammarKind.REGEX, text=regex)
    return choice_grammar(choice) if choice else None


def _show_logprobs(answer: Answer) -> None:
    """By ids: pieces of text would break characters apart."""
    rows = [
        (
            str(token_id),
            f"{one.logprob:.4f}",
            " ".join(f"{top_id}:{logprob:.4f}" for top_id, logprob in one.top),
        )
        for token_id, one in zip(answer.token_ids, answer.logprobs, strict=False)
    ]
    output.table(output.text_columns(("TOKEN ID", "LOGPROB", "LIKELIEST"), 0), rows)


def say_late(accepted: Accepted) -> None:
    """On stderr, at once."""
    if words := told_late(accepted):
        output.message(words)


def _run(
    client: MeshClient, invocation: Invocation, timeout_s: float, answer: Answer, *, live: bool
) -> None:
    """Receive the answer; live, its text is printed at once and its last line ended."""
    with ExitStack() as waiting:
        report = waiting.enter_context(progress(invocation.deployment, quiet_unless_terminal=True))

        def show(piece: str) -> None:
            waiting.close()  # or the bar would be drawn over the answer
            if live:
                output.text(piece, end="")

        try:
            receive(
                client.invoke(invocation, timeout_s=timeout_s),
                answer,
                on_accepted=say_late,
                on_waiting=report,
                on_text=show,
            )
        finally:
            waiting.close()
            if live and answer.pieces:
                output.text("")
