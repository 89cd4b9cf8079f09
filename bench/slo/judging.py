"""Which calls met their SLO, as their client saw it; pure.

A call meets it when each token has come by `sent + TTFT limit + index * TPOT`. There is no grace:
everything is loaded before the first call.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from bench.slo.workload import SLOS
from mesh.evaluation.load_client import Answer, Call


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    call: Call
    answer: Answer

    @property
    def admitted(self) -> bool:
        return self.answer.admitted

    def due_s(self, token: int) -> float:
        """Seconds from its sending until the token of this index is due."""
        slo = self.call.slo
        return slo.ttft_limit_s(len(self.call.prompt_tokens)) + token * slo.tpot_s

    @property
    def late_s(self) -> float:
        """By how much its latest token was late; negative when each was early."""
        return max(
            (at_s - self.due_s(i) for i, at_s in enumerate(self.answer.tokens_s)),
            default=self.answer.ended_s - self.due_s(0),
        )

    @property
    def met(self) -> bool:
        whole = len(self.answer.tokens_s) == self.call.output_tokens
        return self.admitted and whole and self.late_s <= 0.0

    @property
    def refused_in_time(self) -> bool:
        """Before its first token was due."""
        return self.answer.ended_s <= self.due_s(0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """Of all calls that one policy was offered."""

    outcomes: tuple[Outcome, ...]

    @property
    def requests(self) -> int:
        return len(self.outcomes)

    @property
    def admitted(self) -> int:
        return sum(o.admitted for o in self.outcomes)

    @property
    def met(self) -> int:
        return sum(o.met for o in self.outcomes)

    @property
    def met_of_admitted(self) -> float:
        return self.met / max(self.admitted, 1)

    @property
    def refused_by_reason(self) -> dict[str, int]:
        reasons = Counter(o.answer.refused for o in self.outcomes if not o.admitted)
        return dict(sorted(reasons.items()))

    @property
    def failed(self) -> dict[str, int]:
        statuses = Counter(o.answer.failed for o in self.outcomes if o.answer.failed)
        return dict(sorted(statuses.items()))

    @property
    def refusals_before_deadline(self) -> float:
        """The share of refusals that came before the first token was due."""
        refused = [o for o in self.outcomes if not o.admitted]
        return sum(o.refused_in_time for o in refused) / len(refused) if refused else 1.0

    @property
    def late_s(self) -> tuple[float, ...]:
        """Of those that were admitted and came late, ascending."""
        return tuple(sorted(o.late_s for o in self.outcomes if o.admitted and o.late_s > 0.0))

    @property
    def late_first(self) -> int:
        """How many of those were late with their first token already."""
        return sum(o.admitted and o.answer.tokens_s[:1] > (o.due_s(0),) for o in self.outcomes)

    @property
    def late_s_p50(self) -> float:
        return median(self.late_s) if self.late_s else 0.0

    @property
    def met_share_by_deployment(self) -> dict[str, float]:
        shares = {}
        for name in SLOS:
            mine = [o for o in self.outcomes if o.call.deployment == name]
            shares[name] = sum(o.met for o in mine) / max(len(mine), 1)
        return shares

    @property
    def lag_s_p99(self) -> float:
        """The client's own: by so much its times may be off."""
        lags = sorted(o.answer.lag_s for o in self.outcomes)
        return lags[len(lags) * 99 // 100]

    @property
    def output_tokens(self) -> int:
        return sum(len(o.answer.tokens_s) for o in self.outcomes)


def jain(shares: Sequence[float]) -> float:
    """Jain's index of fairness: 1 when all are equal, 1/n when one has everything."""
    squares = sum(share * share for share in shares)
    return sum(shares) ** 2 / (len(shares) * squares) if squares else 1.0
