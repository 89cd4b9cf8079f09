"""Calls to a live cell, each with what came of it, and what that says of all of them; pure.

A call is met as any `Outcome` is: each token has come by `sent + TTFT limit + grace + index *
TPOT`, the grace being by how much it was told to be late. Admitted is what was told that it has a
place, or not refused at all. Before: `load_client`. After: the benchmarks' reports.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median

from mesh.domain.outcome import Outcome
from mesh.evaluation.load_client import Answer, Call, outcome_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    call: Call
    answer: Answer
    outcome: Outcome

    @property
    def spares_s(self) -> tuple[float, ...]:
        """For each token that came, how long before its promised time it did."""
        due_s, grace_s = self.outcome.due_s, self.outcome.grace_s
        return tuple(due_s(n) + grace_s - at_s for n, at_s in enumerate(self.outcome.tokens_s))

    @property
    def met_tokens(self) -> int:
        """Those in time; what never came is late, too."""
        return sum(spare_s >= 0.0 for spare_s in self.spares_s)

    @property
    def late_s(self) -> float:
        """By how much its latest token was late; one whose first never came, by when it ended."""
        return -min(self.spares_s, default=self.outcome.due_s(0) - self.outcome.ended_s)

    @property
    def ended_once(self) -> bool:
        """Whole, or with a reason and without an end of another kind."""
        answer = self.answer
        refused = bool(answer.refused) and not answer.finishes and answer.in_order
        return self.outcome.finished or refused


def judged(call: Call, answer: Answer) -> Judged:
    return Judged(call=call, answer=answer, outcome=outcome_of(call, answer))


def judge(calls: Sequence[Call], answers: Sequence[Answer]) -> "Judgement":
    """Answers in the order of their calls."""
    return Judgement(tuple(judged(c, a) for c, a in zip(calls, answers, strict=True)))


@dataclass(frozen=True, slots=True)
class Judgement:
    """Counts are of calls, unless named otherwise."""

    all: tuple[Judged, ...]

    def __add__(self, other: "Judgement") -> "Judgement":
        return Judgement(self.all + other.all)

    @property
    def requests(self) -> int:
        return len(self.all)

    @property
    def admitted(self) -> tuple[Judged, ...]:
        return tuple(each for each in self.all if each.outcome.admitted)

    @property
    def refused(self) -> tuple[Judged, ...]:
        return tuple(each for each in self.all if not each.outcome.admitted)

    @property
    def refused_by_reason(self) -> dict[str, int]:
        """Those cut off after they were admitted are among them."""
        return _counted(each.answer.refused for each in self.all if each.answer.refused)

    @property
    def finished(self) -> int:
        return sum(each.outcome.finished for each in self.all)

    @property
    def met(self) -> int:
        return sum(each.outcome.met for each in self.all)

    @property
    def promised(self) -> tuple[Outcome, ...]:
        """The outcomes of the calls that were admitted and not told to be late."""
        return tuple(each.outcome for each in self.all if each.outcome.promised_in_time)

    @property
    def met_of_admitted(self) -> float:
        """The share of those promised to be in time of which every token was."""
        promised = self.promised
        return sum(outcome.met for outcome in promised) / max(len(promised), 1)

    @property
    def met_of_admitted_in_the_mean(self) -> float:
        """The share of those promised to be in time that kept TTFT and mean TPOT."""
        promised = self.promised
        return sum(outcome.met_in_the_mean for outcome in promised) / max(len(promised), 1)

    @property
    def late_over_told(self) -> tuple[float, ...]:
        """By how much the first tokens of calls that were told to be late were late, as a share of
        what they were told, ascending.
        """
        shares = (each.outcome.late_over_told for each in self.all)
        return tuple(sorted(share for share in shares if share is not None))

    @property
    def met_tokens_share(self) -> float:
        """The share of the tokens promised to admitted calls that came in time."""
        promised = sum(each.call.output_tokens for each in self.admitted)
        return sum(each.met_tokens for each in self.admitted) / max(promised, 1)

    @property
    def torn(self) -> tuple[Judged, ...]:
        """The calls that were admitted and not answered in full."""
        return tuple(each for each in self.admitted if not each.outcome.finished)

    @property
    def failed(self) -> dict[str, int]:
        """By status: neither finished nor refused."""
        return _counted(each.answer.failed for each in self.all if each.answer.failed)

    @property
    def odd_ends(self) -> dict[str, int]:
        """Calls that neither finished nor were refused, each once, by status."""
        return _counted(each.answer.failed or "torn" for each in self.all if not each.ended_once)

    @property
    def refusals_before_deadline(self) -> float:
        """The share of refusals that came before the first token was due."""
        refused = len(self.refused)
        return 1.0 - self.refused_after_deadline / refused if refused else 1.0

    @property
    def refused_after_deadline(self) -> int:
        return sum(each.late_s > 0.0 for each in self.refused)

    @property
    def refusal_s_p50(self) -> float:
        """From a call to its refusal; 0 without any."""
        return median(each.answer.ended_s for each in self.refused) if self.refused else 0.0

    @property
    def late_s(self) -> tuple[float, ...]:
        """By how much admitted calls came later than promised, ascending; those in time are left
        out.
        """
        return tuple(sorted(each.late_s for each in self.admitted if each.late_s > 0.0))

    @property
    def late_first(self) -> int:
        """How many of those were late with their first token already."""
        return sum(bool(each.spares_s) and each.spares_s[0] < 0.0 for each in self.admitted)

    @property
    def spare_s_least(self) -> float:
        """The time that was left to the token that came nearest to its deadline, over all calls."""
        return min((spare_s for each in self.admitted for spare_s in each.spares_s), default=0.0)

    @property
    def output_tokens(self) -> int:
        return sum(len(each.answer.tokens_s) for each in self.all)

    def served_by(self, node_id: str) -> int:
        """Calls whose last token was computed there."""
        return sum(each.answer.node_id == node_id for each in self.all)


def _counted(words: Iterable[str]) -> dict[str, int]:
    return dict(sorted(Counter(words).items()))
