"""`mesh plan`: how many instances of a deployment its calls need, on which nodes, and what callers
are to expect.

The calls are those that have come lately, those that are given, or those of a journal. The
controller plans, since it knows nodes, profiles and corrections. After: `mesh scale`'s path, which
refuses what was planned for another revision.
"""

from pathlib import Path
from statistics import fmean

import click

from mesh.cli import output, tables
from mesh.cli.options import controller_option, file_option, format_option
from mesh.cli.output import Format
from mesh.domain.errors import InvalidInput
from mesh.domain.ids import DeploymentName
from mesh.domain.revision import public_name
from mesh.domain.views import Arrivals, InstancePlan
from mesh.evaluation.replaying import outcomes_of
from mesh.report.plain import plain_fields
from mesh.wire.client import MeshClient

GRANULARITY = (
    "whole models: no engine of mesh runs single operators on other devices; where that was "
    "simulated with device time counted once, it saved no device over whole models that share them"
)


@click.command()
@click.argument("name")
@click.option("--rate", metavar="R", type=float, help="Plan for R calls a second.")
@click.option(
    "--lengths", metavar="P,…:A", help="Tokens of prompts, and of an answer: 128,1024:64."
)
@file_option("--journal", "Plan for the calls in a controller's journal.")
@click.option("--apply", "applies", is_flag=True, help="Keep as many loaded: set replicas_min.")
@format_option
@controller_option
def plan(
    name: str,
    rate: float | None,
    lengths: str | None,
    journal: Path | None,
    applies: bool,
    form: Format,
    address: str,
) -> None:
    """Plan how many instances a deployment needs for the calls that have come lately, or that are
    to come, on which nodes, and what callers are to expect.
    """
    calls, deployment = None, DeploymentName(name)
    if (rate is None) != (lengths is None) or (rate is not None and journal is not None):
        raise click.UsageError(
            "give --rate and --lengths together, or a --journal, or none of them"
        )
    if rate is not None and lengths is not None:
        calls = _given(rate, lengths)
    elif journal is not None:
        calls = calls_of(journal, deployment)
    with MeshClient(address) as client:
        found = client.plan(deployment, calls)
        if form is Format.TABLE:
            output.fields(_fields(found))
        else:
            output.structured({**plain_fields(found), "granularity": GRANULARITY}, form)
        if applies:
            client.scale(deployment, replicas_min=found.replicas, revision=found.revision)
            output.message(f"{name}: keeps {found.replicas} instances loaded")


def _given(rate: float, lengths: str) -> Arrivals:
    prompts, _, answer = lengths.partition(":")
    try:
        tokens = tuple(int(one) for one in prompts.split(","))
        return Arrivals(rate_per_s=rate, prompts=tokens, answer_tokens=float(answer))
    except ValueError:
        raise click.BadParameter(
            f"{lengths!r} is not such as 128,1024:64", param_hint="--lengths"
        ) from None


def calls_of(journal: Path, name: DeploymentName) -> Arrivals:
    """The calls of a deployment in a controller's journal, which tells how they ended; an answer
    that an earlier controller began counts whole. Raises InvalidInput where the journal does not
    tell their rate or their lengths.
    """
    mine = [each for each in outcomes_of(journal) if public_name(each.deployment) == name]
    came_s = sorted(each.arrival_s for each in mine)
    answers = [each.earlier_tokens + len(each.tokens_s) for each in mine if each.finished]
    if not answers or came_s[-1] == came_s[0]:
        raise InvalidInput(
            f"the journal {journal} has {len(mine)} ended calls of {name!r}, of which "
            f"{len(answers)} were answered: it does not tell how often calls come and how long "
            "they are",
            hint="give the journal of a controller that served it, or --rate and --lengths",
        )
    return Arrivals(
        rate_per_s=(len(mine) - 1) / (came_s[-1] - came_s[0]),
        prompts=tuple(each.input_tokens for each in mine),
        answer_tokens=fmean(answers),
    )


def _fields(found: InstancePlan) -> list[tuple[str, str]]:
    return [
        ("calls", found.calls.words),
        ("replicas", str(found.replicas)),
        ("nodes", ", ".join(found.nodes)),
        ("batch_max", str(found.batch_max)),
        ("ttft_s", _time(found.ttft_s, found.ttft_most_s)),
        ("tpot_s", _time(found.tpot_s, found.tpot_most_s)),
        ("error", "not known yet" if found.error is None else f"{found.error:.0%}"),
        ("utilisation", f"{found.utilisation:.0%}"),
        ("watts", "not known" if found.watts is None else f"{found.watts:.0f}"),
        ("j_per_token", "not known" if found.j_per_token is None else f"{found.j_per_token:.3g}"),
        ("granularity", GRANULARITY),
    ]


def _time(mean_s: float, most_s: float | None) -> str:
    told = tables.seconds(round(mean_s, 4))
    return told if most_s is None else f"{told}, {most_s:.4g} by the error"
