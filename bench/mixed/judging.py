"""Which tokens came in time, who was refused, and which node served whom; pure.

A token is in time by `sent + TTFT limit + grace + index * TPOT`, as mesh counts it: the grace is
load time that its request was granted.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from mesh.domain.slo import Slo
from mesh.evaluation.load_client import Answer, Call


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    phase: str
    call: Call
    slo: Slo
    answer: Answer

    @property
    def admitted(self) -> bool:
        return self.answer.admitted

    @property
    def due_s(self) -> float:
        """Of the first token, without grace."""
        return self.slo.ttft_limit_s(len(self.call.prompt_tokens))

    @property
    def spares_s(self) -> tuple[float, ...]:
        """Of each token that came: how long before it was due."""
        first_s, tpot_s = self.due_s + self.answer.grace_s, self.slo.tpot_s
        return tuple(first_s + i * tpot_s - at_s for i, at_s in enumerate(self.answer.tokens_s))

    @property
    def met_tokens(self) -> int:
        """Those that never came are late, too."""
        return sum(spare_s >= 0.0 for spare_s in self.spares_s)

    @property
    def whole(self) -> bool:
        answer = self.answer
        complete = len(answer.tokens_s) == self.call.output_tokens and answer.in_order
        return complete and answer.finishes == 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """What one node did in one phase; `node_id` is empty for requests that were refused."""

    phase: str
    node_id: str
    requests: int
    tokens: int
    met_tokens: int
    ttft_s_p50: float
    tokens_per_s: float
    """Of a request, in the median: how quickly its tokens followed its first one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    outcomes: tuple[Outcome, ...]

    @property
    def requests(self) -> int:
        return len(self.outcomes)

    @property
    def admitted(self) -> tuple[Outcome, ...]:
        return tuple(outcome for outcome in self.outcomes if outcome.admitted)

    @property
    def refused(self) -> tuple[Outcome, ...]:
        return tuple(outcome for outcome in self.outcomes if not outcome.admitted)

    @property
    def refused_by_reason(self) -> dict[str, int]:
        return dict(sorted(Counter(o.answer.refused for o in self.refused).items()))

    @property
    def met_share(self) -> float:
        """Of the tokens that were promised to admitted requests."""
        promised = sum(outcome.call.output_tokens for outcome in self.admitted)
        return sum(outcome.met_tokens for outcome in self.admitted) / max(promised, 1)

    @property
    def torn(self) -> tuple[Outcome, ...]:
        """Admitted, and not answered in full."""
        return tuple(outcome for outcome in self.admitted if not outcome.whole)

    @property
    def spare_s_least(self) -> float:
        """Of all tokens: what was left of the time of the one that came nearest to its deadline."""
        return min((s for o in self.admitted for s in o.spares_s), default=0.0)

    def of(self, phase: str) -> "Judgement":
        return Judgement(outcomes=tuple(o for o in self.outcomes if o.phase == phase))

    def served_by(self, node_id: str) -> int:
        """Requests whose last token was computed there."""
        return sum(outcome.answer.node_id == node_id for outcome in self.outcomes)

    def rows(self) -> list[Row]:
        """By phase, in their order, and node."""
        phases = dict.fromkeys(outcome.phase for outcome in self.outcomes)
        return [
            _row(phase, node_id, mine)
            for phase in phases
            for node_id, mine in _by_node(self.of(phase).outcomes)
        ]


def _by_node(outcomes: Sequence[Outcome]) -> list[tuple[str, list[Outcome]]]:
    node_ids = sorted({outcome.answer.node_id for outcome in outcomes}, key=lambda n: (not n, n))
    return [(n, [o for o in outcomes if o.answer.node_id == n]) for n in node_ids]


def _row(phase: str, node_id: str, outcomes: Sequence[Outcome]) -> Row:
    came = [o.answer.tokens_s for o in outcomes if o.answer.tokens_s]
    paces = [(len(s) - 1) / (s[-1] - s[0]) for s in came if s[-1] > s[0]]
    return Row(
        phase=phase,
        node_id=node_id,
        requests=len(outcomes),
        tokens=sum(len(o.answer.tokens_s) for o in outcomes),
        met_tokens=sum(o.met_tokens for o in outcomes),
        ttft_s_p50=median(s[0] for s in came) if came else 0.0,
        tokens_per_s=median(paces) if paces else 0.0,
    )
