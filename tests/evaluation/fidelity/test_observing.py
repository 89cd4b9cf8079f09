"""What is read off a node's journal: what was disturbed, what waited for its lane, what came."""

import pytest

from mesh.domain.actions import NodeAction, SendReport, StartStep
from mesh.domain.ids import DeploymentName, InstanceId, RequestId
from mesh.domain.messages import (
    InstanceGone,
    KvResized,
    ResizeKv,
    SubmitRequest,
    TokensReport,
    UnloadInstance,
)
from mesh.domain.node_events import CommandReceived, HeartbeatDue, NodeEvent, StepFinished
from mesh.domain.request import Request, RequestOrder, RequestTokens, SamplingParams
from mesh.domain.slo import Slo
from mesh.evaluation.fidelity.observing import AT_ONCE_S, Observed, Observer
from mesh.runtime.journal import Decision
from tests.core.cells import step_result

ONE, TWO = InstanceId("i-1"), InstanceId("i-2")
STEP = StartStep(instance_id=ONE, prefill=256)


def decided(now_s: float, event: NodeEvent, *actions: NodeAction) -> Decision:
    return Decision(now_s=now_s, event=event, actions=actions)


def beat(rss_bytes: int = 0, engine_bytes: int = 0) -> HeartbeatDue:
    return HeartbeatDue(rss_bytes=rss_bytes, engine_bytes=engine_bytes)


def stepped(elapsed_s: float, batch: int = 2) -> StepFinished:
    result = step_result(
        decode_batch=batch, context_tokens=100 * batch, kv_blocks_used=0, elapsed_s=elapsed_s
    )
    return StepFinished(instance_id=ONE, result=result)


def submitted(name: str, prompt: tuple[int, ...], age_s: float) -> CommandReceived:
    order = RequestOrder(
        request=Request(
            request_id=RequestId(name),
            deployment=DeploymentName("chat"),
            prompt_tokens=prompt,
            sampling=SamplingParams(max_tokens=4),
        ),
        attempt=1,
        slo=Slo(),
        due_in_s=2.0,
        age_s=age_s,
    )
    return CommandReceived(command=SubmitRequest(instance_id=ONE, order=order))


def observe(*decisions: Decision) -> Observed:
    return Observer().run(decisions)


def test_an_iteration_lasts_from_its_turn_to_the_decision_on_it() -> None:
    seen = observe(decided(1.0, beat(), STEP), decided(1.5, stepped(0.4), STEP))
    (step,) = seen.steps
    assert (step.began_s, step.took_s, step.engine_s, step.alone) == (1.0, 0.5, 0.4, True)
    assert (step.shape.decode_batch, step.shape.decode_context_tokens) == (2, 100)


def test_an_iteration_beside_a_resize_is_not_undisturbed() -> None:
    resize = ResizeKv(instance_id=ONE, kv_blocks=9)
    seen = observe(
        decided(1.0, beat(), STEP),
        decided(1.25, beat(), resize),
        decided(1.5, stepped(0.4), STEP),
        decided(1.6, KvResized(instance_id=ONE, kv_blocks=9, elapsed_s=0.0625)),
        decided(2.0, stepped(0.4), STEP),
        decided(2.5, stepped(0.4)),
    )
    assert [step.alone for step in seen.steps] == [False, False, True]
    assert [resize.took_s for resize in seen.resizes] == [0.0625]


def test_an_unload_counts_from_when_the_engine_is_free_for_it() -> None:
    seen = observe(
        decided(1.0, beat(), STEP),
        decided(1.25, beat(), UnloadInstance(instance_id=TWO)),
        decided(2.0, stepped(0.9)),
        decided(2.5, InstanceGone(instance_id=TWO)),
    )
    assert [unload.took_s for unload in seen.unloads] == [0.5]


def test_memory_is_remembered_at_its_highest() -> None:
    seen = observe(decided(1.0, beat(9, 5)), decided(2.0, beat(7, 6)))
    assert (seen.rss_bytes_max, seen.engine_bytes_max) == (9, 6)


def test_only_requests_that_did_not_wait_tell_of_the_way() -> None:
    seen = observe(
        decided(3.0, submitted("r-1", (1, 2), 0.001)),
        decided(4.0, submitted("r-2", (3, 4), 2 * AT_ONCE_S)),
    )
    assert seen.submitted_s == {RequestId("r-1"): 3.0}


@pytest.mark.parametrize("count", [1, 3])
def test_tokens_are_dated_by_their_report(count: int) -> None:
    outputs = RequestTokens(
        request_id=RequestId("r-1"), attempt=1, first_index=0, token_ids=(7,) * count, text=""
    )
    report = SendReport(report=TokensReport(instance_id=ONE, outputs=(outputs,)))
    seen = observe(decided(5.0, stepped(0.1), report), decided(6.0, stepped(0.1), report))
    assert seen.tokens_s == {RequestId("r-1"): [5.0] * count + [6.0] * count}
