"""What a policy has in mind for the cell as a whole, and who is to go: its `upkeep` and releases.

A plan may be about what has gone meanwhile, or about what no engine here can do. Then nothing of it
happens, and the journal has it. Before: the policy. After: `search`, `preemption`, `migration`.
"""

from collections.abc import Iterator

from mesh.core.controller.instances.kv_cache import park
from mesh.core.controller.instances.kv_transfer import can_carry
from mesh.core.controller.instances.lifecycle import start, unload
from mesh.core.controller.instances.open_options import OpenOptions
from mesh.core.controller.instances.pricing import Price
from mesh.core.controller.requests import migration, preemption
from mesh.core.controller.requests.search import InstanceNeeds, carry_out, known, not_in_books
from mesh.core.controller.state.context import EventContext
from mesh.core.controller.state.request import RequestEntry
from mesh.domain.lifecycle import DeploymentState, InstanceState, RequestState
from mesh.domain.reasons import PolicyFaultKind
from mesh.policy.plans import Carry, How, Label, Move, Plan, Release, Start
from mesh.policy.views import RequestView

UPKEEP_MAX = 16
"""Plans of an upkeep, labels aside, that are carried out at a time; the next one may go on."""


def keep_up(ctx: EventContext) -> None:
    """Carry out what the policy has in mind for the cell as a whole."""
    options = _options(ctx)
    _carry_out_all(ctx, ctx.policy.upkeep(options))


def go_on(ctx: EventContext) -> None:
    """Have requests with their first token go where the policy has them decode."""
    options = _options(ctx)
    for request in ctx.take_begun():
        if request.state is RequestState.RUNNING:
            _carry_out_all(ctx, ctx.policy.first_token(request, options))


def _options(ctx: EventContext) -> OpenOptions:
    return OpenOptions(
        ctx=ctx, may_move=lambda instance: preemption.may_be_preempted(ctx, instance)
    )


def _carry_out_all(ctx: EventContext, plans: Iterator[Plan]) -> None:
    left = UPKEEP_MAX
    for plan in plans:
        match plan:
            case Move():
                _move(ctx, plan)
            case Release():
                release(ctx, plan)
            case Start():
                _start(ctx, plan)
            case _:
                carry_out(ctx, plan, None)
        left -= not isinstance(plan, Label)
        if not left:
            break


def release(ctx: EventContext, plan: Release) -> bool:
    """Have an instance go, or give up its cache. One that serves goes once its requests have moved;
    if they cannot do so while they run, they are computed anew elsewhere.
    """
    instance = known(ctx, plan.instance)
    to = None if plan.to is None else known(ctx, plan.to)
    if instance is None:
        not_in_books(ctx, plan, f"there is no instance {plan.instance.instance_id}")
    elif plan.to is not None and (to is None or to.deployment != instance.deployment):
        message = f"{instance.instance_id} cannot go into {plan.to.instance_id}"
        not_in_books(ctx, plan, message)
    elif instance.node.may_go(instance):
        parks = plan.how is How.PARK and ctx.limits.parked_s_max > 0.0
        if not parks:
            unload(ctx, instance)
        elif instance.state is InstanceState.READY:
            park(ctx, instance)
        return True
    elif plan.how is How.UNLOAD and preemption.may_be_preempted(ctx, instance):
        return migration.migrate_and_drain(ctx, instance, to) or preemption.move_and_unload(
            ctx, [instance], to
        )
    else:
        not_in_books(ctx, plan, f"{instance.instance_id} may not go now")
    return False


def _start(ctx: EventContext, plan: Start) -> None:
    """Load an instance that no request asks for, where there is room for it now."""
    entry = None if plan.deployment is None else ctx.cell.deployments.get(plan.deployment)
    node = ctx.cell.nodes.get(plan.node.node_id)
    if entry is None or entry.deployment is None or node is not plan.node or node is None:
        not_in_books(ctx, plan, f"no {plan.deployment} to start on {plan.node.node_id}")
    elif entry.state not in (DeploymentState.STARTING, DeploymentState.READY):
        not_in_books(ctx, plan, f"{entry.name} is {entry.state.value}")
    elif ctx.may_start(entry) and ctx.takes_another(node, entry):
        waiting = [request for request in entry.queue if request.waits_for is None]
        room = InstanceNeeds(ctx, entry, waiting).room(node)
        if room is not None:
            start(ctx, Price(ctx, plan, entry, node, None, None, room))


def _move(ctx: EventContext, plan: Move) -> None:
    target = known(ctx, plan.to)
    moved = [_running(ctx, request) for request in plan.requests]
    asked = [request for request in moved if request is not None]
    if target is None or len(asked) < len(moved):
        not_in_books(ctx, plan, f"not all of it is there to move to {plan.to.instance_id}")
        return
    sources = [request.instance for request in asked if request.instance is not None]
    if plan.carry is Carry.KV and not all(can_carry(source, target) for source in sources):
        message = f"{target.node.node_id} cannot take KV blocks from each of their nodes"
        ctx.policy.fault(PolicyFaultKind.NO_CAPABILITY, type(plan).__name__, message)
    else:
        migration.begin_all(ctx, asked, target, plan.carry, at_once=plan.at_once)


def _running(ctx: EventContext, view: RequestView) -> RequestEntry | None:
    request = ctx.cell.requests.get(view.request_id)
    runs = request is view and request is not None and request.state is RequestState.RUNNING
    return request if runs else None
