"""Offers a cell of an OpenVINO node and a vLLM node bursts that the first cannot compute alone.

Shadow validation sends what is too much for the first node to the second, and the quiet after each
burst comes back. The client times every token. The last line is one JSON object: `met_share` is of
the tokens of admitted requests, `spilled` counts requests of bursts that the second node served,
`returned` those after bursts that the first one did.
"""

import random
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from statistics import median
from typing import Annotated

from bench.cells import local_cell, measured_profile, wait_until
from bench.harness import Report, Table, show_status
from bench.judging import Judged, Judgement, judge
from mesh.cli.cell import LocalCell
from mesh.cli.cell_plan import NodePlan
from mesh.compute.times import Times
from mesh.domain.deployment import DeploymentSpec, Scaling
from mesh.domain.errors import InvalidInput
from mesh.domain.ids import DeploymentName, NodeId
from mesh.domain.lifecycle import InstanceState
from mesh.domain.limits import CellLimits
from mesh.domain.node_rule import DEFAULT_RULE
from mesh.domain.profile import Profile
from mesh.domain.reasons import DeviceKind
from mesh.domain.slo import Slo
from mesh.evaluation.load_client import Call, offer
from mesh.request.shadow import LOOKAHEAD_TOKENS
from mesh.wire.client import MeshClient
from tests.support.tiny_model import LlamaShape, write_llama

FIRST_BATCH = 12
"""Requests that the first node can give their tokens in time, if it is as quick as it was."""
BURST_OVER_FIRST = 2.0
BURST_S = 1.0
QUIET_GAP_S = 1.0
SECOND_SLOWER = 2.0
OUTPUT_TOKENS = (64, 112)
"""The least and the most."""
TOKEN_IDS = range(2, 250)


@dataclass(frozen=True, slots=True, kw_only=True)
class Requests:
    """How long they are, and when their first tokens are due."""

    prompt_tokens: int
    served_s: float
    """That the first node is busy at least with a full batch of them."""
    ttft_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    slo: Slo
    prompt_tokens: int
    output_tokens: int
    first_batch: int
    """Requests at once with which the nodes can keep the TPOT SLO."""
    second_batch: int
    burst: int
    """Requests."""


def sizes(first: Profile, second: Profile, requests: Requests) -> Sizes:
    """Raises InvalidInput where no burst is too much for the first node."""
    prompt_tokens = requests.prompt_tokens
    quickest_s = Times(first).decode_s(FIRST_BATCH, prompt_tokens)
    least, most = OUTPUT_TOKENS
    output_tokens = min(max(ceil(requests.served_s / quickest_s), least), most)
    # The longest mean context that shadow validation reckons with.
    context = prompt_tokens + output_tokens + LOOKAHEAD_TOKENS
    first_s = _decode_s(first, FIRST_BATCH, context)
    tpot_s = max(first_s, SECOND_SLOWER * _decode_s(second, 1, context))
    first_batch = _batch(first, context, tpot_s)
    burst = ceil(BURST_OVER_FIRST * first_batch)
    if first_batch >= CellLimits().batch_max:
        raise InvalidInput(
            f"the first node decodes {first_batch} requests within {tpot_s:.3f} s, as many as an "
            "instance takes: shadow validation would not refuse the next one",
            hint="the second node is too slow beside it: give that one a quicker machine",
        )
    return Sizes(
        slo=Slo(ttft_s=requests.ttft_s, tpot_s=tpot_s),
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        first_batch=first_batch,
        second_batch=_batch(second, context, tpot_s),
        burst=burst,
    )


def _decode_s(profile: Profile, batch: int, context: int) -> float:
    return Times(profile, DEFAULT_RULE.overestimate).decode_s(batch, context)


def _batch(profile: Profile, context: int, tpot_s: float) -> int:
    batches = range(1, CellLimits().batch_max + 1)
    return max((b for b in batches if _decode_s(profile, b, context) <= tpot_s), default=0)


