"""One run on a mixed cell: profiles are measured, an SLO is promised by them, phases follow.

The benchmark and the end-to-end test call it with other lengths.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from bench.mixed.cell import FIRST, KEEP_ALIVE_S, NAME, PATIENT, SECOND, MixedCell
from bench.mixed.workload import Requests, Sizes, burst, quiet, sizes
from mesh.evaluation.judging import Judgement, judge
from mesh.evaluation.load_client import Call, offer
from tests.support.tiny_model import LlamaShape, write_llama

SHAPE = LlamaShape(hidden=128, intermediate=256, layers=12, heads=64, kv_heads=64, head_size=64)
"""Attention is most of its work, so that it is the batch and not the weights that takes an
iteration's time, in either engine."""
QUIET_BEFORE, BURST, QUIET_AFTER = "quiet", "burst", "quiet again"
PARKED_S_MAX = KEEP_ALIVE_S + 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    sizes: Sizes
    phases: dict[str, Judgement]
    """By their names, in their order."""

    @property
    def judged(self) -> Judgement:
        """All of it."""
        return sum(self.phases.values(), Judgement(()))

    @property
    def spilled(self) -> int:
        """Requests of bursts that the second node served."""
        return self.phases[BURST].served_by(SECOND)

    @property
    def returned(self) -> int:
        """Requests after bursts that the first node served."""
        return self.phases[QUIET_AFTER].served_by(FIRST)


def model_in(folder: Path) -> str:
    """A made-up model's source."""
    return f"file://{write_llama(folder / 'model', SHAPE, seed=1)}"


def promise(cell: MixedCell, source: str, requests: Requests, note: Callable[[str], None]) -> Sizes:
    """Deploy, measure on both nodes, and deploy again with an SLO that follows. Nothing is loaded
    then.
    """
    cell.deploy(source, PATIENT)
    note(f"measure a profile on {FIRST}")
    first = cell.measured(FIRST)
    note(f"measure a profile on {SECOND}")
    second = cell.measured(SECOND)
    found = sizes(first, second, requests)
    cell.deploy(source, found.slo)
    return found


def run(
    cell: MixedCell,
    sized: Sizes,
    *,
    rounds: int,
    quiet_requests: int,
    seed: int,
    note: Callable[[str], None],
) -> Run:
    """A quiet phase, then rounds of a burst and a quiet phase each."""
    draw = random.Random(seed)
    phases = {name: Judgement(()) for name in (QUIET_BEFORE, BURST, QUIET_AFTER)}

    def phase(name: str, calls: list[Call]) -> None:
        note(f"{name}: {len(calls)} requests")
        answers = offer(cell.address, calls)
        cell.check_alive()
        phases[name] += judge(calls, answers)

    phase(QUIET_BEFORE, quiet(NAME, sized, quiet_requests, draw))
    for _ in range(rounds):
        phase(BURST, burst(NAME, sized, draw))
        phase(QUIET_AFTER, quiet(NAME, sized, quiet_requests, draw))
        note("wait until the second node is idle")
        cell.wait_for("the second node to be idle", cell.second_is_idle, PARKED_S_MAX)
    return Run(sizes=sized, phases=phases)
