"""When waiting has become pointless, and what the client is told then: why, and when to come again.

A request waits as long as the policy sees a way for it (`requests.outlook`). What a place has time
for is looked at for the whole queue at once. As soon as no way is left, it is refused, with the
time at which a place is expected. One that was accepted has a promise, and nobody waits for longer
than any request may.
"""

from dataclasses import dataclass, replace
from itertools import islice
from math import inf

from mesh.core.controller.instances.node_schedule import without_time_on
from mesh.core.controller.requests.ending import refuse
from mesh.core.controller.requests.outlook import Outlook, latest_start_s, too_long
from mesh.core.controller.requests.search import Search
from mesh.core.controller.state.context import EventContext
from mesh.core.controller.state.deployment import DeploymentEntry
from mesh.core.controller.state.request import RequestEntry
from mesh.domain.ids import RequestId
from mesh.domain.reasons import RefusalReason, Verdict
from mesh.policy.plans import Shortage

RETRY_S_LEAST, RETRY_S_MOST = 0.5, 60.0
"""Clients that are refused for want of a place are told to come again after a time within these
bounds.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cause:
    """Why a request is refused: what the place that is nearest to taking it lacks."""

    reason: RefusalReason
    loaded: bool = True
    """The place is an instance that is there."""


NO_PLACE = Cause(reason=RefusalReason.QUEUE_TIMEOUT)
"""Every instance is full and no further one may start, or none was tried."""
LOOKED_AT = 8
"""This many requests of a queue that are looked at together cost what the validation of one
does.
"""


def refuse_past_deadline(outlook: Outlook) -> None:
    """Refuse the requests in the deployment's queue that the policy does not have wait on."""
    ctx, entry = outlook.ctx, outlook.entry
    # Behind a head that was TPOT_EXCEEDED none of its class was tried: it holds for any length.
    heads: dict[str, RequestEntry] = {}
    for request in entry.queue:
        if request.waits_for is None:
            heads.setdefault(request.slo.name, request)
    untried = [name for name, head in heads.items() if stops_queue(head)]
    causes: dict[str, Cause] = {}
    for request in list(entry.queue):
        best_effort = request.slo.best_effort
        most_s = request.slo.ttft_s if best_effort else ctx.limits.queue_wait_s_max
        waited_out = ctx.now_s - request.waits_since_s >= most_s
        if request.waits_for is not None and not (waited_out and request.waits_for.is_loaded):
            continue
        name = request.slo.name
        if name in untried and request.refusals.verdict is None and not request.has_own_slo:
            request.refusals.note(Verdict.TPOT_EXCEEDED)
        of = outlook.of(request)
        waits: bool | Shortage = not waited_out
        if waits and not (request.accepted or best_effort):
            waits = ctx.policy.waits(request, of)
        if waits is True:
            outlook.note_waits()
            continue
        if isinstance(waits, Shortage):
            request.refusals.note(waits)
        causes[name], message = _why(ctx, outlook, request, causes.get(name))
        reason = causes[name].reason
        if too_long(ctx, request):
            too_slow = latest_start_s(ctx, request) == -inf
            raises = "raise its SLO" if request.has_own_slo else "raise spec.slo.tpot_s"
            remedy = raises if too_slow else "shorten the prompt, or raise its SLO"
            refuse(ctx, request, reason, message, hint=f"no node is quick enough: {remedy}")
        elif reason is RefusalReason.LOAD_FAILED:
            retry_s = max(entry.pause_left_s(ctx.now_s), RETRY_S_LEAST)
            refuse(ctx, request, reason, message, retry_after_s=retry_s)
        else:
            expected_s, interval_s = outlook.place_or_load_s(), outlook.interval_s
            return_at_s = entry.note_return_at(
                expected_s, interval_s, now_s=ctx.now_s, wait_s_max=RETRY_S_MOST
            )
            retry_s = max(return_at_s - ctx.now_s, RETRY_S_LEAST)
            refuse(ctx, request, reason, message, retry_after_s=retry_s)


def stops_queue(head: RequestEntry) -> bool:
    """Whether what it was refused for holds for all of its class behind it, which may want fewer
    answers.
    """
    exceeded = head.refusals.verdict is Verdict.TPOT_EXCEEDED
    return exceeded and not head.has_own_slo and not head.mates


