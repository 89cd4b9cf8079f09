"""A cell of one CPU node under one policy, with every deployment loaded."""

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import reduce
from operator import add

from bench.cells import deployed, local_cell, measured_profile, wait_calm
from bench.demo_model import SOURCE
from mesh.cli.cell import LocalCell
from mesh.domain.deployment import DeploymentSpec
from mesh.domain.ids import DeploymentName
from mesh.domain.slo import Slo
from mesh.evaluation.judging import Judgement, judge, judged
from mesh.evaluation.load_client import Call, offer_again

CONTEXT_TOKENS_MAX = 1024


@contextmanager
def loaded_cell(policy: str, slos: Mapping[str, Slo]) -> Iterator[LocalCell]:
    """With a deployment for each of these. Raises MeshError when a part of it ends."""
    with local_cell(policy=policy) as local:
        deployed(
            local.address,
            [
                DeploymentSpec(
                    name=DeploymentName(name),
                    source=SOURCE,
                    context_tokens_max=CONTEXT_TOKENS_MAX,
                    slo=slo,
                )
                for name, slo in slos.items()
            ],
        )
        yield local
        local.check_alive()


NAME = DeploymentName("burst")
SLO = Slo(ttft_s=2.0, tpot_s=0.15)
MET_MIN = {16: 16, 64: 64, 256: 32}
"""By the calls of a burst."""
PROMPT_TOKENS = (20, 34)
OUTPUT_TOKENS = (32, 64)
TOKEN_IDS = range(100, 2000)
REFUSAL_S_P50_MAX = 0.3
AGAIN_ADMITTED_MIN = 0.9
HEADINGS = ("calls", "taken", "met", "every", "refused", "too late", "p50 s", "again", "taken then")
LEGEND = (
    "Bursts to one resident deployment. met: TTFT and mean TPOT in time; every: with every token. "
    "too late: refused when the first token was due; p50: seconds until a refusal. again: at their "
    "Retry-After"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Burst:
    first: Judgement
    again: Judgement
    """The judgement of the refused calls that came again."""

    @property
    def met(self) -> int:
        """Every token."""
        return sum(each.outcome.met_without_grace for each in self.first.all)

    @property
    def met_in_the_mean(self) -> int:
        return sum(each.outcome.met_in_the_mean_without_grace for each in self.first.all)

    @property
    def met_of_admitted(self) -> float:
        """The share that met both measures."""
        outcomes = [each.outcome for each in self.first.admitted]
        met = sum(o.met_without_grace and o.met_in_the_mean_without_grace for o in outcomes)
        return met / max(len(outcomes), 1)

    @property
    def again_admitted(self) -> float:
        """The share; 0 where nobody came again."""
        return len(self.again.admitted) / max(self.again.requests, 1)

    def __add__(self, other: "Burst") -> "Burst":
        return Burst(first=self.first + other.first, again=self.again + other.again)


def calls(size: int, seed: int) -> list[Call]:
    draw = random.Random(f"{seed} {size}")
    return [
        Call(
            at_s=0.0,
            deployment=NAME,
            slo=SLO,
            prompt_tokens=tuple(draw.choices(TOKEN_IDS, k=draw.randint(*PROMPT_TOKENS))),
            output_tokens=draw.randint(*OUTPUT_TOKENS),
        )
        for _ in range(size)
    ]


def offered(
    policy: str, seed: int, told: Callable[[str], None], *, survey: bool = False
) -> list[Burst]:
    """To a cell of their own as `mesh up` starts it, or after a `survey`. Raises MeshError."""
    found = []
    with loaded_cell(policy, {NAME: SLO}) as cell:
        if survey:
            measured_profile(cell.address, NAME, told)
        for size in MET_MIN:
            wait_calm(cell)
            told(f"{policy}: {size} calls at once")
            sent = calls(size, seed)
            answers, retries = offer_again(cell.address, sent)
            again = Judgement(tuple(judged(*retry) for retry in retries))
            found.append(Burst(first=judge(sent, answers), again=again))
    return found


def rows(bursts: Sequence[Burst]) -> list[tuple[str, ...]]:
    return [
        (
            str(each.first.requests),
            str(len(each.first.admitted)),
            str(each.met_in_the_mean),
            str(each.met),
            str(len(each.first.refused)),
            str(each.first.refused_after_deadline),
            f"{each.first.refusal_s_p50:.2f}",
            str(each.again.requests),
            str(len(each.again.admitted)),
        )
        for each in bursts
    ]


def figures(bursts: Sequence[Burst]) -> dict[str, object]:
    """Lists are by burst."""
    whole = reduce(add, bursts)
    return {
        "burst_calls": [each.first.requests for each in bursts],
        "burst_admitted": [len(each.first.admitted) for each in bursts],
        "burst_met": [each.met for each in bursts],
        "burst_met_in_the_mean": [each.met_in_the_mean for each in bursts],
        "burst_met_of_admitted": round(whole.met_of_admitted, 4),
        "burst_refused_by_reason": [each.first.refused_by_reason for each in bursts],
        "refusal_s_p50": round(whole.first.refusal_s_p50, 4),
        "refused_after_deadline": whole.first.refused_after_deadline,
        "came_again": whole.again.requests,
        "again_admitted": round(whole.again_admitted, 4),
    }


def targets(bursts: Sequence[Burst]) -> dict[str, bool]:
    """Whether each is reached."""
    whole = reduce(add, bursts)
    return {
        "refusal_s_p50": whole.first.refusal_s_p50 <= REFUSAL_S_P50_MAX,
        "refused_after_deadline": whole.first.refused_after_deadline == 0,
        "burst_met_of_admitted": whole.met_of_admitted == 1.0,
        "burst_met": all(
            min(each.met, each.met_in_the_mean) >= MET_MIN[each.first.requests] for each in bursts
        ),
        "again_admitted": not whole.first.refused or whole.again_admitted >= AGAIN_ADMITTED_MIN,
    }
