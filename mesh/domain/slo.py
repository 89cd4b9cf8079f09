"""Service level objectives and headroom, the measure of urgency that all scheduling rests on.

Two measures of the same SLO are kept at once: every token by its deadline, and TTFT with the mean
TPOT. For the second an early first token is no headroom for the others. So tokens are planned a
little quicker than the TPOT SLO asks, and a request whose first token came early may be behind its
own pace from there by no more than that makes up for in the rest of its answer.
"""

from enum import StrEnum
from math import inf

from mesh.domain.values import dataclass

SLO_S_MAX = 24 * 3600.0
"""The longest limit, and the TPOT of best effort."""
SLO_TOKENS_PER_S_MAX = 1e9


class ColdStart(StrEnum):
    """What becomes of a request that only a load makes late."""

    LATE = "late"
    """It is taken, and its caller is told by how much it may be late."""
    REFUSE = "refuse"


@dataclass(frozen=True, slots=True, kw_only=True)
class Slo:
    """What a deployment promises for each request (LLM-Mesh §3.1).

    The first token is due `max(ttft_s, prompt tokens / ttft_tokens_per_s)` after arrival, every
    further one `tpot_s` later than the one before it was due. A deployment may offer several, each
    with a name: its SLO classes.
    """

    ttft_s: float = 2.0
    ttft_tokens_per_s: float = 512.0
    tpot_s: float = 0.25
    cold_start: ColdStart = ColdStart.LATE
    name: str = ""
    """The class of its deployment; empty for the only SLO of one, or a request's own."""
    price: float = 1.0
    """What a token of the class is worth, against other classes."""
    best_effort: bool = False
    """Its requests have what all others leave. `ttft_s` is how long they wait at most."""

    def ttft_limit_s(self, prompt_tokens: int) -> float:
        """Seconds from arrival by which the first token of a prompt of this length is due."""
        return max(self.ttft_s, prompt_tokens / self.ttft_tokens_per_s)


def best_effort(name: str, within_s: float, price: float = 1.0) -> Slo:
    """A class whose requests wait for up to `within_s` seconds, and have what all others leave."""
    return Slo(
        ttft_s=within_s,
        ttft_tokens_per_s=SLO_TOKENS_PER_S_MAX,
        tpot_s=SLO_S_MAX,
        name=name,
        price=price,
        best_effort=True,
    )


BEST_EFFORT = best_effort("best_effort", SLO_S_MAX)
"""That of batch files, at a deployment without such a class: no class can have its name, which is
no DNS label.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """How a policy plans tokens: a little quicker than the SLO asks."""

    share: float = 0.95
    """The time from one token to the next, as a share of the TPOT SLO (LLM-Mesh plans 0.2375 of
    0.25 s).
    """
    slack_share: float = 0.5
    """The share of a deployment's mean answer that one is expected to have at least: many are
    shorter.
    """

    def token_s(self, slo: Slo) -> float:
        """From one token to the next, as planned."""
        return slo.tpot_s * self.share

    def slack_s(self, slo: Slo, output_tokens: float) -> float:
        """The seconds by which the token after an early first one may be behind the pace, where an
        answer is expected to have so many tokens: what the pace gains until its end.
        """
        gained_s = slo.tpot_s - self.token_s(slo)
        return max(output_tokens * self.slack_share - 1.0, 0.0) * gained_s


PACE = Pace()


def next_due_s(
    due_s: float, pace_s: float, now_s: float, tokens: int = 1, slack_s: float = inf
) -> float:
    """When the token after so many of which the first was due at `due_s`, and which came now, is
    due for the scheduler. Less the current time that is the headroom: the seconds by which it may
    still be delayed (LLM-Mesh §5.1, eq. 1). `slack_s`: the first of them is the request's first.

    A token that came late is forgiven: the request continues at the pace of its SLO from there. Its
    SLO is lost, and were it to catch up at the expense of others, theirs would be, too (the domino
    effect of earliest deadline first under overload).
    """
    earlier_s = now_s + slack_s
    anchor_s = due_s if due_s < earlier_s else earlier_s
    return (anchor_s if anchor_s > now_s else now_s) + tokens * pace_s