def quiet(deployment: DeploymentName, sized: Sizes, count: int, draw: random.Random) -> list[Call]:
    """One after the other."""
    return [_call(deployment, sized, n * QUIET_GAP_S, draw) for n in range(count)]


def burst(deployment: DeploymentName, sized: Sizes, draw: random.Random) -> list[Call]:
    """All of them within BURST_S, in the order of their times."""
    at_s = sorted(draw.uniform(0.0, BURST_S) for _ in range(sized.burst))
    return [_call(deployment, sized, at, draw) for at in at_s]


def _call(deployment: DeploymentName, sized: Sizes, at_s: float, draw: random.Random) -> Call:
    return Call(
        at_s=at_s,
        deployment=deployment,
        slo=sized.slo,
        prompt_tokens=tuple(draw.choice(TOKEN_IDS) for _ in range(sized.prompt_tokens)),
        output_tokens=sized.output_tokens,
    )


NAME = DeploymentName("chat")
FIRST, SECOND = "openvino", "vllm"
"""Names of the nodes, and of their engines. The first is the fuller one, which is tried first."""
MEMORY_BYTES = {FIRST: 2 * 2**30, SECOND: 4 * 2**30}
CONTEXT_TOKENS = 256
KEEP_ALIVE_S = 2.0
PATIENT = Slo(ttft_s=60.0, tpot_s=5.0)
"""Until there is a profile to promise by."""


@contextmanager
def mixed_cell(root: Path) -> Iterator["MixedCell"]:
    """With its state, and a model store of its own, under `root`. Raises MeshError when a part of
    it does not do its.
    """
    (root / "store").mkdir()
    nodes = [
        NodePlan(name=name, device=DeviceKind.CPU, engine=name, memory_bytes=memory_bytes)
        for name, memory_bytes in MEMORY_BYTES.items()
    ]
    with local_cell(home=root, nodes=nodes, threads=1) as cell:
        yield MixedCell(cell)


class MixedCell:
    """While it runs."""

    def __init__(self, cell: LocalCell) -> None:
        self.address = cell.address
        self.cell = cell

    def deploy(self, source: str, slo: Slo) -> None:
        """With nothing loaded; instead of what is deployed."""
        spec = DeploymentSpec(
            name=NAME,
            source=source,
            context_tokens_max=CONTEXT_TOKENS,
            slo=slo,
            scaling=Scaling(replicas_max=2, keep_alive_s=KEEP_ALIVE_S),
            devices=(DeviceKind.CPU,),
        )
        with MeshClient(self.address) as client:
            if client.list():
                client.delete(NAME)
                wait_until(
                    lambda: not any(node.instances for node in client.nodes()),
                    "its instances have not gone",
                    cell=self.cell,
                )
            client.deploy(spec)

    def measured(self, node_id: str, note: Callable[[str], None]) -> Profile:
        """Measure the deployment's model on a node: its profile."""
        return measured_profile(self.address, NAME, note, NodeId(node_id))

    def second_is_idle(self) -> bool:
        """Whether the second node's instance has given its KV cache back, or has gone."""
        with MeshClient(self.address) as client:
            states = {str(i.node_id): i.state for i in client.get(NAME).instances}
        return states.get(SECOND) in (None, InstanceState.PARKED)


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
    """Deploy, measure on both nodes at once, as they will compute, and deploy again with an SLO
    that follows. Nothing is loaded then.
    """
    cell.deploy(source, PATIENT)
    note("measure a profile on both")
    with ThreadPoolExecutor() as pool:
        first, second = pool.map(lambda name: cell.measured(name, note), (FIRST, SECOND))
    found = sizes(first, second, requests)
    cell.deploy(source, found.slo)
    return found


