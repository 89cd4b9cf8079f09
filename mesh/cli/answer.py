"""One answer as it comes in: its text so far, what it waited for, and how it kept its SLO.

`invoke`, `chat` and `demo` feed it the client's events; what they show of it is their matter.
"""

from collections.abc import Callable, Iterable
from dataclasses import field
from typing import assert_never

from mesh.domain.errors import EngineError
from mesh.domain.invocation import (
    Accepted,
    Finished,
    InvocationEvent,
    Tokens,
    Waiting,
    check_complete,
)
from mesh.domain.request import TokenLogprobs
from mesh.domain.values import dataclass


@dataclass(slots=True)
class Answer:
    """Complete once `finished` is set."""

    accepted: Accepted | None = None
    finished: Finished | None = None
    pieces: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    """One of each token, where they were asked for."""

    @property
    def text(self) -> str:
        return "".join(self.pieces)

    @property
    def output_tokens(self) -> int:
        return len(self.token_ids)

    def ttft_met(self, *, with_grace: bool) -> bool:
        """Whether the first token came in time; with the grace, whether it came as promised."""
        accepted, finished = self._ends()
        grace_s = accepted.grace_s if with_grace else 0.0
        return finished.ttft_s <= accepted.ttft_limit_s + grace_s

    def tpot_met(self) -> bool:
        """Whether the further tokens came in time, on the mean."""
        accepted, finished = self._ends()
        return finished.tpot_s <= accepted.tpot_limit_s

    def slo_met(self, *, with_grace: bool) -> bool:
        return self.ttft_met(with_grace=with_grace) and self.tpot_met()

    def stats(self) -> str:
        """A finished answer in one line for people."""
        accepted, finished = self._ends()
        cached = f" ({finished.cached_prompt_tokens} cached)" * (finished.cached_prompt_tokens > 0)
        told = f", told late by {accepted.grace_s:.2f}" if accepted.grace_s else ""
        return (
            f"{accepted.request_id}: {finished.prompt_tokens} prompt{cached} and "
            f"{finished.output_tokens} output tokens, {finished.reason}; "
            f"TTFT {finished.ttft_s:.3f} s (SLO {accepted.ttft_limit_s:g}{told}: "
            f"{met(self.ttft_met(with_grace=True))}); "
            f"TPOT {finished.tpot_s:.4f} s (SLO {accepted.tpot_limit_s:g}: {met(self.tpot_met())})"
        )

    def plain(self) -> dict[str, object]:
        """A finished answer for scripts."""
        accepted, finished = self._ends()
        told = [
            {
                "logprob": one.logprob,
                "top": [{"token_id": token, "logprob": logprob} for token, logprob in one.top],
            }
            for one in self.logprobs
        ]
        return {
            "request_id": str(accepted.request_id),
            **({"slo_class": accepted.slo_class} if accepted.slo_class else {}),
            "text": self.text,
            "token_ids": self.token_ids,
            **({"logprobs": told} if told else {}),
            "finish_reason": finished.reason.value,
            "prompt_tokens": finished.prompt_tokens,
            "cached_prompt_tokens": finished.cached_prompt_tokens,
            "output_tokens": finished.output_tokens,
            "ttft_s": finished.ttft_s,
            "ttft_limit_s": accepted.ttft_limit_s,
            "tpot_s": finished.tpot_s,
            "tpot_limit_s": accepted.tpot_limit_s,
            "grace_s": accepted.grace_s,
            "node_id": finished.node_id,
            "slo_met": self.slo_met(with_grace=True),
            "slo_met_without_grace": self.slo_met(with_grace=False),
        }

    def _ends(self) -> tuple[Accepted, Finished]:
        if self.accepted is None or self.finished is None:
            raise EngineError("the answer ended before it was complete")
        return self.accepted, self.finished


def receive(
    events: Iterable[InvocationEvent],
    answer: Answer,
    *,
    on_accepted: Callable[[Accepted], None] = lambda accepted: None,
    on_waiting: Callable[[str, float], None] = lambda phase, share: None,
    on_text: Callable[[str], None] = lambda piece: None,
) -> None:
    """Fill `answer` until it is complete.

    Raises Cancelled or EngineError when it ends but not as an answer should, and what the client
    raises. `answer` then holds what had come.
    """
    for event in events:
        match event:
            case Accepted():
                answer.accepted = event
                on_accepted(event)
            case Waiting():
                on_waiting(event.phase, event.share)
            case Tokens():
                answer.token_ids.extend(event.token_ids)
                answer.logprobs.extend(event.logprobs)
                if event.text:
                    answer.pieces.append(event.text)
                    on_text(event.text)
            case Finished():
                answer.finished = event
            case _:
                assert_never(event)
    if answer.finished is None:
        raise EngineError("the answer broke off", hint="`mesh logs` shows what happened; try again")
    check_complete(answer.finished)


def told_late(accepted: Accepted) -> str:
    """What a caller has to know before its first token; empty when that will be in time."""
    if not accepted.grace_s:
        return ""
    return (
        f"an instance has to be loaded: the first token comes about {accepted.grace_s:.2f} s after "
        f"its limit, {accepted.ttft_limit_s:g} s"
    )


def met(yes: bool) -> str:
    return "met" if yes else "missed"
