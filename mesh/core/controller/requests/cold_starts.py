"""Requests that no loaded instance takes: which load each of them waits for, and what it is told.

A load is promised only to a request that will be in time by it, its place in the lane of its node
and the load's own time included. Where that fails for the sake of the load alone, as for the first
caller of a deployment at zero, the request may be taken late, if its deployment wants that and
nobody else pays for it; it is told at once by how much. Before: `queueing`, for those it could not
place. After: `submitting`, which promises, and the end of the load, when they are placed.
"""

from collections.abc import Iterator
from itertools import chain

from mesh.core.controller.instances.kv_cache import blocks_for_load, room_for
from mesh.core.controller.instances.lifecycle import (
    may_start,
    search_start,
    start_instance,
)
from mesh.core.controller.instances.offer import Offer
from mesh.core.controller.instances.placement import MARGIN_SHARE, NoRoom, StartSearch, Wanted
from mesh.core.controller.instances.pricing import Price
from mesh.core.controller.requests.deadlines import latest_start_s
from mesh.core.controller.requests.ending import refuse_all_queued
from mesh.core.controller.requests.fairness import note_overtaken
from mesh.core.controller.requests.joining import in_time
from mesh.core.controller.requests.plan_books import joined
from mesh.core.controller.requests.submitting import promise, submit
from mesh.core.controller.state.context import EventContext
from mesh.core.controller.state.deployment import DeploymentEntry
from mesh.core.controller.state.instance import InstanceEntry
from mesh.core.controller.state.node import NodeEntry
from mesh.core.controller.state.request import RequestEntry
from mesh.domain.lifecycle import InstanceState, RequestState
from mesh.domain.reasons import RefusalReason, Verdict
from mesh.domain.slo import ColdStart
from mesh.domain.units import format_bytes
from mesh.policy.plans import Plan, Start

TRIES_MAX = 4
"""Waiting requests of a deployment that an event tries in vain one after the other, for a place or
for a load, before the others wait for the next one.
"""


def find_loads(ctx: EventContext, entry: DeploymentEntry) -> None:
    """Promise loads to those who wait, under way or begun for them."""
    if not ctx.policy.promises:
        _load_for_all(ctx, entry)
        return
    waiting = [request for request in entry.queue if request.waits_for is None]
    tries = TRIES_MAX
    for request in waiting:
        if not tries or not ctx.validations_left or _tries_estimate(entry, request):
            return
        if not _find_load(ctx, entry, request):
            if request not in entry.queue:
                return  # all of them were refused
            tries -= 1


def _find_load(ctx: EventContext, entry: DeploymentEntry, request: RequestEntry) -> bool:
    """Whether one is promised to the request now."""
    if _look(ctx, entry, request):
        return True
    if request.accepted or request not in entry.queue or not _may_be_late(ctx, entry, request):
        return False
    return _look(ctx, entry, request, late=True)


def _look(
    ctx: EventContext, entry: DeploymentEntry, request: RequestEntry, *, late: bool = False
) -> bool:
    """Try loads that are under way, and starts, in the order in which the policy has them; loaded
    instances too, where it has asked for starts before them.
    """
    search = _search(ctx, entry, request, late=late)
    deferred = not late and request.original.request_id in ctx.deferred
    joins = enumerate(chain(_loaded(entry) if deferred else (), _loading(ctx, entry)))
    offer = search.offer(joins) if search else Offer(ctx=ctx, entry=entry, joins=joins)
    for plan in ctx.policy.places(request, offer):
        if request.state is not RequestState.QUEUED:
            return False
        if isinstance(plan, Start):
            found = search.take(plan) if search else None
            if search and found:
                return _promise(ctx, found, late=late)
            if search and search.stopped:
                break
        elif _join(ctx, entry, plan, request, offer, late=late):
            return True
    if search is None or request.state is not RequestState.QUEUED:
        return False
    rest = search.rest()
    if isinstance(rest, Price):
        return _promise(ctx, rest, late=late)
    if isinstance(rest, NoRoom) and not late:
        _refuse_in_vain(ctx, entry, rest)
    return False


