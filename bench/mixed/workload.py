"""What is asked of a mixed cell, and the SLO that makes a burst too much for its first node; pure.

All of it follows from the profiles that the cell has measured: answers are as long as it takes for
the second node to load while the first is busy with them; the TPOT SLO is what one decode of
`FIRST_BATCH` requests takes on the first node as shadow validation reckons it, or what the second
node can keep at half its speed if that is more; a burst is so many times what the first node takes.
"""

import random
from dataclasses import dataclass
from math import ceil

from mesh.compute.times import Times
from mesh.domain.errors import InvalidInput
from mesh.domain.ids import DeploymentName
from mesh.domain.limits import CellLimits
from mesh.domain.node_rule import DEFAULT_RULE
from mesh.domain.profile import Profile
from mesh.domain.slo import Slo
from mesh.evaluation.load_client import Call
from mesh.request.shadow import LOOKAHEAD_TOKENS

FIRST_BATCH = 12
"""Requests that the first node can give their tokens in time, if it is as quick as it was."""
BURST_OVER_FIRST = 2.0
BURST_S = 1.0
QUIET_GAP_S = 1.0
SECOND_SLOWER = 2.0
OUTPUT_TOKENS = (64, 112)
"""The least and the most."""
TOKEN_IDS = range(2, 250)


@dataclass(frozen=True, slots=True, kw_only=True)
class Requests:
    """How long they are, and when their first tokens are due."""

    prompt_tokens: int
    served_s: float
    """That the first node is busy at least with a full batch of them."""
    ttft_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    slo: Slo
    prompt_tokens: int
    output_tokens: int
    first_batch: int
    """Requests at once with which the nodes can keep the TPOT SLO."""
    second_batch: int
    burst: int
    """Requests."""


def sizes(first: Profile, second: Profile, requests: Requests) -> Sizes:
    """Raises InvalidInput where no burst is too much for the first node."""
    prompt_tokens = requests.prompt_tokens
    quickest_s = Times(first).decode_s(FIRST_BATCH, prompt_tokens)
    least, most = OUTPUT_TOKENS
    output_tokens = min(max(ceil(requests.served_s / quickest_s), least), most)
    # The longest mean context that shadow validation reckons with.
    context = prompt_tokens + output_tokens + LOOKAHEAD_TOKENS
    first_s = _decode_s(first, FIRST_BATCH, context)
    tpot_s = max(first_s, SECOND_SLOWER * _decode_s(second, 1, context))
    first_batch = _batch(first, context, tpot_s)
    burst = ceil(BURST_OVER_FIRST * first_batch)
    if first_batch >= CellLimits().batch_max:
        raise InvalidInput(
            f"the first node decodes {first_batch} requests within {tpot_s:.3f} s, as many as an "
            "instance takes: shadow validation would not refuse the next one",
            hint="the second node is too slow beside it: give that one a quicker machine",
        )
    return Sizes(
        slo=Slo(ttft_s=requests.ttft_s, tpot_s=tpot_s),
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        first_batch=first_batch,
        second_batch=_batch(second, context, tpot_s),
        burst=burst,
    )


def _decode_s(profile: Profile, batch: int, context: int) -> float:
    return Times(profile, DEFAULT_RULE.overestimate).decode_s(batch, context)


def _batch(profile: Profile, context: int, tpot_s: float) -> int:
    batches = range(1, CellLimits().batch_max + 1)
    return max((b for b in batches if _decode_s(profile, b, context) <= tpot_s), default=0)


def quiet(deployment: str, sized: Sizes, count: int, draw: random.Random) -> list[Call]:
    """One after the other."""
    return [_call(deployment, sized, n * QUIET_GAP_S, draw) for n in range(count)]


def burst(deployment: str, sized: Sizes, draw: random.Random) -> list[Call]:
    """All of them within BURST_S, in the order of their times."""
    at_s = sorted(draw.uniform(0.0, BURST_S) for _ in range(sized.burst))
    return [_call(deployment, sized, at, draw) for at in at_s]


def _call(deployment: str, sized: Sizes, at_s: float, draw: random.Random) -> Call:
    return Call(
        at_s=at_s,
        deployment=DeploymentName(deployment),
        slo=sized.slo,
        prompt_tokens=tuple(draw.choice(TOKEN_IDS) for _ in range(sized.prompt_tokens)),
        output_tokens=sized.output_tokens,
    )
