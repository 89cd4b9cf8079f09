"""What one worker sends: its part of a plan's calls, and all that it needs to make them.

Call `i` of the plan is worker `i mod n`'s. A share crosses in pieces of bounded length, and holds
the tokens of the prompts' sentences: only the master reads the trace, and has the tokenizer.
Shares and results go as locust's messages carry them: dictionaries of plain values, and back.
Before: `master`. After: `worker`.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from cattrs import Converter

from mesh.domain.reasons import FinishReason, RefusalReason
from mesh.domain.slo import Slo
from mesh.evaluation import load_client
from mesh.evaluation.replay.results import CallResult
from mesh.evaluation.replay.running import as_sent
from mesh_workloads.prompts import Prompts, Sentences
from mesh_workloads.replay_plan import Call

CALLS_PER_PIECE = 20_000
"""About 3 MB."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """What one worker sends. A piece of it has some of its calls."""

    address: str
    """Where calls go."""
    slos: dict[str, Slo]
    """By deployment."""
    sentences: dict[str, Sentences]
    """By deployment."""
    seed: int
    """The seed of the prompts."""
    forced: bool
    """Answers have exactly the planned lengths."""
    calls: tuple[Call, ...] = ()
    calls_whole: int = 0
    """In all pieces together."""
    http: bool = False
    """Calls go by OpenAI's protocol, instead of gRPC."""

    def of_worker(self, index: int, workers: int) -> "Share":
        calls = self.calls[index::workers]
        return replace(self, calls=calls, calls_whole=len(calls))

    @property
    def complete(self) -> bool:
        return len(self.calls) == self.calls_whole

    def joined(self, piece: "Share") -> "Share":
        """With the calls of the piece that follows."""
        return replace(self, calls=self.calls + piece.calls)

    def to_send(self) -> Iterator[tuple[Call, load_client.Call]]:
        """Calls as planned and as they are sent, their prompts made when they are drawn."""
        prompts = {name: Prompts(each, seed=self.seed) for name, each in self.sentences.items()}
        for call in self.calls:
            name = call.deployment
            yield call, as_sent(call, self.slos[name], prompts[name], forced=self.forced)

    def pieces(self) -> Iterator["Share"]:
        """One at least."""
        for begin in range(0, max(1, len(self.calls)), CALLS_PER_PIECE):
            yield replace(self, calls=self.calls[begin : begin + CALLS_PER_PIECE])


_End = FinishReason | RefusalReason
_FINISHES = frozenset(FinishReason)


def _end(word: str, _: object) -> _End:
    return FinishReason(word) if word in _FINISHES else RefusalReason(word)


_CONVERTER = Converter()
_CONVERTER.register_structure_hook(_End, _end)


def plain_of(value: Share | CallResult) -> dict[str, Any]:
    plain: dict[str, Any] = _CONVERTER.unstructure(value)
    return plain


def share_of(plain: dict[str, Any]) -> Share:
    return _CONVERTER.structure(plain, Share)


def result_of(plain: dict[str, Any]) -> CallResult:
    return _CONVERTER.structure(plain, CallResult)
