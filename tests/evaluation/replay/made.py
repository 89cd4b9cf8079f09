"""Results as a replay makes them, of made-up outcomes."""

from dataclasses import replace

from mesh.domain.ids import DeploymentName, RequestId
from mesh.domain.outcome import Outcome
from mesh.domain.reasons import FinishReason, RefusalReason
from mesh.domain.slo import Slo
from mesh.evaluation.load_client import NOT_SENT, STOPPED
from mesh.evaluation.replay.results import CallResult
from mesh_workloads.replay_plan import Call, ReplayPlan

SLO = Slo(ttft_s=1.0, ttft_tokens_per_s=1000.0, tpot_s=0.1)


def result(
    number: int,
    *tokens_s: float,
    deployment: str = "chat",
    end: FinishReason | RefusalReason = FinishReason.LENGTH,
    failed: str = "",
    late_s: float = 0.001,
) -> CallResult:
    """A call due, and sent, at second `number`; its tokens so many seconds later."""
    arrival_s = number + late_s
    return CallResult(
        call=Call(
            number=number,
            at_s=float(number),
            deployment=deployment,
            function="f/1",
            input_tokens=10,
            output_tokens=max(len(tokens_s), 1),
        ),
        outcome=Outcome(
            request_id=RequestId(str(number)),
            deployment=DeploymentName(deployment),
            slo=SLO,
            arrival_s=arrival_s,
            input_tokens=10,
            tokens_s=tuple(arrival_s + at_s for at_s in tokens_s),
            ended_s=arrival_s + max(tokens_s, default=0.25),
            end=end,
        ),
        late_s=late_s,
        failed=failed,
    )


RESULTS = (
    result(0, 0.5, 0.6),
    result(1, 0.5, 0.9, 0.95, 1.0, late_s=0.004),
    result(2, 0.5, 1.4, 1.42, 1.43, 1.44, 1.45, 1.46, 1.47, 1.48, 1.49, 1.5),
    result(3, 1.5, 1.55, deployment="code"),
    result(4, end=RefusalReason.MEMORY_FULL, deployment="code"),
    result(5, end=FinishReason.FAILED, failed="unavailable"),
    result(6, end=FinishReason.FAILED, failed=NOT_SENT),
    result(7, 0.5, end=FinishReason.CANCELLED, failed=STOPPED),
)
"""These outcomes are: met; met but for the mean TPOT; met in the mean only; missed; and not
finished.
"""
PLAN = ReplayPlan(
    name="made",
    calls=(*(r.call for r in RESULTS), replace(RESULTS[0].call, number=8, at_s=8.0)),
    duration_s=10.0,
    deployments=("chat", "code", "idle"),
    functions=1,
    forced=True,
    too_long=3,
    clipped=True,
    left_out=2,
)