def _search(
    ctx: EventContext, entry: DeploymentEntry, request: RequestEntry, *, late: bool
) -> StartSearch | None:
    """Where another instance could start for the request. One for a request that will be late is
    the first of its deployment, where memory is free, or where idle instances can go and no other
    load is promised.
    """
    if not may_start(ctx, entry) or (late and entry.replicas()):
        return None

    def free() -> list[NodeEntry]:
        nodes = ctx.cell.nodes.values()
        return [node for node in nodes if _has_free_lane_or_room(ctx, entry, request, node)]

    wanted = Wanted(by=request, late=late)
    return search_start(ctx, entry, among=free if late else None, wanted=wanted)


def _promise(ctx: EventContext, price: Price, *, late: bool) -> bool:
    grace_s = _late_s(ctx, price.wanted_by, price.first_token_s) if late else 0.0
    promise(ctx, price, grace_s)
    return True


def _join(
    ctx: EventContext,
    entry: DeploymentEntry,
    plan: Plan,
    request: RequestEntry,
    offer: Offer,
    *,
    late: bool,
) -> bool:
    """Submit the request to a loaded instance, or promise it a load that is under way."""
    instance = joined(ctx, plan, request, offer)
    if instance is None:
        return False
    room = room_for(ctx, entry, instance, request)
    if room is None:
        request.refusals.note_no_room()
        return False
    if instance.is_loaded:
        if not in_time(ctx, entry, plan, instance, request):
            return False
        note_overtaken(ctx, instance.node, request)
        submit(ctx, entry, request, instance, room)
        entry.dequeue(request)
        return True
    late_too = late or request.accepted
    price = Price(ctx, plan, entry, instance.node, instance, request, room, late=late_too)
    verdict = price.verdict()
    if verdict is not Verdict.PASSES:
        request.refusals.note(verdict)
        return False
    return _promise(ctx, price, late=late)


def _loaded(entry: DeploymentEntry) -> Iterator[InstanceEntry]:
    return (i for i in entry.candidates if i.takes_now and not i.is_full)


def _loading(ctx: EventContext, entry: DeploymentEntry) -> Iterator[InstanceEntry]:
    for instance in entry.instances.values():
        loads = instance.state is InstanceState.LOADING and instance.takes_requests
        if loads and not instance.is_full and ctx.validations_left:
            yield instance


def _may_be_late(ctx: EventContext, entry: DeploymentEntry, request: RequestEntry) -> bool:
    """Whether nothing but a load keeps the request from being in time: none of its deployment is
    loaded, alone it would be in time, and it has just come. One that has waited for room first
    would take it from those who need not be late.
    """
    waited = ctx.now_s - request.arrival_s > ctx.limits.place_retry_s
    if waited or request.slo.cold_start is not ColdStart.LATE:
        return False
    loaded = any(instance.is_loaded for instance in entry.instances.values())
    return not loaded and latest_start_s(ctx, entry, request) >= request.arrival_s


def _has_free_lane_or_room(
    ctx: EventContext, entry: DeploymentEntry, request: RequestEntry, node: NodeEntry
) -> bool:
    if not any(i.state is InstanceState.LOADING and not i.ahead for i in node.instances.values()):
        return True
    deployment = entry.deployment
    assert deployment is not None
    footprint = node.footprint_of(deployment)
    least, _ = blocks_for_load(ctx, entry, (request,), footprint)
    return footprint.instance_bytes(least) <= node.free_bytes_for(deployment)


def _late_s(ctx: EventContext, request: RequestEntry, first_token_s: float) -> float:
    """By how much it is told to be late, with a margin: loads take longer as often as not."""
    margin_s = MARGIN_SHARE * (first_token_s - ctx.now_s)
    return max(first_token_s + margin_s - request.due_s, 0.0)


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
    if coming < len(entry.queue) and may_start(ctx, entry):
        found = start_instance(ctx, entry, wanted=Wanted(by=entry.queue[0]))
        if isinstance(found, NoRoom):
            _refuse_in_vain(ctx, entry, found)


def _refuse_in_vain(ctx: EventContext, entry: DeploymentEntry, lacking: NoRoom) -> None:
    """No node could ever hold an instance: nobody needs to wait for one."""
    if not entry.instances and lacking.in_vain and lacking.largest_bytes:
        message = (
            f"{entry.spec.name!r} needs {format_bytes(lacking.needed_bytes)} on a node; "
            f"the largest has {format_bytes(lacking.largest_bytes)}"
        )
        hint = "lower spec.context_tokens_max, or start a node with more --memory"
        refuse_all_queued(ctx, entry, RefusalReason.MEMORY_FULL, message, hint=hint)