def phased(
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
        cell.cell.check_alive()
        phases[name] += judge(calls, answers)

    phase(QUIET_BEFORE, quiet(NAME, sized, quiet_requests, draw))
    for _ in range(rounds):
        phase(BURST, burst(NAME, sized, draw))
        phase(QUIET_AFTER, quiet(NAME, sized, quiet_requests, draw))
        note("wait until the second node is idle")
        wait_until(cell.second_is_idle, "the second node is not idle", PARKED_S_MAX, cell=cell.cell)
    return Run(sizes=sized, phases=phases)


TARGET = 0.99
"""The share of the tokens of admitted requests that is to be in time."""
HEADINGS = ("PHASE", "NODE", "REQUESTS", "TOKENS", "IN TIME", "TTFT_P50_S", "TOKENS/S")


def rows(made: Run) -> list[tuple[str, ...]]:
    """By phase, in their order, and node; last those of a phase that were refused."""
    found = []
    for phase, judged in made.phases.items():
        nodes = sorted({each.answer.node_id for each in judged.all}, key=lambda n: (not n, n))
        for node_id in nodes:
            mine = [each for each in judged.all if each.answer.node_id == node_id]
            found.append((phase, node_id or "refused", *_numbers(mine)))
    return found


def _numbers(of: Sequence[Judged]) -> tuple[str, ...]:
    """How quickly tokens followed a request's first one is told in the median."""
    came = [each.answer.tokens_s for each in of if each.answer.tokens_s]
    tokens = sum(map(len, came))
    if not tokens:
        return (str(len(of)), "0", "-", "-", "-")
    paces = [(len(s) - 1) / (s[-1] - s[0]) for s in came if s[-1] > s[0]]
    return (
        str(len(of)),
        str(tokens),
        f"{sum(each.met_tokens for each in of) / tokens:.1%}",
        f"{median(s[0] for s in came):.2f}",
        f"{median(paces) if paces else 0.0:.1f}",
    )


def figures(made: Run) -> dict[str, object]:
    judged, slo = made.judged, made.sizes.slo
    return {
        "requests": judged.requests,
        "admitted": len(judged.admitted),
        "refused": len(judged.refused),
        "refused_by_reason": judged.refused_by_reason,
        "torn": len(judged.torn),
        "met_share": round(judged.met_tokens_share, 4),
        "spare_s_least": round(judged.spare_s_least, 3),
        "spilled": made.spilled,
        "returned": made.returned,
        "after_bursts": made.phases[QUIET_AFTER].requests,
        "ttft_slo_s": slo.ttft_s,
        "tpot_slo_s": round(slo.tpot_s, 4),
    }


QUIET_REQUESTS = 6
REQUESTS = Requests(prompt_tokens=64, served_s=4.0, ttft_s=8.0)


def report(made: Run) -> Report:
    sizes, judged = made.sizes, made.judged
    slo = (
        f"TTFT {sizes.slo.ttft_s:g} s, TPOT {sizes.slo.tpot_s:.3f} s: by its profile {FIRST} keeps "
        f"that for {sizes.first_batch} requests at once, {SECOND} for {sizes.second_batch}; "
        f"{sizes.burst} in a burst, of {sizes.prompt_tokens} and {sizes.output_tokens} tokens"
    )
    met = (
        f"{judged.met_tokens_share:.2%} of the tokens in time (≥ {TARGET:.0%}), the tightest with "
        f"{judged.spare_s_least:.2f} s to spare; {made.spilled} requests spilled over; "
        f"{made.returned} of {made.phases[QUIET_AFTER].requests} came back"
    )
    table = Table(headings=HEADINGS, rows=rows(made), words=2)
    return Report(figures=figures(made), shown=(slo, table, met), surveyed=True)


def run(*, rounds: Annotated[int, "bursts"] = 6, seed: int = 1) -> Report:
    with tempfile.TemporaryDirectory() as folder, mixed_cell(Path(folder)) as cell:
        sized = promise(cell, model_in(Path(folder)), REQUESTS, show_status)
        made = phased(
            cell,
            sized,
            rounds=rounds,
            quiet_requests=QUIET_REQUESTS,
            seed=seed,
            note=show_status,
        )
    return report(made)
