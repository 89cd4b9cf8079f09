"""`mesh invoke`: one prompt, one answer, printed as it is generated."""

from contextlib import ExitStack
from typing import Unpack

import click

from mesh.cli import output
from mesh.cli.answer import Answer, receive, told_late
from mesh.cli.options import controller_option, format_option, timeout_option
from mesh.cli.output import Format
from mesh.cli.progress import progress
from mesh.cli.prompts import read_prompt
from mesh.cli.sampling import Sampling, sampling_options
from mesh.domain.grammar import Grammar, GrammarKind
from mesh.domain.ids import DeploymentName
from mesh.domain.invocation import Accepted, ChatPrompt, Invocation, TextPrompt
from mesh.domain.text import ChatMessage
from mesh.text.grammars import choice_grammar, json_grammar
from mesh.wire.client import MeshClient

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
