"""The same questions to a whole cell, through gRPC, by one client with one event loop."""

from bench.overhead.workload import (
    BATCH,
    BATCH_TOKENS,
    PROMPT_TOKENS,
    TTFT_REPEATS,
    Answer,
    steady,
)
from mesh.domain.errors import Unavailable
from mesh.domain.ids import DeploymentName
from mesh.domain.slo import Slo
from mesh.evaluation.load_client import Call, offer

LONE_EVERY_S = 0.25
"""Several times what a request of one token takes."""
CALL_S_MAX = 120.0


def ask(address: str, name: DeploymentName) -> Answer:
    """One round of both questions; a lone request before them opens the connection. Raises
    Unavailable when a request is not answered in full.
    """
    lone = [_call(name, LONE_EVERY_S * number, 1) for number in range(TTFT_REPEATS + 1)]
    together = [_call(name, LONE_EVERY_S * len(lone), BATCH_TOKENS)] * BATCH
    calls = [*lone, *together]
    answers = offer(address, calls, call_s_max=CALL_S_MAX)
    if odd := [a for c, a in zip(calls, answers, strict=True) if not a.whole(c)]:
        why = odd[0].refused or odd[0].failed or "torn"
        raise Unavailable(f"{len(odd)} of {len(calls)} requests were not answered in full: {why}")
    streams = [[a.sent_s + at_s for at_s in a.tokens_s] for a in answers[len(lone) :]]
    ttft_ms = tuple(1e3 * answer.tokens_s[0] for answer in answers[1 : len(lone)])
    return Answer(ttft_ms=ttft_ms, token_ms=steady(streams))


def _call(name: DeploymentName, at_s: float, output_tokens: int) -> Call:
    return Call(
        at_s=at_s,
        deployment=name,
        slo=Slo(),
        prompt_tokens=PROMPT_TOKENS,
        output_tokens=output_tokens,
    )
