"""The sampling options of `invoke` and `chat`. What is not given is the controller's choice.

Ranges are the gateway's to check: it tells every client alike.
"""

from collections.abc import Callable
from typing import Any, TypedDict, TypeVar

import click

from mesh.cli.options import checked_text

Command = TypeVar("Command", bound=Callable[..., Any])


class Sampling(TypedDict):
    """Fields of an Invocation, as the options give them."""

    max_tokens: int | None
    temperature: float | None
    top_p: float | None
    top_k: int | None
    min_p: float | None
    seed: int | None
    repetition_penalty: float | None
    presence_penalty: float | None
    frequency_penalty: float | None
    ignore_eos: bool
    stop: tuple[str, ...]
    slo_ttft_s: float | None
    slo_tpot_s: float | None
    cache_salt: str


def _stops(ctx: click.Context, option: click.Parameter, values: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(checked_text(value, "a stop string") for value in values)


_OPTIONS = (
    click.option("--max-tokens", type=int, help="Output tokens at most."),
    click.option("--temperature", type=float, help="0 (the default): the likeliest token."),
    click.option("--top-p", type=float, help="Only the likeliest tokens of this summed share."),
    click.option("--top-k", type=int, help="Only this many likeliest tokens; 0: all."),
    click.option("--min-p", type=float, help="Only tokens above this share of the likeliest's."),
    click.option("--seed", type=int, help="The same seed draws the same tokens."),
    click.option("--repetition-penalty", type=float, help="Above 1: what is there comes less."),
    click.option("--presence-penalty", type=float, help="Off what the answer has; -2 to 2."),
    click.option("--frequency-penalty", type=float, help="The same for each time; -2 to 2."),
    click.option("--ignore-eos", is_flag=True, help="Go on after the model would end."),
    click.option("--slo-ttft", "slo_ttft_s", type=float, help="Seconds to its first token."),
    click.option("--slo-tpot", "slo_tpot_s", type=float, help="Seconds for each further one."),
    click.option("--cache-salt", default="", help="Share cached prompts with the same one only."),
    click.option(
        "--stop", metavar="TEXT", multiple=True, callback=_stops, help="End before it. Repeatable."
    ),
)


def sampling_options(command: Command) -> Command:
    for option in reversed(_OPTIONS):
        command = option(command)
    return command
