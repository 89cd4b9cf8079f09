"""Proactive defragmentation (LLM-Mesh §7.1): smaller neighbours give an instance their memory.

Their requests move to other nodes with their tokens so far, each only where shadow validation finds
that every token stays in time, its own included: an instance of their deployment, or a new one on
a node that has room. If one finds no such place, nothing moves. Before: a request, or a running
instance, for which there is no memory. After: it has it.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from mesh.core.controller.instances.kv_cache import room_for
from mesh.core.controller.instances.lifecycle import start
from mesh.core.controller.instances.offer import Offer, released
from mesh.core.controller.instances.placement import StartSearch, Wanted
from mesh.core.controller.instances.pricing import Price
from mesh.core.controller.instances.reservations import let_go
from mesh.core.controller.requests.ending import abort_on_node
from mesh.core.controller.requests.submitting import submit, wait_for
from mesh.core.controller.state.context import EventContext
from mesh.core.controller.state.deployment import DeploymentEntry
from mesh.core.controller.state.instance import InstanceEntry
from mesh.core.controller.state.request import RequestEntry
from mesh.domain.ids import NodeId, RequestId
from mesh.domain.lifecycle import InstanceState
from mesh.domain.reasons import Verdict
from mesh.policy.plans import Join
from mesh.policy.room import freed_bytes


@dataclass(slots=True, kw_only=True, eq=False)
class _Moves:
    """Where displaced requests are to go.

    Room was found for each by itself. Two moves may count on unloading idle instances of the same
    deployment, on different nodes, of which its minimum keeps one: the second request is queued.
    """

    placed: list[tuple[RequestEntry, InstanceEntry]] = field(default_factory=list)
    started: list[tuple[RequestEntry, Price]] = field(default_factory=list)
    """Those for whom an instance is to be loaded."""

    def to(self, instance: InstanceEntry) -> list[RequestEntry]:
        return [request for request, target in self.placed if target is instance]

    def takes_more(self, instance: InstanceEntry) -> bool:
        """Only one instance of a node grows for them, and none does where one is to be loaded."""
        node = instance.node
        others = [target.node for _, target in self.placed if target is not instance]
        loading = [price.node.node_id for _, price in self.started]
        return node not in others and node.node_id not in loading


def preempt(ctx: EventContext, instance: InstanceEntry, missing_bytes: int) -> bool:
    """Have neighbours of the instance give up so much memory with what idles, which is promised at
    once; False when that cannot be, and nothing moves.
    """
    if missing_bytes <= 0:
        return False

    def may_move(other: InstanceEntry) -> bool:
        return may_be_preempted(ctx, other)

    offer = Offer(ctx=ctx, entry=ctx.cell.deployments.get(instance.deployment), may_move=may_move)
    for releases in ctx.policy.relieve(instance, missing_bytes, offer):
        taken = released(ctx, instance, releases, may_move)
        idle = [other for other in offer.idle(instance) if other not in taken]
        if taken and freed_bytes([*taken, *idle]) >= missing_bytes and displace(ctx, taken):
            return True
    return False


def displace(ctx: EventContext, taken: Sequence[InstanceEntry]) -> bool:
    """Have instances of a node go whose requests get other places, where each is in time; False
    when one has none, and nothing moves. Requests whose new instance has to be loaded first are
    queued.
    """
    moves = _plan(ctx, taken, taken[0].node.node_id)
    if moves is None:
        return False
    for request, target in moves.placed:
        _move(ctx, request, target)
    for request, price in moves.started:
        _move_to_new(ctx, request, price)
    for victim in taken:
        let_go(ctx, victim)
    return True


def may_be_preempted(ctx: EventContext, instance: InstanceEntry) -> bool:
    """Whether an instance serves, nothing and nobody wants it to stay, and none of its requests has
    been moved too often.
    """
    owner = ctx.cell.deployments.get(instance.deployment)
    if instance.state is not InstanceState.READY or owner is None:
        return False
    if instance.profiling or instance.expected:
        return False
    most = ctx.limits.preempted_max
    if any(request.migration is not None for request in instance.requests.values()):
        return False
    often = any(request.evictions >= most for request in instance.requests.values())
    above_minimum = owner.replicas() > owner.spec.scaling.replicas_min
    return bool(instance.requests) and not often and above_minimum


def _plan(ctx: EventContext, taken: Sequence[InstanceEntry], away_from: NodeId) -> _Moves | None:
    """Where all requests of the victims go, none of them on their node; None if one has no place.
    An instance is loaded only for a victim's only request: the start of one is validated for one.
    """
    moves = _Moves()
    for victim in taken:
        owner = ctx.cell.deployments[victim.deployment]
        for request in sorted(victim.requests.values(), key=_by_deadline):
            if not ctx.validations_left:
                return None
            if _place(ctx, owner, request, moves, away_from):
                continue
            if len(victim.requests) > 1 or not _start(ctx, owner, request, moves, away_from):
                return None
    return moves


def _by_deadline(request: RequestEntry) -> tuple[float, RequestId]:
    return request.due_s, request.original.request_id


def _place(
    ctx: EventContext,
    owner: DeploymentEntry,
    request: RequestEntry,
    moves: _Moves,
    away_from: NodeId,
) -> bool:
    """Plan the move to a loaded instance on another node, as the policy has it."""
    joins = enumerate(_open(ctx, owner, moves, away_from))
    offer = Offer(ctx=ctx, entry=owner, joins=joins)
    for plan in ctx.policy.places(request, offer):
        instance = offer.last
        if not isinstance(plan, Join) or instance is None or plan.instance is not instance:
            continue
        others = moves.to(instance)
        if room_for(ctx, owner, instance, request, others) is None:
            continue
        price = Price(ctx, plan, owner, instance, request, beside=others, moves=True)
        if price.verdict() is Verdict.PASSES:
            moves.placed.append((request, instance))
            return True
    return False


def _open(
    ctx: EventContext, owner: DeploymentEntry, moves: _Moves, away_from: NodeId
) -> Iterator[InstanceEntry]:
    """Loaded instances on other nodes that may take one more of those that move."""
    for instance in owner.candidates:
        full = instance.free_places <= len(moves.to(instance))
        if full or not instance.takes_now or instance.node.node_id == away_from:
            continue
        if moves.takes_more(instance) and ctx.validations_left:
            yield instance


def _start(
    ctx: EventContext,
    owner: DeploymentEntry,
    request: RequestEntry,
    moves: _Moves,
    away_from: NodeId,
) -> bool:
    """Plan the move to a new instance on a node that no other of them goes to; none starts in the
    pause after a failed load.
    """
    if ctx.now_s < owner.paused_until_s:
        return False
    taken = [away_from, *(target.node.node_id for _, target in moves.placed)]
    taken += [price.node.node_id for _, price in moves.started]
    nodes = [node for node in ctx.cell.nodes.values() if node.node_id not in taken]
    wanted = Wanted(by=request, moves=True)
    found = StartSearch(ctx, owner, wanted, waiting=lambda: (request,), among=lambda: nodes).run()
    if not isinstance(found, Price):
        return False
    moves.started.append((request, found))
    return True


def _move(ctx: EventContext, request: RequestEntry, target: InstanceEntry) -> None:
    owner = _leave(ctx, request)
    room = room_for(ctx, owner, target, request)
    if room is None:  # an idle instance beside it has to stay now; see `_Moves`
        ctx.enqueue(owner, request)
    else:
        submit(ctx, owner, request, target, room)


def _move_to_new(ctx: EventContext, request: RequestEntry, price: Price) -> None:
    owner, node, room = _leave(ctx, request), price.node, price.room
    ctx.enqueue(owner, request)
    if room and all(node.may_go(node.instances[instance_id]) for instance_id in room.reclaim):
        wait_for(ctx, owner, request, start(ctx, price))


def _leave(ctx: EventContext, request: RequestEntry) -> DeploymentEntry:
    abort_on_node(ctx, request)
    request.note_evicted()
    return ctx.cell.deployments[request.original.deployment]
