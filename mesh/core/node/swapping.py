"""Swapping on a node: weights go off the device and come back, one instance's at a time.

After each event, unless a swap is under way, the turn rule chooses the instance to swap, where
weights come whole among those whose KV cache is not being resized. It may use the node's memory
without KV caches, those included that wait to come or to grow: they begin as soon as weights have
made room. Before: the node core. After: `Engine.swap`, and what came of it, told by a heartbeat.
"""

from math import inf
from typing import cast

from mesh.core.node import instances
from mesh.core.node.context import NodeEventContext
from mesh.core.node.iterations import broken
from mesh.core.node.local_instance import LocalInstance, LocalState
from mesh.core.node.state import LocalNode
from mesh.domain.actions import SwapWeights
from mesh.domain.node_events import StepBroke, SwapFinished
from mesh.domain.values import replace
from mesh.policy.rules.rounds import WorkingWeights
from mesh.policy.rules.swapping import BEHIND_S, SwapRule, wanted

FAILURES_MAX = 3
"""Swaps of an instance that fail in a row: then it is unloaded, and its requests go elsewhere."""


def decide(ctx: NodeEventContext, node: LocalNode, margin_s: float) -> None:
    """Have the next weights go off the device or come back, if the rule wants that, and tell the
    cell, whose validations reckon with it.
    """
    if _begin_next(ctx, node, margin_s):
        ctx.report(node.heartbeat(ctx.now_s))


def _begin_next(ctx: NodeEventContext, node: LocalNode, margin_s: float) -> bool:
    """Begin the next swap, if the rule wants one and none is under way; returns whether it has."""
    rule = cast(SwapRule, node.turns)  # Checked when the link opens, where any are swapped.
    if not node.rule.swap_bytes:
        return False
    instances.begin_waiting(ctx, node)
    if node.swapping is not None:
        return False
    ready = [i for i in node.instances.values() if i.state is LocalState.READY]
    free_bytes = node.pool_bytes()
    if free_bytes >= 0 and not any(i.out and i.requests for i in ready) and node.survey is None:
        return False
    may = [_weights(ctx, node, each, margin_s) for each in ready if node.moves_beside_resize(each)]
    found = wanted(rule, may, free_bytes)
    if found is None:
        return False
    node.begin_swap(found, ctx.now_s)
    ctx.engine(SwapWeights(instance_id=found.instance_id, share=found.share))
    return True


def _weights(
    ctx: NodeEventContext, node: LocalNode, instance: LocalInstance, margin_s: float
) -> WorkingWeights:
    assert instance.footprint is not None, "it is loaded"
    care = node.rule.overestimate
    run_queue = instance.run_queue(ctx.now_s, margin_s, node.slowdown, care)
    due_s = inf if run_queue is None else run_queue.first_due_s
    if due_s == inf and instance.promising:
        due_s = instance.best_effort_since_s + BEHIND_S
    survey = node.survey
    asked = survey is not None and survey.operation_id is not None
    measured = asked and survey is not None and survey.instance is instance
    if run_queue is not None and node.shows_all:
        node.place(run_queue, ctx.now_s)
    return WorkingWeights(
        instance_id=instance.instance_id,
        weights_bytes=instance.footprint.weights_bytes,
        share=instance.here,
        due_s=ctx.now_s if measured else due_s,
        may_go=node.stepping != instance.instance_id,
        queue=run_queue,
    )


def finished(ctx: NodeEventContext, node: LocalNode, event: SwapFinished, margin_s: float) -> None:
    """Weights are where they were to go, or where they were; the next swap begins at once."""
    instance = node.end_swap(ctx.now_s, failed=bool(event.error))
    if instance is None:
        return
    if instance.state is LocalState.UNLOADING:
        instances.start_unload(ctx, node, instance)
    elif instance.swap_failures >= FAILURES_MAX:
        broke = StepBroke(instance_id=event.instance_id, error=event.error, message=event.message)
        broken(ctx, node, instance, broke)
    else:
        end(ctx, node)
        _begin_next(ctx, node, margin_s)
        beat = node.heartbeat(ctx.now_s)
        whole_s = instance.take_copied_s()
        if whole_s is not None and instance.footprint is not None:
            weights_bytes = instance.footprint.weights_bytes
            node.note_copied(weights_bytes, whole_s)
            beat = replace(beat, swapped_bytes=weights_bytes, swapped_s=whole_s)
        ctx.report(beat)


def end(ctx: NodeEventContext, node: LocalNode) -> None:
    """If the controller swaps nothing, instances that are out go: they could not compute."""
    message = "its controller does not swap weights any more"
    for instance in node.instances.values():
        if instance.out and instance.state is LocalState.READY and not node.rule.swap_bytes:
            name = instance.instance_id
            broke = StepBroke(instance_id=name, error="Unavailable", message=message)
            broken(ctx, node, instance, broke)
