"""Bursts of requests for several deployments of one model, with pauses between them.

Each deployment has bursts of its own. How many requests there are follows from what the node can
compute by its profile, so that a quick machine has as much to do as a slow one. Drawn from a seed.
Before: a profile. After: the live client, and `mesh.sim.cluster`.
"""

import random
from collections.abc import Iterator, Mapping, Sequence

from mesh.compute.times import Times
from mesh.domain.ids import DeploymentName
from mesh.domain.limits import PREFILL_TOKENS_MAX
from mesh.domain.slo import Slo
from mesh.evaluation.load_client import Call
from mesh.sim.cluster import Arrival

INPUT_TOKENS = (16, 400)
OUTPUT_TOKENS = (16, 128)
BURST_S = (3.0, 10.0)
"""How long a burst lasts, and the pause after it."""
TOKEN_IDS = range(100, 2000)
"""Prompts are made of these token ids."""


def bursts(
    names: Sequence[str], times: Times, batch: int, *, seconds: float, load: float, seed: int
) -> tuple[Arrival, ...]:
    """In order: `load` times as much as a node with these times can compute in `seconds`; see
    `request_s`.
    """
    draw = random.Random(seed)
    sizes: list[tuple[int, int]] = []
    left_s = load * seconds
    while left_s > 0:
        size = draw.randint(*INPUT_TOKENS), draw.randint(*OUTPUT_TOKENS)
        left_s -= request_s(times, *size, batch)
        sizes.append(size)
    spans = {name: tuple(_spans(draw, seconds)) for name in names}
    made = []
    for number, (input_tokens, output_tokens) in enumerate(sizes):
        name = names[number % len(names)]
        at_s = _moment(draw, spans[name])
        made.append(Arrival(at_s, name, input_tokens, output_tokens))
    return tuple(sorted(made))


def calls_of(arrivals: Sequence[Arrival], slos: Mapping[str, Slo], seed: int) -> list[Call]:
    """With prompts of their lengths."""
    draw = random.Random(seed)
    return [
        Call(
            at_s=arrival.at_s,
            deployment=DeploymentName(arrival.deployment),
            slo=slos[arrival.deployment],
            prompt_tokens=tuple(draw.choices(TOKEN_IDS, k=arrival.input_tokens)),
            output_tokens=arrival.output_tokens,
        )
        for arrival in arrivals
    ]


def request_s(times: Times, input_tokens: int, output_tokens: int, batch: int) -> float:
    """Seconds of compute: the prompt, and its share of the decodes of a batch."""
    seconds, past = 0.0, 0
    while past < input_tokens:
        tokens = min(input_tokens - past, PREFILL_TOKENS_MAX)
        seconds += times.prefill_s(tokens, past)
        past += tokens
    return seconds + output_tokens * times.decode_s(batch, input_tokens + output_tokens / 2) / batch


def _spans(draw: random.Random, seconds: float) -> Iterator[tuple[float, float]]:
    """Starts and ends of bursts."""
    at_s = -draw.uniform(0.0, BURST_S[0])
    while at_s < seconds:
        end_s = at_s + draw.uniform(*BURST_S)
        yield max(at_s, 0.0), min(max(end_s, 0.0), seconds)
        at_s = end_s + draw.uniform(*BURST_S)


def _moment(draw: random.Random, spans: Sequence[tuple[float, float]]) -> float:
    """At random within the bursts: as of a Poisson process whose number of arrivals is known."""
    left_s = draw.uniform(0.0, sum(end_s - start_s for start_s, end_s in spans))
    for start_s, end_s in spans:
        if left_s <= end_s - start_s:
            return start_s + left_s
        left_s -= end_s - start_s
    return spans[-1][1]
