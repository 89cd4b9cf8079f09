"""A sender whose answers are scripted, and calls for it: what tests of a replay share."""

import threading
from collections.abc import Iterator

import gevent

from mesh.domain.errors import Cancelled, DeadlineExceeded, MeshError, Refused, Unavailable
from mesh.domain.ids import DeploymentName, RequestId
from mesh.domain.invocation import Accepted, Finished, InvocationEvent, Tokens
from mesh.domain.reasons import FinishReason, RefusalReason
from mesh.domain.slo import Slo
from mesh.evaluation.load_client import Call
from mesh_load.share import Share
from mesh_workloads import replay_plan
from mesh_workloads.prompts import encoded

SLO = Slo(ttft_s=1.0, tpot_s=0.1)
FAILURES: dict[str, MeshError] = {
    "gone": Unavailable("nobody answers"),
    "left": Cancelled("the cell stops"),
    "late": DeadlineExceeded("not done within 5 s"),
}


class ScriptedSender:
    """Answers by deployment: `quick` at once, `slow` after `token_s` a token, `full` refuses, and
    the names in FAILURES fail.
    """

    def __init__(self, token_s: float = 0.05) -> None:
        self._token_s = token_s
        self.sent: list[Call] = []
        self.closed = threading.Event()

    def send(self, call: Call, timeout_s: float) -> Iterator[InvocationEvent]:
        self.sent.append(call)
        if call.deployment == "full":
            raise Refused("no room", reason=RefusalReason.MEMORY_FULL, retry_after_s=2.0)
        if call.deployment in FAILURES:
            raise FAILURES[call.deployment]
        prompt_tokens = len(call.prompt_tokens)
        yield Accepted(
            request_id=RequestId("r1"),
            prompt_tokens=prompt_tokens,
            ttft_limit_s=1,
            tpot_limit_s=1,
            grace_s=0.5,
        )
        for n in range(call.output_tokens):
            gevent.sleep(self._token_s if call.deployment == "slow" else 0.0)
            yield Tokens(first_index=n, token_ids=(7,), text="a")
        yield Finished(
            reason=FinishReason.LENGTH,
            prompt_tokens=prompt_tokens,
            output_tokens=call.output_tokens,
            ttft_s=0.0,
            tpot_s=0.0,
        )

    def close(self) -> None:
        self.closed.set()


def planned(*calls: tuple[float, str, int]) -> tuple[replay_plan.Call, ...]:
    """Calls of (at_s, deployment, output_tokens)."""
    return tuple(
        replay_plan.Call(
            number=number,
            at_s=at_s,
            deployment=deployment,
            function=f"f{number}",
            input_tokens=3 + number,
            output_tokens=tokens,
        )
        for number, (at_s, deployment, tokens) in enumerate(calls)
    )


def share_of(*calls: tuple[float, str, int]) -> Share:
    """The share of one worker."""
    names = ("quick", "slow", "full", "gone")
    return Share(
        address="127.0.0.1:1",
        slos=dict.fromkeys(names, SLO),
        sentences=dict.fromkeys(names, encoded(str.encode)),
        seed=1,
        forced=True,
        calls=planned(*calls),
        calls_whole=len(calls),
    )


def as_sent(call: replay_plan.Call) -> Call:
    return Call(
        at_s=call.at_s,
        deployment=DeploymentName(call.deployment),
        slo=SLO,
        prompt_tokens=(1,) * call.input_tokens,
        output_tokens=call.output_tokens,
    )
