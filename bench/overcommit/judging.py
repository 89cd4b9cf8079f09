"""How each call ended, as its client saw it; pure."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from mesh.evaluation.load_client import Answer, Call


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    call: Call
    answer: Answer

    @property
    def finished(self) -> bool:
        """Whole, with one message that says so."""
        return self.answer.whole(self.call)

    @property
    def refused(self) -> bool:
        """With a reason, and without an end of another kind."""
        answer = self.answer
        return bool(answer.refused) and not answer.finishes and answer.in_order

    @property
    def admitted(self) -> bool:
        return self.answer.admitted

    @property
    def met(self) -> bool:
        """Each token came by its deadline, with the load time that the call was granted."""
        slo, answer = self.call.slo, self.answer
        first_s = slo.ttft_limit_s(len(self.call.prompt_tokens)) + answer.grace_s
        late = any(at_s > first_s + i * slo.tpot_s for i, at_s in enumerate(answer.tokens_s))
        return self.finished and not late


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    outcomes: Sequence[Outcome]

    @property
    def finished(self) -> int:
        return sum(o.finished for o in self.outcomes)

    @property
    def refused_by_reason(self) -> dict[str, int]:
        return dict(sorted(Counter(o.answer.refused for o in self.outcomes if o.refused).items()))

    @property
    def odd_ends(self) -> dict[str, int]:
        """Calls that neither finished nor were refused, by status; of all calls, each once."""
        odd = [o.answer.failed or "torn" for o in self.outcomes if not (o.finished or o.refused)]
        return dict(sorted(Counter(odd).items()))

    @property
    def ended_once(self) -> bool:
        return not self.odd_ends

    @property
    def met_of_admitted(self) -> float:
        admitted = sum(o.admitted for o in self.outcomes)
        return sum(o.met for o in self.outcomes) / max(admitted, 1)
