"""What the node core knows of cached KV blocks: the keys that are there, and what requests found.

The engine owns the blocks and says what came and went; the controller is told so that it can place
requests where their beginnings are. Before: iterations, heartbeats, submissions. After: reports.
"""

from mesh.core.node.context import NodeEventContext
from mesh.core.node.local_instance import LocalInstance
from mesh.core.node.state import LocalNode
from mesh.domain.actions import AskPrefixes
from mesh.domain.messages import PrefixesChanged, PrefixMissed
from mesh.domain.node_events import PrefixesTold, SubmitFinished
from mesh.domain.steps import PrefixChange


def submitted(ctx: NodeEventContext, instance: LocalInstance, done: SubmitFinished) -> None:
    """The engine has the request, and has found so much of it. Of what the controller counted on
    some may have gone while it was on its way.
    """
    request = instance.requests.get(done.request_id)
    if request is None or request.order.attempt != done.attempt or request.decodes:
        return
    request.note_prefill_left(request.tokens - request.paused - done.cached_tokens)
    instance.request_changed()
    if done.cached_tokens < request.order.cached_tokens:
        missed = PrefixMissed(
            request_id=done.request_id, attempt=done.attempt, cached_tokens=done.cached_tokens
        )
        ctx.report(missed)


def changed(ctx: NodeEventContext, instance: LocalInstance, change: PrefixChange | None) -> None:
    """Blocks have come to an instance and gone; None: none has."""
    if change is not None:
        instance.cache.note_change(change)
        ctx.report(PrefixesChanged(instance_id=instance.instance_id, change=change))


def ask(ctx: NodeEventContext, node: LocalNode) -> None:
    """What has come and gone beside iterations: by aborts, resizes, and loads of others. What
    unloaded instances left goes so as well.
    """
    if node.left or any(i.cache.in_use for i in node.instances.values()):
        ctx.engine(AskPrefixes())


def told(ctx: NodeEventContext, node: LocalNode, event: PrefixesTold) -> None:
    for instance_id, change in event.changes:
        instance = node.instances.get(instance_id)
        if instance is not None:
            changed(ctx, instance, change)
        elif (left := node.left.get(instance_id)) is not None:
            deployment, cache = left
            cache.note_change(change)
            told_of = PrefixesChanged(instance_id=instance_id, change=change, left_to=deployment)
            ctx.report(told_of)


def tell_left(ctx: NodeEventContext, node: LocalNode) -> None:
    """A new link knows nothing of what unloaded instances have left."""
    for instance_id, (deployment, cache) in node.left.items():
        if cache.digests:
            change = PrefixChange(came=tuple(cache.digests))
            ctx.report(PrefixesChanged(instance_id=instance_id, change=change, left_to=deployment))
