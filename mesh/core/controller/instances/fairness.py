"""Who may overtake whom: a request that a node could not compute in time is not starved by others.

A later request that fits may be computed first, but only so often: from then on a node that could
keep the earlier one's SLO by itself takes nobody who came later, until that one has its place. One
whose load is over was promised the node's time, late or not: nobody who came later is before it.
`pricing` asks before it validates, and `requests.submitting` tells when it has placed.
"""

from mesh.core.controller.instances.node_schedule import in_time_alone
from mesh.core.controller.state.context import EventContext
from mesh.core.controller.state.instance import InstanceEntry
from mesh.core.controller.state.node import NodeEntry
from mesh.core.controller.state.request import RequestEntry
from mesh.domain.reasons import Verdict


def must_give_way(ctx: EventContext, node: NodeEntry, request: RequestEntry) -> bool:
    """Whether an earlier request was promised the node's time, or has been overtaken often enough
    that the node could compute in time, if it had nothing else to do. Best effort gives way to all
    others that no load was promised to and whose deployments the node suits.
    """
    if request.slo.best_effort:
        return any(
            not waiting.slo.best_effort and waiting.waits_for is None
            for deployment in ctx.cell.with_queues()
            if node.suits(deployment.spec)
            for waiting in deployment.queue
        )
    return any(
        earlier.waits_for is not None
        or (
            earlier.overtaken >= ctx.limits.overtaken_max
            and in_time_alone(instance, earlier, ctx.now_s, ctx.limits)
        )
        for earlier, instance in _earlier(ctx, node, request)
    )


def note_overtaken(ctx: EventContext, node: NodeEntry, request: RequestEntry) -> None:
    """The request gets a place on the node, before those that came earlier."""
    for earlier, _ in _earlier(ctx, node, request):
        earlier.note_overtaken(ctx.limits.overtaken_max)


def _earlier(
    ctx: EventContext, node: NodeEntry, request: RequestEntry
) -> list[tuple[RequestEntry, InstanceEntry]]:
    """Requests that came before this one and wait because the node could not compute them in time,
    of all deployments that are loaded there, with their instances. Who is promised a load waits for
    that, and for the node only once it is over and has left it time for the decodes.
    """
    found: list[tuple[RequestEntry, InstanceEntry]] = []
    for instance in node.instances.values():
        owner = ctx.cell.deployments.get(instance.deployment)
        if owner is None or not owner.queue or not instance.takes_now:
            continue
        for waiting in owner.queue:
            if waiting.rank >= request.rank:
                break
            said = waiting.refusals
            if not said.verdict or said.short_of_memory or instance.is_full:
                continue
            waits_here = said.verdict is not Verdict.TPOT_EXCEEDED and waiting.waits_for is instance
            if waits_here or waiting.waits_for is None:
                found.append((waiting, instance))
    return found
