"""What is offered to every policy alike: deployments and their SLOs, and bursts of calls.

The profile says how long each call takes, in the largest batch with which every deployment could
still keep its TPOT SLO.
"""

from collections.abc import Sequence

from mesh.compute.times import Times
from mesh.domain.limits import CellLimits
from mesh.domain.slo import Slo
from mesh.evaluation.bursts import INPUT_TOKENS, OUTPUT_TOKENS, bursts, calls_of, request_s
from mesh.evaluation.judging import Judgement
from mesh.evaluation.load_client import Call

SLOS = {
    "slo-a": Slo(ttft_s=1.0, tpot_s=0.10),
    "slo-b": Slo(ttft_s=1.5, tpot_s=0.15),
    "slo-c": Slo(ttft_s=2.0, tpot_s=0.20),
    "slo-d": Slo(ttft_s=1.0, tpot_s=0.12),
}
"""By deployment; all of them are the demo model."""
CONTEXT_TOKENS = sum(INPUT_TOKENS) / 2 + sum(OUTPUT_TOKENS) / 4
"""The mean context of a call in its middle."""


class Costs:
    """Seconds of the node's compute time, by a measured profile."""

    def __init__(self, times: Times) -> None:
        self._times = times
        per_s = sum(1 / slo.tpot_s for slo in SLOS.values())
        batches = range(1, CellLimits().batch_max + 1)
        fitting = [b for b in batches if per_s * times.decode_s(b, CONTEXT_TOKENS) <= 1.0]
        self.batch = max(fitting, default=1)
        """The batch of every deployment when as many requests run as the SLOs allow."""

    def call_s(self, call: Call) -> float:
        """Its prompt, and its share of the decodes of a batch."""
        return request_s(self._times, len(call.prompt_tokens), call.output_tokens, self.batch)

    def calls(self, *, load: float, seconds: float, seed: int) -> list[Call]:
        """What is sent, in order: `load` times as much as the node can compute in `seconds`."""
        arrivals = bursts(
            tuple(SLOS), self._times, self.batch, seconds=seconds, load=load, seed=seed
        )
        return calls_of(arrivals, SLOS, seed)


def met_share_by_deployment(judged: Judgement) -> dict[str, float]:
    shares = {}
    for name in SLOS:
        mine = [each.outcome.met for each in judged.all if each.call.deployment == name]
        shares[name] = sum(mine) / max(len(mine), 1)
    return shares


def jain(shares: Sequence[float]) -> float:
    """Jain's index of fairness: 1 when all are equal, 1/n when one has everything."""
    squares = sum(share * share for share in shares)
    return sum(shares) ** 2 / (len(shares) * squares) if squares else 1.0
