"""What came of a request, as its caller saw it, and what that says of its SLO.

A request meets its SLO when every token has come by `arrival + TTFT limit + index * TPOT`
(LLM-Mesh §3.1). Who only a load makes late is told by how much its first token may come after that
(the grace): the numbers say whether the SLO was met, and whether what was promised was. Before: the
callers of a cell, simulated or live. After: `mesh.evaluation`.
"""

from mesh.domain.ids import DeploymentName, RequestId
from mesh.domain.reasons import FinishReason, RefusalReason
from mesh.domain.slo import Slo
from mesh.domain.values import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What came of one request. Times are points on one clock, in seconds."""

    request_id: RequestId
    deployment: DeploymentName
    slo: Slo
    arrival_s: float
    input_tokens: int
    tokens_s: tuple[float, ...]
    """When each token came."""
    earlier_tokens: int = 0
    """How many came before these, from an earlier controller or by an earlier stream."""
    ended_s: float
    accepted: bool = False
    """Its caller was told that it has a place."""
    grace_s: float = 0.0
    """The seconds by which its first token might be late, as its caller was told then."""
    end: FinishReason | RefusalReason

    @property
    def admitted(self) -> bool:
        """It was not refused before it had a place."""
        refused = isinstance(self.end, RefusalReason)
        return self.accepted or not refused or bool(self.tokens_s)

    @property
    def promised_in_time(self) -> bool:
        """It was admitted, and its caller not told that it would be late."""
        return self.admitted and self.grace_s == 0.0

    @property
    def finished(self) -> bool:
        """It has all of its tokens."""
        return self.end in (FinishReason.STOP, FinishReason.LENGTH)

    @property
    def ttft_s(self) -> float | None:
        return self.tokens_s[0] - self.arrival_s if self.tokens_s else None

    @property
    def tpot_s(self) -> float | None:
        """Mean time of a token after the first; None when there is none."""
        if len(self.tokens_s) < 2:
            return None
        return (self.tokens_s[-1] - self.tokens_s[0]) / (len(self.tokens_s) - 1)

    def due_s(self, index: int) -> float:
        """When the SLO wants the token with this index."""
        first_s = self.arrival_s + self.slo.ttft_limit_s(self.input_tokens)
        return first_s + index * self.slo.tpot_s

    @property
    def late_s(self) -> float:
        """The seconds by which its latest token was late by the SLO; negative when none was."""
        first_s, tpot_s = self.due_s(0), self.slo.tpot_s
        late = (at_s - (first_s + n * tpot_s) for n, at_s in enumerate(self.tokens_s))
        return max(late, default=0.0)

    @property
    def ttft_met(self) -> bool:
        """Its first token was in time by the SLO alone."""
        return self.ttft_s is not None and self.ttft_s <= self.slo.ttft_limit_s(self.input_tokens)

    @property
    def tokens_in_time_share(self) -> float:
        """The share of its tokens that came when the SLO wants them (Aegaeon §2.1); 0 where it did
        not get all of them.
        """
        in_time = sum(at_s <= self.due_s(n) for n, at_s in enumerate(self.tokens_s))
        return in_time / len(self.tokens_s) if self.finished and self.tokens_s else 0.0

    @property
    def late_over_told(self) -> float | None:
        """The lateness of its first token over what its caller was told: 1 is as told, 0 or less is
        in time after all. `None` without a token, or where nothing was told.
        """
        if not self.tokens_s or not self.grace_s:
            return None
        return (self.tokens_s[0] - self.due_s(0)) / self.grace_s

    @property
    def met(self) -> bool:
        """What was promised: every token by the SLO, or late by no more than was told."""
        return self.finished and self.late_s <= self.grace_s

    @property
    def met_without_grace(self) -> bool:
        """The SLO, every token: what the caller's clock sees."""
        return self.finished and self.late_s <= 0.0

    @property
    def met_in_the_mean(self) -> bool:
        """The same of TTFT and mean TPOT: single tokens may have been late."""
        return self._met_in_the_mean(self.grace_s)

    @property
    def met_in_the_mean_without_grace(self) -> bool:
        """The SLO, TTFT and mean TPOT."""
        return self._met_in_the_mean(0.0)

    def _met_in_the_mean(self, grace_s: float) -> bool:
        if not self.finished or self.ttft_s is None:
            return False
        limit_s = self.slo.ttft_limit_s(self.input_tokens) + grace_s
        return self.ttft_s <= limit_s and (self.tpot_s or 0.0) <= self.slo.tpot_s
