"""The hops of a first token are what passes between the moments that the journals hold."""

from pathlib import Path

import pytest

from bench.overhead import HOPS, hops_ms
from mesh.domain.events import ControllerEvent, InvokeRequested, NodeReported
from mesh.domain.ids import DeploymentName, InstanceId, RequestId
from mesh.domain.limits import CellLimits, NodeLimits
from mesh.domain.messages import SubmitRequest, TokensReport
from mesh.domain.node_events import CommandReceived, NodeEvent, StepFinished
from mesh.domain.request import Request, RequestOrder, RequestTokens, SamplingParams
from mesh.domain.slo import Slo
from mesh.domain.steps import StepResult
from mesh.evaluation.load_client import Answer
from mesh.policy.registry import DEFAULT_POLICY
from mesh.runtime.journal import ControllerStart, NodeStart, Start, open_journal

R1, I1 = RequestId("r1-1"), InstanceId("i")


def kept(path: Path, start: Start, *told: tuple[float, ControllerEvent | NodeEvent]) -> Path:
    journal = open_journal(path, start)
    for now_s, event in told:
        journal.record(now_s, event, ())
    journal.close()
    return path


def test_hops_are_between_the_moments_of_both_journals(tmp_path: Path) -> None:
    request = Request(
        request_id=R1,
        deployment=DeploymentName("chat"),
        prompt_tokens=(1,),
        sampling=SamplingParams(max_tokens=1),
    )
    order = RequestOrder(
        request=request, attempt=1, slo=Slo(ttft_s=1, tpot_s=1), age_s=0.0, due_in_s=1.0
    )
    outputs = (RequestTokens(request_id=R1, attempt=1, first_index=0, token_ids=(7,), text="x"),)
    result = StepResult(
        outputs=outputs,
        prefill_tokens=1,
        prefill_past_tokens=0,
        decode_batch=0,
        context_tokens=0,
        prefill_left=(),
        starved=(),
        kv_blocks_used=1,
        elapsed_s=0.020,
    )
    report = TokensReport(instance_id=I1, outputs=outputs)
    controller = kept(
        tmp_path / "controller",
        ControllerStart(
            version="0", epoch=1, policy=DEFAULT_POLICY, limits=CellLimits(), deployments=()
        ),
        (10.001, InvokeRequested(request=request)),
        (10.034, NodeReported(link_id=1, report=report)),
    )
    node = kept(
        tmp_path / "node",
        NodeStart(version="0", limits=NodeLimits()),
        (10.003, CommandReceived(command=SubmitRequest(instance_id=I1, order=order))),
        (10.028, StepFinished(instance_id=I1, result=result)),
    )
    answer = Answer(sent_s=10.0, ended_s=0.05, tokens_s=(0.041,), request_id=R1)
    found = hops_ms(controller, node, [answer])
    assert tuple(found) == HOPS
    assert list(found.values()) == pytest.approx([1, 2, 5, 20, 6, 7])