def without_time(ctx: EventContext, entry: DeploymentEntry) -> frozenset[RequestId]:
    """The waiting requests for which no loaded instance will have time unless another request ends,
    with those of their class ahead of them computed first. Only the first of a long queue are
    looked at: so many that all of it costs no more than the validations that are left to the event.
    """
    if not ctx.policy.promises:
        return frozenset()
    looks = sum(instance.takes_now for instance in entry.candidates)
    most = LOOKED_AT * (ctx.validations_left // max(looks, 1))
    waiting = (r for r in entry.queue if r.waits_for is None and not r.has_own_slo)
    by_class: dict[str, list[RequestEntry]] = {}
    for request in islice(waiting, most):
        if not request.slo.best_effort:
            by_class.setdefault(request.slo.name, []).append(request)
    found: list[RequestEntry] = []
    for left in by_class.values():
        for instance in entry.candidates:
            if not left:
                break
            if not instance.takes_now:
                continue
            ctx.note_validations(-(-len(left) // LOOKED_AT))
            left = without_time_on(instance, left, now_s=ctx.now_s, limits=ctx.limits)
        found += left
    return frozenset(request.original.request_id for request in found)


def _why(
    ctx: EventContext, outlook: Outlook, request: RequestEntry, before: Cause | None
) -> tuple[Cause, str]:
    """What it is refused for, and in words. `before`: what the one before it was."""
    entry, waited = outlook.entry, f"{ctx.now_s - request.queued_at_s:.1f} s"
    if not outlook.has_node():
        if request.attempt:
            message = f"its node was lost, and no other came up within {waited}"
            return Cause(reason=RefusalReason.NODE_LOST), message
        return Cause(reason=RefusalReason.NO_NODE), f"no node came up within {waited}"
    if entry.load_failures and not entry.replicas():
        message = f"not loaded within {waited}: {entry.load_error}"
        return Cause(reason=RefusalReason.LOAD_FAILED), message
    if request.refusals.last is Verdict.POLICY:
        return Cause(reason=RefusalReason.POLICY), request.refusals.message
    if too_long(ctx, request):
        never = latest_start_s(ctx, request) == -inf
        late = RefusalReason.TPOT_EXCEEDED if never else RefusalReason.FIRST_TOKEN_LATE
        cause = Cause(reason=late)
    else:
        cause = (before if not ctx.looks_left else None) or _cause(ctx, outlook, request)
    return cause, _words(entry, request, cause, waited)


def _cause(ctx: EventContext, outlook: Outlook, request: RequestEntry) -> Cause:
    """What the cheapest place lacks. Each is asked as if the request came this moment, for that has
    nothing to do with how long it has waited. Where one would take it then, it has waited for too
    long; it is refused for what its last try found where that place would be in time even so, or
    where no place was looked at.
    """
    entry, new = outlook.entry, request.as_if_now(ctx.now_s)
    late = ctx.policy.may_be_late(new, outlook.of(new, new.due_s - request.due_s))
    joins = [instance for instance in entry.instances.values() if instance.takes_requests]
    nodes = ctx.cell.nodes.values if ctx.may_start(entry) else None
    search = Search(ctx=ctx, entry=entry, request=request, late=late, joins=joins, among=nodes)
    price = search.cheapest(new)
    if price is None:
        return NO_PLACE
    if price.room is None:
        return Cause(reason=RefusalReason.MEMORY_FULL, loaded=price.instance is not None)
    if price.validated:
        price = replace(price, request=request, late=False)
        price.look(request)
    verdict = price.seen.verdict if price.seen is not None else Verdict.PASSES
    if verdict is Verdict.PASSES:
        if request.refusals.last is None:
            return NO_PLACE
        verdict = request.refusals.last
    return Cause(reason=RefusalReason(verdict))


def _words(entry: DeploymentEntry, request: RequestEntry, cause: Cause, waited: str) -> str:
    slo, prompt = request.slo, len(request.original.prompt_tokens)
    match cause.reason:
        case RefusalReason.FIRST_TOKEN_LATE:
            limit = f"{slo.ttft_limit_s(prompt):.3g} s"
            return f"its first token would come after its limit, {limit} for {prompt} tokens"
        case RefusalReason.DELAYS_RUNNING:
            return "it would make a request late that came before it"
        case RefusalReason.TPOT_EXCEEDED:
            name = repr(entry.spec.name)
            return f"there is no time left to give {name} its tokens every {slo.tpot_s:.3g} s"
        case RefusalReason.MEMORY_FULL:
            where = "for its KV cache" if cause.loaded else "on a node"
            return f"no memory came free {where} within {waited}"
        case _:
            return f"no place came free within {waited}"
