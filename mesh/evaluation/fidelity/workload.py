"""Bursts of requests for several deployments of one model: the same arrivals on both sides.

Each deployment has bursts of its own, with pauses between them. How many requests there are follows
from what the node can compute by its profile, so that a quick machine has as much to do as a slow
one. Before: a profile. After: the live client, and `mesh.sim.cluster`.
"""

import random
from collections.abc import Iterator, Sequence

from mesh.compute.times import Times
from mesh.domain.deployment import DeploymentSpec, Scaling
from mesh.domain.ids import DeploymentName
from mesh.domain.limits import PREFILL_TOKENS_MAX
from mesh.domain.profile import Profile
from mesh.domain.slo import Slo
from mesh.sim.cluster import Arrival

SLOS = {
    "fidelity-a": Slo(ttft_s=1.5, tpot_s=0.12),
    "fidelity-b": Slo(ttft_s=2.0, tpot_s=0.15),
    "fidelity-c": Slo(ttft_s=3.0, tpot_s=0.20),
}
"""By deployment."""
CONTEXT_TOKENS = 1024
KEEP_ALIVE_S = 1.0
"""Shorter than the pauses, so that instances are parked in them and resumed."""
INPUT_TOKENS = (16, 400)
OUTPUT_TOKENS = (16, 128)
BURST_S = (3.0, 10.0)
"""How long a burst lasts, and the pause after it."""
BATCH = 4
"""Requests of a deployment that decode together, for the estimate of what the node can do."""


def deployments(source: str) -> tuple[DeploymentSpec, ...]:
    """Of the model of this source, each with an instance at most."""
    scaling = Scaling(replicas_min=0, replicas_max=1, keep_alive_s=KEEP_ALIVE_S)
    return tuple(
        DeploymentSpec(
            name=DeploymentName(name),
            source=source,
            context_tokens_max=CONTEXT_TOKENS,
            slo=slo,
            scaling=scaling,
        )
        for name, slo in SLOS.items()
    )


def bursts(profile: Profile, *, seconds: float, load: float, seed: int) -> tuple[Arrival, ...]:
    """In order: `load` times as much as a node of this profile can compute in `seconds`."""
    draw, times, names = random.Random(seed), Times(profile), list(SLOS)
    sizes: list[tuple[int, int]] = []
    left_s = load * seconds
    while left_s > 0:
        size = draw.randint(*INPUT_TOKENS), draw.randint(*OUTPUT_TOKENS)
        left_s -= request_s(times, *size)
        sizes.append(size)
    spans = {name: tuple(_spans(draw, seconds)) for name in names}
    made = []
    for number, (input_tokens, output_tokens) in enumerate(sizes):
        name = names[number % len(names)]
        at_s = _moment(draw, spans[name])
        made.append(Arrival(at_s, name, input_tokens, output_tokens))
    return tuple(sorted(made))


def request_s(times: Times, input_tokens: int, output_tokens: int) -> float:
    """Seconds of compute: the prompt, and its share of the decodes of a batch."""
    seconds, past = 0.0, 0
    while past < input_tokens:
        tokens = min(input_tokens - past, PREFILL_TOKENS_MAX)
        seconds += times.prefill_s(tokens, past)
        past += tokens
    return seconds + output_tokens * times.decode_s(BATCH, input_tokens + output_tokens / 2) / BATCH


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
