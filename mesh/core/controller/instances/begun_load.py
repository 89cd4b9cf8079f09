"""How long a load that begins is expected to take: beside what its node will compute meanwhile.

That is for whom it computes, and for those who waited for what has just been loaded; who comes
meanwhile is not known. Promises rest on more (`loading_lane`). Before: `reservations`, which begins
loads. After: what people are told, and whether that held.
"""

from mesh.compute.times import Times
from mesh.core.controller.state.context import EventContext
from mesh.core.controller.state.instance import InstanceEntry
from mesh.core.controller.state.node import NodeEntry
from mesh.core.controller.state.request import RequestEntry
from mesh.memory.watermark import expected_tokens


def begun_load_s(ctx: EventContext, instance: InstanceEntry) -> float:
    """Seconds, as likely more as less."""
    owner, node = ctx.cell.deployments.get(instance.deployment), instance.node
    if owner is None or owner.deployment is None:
        return instance.load_s
    tier = node.tier_of(owner.deployment, without=(instance.instance_id,))
    return ctx.cell.expectations.estimate_s(
        node.hello,
        node.load_bytes(instance.footprint.weights_bytes, tier),
        tier,
        computes_s=_computes_s(ctx, node),
    )


def _computes_s(ctx: EventContext, node: NodeEntry) -> float:
    """For how long the node has work, beside a load."""
    return node.load_slowdown * sum(_work_s(ctx, i) for i in node.instances.values())


def _work_s(ctx: EventContext, instance: InstanceEntry) -> float:
    """The work of the requests that an instance has, and of those that get a place on it now, in
    seconds.
    """
    loads = instance.node.station.load_kind(instance.instance_id) is not None
    coming = {} if loads else instance.expected
    requests = [*instance.requests.values(), *coming.values()]
    if not requests or instance.profile is None:
        return 0.0
    times = Times(instance.profile, instance.correction.factor(ctx.now_s))
    prompts = (r.prefill_left or (0 if r.instance else r.tokens) for r in requests)
    prefill_s = sum(times.prefill_s(tokens, 0) for tokens in prompts if tokens)
    decodes = max(_tokens_left(ctx, request) for request in requests)
    context = sum(r.tokens for r in requests) / len(requests)
    return prefill_s + decodes * times.decode_s(len(requests), context)


def _tokens_left(ctx: EventContext, request: RequestEntry) -> int:
    """As its deployment's answers have had lately; one at least."""
    prompt = len(request.original.prompt_tokens)
    owner = ctx.cell.deployments.get(request.deployment)
    whole = expected_tokens(
        prompt,
        len(request.output_tokens) + 1,
        output_tokens_max=request.original.sampling.max_tokens,
        output_tokens_mean=owner.history.mean_tokens if owner else 0.0,
    )
    return max(whole - request.tokens, 1)
