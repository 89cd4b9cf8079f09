"""What the node core makes of an iteration: tokens to report, requests that ended or starve."""

from mesh.compute.times import Times
from mesh.core import measuring
from mesh.core.node_state import LocalInstance, LocalNode, LocalRequest, LocalState
from mesh.core.node_turn import NodeTurn
from mesh.domain.actions import StartUnload
from mesh.domain.ids import RequestId
from mesh.domain.messages import RequestReturned, TokensReport
from mesh.domain.node_events import StepBroke, SubmitBroke
from mesh.domain.profile import IterationShape
from mesh.domain.request import RequestTokens
from mesh.domain.steps import StepResult, TokenOutput


def learn(turn: NodeTurn, node: LocalNode, instance: LocalInstance, result: StepResult) -> None:
    """Correct the instance's profile by how long the iteration took, from turn to turn.

    Beside a load it says more about loads than about the model.
    """
    batch = result.decode_batch
    shape = IterationShape(
        prefill_tokens=result.prefill_tokens,
        prefill_past_tokens=result.prefill_past_tokens,
        decode_batch=batch,
        decode_context_tokens=result.context_tokens // batch if batch else 0,
    )
    now_s, correction = turn.now_s, instance.correction
    measured_s = now_s - node.step_started_s
    predicted_s = Times(instance.profile).iteration_s(shape)
    if node.step_beside_load or node.loading():
        corrected_s = predicted_s * correction.factor(now_s)
        node.load_slowdown.observe(measured_s, corrected_s, now_s)
    else:
        correction.observe(measured_s, predicted_s, now_s)


def step_finished(turn: NodeTurn, instance: LocalInstance, result: StepResult, step: int) -> None:
    """Report the tokens of requests that still run; an aborted one's are for nobody."""
    took_part = {r for r, held in instance.requests.items() if held.first_step <= step}
    instance.kv_blocks_used = result.kv_blocks_used
    by_request: dict[RequestId, list[TokenOutput]] = {}
    for token in result.tokens:
        if token.request_id in took_part:
            by_request.setdefault(token.request_id, []).append(token)
    outputs = tuple(
        _outputs(instance.requests[request_id], tokens) for request_id, tokens in by_request.items()
    )
    for output in outputs:
        instance.requests[output.request_id].note_tokens(len(output.token_ids), turn.now_s)
        if output.finish is not None:
            del instance.requests[output.request_id]
    prefill_left = [(r, left) for r, left in result.prefill_left if r in took_part]
    for request_id, tokens in prefill_left:
        instance.requests[request_id].prefill_left = tokens
    starved = tuple(r for r in result.starved if r in took_part and r in instance.requests)
    if result.decode_batch or result.prefill_tokens or not starved:
        instance.promising = True
    turn.report(
        TokensReport(
            instance_id=instance.instance_id,
            outputs=outputs,
            prefill_left=tuple(prefill_left),
            starved=starved,
            correction=instance.correction.factor(turn.now_s),
        )
    )


def _outputs(held: LocalRequest, tokens: list[TokenOutput]) -> RequestTokens:
    return RequestTokens(
        request_id=held.request_id,
        attempt=held.order.attempt,
        first_index=tokens[0].index,
        token_ids=tuple(token.token_id for token in tokens),
        text="".join(token.text for token in tokens),
        finish=tokens[-1].finish,
    )


def step_broke(turn: NodeTurn, node: LocalNode, instance: LocalInstance, broke: StepBroke) -> None:
    """The engine failed in an iteration: the instance cannot be trusted any more.

    The heartbeat says that it serves no more, so that what it gives back does not come again.
    """
    if instance.state is not LocalState.READY:
        return
    instance.state = LocalState.UNLOADING
    instance.error, instance.message = broke.error, broke.message
    turn.report(node.heartbeat(turn.now_s))
    for held in instance.requests.values():
        turn.report(_returned(held, broke.error, broke.message))
    instance.requests.clear()
    measuring.stop(turn, node, instance)
    turn.engine(StartUnload(instance_id=instance.instance_id))


def submit_broke(turn: NodeTurn, instance: LocalInstance, broke: SubmitBroke) -> None:
    """The engine would not take the request; the instance is well."""
    held = instance.requests.get(broke.request_id)
    if held is not None and held.order.attempt == broke.attempt:
        del instance.requests[broke.request_id]
        turn.report(_returned(held, broke.error, broke.message))


def _returned(held: LocalRequest, error: str, message: str) -> RequestReturned:
    return RequestReturned(
        request_id=held.request_id, attempt=held.order.attempt, error=error, message=message
    )
