"""Plans against the books: what of a policy's plans can be carried out, and whose fault it is where
that cannot be.

A plan may be about what has gone meanwhile, or about what no engine here can do. Then nothing of it
happens, and the journal has it. Joins and starts are carried out by who asked for them, releases
among `places` once places have been looked for; what comes of `upkeep` is here. Before: the policy.
After: `submitting`, `preemption`, `migration`, `ending`.
"""

from mesh.core.controller.instances.kv_cache import park
from mesh.core.controller.instances.kv_transfer import can_carry
from mesh.core.controller.instances.lifecycle import may_start, start, unload
from mesh.core.controller.instances.offer import Offer
from mesh.core.controller.instances.placement import priced_on
from mesh.core.controller.requests import migration, preemption
from mesh.core.controller.requests.ending import RETRY_AFTER_S, refuse
from mesh.core.controller.state.context import EventContext
from mesh.core.controller.state.instance import InstanceEntry
from mesh.core.controller.state.request import RequestEntry
from mesh.domain.lifecycle import InstanceState, RequestState
from mesh.domain.reasons import PolicyFaultKind
from mesh.policy.plans import Carry, How, Join, Label, Move, Plan, Refuse, Release, Start
from mesh.policy.views import InstanceView, RequestView

UPKEEP_MAX = 16
"""Plans of an upkeep that are carried out at a time."""


def joined(
    ctx: EventContext,
    plan: Plan,
    request: RequestEntry,
    offer: Offer,
    *,
    loaded: bool | None = None,
) -> InstanceEntry | None:
    """The instance that a plan has the request join, which may be done as far as the books go. What
    is not up now, as a start is before all queues were tried, is passed over.
    """
    if request.state is not RequestState.QUEUED:
        return None  # a plan before this one has refused it
    if isinstance(plan, Join) and plan.request is request:
        if plan.instance is offer.last:
            return offer.last  # it was looked at as it was offered, a moment ago
        instance = _known(ctx, plan.instance)
        if instance is None or instance.deployment != request.deployment:
            _not_in_books(ctx, plan, f"{request.request_id} cannot join {_name(plan.instance)}")
        elif instance.takes_requests and not instance.is_full:
            return instance if loaded in (None, instance.is_loaded) else None
    elif isinstance(plan, Refuse):
        _refuse(ctx, plan)
    elif isinstance(plan, Release):
        ctx.wish(plan)
    elif isinstance(plan, Label):
        _label(ctx, plan)
    elif not isinstance(plan, Start):
        _not_in_books(ctx, plan, f"no place for {request.request_id}")
    return None


def keep_up(ctx: EventContext) -> None:
    """Carry out what the policy has in mind for the cell as a whole."""
    offer = Offer(ctx=ctx, may_move=lambda instance: preemption.may_be_preempted(ctx, instance))
    for plan, _ in zip(ctx.policy.upkeep(offer), range(UPKEEP_MAX), strict=False):
        match plan:
            case Move():
                _move(ctx, plan)
            case Release():
                release(ctx, plan)
            case Refuse():
                _refuse(ctx, plan)
            case Start():
                _start(ctx, plan)
            case Label():
                _label(ctx, plan)
            case _:
                _not_in_books(ctx, plan, "no request asks for it")


def release(ctx: EventContext, plan: Release) -> bool:
    """Have an instance go, or give up its cache. One that serves goes once its requests have moved;
    if they cannot do so while they run, they are computed anew elsewhere.
    """
    instance = _known(ctx, plan.instance)
    if instance is None:
        _not_in_books(ctx, plan, f"there is no instance {_name(plan.instance)}")
    elif plan.how is How.SWAP:
        _cannot(ctx, plan, f"{instance.node.node_id} has no swap of weights to its host")
    elif instance.node.may_go(instance):
        parks = plan.how is How.PARK and ctx.limits.parked_s_max > 0.0
        if not parks:
            unload(ctx, instance)
        elif instance.state is InstanceState.READY:
            park(ctx, instance)
        return True
    elif plan.how is How.UNLOAD and preemption.may_be_preempted(ctx, instance):
        return migration.leave(ctx, instance) or preemption.displace(ctx, [instance])
    else:
        _not_in_books(ctx, plan, f"{instance.instance_id} may not go now")
    return False


def _start(ctx: EventContext, plan: Start) -> None:
    """Load an instance that no request asks for, where there is room for it now."""
    entry = None if plan.deployment is None else ctx.cell.deployments.get(plan.deployment)
    node = ctx.cell.nodes.get(plan.node.node_id)
    if entry is None or entry.deployment is None or node is not plan.node or node is None:
        _not_in_books(ctx, plan, f"no {plan.deployment} to start on {plan.node.node_id}")
    elif may_start(ctx, entry) and ctx.takes_another(node, entry):
        price = priced_on(ctx, entry, node, plan)
        if price is not None:
            start(ctx, price)


def _label(ctx: EventContext, plan: Label) -> None:
    instance = _known(ctx, plan.instance)
    if instance is None:
        _not_in_books(ctx, plan, f"there is no instance {_name(plan.instance)}")
    else:
        instance.note_label(plan.label)


def _move(ctx: EventContext, plan: Move) -> None:
    target = _known(ctx, plan.to)
    moved = [_running(ctx, request) for request in plan.requests]
    asked = [request for request in moved if request is not None]
    if target is None or len(asked) < len(moved):
        _not_in_books(ctx, plan, f"not all of it is there to move to {_name(plan.to)}")
        return
    sources = [request.instance for request in asked if request.instance is not None]
    if plan.carry is Carry.KV and not all(can_carry(source, target) for source in sources):
        message = f"{target.node.node_id} cannot take KV blocks from each of their nodes"
        _cannot(ctx, plan, message)
    else:
        migration.begin_all(ctx, asked, target, plan.carry)


def _refuse(ctx: EventContext, plan: Refuse) -> None:
    request = ctx.cell.requests.get(plan.request.request_id)
    if request is not plan.request or request is None or request.state is not RequestState.QUEUED:
        _not_in_books(ctx, plan, f"{plan.request.request_id} does not wait")
    elif request.accepted:
        _not_in_books(ctx, plan, f"{request.request_id} has been promised its deadlines")
    else:
        message = plan.message or f"policy {ctx.policy.name!r} has no place for it"
        refuse(ctx, request, plan.why, message, retry_after_s=RETRY_AFTER_S)


def _running(ctx: EventContext, view: RequestView) -> RequestEntry | None:
    request = ctx.cell.requests.get(view.request_id)
    runs = request is view and request is not None and request.state is RequestState.RUNNING
    return request if runs else None


def _known(ctx: EventContext, view: InstanceView) -> InstanceEntry | None:
    """The entry that a view is of, if it is in the books still."""
    instance = ctx.cell.instances.get(view.instance_id)
    return instance if instance is view else None


def _name(instance: InstanceView) -> str:
    return str(instance.instance_id)


def _not_in_books(ctx: EventContext, plan: Plan, message: str) -> None:
    ctx.policy.fault(PolicyFaultKind.NOT_IN_BOOKS, type(plan).__name__, message)


def _cannot(ctx: EventContext, plan: Plan, message: str) -> None:
    ctx.policy.fault(PolicyFaultKind.NO_CAPABILITY, type(plan).__name__, message)
