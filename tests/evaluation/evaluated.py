"""Small evaluations with known numbers."""

from dataclasses import replace

from mesh.domain.energy import EnergySource, EnergyView, together
from mesh.domain.ids import DeploymentName, NodeId, RequestId
from mesh.domain.outcome import Outcome
from mesh.domain.reasons import DeviceKind, FinishReason, RefusalReason
from mesh.domain.slo import Slo
from mesh.evaluation.cell_numbers import CellNumbers, cell_numbers
from mesh.evaluation.paper.evaluation import EvaluatedRun, Evaluation, Reference
from mesh.evaluation.series import NodeSeries

SLO = Slo(ttft_s=2.0, ttft_tokens_per_s=512, tpot_s=0.25)


def outcome(name: str = "f", *, ttft_s: float = 1.0, tokens: int = 3, **changed: object) -> Outcome:
    """The outcome of a request that came at 10 s and got a token every 0.1 s."""
    made = Outcome(
        request_id=RequestId("r"),
        deployment=DeploymentName(name),
        slo=SLO,
        arrival_s=10.0,
        input_tokens=100,
        tokens_s=tuple(10.0 + ttft_s + 0.1 * n for n in range(tokens)),
        ended_s=20.0,
        end=FinishReason.LENGTH,
    )
    return replace(made, **changed)  # type: ignore[arg-type]


def refused(name: str = "f") -> Outcome:
    return outcome(name, tokens=0, end=RefusalReason.MEMORY_FULL)


def series(
    node: str, *, used: tuple[float, ...], decoded: tuple[int, ...] | None = None, loads: int = 0
) -> NodeSeries:
    seconds = len(used)
    return NodeSeries(
        node_id=NodeId(node),
        device=DeviceKind(node.partition("-")[0]),
        memory_bytes=100,
        used=used,
        busy=used,
        computing=used,
        decoded_tokens=decoded or (0,) * seconds,
        weights_bytes=(2_000_000_000,) * seconds,
        kv_held_bytes=(500_000_000,) * seconds,
        requests=(1,) * seconds,
        loads=(loads, *((0,) * (seconds - 1))),
    )


NODES = (
    series("cpu-1", used=(1.0, 0.5, 0.0, 0.0), decoded=(30, 15, 0, 0), loads=1),
    series("gpu-1", used=(1.0, 1.0, 1.0, 1.0), decoded=(100, 100, 100, 100), loads=2),
    series("gpu-2", used=(0.0, 0.0, 0.0, 1.0), decoded=(0, 0, 0, 50)),
)
OUTCOMES = (outcome("a"), outcome("a", ttft_s=2.5, grace_s=1.0), outcome("a"), refused("b"))


def numbers() -> CellNumbers:
    watts = (EnergySource.WATTS,)
    took = EnergyView(sources=watts, busy_j=60.0, requests=3, output_tokens=30)
    return cell_numbers(OUTCOMES, NODES, together((took,)))


def run(
    cell: str = "7B/64", policy: str = "llm-mesh", reference: Reference | None = None
) -> EvaluatedRun:
    return EvaluatedRun(
        cell=cell,
        policy=policy,
        numbers=numbers(),
        reference=reference or Reference(),
        nodes=NODES,
        seconds=1.5,
    )


def evaluation(*runs: EvaluatedRun) -> Evaluation:
    return Evaluation(workload="trace small", duration_s=4.0, runs=runs)
