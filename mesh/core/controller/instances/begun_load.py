"""How long a load that begins is expected to take: beside what its node will compute meanwhile.

That is for whom it computes, and for those who waited for what has just been loaded; who comes
meanwhile is not known. Promises rest on more (`loading_lane`). Before: `reservations`, which begins
loads. After: what people are told, and whether that held.
"""

from mesh.compute.times import Times
from mesh.core.controller.state.context import EventContext
from mesh.core.controller.state.instance import InstanceEntry
from mesh.core.controller.state.node import NodeEntry


def begun_load_s(ctx: EventContext, instance: InstanceEntry) -> float:
    """Seconds, as likely more as less."""
    owner, node = ctx.cell.deployments.get(instance.deployment), instance.node
    if owner is None or owner.deployment is None:
        return instance.load_s
    return ctx.cell.expectations.estimate_s(
        node.hello,
        instance.footprint.weights_bytes,
        node.tier_of(owner.deployment, of=instance),
        computes_s=_computes_s(node, ctx.now_s),
    )


def _computes_s(node: NodeEntry, now_s: float) -> float:
    """For how long the node has work, beside a load."""
    return node.load_slowdown * sum(_work_s(i, now_s) for i in node.instances.values())


def _work_s(instance: InstanceEntry, now_s: float) -> float:
    """Of an instance's requests, and of those who get their place on it now."""
    coming = instance.expected if instance.is_loaded else {}
    requests = [*instance.requests.values(), *coming.values()]
    if not requests or instance.profile is None:
        return 0.0
    times = Times(instance.profile, instance.correction.factor(now_s))
    prompts = (r.prefill_left or (0 if r.instance else r.tokens) for r in requests)
    prefill_s = sum(times.prefill_s(tokens, 0) for tokens in prompts if tokens)
    decodes = max(r.original.sampling.max_tokens - len(r.output_tokens) for r in requests)
    context = sum(r.tokens for r in requests) / len(requests)
    return prefill_s + decodes * times.decode_s(len(requests), context)
