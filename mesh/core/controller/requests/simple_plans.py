"""Plans that need no search: a refusal, a label, a release once places have been looked for.

A plan may be about what has gone meanwhile. Then nothing of it happens, and the journal has whose
fault it is. Before: `search` and `plan_books`, which have the plans of a policy. After: `ending`.
"""

from mesh.core.controller.requests.ending import RETRY_AFTER_S, refuse
from mesh.core.controller.state.context import EventContext
from mesh.core.controller.state.instance import InstanceEntry
from mesh.core.controller.state.request import RequestEntry
from mesh.domain.lifecycle import RequestState
from mesh.domain.reasons import PolicyFaultKind
from mesh.policy.plans import Label, Plan, Refuse, Release
from mesh.policy.views import InstanceView


def carry_out(ctx: EventContext, plan: Plan, request: RequestEntry | None) -> None:
    """Carry out a plan that is no place; of those that are, it is noted that there is no such place
    for the request, or that no request asks.
    """
    match plan:
        case Refuse():
            _refuse(ctx, plan)
        case Release():
            ctx.defer_release(plan)
        case Label():
            _label(ctx, plan)
        case _:
            asks = f"no place for {request.request_id}" if request else "no request asks for it"
            not_in_books(ctx, plan, asks)


def _refuse(ctx: EventContext, plan: Refuse) -> None:
    """Refuse a request that waits and has no promise."""
    request = ctx.cell.requests.get(plan.request.request_id)
    if request is not plan.request or request is None or request.state is not RequestState.QUEUED:
        not_in_books(ctx, plan, f"{plan.request.request_id} does not wait")
    elif request.accepted:
        not_in_books(ctx, plan, f"{request.request_id} has been promised its deadlines")
    else:
        message = plan.message or f"policy {ctx.policy.name!r} has no place for it"
        refuse(ctx, request, plan.why, message, retry_after_s=RETRY_AFTER_S)


def _label(ctx: EventContext, plan: Label) -> None:
    """Remember a label with its instance."""
    instance = known(ctx, plan.instance)
    if instance is None:
        not_in_books(ctx, plan, f"there is no instance {plan.instance.instance_id}")
    else:
        instance.note_label(plan.label)


def known(ctx: EventContext, view: InstanceView) -> InstanceEntry | None:
    """The entry that a view is of, if it is in the books still."""
    instance = ctx.cell.instances.get(view.instance_id)
    return instance if instance is view else None


def not_in_books(ctx: EventContext, plan: Plan, message: str) -> None:
    """Note that a plan is about what there is not."""
    ctx.policy.fault(PolicyFaultKind.NOT_IN_BOOKS, type(plan).__name__, message)
