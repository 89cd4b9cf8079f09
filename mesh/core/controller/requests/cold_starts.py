"""Requests that no loaded instance takes: which load each of them waits for, and what it is told.

A load is promised only to a request that will be in time by it, its place in the lane of its node
and the load's own time included. Where that fails for the sake of the load alone, as for the first
caller of a deployment at zero, the request may be taken late, if its deployment wants that and
nobody else pays for it; it is told at once by how much. Before: `queueing`, for those it could not
place. After: `submitting`, which promises, and the end of the load, when they are placed.
"""

from mesh.core.controller.instances.kv_cache import blocks_for_load
from mesh.core.controller.instances.lifecycle import start
from mesh.core.controller.instances.placement import InstanceNeeds, NoRoom
from mesh.core.controller.instances.pricing import Price
from mesh.core.controller.requests.ending import refuse_all_queued
from mesh.core.controller.requests.outlook import Outlook
from mesh.core.controller.requests.preemption import displace, may_be_preempted
from mesh.core.controller.requests.search import Search
from mesh.core.controller.requests.submitting import take
from mesh.core.controller.state.context import EventContext
from mesh.core.controller.state.deployment import DeploymentEntry
from mesh.core.controller.state.node import NodeEntry
from mesh.core.controller.state.request import RequestEntry
from mesh.domain.lifecycle import InstanceState
from mesh.domain.reasons import RefusalReason, Verdict
from mesh.domain.units import format_bytes
from mesh.policy.plans import Start

TRIES_MAX = 4
"""Waiting requests of a deployment that an event tries in vain one after the other, for a place or
for a load, before the others wait for the next one.
"""


def find_loads(ctx: EventContext, entry: DeploymentEntry) -> None:
    """Promise loads to those who wait, under way or begun for them. Under a policy that does not
    promise only those are looked at by themselves for whom it would rather start an instance.
    """
    waiting = [request for request in entry.queue if request.waits_for is None]
    if not ctx.policy.promises:
        waiting = [request for request in waiting if request.request_id in ctx.deferred]
    tries = TRIES_MAX
    for request in waiting:
        if not tries or not ctx.validations_left or _tries_estimate(entry, request):
            break
        if request.follows:
            continue
        if not _find_load(ctx, entry, request):
            if request not in entry.queue:
                break  # all of them were refused
            tries -= 1
    if not ctx.policy.promises and entry.queue:
        _load_for_all(ctx, entry)


def _find_load(ctx: EventContext, entry: DeploymentEntry, request: RequestEntry) -> bool:
    """Whether one is promised to the request now."""
    if _look(ctx, entry, request):
        return True
    if request.slo.best_effort or request.accepted or request not in entry.queue:
        return False
    outlook = Outlook(ctx=ctx, entry=entry).of(request)
    late = ctx.policy.may_be_late(request, outlook)
    if late and _look(ctx, entry, request, late=True):
        return True
    if not _displace_best_effort(ctx, entry, request, late=late and not entry.replicas()):
        return False
    return _look(ctx, entry, request) or (late and _look(ctx, entry, request, late=True))


def _displace_best_effort(
    ctx: EventContext, entry: DeploymentEntry, request: RequestEntry, *, late: bool
) -> bool:
    """Have instances with best effort alone go from a node that lacks memory and nothing else for a
    load, where that makes it fit; whether they do.
    """
    deployment = entry.deployment
    assert deployment is not None
    if request.slo.best_effort or not ctx.may_start(entry):
        return False
    needs = InstanceNeeds(ctx, entry, (request,))
    for node in ctx.cell.nodes.values():
        alone = [i for i in node.instances.values() if 0 < i.batch == len(i.best_effort)]
        alone = [i for i in alone if may_be_preempted(ctx, i)]
        if not alone or not ctx.may_evict or not ctx.may_validate:
            continue
        if not ctx.takes_another(node, entry) or needs.room(node) is not None:
            continue
        footprint, share = node.footprint_of(deployment), node.share_of(deployment)
        least_bytes = footprint.instance_bytes(needs.kv_blocks(node, footprint)[0])
        lacks_bytes = least_bytes - node.free_bytes_for(deployment)
        idle = [i.instance_id for i in node.instances.values() if node.may_go(i)]
        alone.sort(key=lambda i: (i.batch, i.instance_id))
        for count in range(1, len(alone) + 1):
            gone = [*idle, *(i.instance_id for i in alone[:count])]
            if node.station.freed_bytes(gone, share) < lacks_bytes:
                continue
            plan = Start(request=request, node=node)
            price = Price(ctx, plan, entry, node, None, request, late=late)
            if price.verdict() is Verdict.PASSES and displace(ctx, alone[:count]):
                return True
            break
    return False


