"""Bursts of requests for several deployments, drawn once and offered to every policy alike.

How many they are follows from what the node can compute: the profile says how long each request
takes, in the largest batch with which every deployment could still keep its TPOT SLO.
"""

import random
from collections.abc import Sequence
from dataclasses import replace

from mesh.compute.times import Times
from mesh.domain.ids import DeploymentName
from mesh.domain.limits import PREFILL_TOKENS_MAX, CellLimits
from mesh.domain.slo import Slo
from mesh.evaluation.judging import Judgement
from mesh.evaluation.load_client import Call

SLOS = {
    "slo-a": Slo(ttft_s=1.0, tpot_s=0.10),
    "slo-b": Slo(ttft_s=1.5, tpot_s=0.15),
    "slo-c": Slo(ttft_s=2.0, tpot_s=0.20),
    "slo-d": Slo(ttft_s=1.0, tpot_s=0.12),
}
"""By deployment; all of them are the demo model."""
PROMPT_TOKENS = (16, 400)
OUTPUT_TOKENS = (16, 128)
BURST_S = (3.0, 10.0)
"""How long a burst lasts, and the pause after it."""
TOKEN_IDS = range(100, 2000)


class Costs:
    """Seconds of the node's compute time, by a measured profile."""

    def __init__(self, times: Times) -> None:
        self._times = times
        self._context_tokens = sum(PROMPT_TOKENS) / 2 + sum(OUTPUT_TOKENS) / 4
        per_s = sum(1 / slo.tpot_s for slo in SLOS.values())
        batches = range(1, CellLimits().batch_max + 1)
        fitting = [b for b in batches if per_s * self._decode_s(b) <= 1.0]
        self.batch = max(fitting, default=1)
        """Of every deployment, when as many requests run as the SLOs allow."""

    def call_s(self, call: Call) -> float:
        """Its prompt, and its share of the decodes of a batch."""
        seconds, past, left = 0.0, 0, len(call.prompt_tokens)
        while left:
            tokens = min(left, PREFILL_TOKENS_MAX)
            seconds += self._times.prefill_s(tokens, past)
            past, left = past + tokens, left - tokens
        return seconds + call.output_tokens * self._decode_s(self.batch) / self.batch

    def _decode_s(self, batch: int) -> float:
        return self._times.decode_s(batch, self._context_tokens)


def calls(costs: Costs, *, load: float, seconds: float, seed: int) -> list[Call]:
    """What is sent, in order: `load` times as much as the node can compute in `seconds`."""
    draw = random.Random(seed)
    bodies: list[Call] = []
    left_s = load * seconds
    while left_s > 0:
        body = _call(draw, list(SLOS)[len(bodies) % len(SLOS)])
        left_s -= costs.call_s(body)
        bodies.append(body)
    bursts = {name: _bursts(draw, seconds) for name in SLOS}
    placed = [_at(draw, body, bursts[body.deployment]) for body in bodies]
    return sorted(placed, key=lambda call: call.at_s)


def _call(draw: random.Random, deployment: str) -> Call:
    prompt = tuple(draw.choice(TOKEN_IDS) for _ in range(draw.randint(*PROMPT_TOKENS)))
    return Call(
        at_s=0.0,
        deployment=DeploymentName(deployment),
        slo=SLOS[deployment],
        prompt_tokens=prompt,
        output_tokens=draw.randint(*OUTPUT_TOKENS),
    )


def _bursts(draw: random.Random, seconds: float) -> list[tuple[float, float]]:
    """Their starts and ends, pauses between them."""
    found = []
    at_s = -draw.uniform(0.0, BURST_S[0])
    while at_s < seconds:
        end_s = at_s + draw.uniform(*BURST_S)
        found.append((max(at_s, 0.0), min(end_s, seconds)))
        at_s = end_s + draw.uniform(*BURST_S)
    return found


def _at(draw: random.Random, call: Call, bursts: Sequence[tuple[float, float]]) -> Call:
    """At a random moment of the bursts: so are arrivals of a Poisson process whose number is
    known.
    """
    left_s = draw.uniform(0.0, sum(end_s - start_s for start_s, end_s in bursts))
    at_s = 0.0
    for start_s, end_s in bursts:
        at_s = start_s + left_s
        if at_s <= end_s:
            break
        left_s -= end_s - start_s
    return replace(call, at_s=at_s)


def met_share_by_deployment(judged: Judgement) -> dict[str, float]:
    shares = {}
    for name in SLOS:
        mine = [each.outcome.met for each in judged.all if each.call.deployment == name]
        shares[name] = sum(mine) / max(len(mine), 1)
    return shares


def jain(shares: Sequence[float]) -> float:
    """Jain's index of fairness: 1 when all are equal, 1/n when one has everything."""
    squares = sum(share * share for share in shares)
    return sum(shares) ** 2 / (len(shares) * squares) if squares else 1.0
