"""Proactive defragmentation (LLM-Mesh §7.1): smaller neighbours give an instance their memory.

Their requests move to other nodes with their tokens so far, each only where shadow validation finds
that every token stays in time, its own included: an instance of their deployment, or a new one on
a node that has room. If one finds no such place, nothing moves. Before: a request, or a running
instance, for which there is no memory. After: it has it.
"""

from collections.abc import Iterable, Iterator, Sequence

from mesh.core.controller.instances.open_options import OpenOptions, checked_releases
from mesh.core.controller.instances.pricing import Price, going_to
from mesh.core.controller.instances.reservations import unload_loaded
from mesh.core.controller.requests.ending import abort_on_node, evict_best_effort
from mesh.core.controller.requests.search import Search, StartNodes
from mesh.core.controller.requests.submitting import promise, submit
from mesh.core.controller.state.context import EventContext
from mesh.core.controller.state.deployment import DeploymentEntry
from mesh.core.controller.state.instance import InstanceEntry
from mesh.core.controller.state.node import NodeEntry
from mesh.core.controller.state.request import RequestEntry
from mesh.domain.ids import RequestId
from mesh.domain.lifecycle import InstanceState
from mesh.policy.room import freed_bytes


def preempt(ctx: EventContext, instance: InstanceEntry, missing_bytes: int) -> bool:
    """Have neighbours of the instance give up so much memory with what idles, which is promised at
    once; False when that cannot be, and nothing moves.
    """
    if missing_bytes <= 0:
        return False

    def may_move(other: InstanceEntry) -> bool:
        return may_be_preempted(ctx, other)

    options = OpenOptions(
        ctx=ctx, entry=ctx.cell.deployments.get(instance.deployment), may_move=may_move
    )
    for releases in ctx.policy.relieve(instance, missing_bytes, options):
        taken = checked_releases(ctx, instance, releases, may_move)
        idle = [other for other in options.idle(instance) if other not in taken]
        if taken and freed_bytes([*taken, *idle]) >= missing_bytes and move_and_unload(ctx, taken):
            return True
    return False


def move_and_unload(
    ctx: EventContext, taken: Sequence[InstanceEntry], to: InstanceEntry | None = None
) -> bool:
    """Have instances of a node go whose requests get other places, where each is in time; False
    when one has none, and nothing moves. Best effort is queued, and so are requests whose new
    instance has to be loaded first. `to`: the only instance that they may join; none is loaded for
    them then.
    """
    moves = _plan(ctx, taken, to)
    if moves is None:
        return False
    for move in sorted(moves, key=lambda move: move.instance is None):
        _move(ctx, move)
    for victim in taken:
        while victim.best_effort:
            evict_best_effort(ctx, victim)
        unload_loaded(ctx, victim)
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
    others = (r for r in instance.requests.values() if not r.slo.best_effort)
    often = any(request.evictions >= most for request in others)
    above_minimum = owner.replicas() > owner.spec.scaling.replicas_min
    return bool(instance.requests) and not often and above_minimum


def _plan(
    ctx: EventContext, taken: Sequence[InstanceEntry], to: InstanceEntry | None
) -> list[Price] | None:
    """Where all requests of the victims go, none of them on their node; `None` if one has no place.
    An instance is loaded only for a victim's only request: the start of one is validated for one.

    Room is found for each by itself. Two moves may count on unloading idle instances of the same
    deployment, on different nodes, of which its minimum keeps one: the second request is queued.
    """
    moves: list[Price] = []
    for victim in taken:
        owner = ctx.cell.deployments[victim.deployment]
        for request in sorted(victim.requests.values(), key=_by_deadline):
            if request.slo.best_effort:
                continue
            alone = to is None and len(victim.requests) == 1
            among = owner.candidates if to is None else (to,)
            move = _place(ctx, owner, request, moves, among, alone=alone)
            if move is None:
                return None
            moves.append(move)
    return moves


def _by_deadline(request: RequestEntry) -> tuple[float, RequestId]:
    return request.due_s, request.original.request_id


def _place(
    ctx: EventContext,
    owner: DeploymentEntry,
    request: RequestEntry,
    moves: Sequence[Price],
    among: Iterable[InstanceEntry],
    *,
    alone: bool,
) -> Price | None:
    """The move to one of these instances on another node, as the policy has it, or, of one that is
    `alone` on its instance, to a new one on a node that no other of them goes to. None starts in
    the pause after a failed load.
    """
    assert request.instance is not None, "it runs"
    away_from = request.instance.node

    def nodes() -> list[NodeEntry]:
        taken = [away_from, *(move.node for move in moves)]
        return [node for node in ctx.cell.nodes.values() if node not in taken]

    starts = alone and ctx.now_s >= owner.paused_until_s
    search = Search(
        ctx=ctx,
        entry=owner,
        request=request,
        before=moves,
        joins=_open(among, moves, away_from),
        start_nodes=StartNodes(nodes) if starts else None,
    )
    return search.first()


def _open(
    among: Iterable[InstanceEntry], moves: Sequence[Price], away_from: NodeEntry
) -> Iterator[InstanceEntry]:
    """Loaded instances on other nodes that may take one more of those that move. Only one instance
    of a node grows for them, and none does where one is to be loaded.
    """
    for instance in among:
        full = instance.free_places <= len(going_to(instance, moves))
        if full or not instance.takes_now or instance.node is away_from:
            continue
        others = any(m.node is instance.node and m.instance is not instance for m in moves)
        if not others:
            yield instance


def _move(ctx: EventContext, move: Price) -> None:
    """A request goes to its place, or is queued for the instance that is loaded for it."""
    owner, instance, request = move.entry, move.instance, move.wanted_by
    abort_on_node(ctx, request)
    request.note_evicted()
    room = move.room_now()
    if instance is not None and room is not None:
        submit(ctx, owner, request, instance, room)
        return
    ctx.enqueue(owner, request)
    if room is not None:
        promise(ctx, move)