def _look(
    ctx: EventContext, entry: DeploymentEntry, request: RequestEntry, *, late: bool = False
) -> bool:
    """Try loads that are under way, and starts, in the order in which the policy has them; loaded
    instances too, where it has asked for starts before them, or the request may be `late`. One that
    is loaded for a request that will be late is the first of its deployment, where memory is free,
    or where idle instances can go and no other load is promised.
    """

    def free() -> list[NodeEntry]:
        nodes = ctx.cell.nodes.values()
        return [node for node in nodes if _has_free_lane_or_room(ctx, entry, request, node)]

    may_start = ctx.may_start(entry) and not (late and entry.replicas())
    nodes = free if late or request.slo.best_effort else ctx.cell.nodes.values
    search = Search(
        ctx=ctx,
        entry=entry,
        request=request,
        late=late,
        among=nodes if may_start else None,
    )
    price = search.first()
    if price is not None:
        take(ctx, price)
    elif not late:
        _refuse_in_vain(ctx, entry, search.lacks_room())
    return price is not None


def _has_free_lane_or_room(
    ctx: EventContext, entry: DeploymentEntry, request: RequestEntry, node: NodeEntry
) -> bool:
    loads = any(i.state is InstanceState.LOADING and not i.ahead for i in node.instances.values())
    if not loads and not request.slo.best_effort:
        return True
    if loads and request.slo.best_effort:
        return False
    deployment = entry.deployment
    assert deployment is not None
    footprint = node.footprint_of(deployment)
    least, _ = blocks_for_load(ctx, entry, (request,), footprint)
    return footprint.instance_bytes(least) <= node.free_bytes_for(deployment)


def _tries_estimate(entry: DeploymentEntry, request: RequestEntry) -> bool:
    """Whether time is lacking where the first request of an instance is just showing how far the
    estimate of its times is off.
    """
    return request.refusals.verdict is not None and any(
        instance.takes_now and instance.requests and instance.correction.trial_left
        for instance in entry.instances.values()
    )


def _load_for_all(ctx: EventContext, entry: DeploymentEntry) -> None:
    """Under a policy that does not validate: load another instance for those who wait, unless those
    that load will hold them all.
    """
    loading = (i for i in entry.instances.values() if i.state is InstanceState.LOADING)
    coming = sum(instance.batch_max for instance in loading)
    if coming < len(entry.queue) and ctx.may_start(entry):
        search = Search(
            ctx=ctx,
            entry=entry,
            request=entry.queue[0],
            joins=(),
            among=ctx.cell.nodes.values,
        )
        price = search.first()
        if price is None and _displace_best_effort(ctx, entry, entry.queue[0], late=True):
            ctx.wake(entry.spec.name)
        elif price is not None:
            start(ctx, price)
        else:
            _refuse_in_vain(ctx, entry, search.lacks_room())


def _refuse_in_vain(ctx: EventContext, entry: DeploymentEntry, lacks: NoRoom | None) -> None:
    """No node could ever hold an instance: nobody needs to wait for one."""
    if lacks is not None and not entry.instances and lacks.in_vain and lacks.largest_bytes:
        message = (
            f"{entry.spec.name!r} needs {format_bytes(lacks.needed_bytes)} on a node; "
            f"the largest has {format_bytes(lacks.largest_bytes)}"
        )
        hint = "lower spec.context_tokens_max, or start a node with more --memory"
        refuse_all_queued(ctx, entry, RefusalReason.MEMORY_FULL, message, hint=hint)
