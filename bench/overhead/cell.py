"""The same questions to a whole cell, through gRPC, by one client with one event loop."""

from bench.overhead.workload import (
    BATCH,
    BATCH_TOKENS,
    LONE_EVERY_S,
    PROMPT_TOKENS,
    SLO,
    TTFT_REPEATS,
    Answer,
    steady,
)
from mesh.domain.errors import Unavailable
from mesh.domain.ids import DeploymentName
from mesh.evaluation import load_client
from mesh.evaluation.load_client import Call, offer

CALL_S_MAX = 120.0


def ask(address: str, name: DeploymentName) -> Answer:
    """One round of both questions. Raises Unavailable when a request is not answered in full, or a
    lone one was not alone.
    """
    lone = _lone(name)
    together = [_call(name, LONE_EVERY_S * len(lone), BATCH_TOKENS)] * BATCH
    answers = _answered(address, [*lone, *together])
    alone = _alone(answers[: len(lone)])
    streams = [[a.sent_s + at_s for at_s in a.tokens_s] for a in answers[len(lone) :]]
    ttft_ms = tuple(1e3 * answer.tokens_s[0] for answer in alone)
    return Answer(ttft_ms=ttft_ms, token_ms=steady(streams))


def ask_alone(address: str, name: DeploymentName) -> list[load_client.Answer]:
    """The first question, and what came of each call. Raises as `ask`."""
    return _alone(_answered(address, _lone(name)))


def _lone(name: DeploymentName) -> list[Call]:
    """The first opens the connection."""
    return [_call(name, LONE_EVERY_S * number, 1) for number in range(TTFT_REPEATS + 1)]


def _alone(answers: list[load_client.Answer]) -> list[load_client.Answer]:
    """All but the first."""
    if (took_s := max(answer.ended_s for answer in answers[1:])) > LONE_EVERY_S:
        raise Unavailable(
            f"a lone request took {took_s:.2f} s, and the next came after {LONE_EVERY_S:g} s",
            hint="measure on a machine that has nothing else to do",
        )
    return answers[1:]


def _answered(address: str, calls: list[Call]) -> list[load_client.Answer]:
    answers = offer(address, calls, call_s_max=CALL_S_MAX)
    if odd := [a for c, a in zip(calls, answers, strict=True) if not a.whole(c)]:
        why = odd[0].refused or odd[0].failed or "torn"
        raise Unavailable(f"{len(odd)} of {len(calls)} requests were not answered in full: {why}")
    return answers


def _call(name: DeploymentName, at_s: float, output_tokens: int) -> Call:
    return Call(
        at_s=at_s,
        deployment=name,
        slo=SLO,
        prompt_tokens=PROMPT_TOKENS,
        output_tokens=output_tokens,
    )
