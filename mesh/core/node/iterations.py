"""What the node core makes of an iteration: tokens to report, requests that ended or starve."""

from mesh.compute.correction import share_trials
from mesh.compute.times import Times
from mesh.core.node import measuring
from mesh.core.node.context import NodeEventContext
from mesh.core.node.energy import shares
from mesh.core.node.instances import cancel, start_unload
from mesh.core.node.local_instance import LocalInstance, LocalState
from mesh.core.node.state import LocalNode
from mesh.domain.ids import RequestId
from mesh.domain.messages import ComputedAhead, InstanceGone, TokensReport
from mesh.domain.node_events import StepBroke, SubmitBroke
from mesh.domain.steps import StepResult


def learn(
    ctx: NodeEventContext, node: LocalNode, instance: LocalInstance, result: StepResult
) -> None:
    """Correct the instance's profile by how long its iterations took, from turn to turn.

    Beside a load, how much loads slow iterations down is learned instead; but for an estimate
    which takes too long even so: that much is known of it. Beside a swap only that is learned.
    Prompts whose log-probabilities are asked for take longer than others, and teach nothing.
    """
    asked = (of.order.request.sampling.prompt_logprobs for of in instance.requests.values())
    if result.prefill_tokens and any(most is not None for most in asked):
        return
    batch = result.decode_batch
    now_s, correction = ctx.now_s, instance.correction
    measured_s = now_s - node.step_started_s
    predicted_s = result.iterations * Times(instance.profile).seconds(
        result.prefill_tokens,
        result.prefill_past_tokens,
        batch,
        result.context_tokens // batch if batch else 0,
    )
    on_trial = correction.trial_left
    quicker = on_trial and measured_s < predicted_s
    if not quicker and node.step_beside_swap:
        return
    if not quicker and (node.step_beside_load or node.loading()):
        corrected_s = predicted_s * correction.factor(now_s)
        node.load_slowdown.observe(measured_s, corrected_s, now_s)
    else:
        shape, each_s = result.shape, measured_s / result.iterations
        factor = correction.factor(now_s - measured_s)
        if not on_trial:
            instance.note_error(measured_s, predicted_s * factor)
            instance.refinement.note(shape, each_s, factor)
        correction.observe(measured_s, predicted_s, now_s, shape)
        if on_trial and not correction.trial_left:
            share_trials(node.instances.values(), now_s)


def tell_refined(ctx: NodeEventContext, node: LocalNode) -> None:
    """Predict by what iterations have told of profiles, and have the cell do so."""
    for instance in node.instances.values():
        factor = instance.correction.factor(ctx.now_s)
        profile = instance.refinement.refined(ctx.now_s, factor)
        if profile is None or instance.state is not LocalState.READY:
            continue
        if instance.profile.measured:
            instance.refine_profile(profile)
        else:
            instance.use_profile(profile)
        ctx.report(instance.tell_profile(ctx.now_s))


def step_finished(
    ctx: NodeEventContext, instance: LocalInstance, result: StepResult, step: int
) -> None:
    """Report the tokens of requests that still run; an aborted one's are for nobody."""
    requests, now_s = instance.requests, ctx.now_s
    instance.note_iteration(result.kv_blocks_used)

    outputs, prompts, left_before = [], [], dict[RequestId, int]()
    meters = ctx.node.energy.meters
    if meters:
        left_before = {name: request.prefill_left for name, request in requests.items()}
    for output in result.outputs:
        request = requests.get(output.request_id)
        if request is not None and request.order.attempt == output.attempt:
            outputs.append(output)
            prompts.append(request.prefill_left)
            request.keep(output)
            request.note_tokens(len(output.token_ids), now_s)
            if output.finish is not None:
                if not ctx.node.linked:
                    ctx.node.note_ended(instance, request, now_s)
                instance.remove(request)
    prefill_left, starved = result.prefill_left, result.starved
    ahead = [
        r
        for r in requests.values()
        if r.paused and r.prefill_left and r.first_step <= step and not r.fetching
    ]
    if prefill_left or starved:
        took_part = {r for r, request in requests.items() if request.first_step <= step}
        prefill_left = tuple([of for of in prefill_left if of[0] in took_part])
        starved = tuple([request_id for request_id in starved if request_id in took_part])
    for request_id, left in prefill_left:
        requests[request_id].note_prefill_left(left)
    busy_s: tuple[float, ...] = ()
    if meters:
        chunks = [max(left_before[request_id] - left, 0) for request_id, left in prefill_left]
        elapsed_s = now_s - ctx.node.step_started_s
        busy_s = shares(elapsed_s, Times(instance.profile), result, prompts, chunks)
    computing = {request_id for request_id, _ in prefill_left}
    ahead = [request for request in ahead if request.request_id not in computing]
    for request in ahead:
        request.note_prefill_left(0)
    _end_pauses(instance, step)
    if result.decode_batch or result.prefill_tokens or not starved:
        instance.encourage()
    ctx.report(
        TokensReport(
            instance_id=instance.instance_id,
            outputs=tuple(outputs),
            prefill_left=prefill_left,
            starved=starved,
            correction=instance.correction.factor(now_s),
            busy_s=busy_s,
        )
    )
    for request in ahead:
        ctx.report(ComputedAhead(request_id=request.request_id, attempt=request.order.attempt))


def _end_pauses(instance: LocalInstance, step: int) -> None:
    """Requests that decode here, and were paused in this iteration of the others, go on."""
    for request in instance.requests.values():
        if request.paused and request.decodes and request.first_step <= step:
            request.go_on((), paused=False, due_s=request.due_s, first_step=step + 1)
            instance.request_changed()


def broken(
    ctx: NodeEventContext, node: LocalNode, instance: LocalInstance, broke: StepBroke | InstanceGone
) -> None:
    """The engine failed in an iteration, so that the instance cannot be trusted any more, or has
    lost it. Both may be told of the same end, and in any order.

    The heartbeat says that it serves no more, so that what it gives back does not come again.
    """
    if instance.state not in (LocalState.LOADING, LocalState.READY):
        return
    instance.note_broken(broke.error, broke.message)
    if instance.state is LocalState.LOADING:
        # It was loaded, and broke before that could be told: it goes as soon as it has been.
        instance.unload_when_loaded()
        return
    requests = instance.unload()
    ctx.report(node.heartbeat(ctx.now_s))
    for request in requests:
        ctx.give_back(request.request_id, request.order.attempt, broke.message, broke.error)
    measuring.stop(ctx, node, instance)
    start_unload(ctx, node, instance)


def submit_broke(ctx: NodeEventContext, instance: LocalInstance, broke: SubmitBroke) -> None:
    """The engine would not take the request; the instance is well."""
    request = instance.requests.get(broke.request_id)
    if request is not None and request.order.attempt == broke.attempt:
        # The engine may hold it, if it would not let it go on.
        cancel(ctx, instance, request)
        ctx.give_back(request.request_id, request.order.attempt, broke.message, broke.error)
