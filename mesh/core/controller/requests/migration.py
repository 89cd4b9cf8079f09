"""Live migration (ServerlessLLM §5): a request moves while it runs, and only its tokens travel, or
its KV blocks as well.

The target fetches or computes prompt and output so far while the source goes on, then what came
meanwhile, until that is next to nothing; then both draw tokens, which are the same, and once the
target has as many as the client the source stops. Begun only where shadow validation finds that
nobody gets late by it; whatever fails leaves the request at its source. Before: a drain, or a token
of either place. After: the request runs in the place of its copy.
"""

from collections.abc import Iterable, Iterator, Sequence

from mesh.core.controller.instances.kv_cache import note_longer, room_for
from mesh.core.controller.instances.kv_transfer import transfer_of
from mesh.core.controller.instances.lifecycle import drain
from mesh.core.controller.instances.node_schedule import continues_s, round_s
from mesh.core.controller.instances.pricing import Price, going_to
from mesh.core.controller.requests.ending import abort_on_node, cancel_migration, pause
from mesh.core.controller.requests.submitting import compute_ahead
from mesh.core.controller.state.context import EventContext
from mesh.core.controller.state.instance import InstanceEntry
from mesh.core.controller.state.migration import Migration
from mesh.core.controller.state.node import NodeEntry
from mesh.core.controller.state.request import RequestEntry
from mesh.domain.errors import Unavailable
from mesh.domain.events import MigrationDue
from mesh.domain.lifecycle import InstanceState, MigrationState, NodeState
from mesh.domain.messages import ComputedAhead, ContinueRequest, KvArrived
from mesh.domain.reasons import Verdict
from mesh.domain.request import RequestTokens
from mesh.policy.plans import Carry, Move

BEHIND_SHARE_MAX = 0.5
"""When its source stops, a target may draw behind it by this share of a round of its node."""


def move_soon(ctx: EventContext) -> None:
    """Requests are to move: look for their places, in an event of its own."""
    if ctx.cell.migrations_at_s is None:
        ctx.cell.set_migrations(ctx.now_s)
        ctx.set_timer(ctx.now_s, MigrationDue())


def look_again(ctx: EventContext) -> None:
    """Give up what takes too long, or would go where nothing may go by now; begin what can be
    begun; and come back while there is either.
    """
    for migration in list(ctx.cell.migrations.values()):
        target = migration.copy.instance
        closed = target is None or not target.takes_now
        if closed or ctx.now_s - migration.begun_s > ctx.limits.migration_s_max:
            cancel_migration(ctx, migration)
        elif migration.waits_since(ctx.now_s - ctx.limits.migration_retry_s):
            pause(ctx, migration, paused=False)
    waiting = [request for request in _leaving(ctx) if not _begin(ctx, request)]
    if waiting or ctx.cell.migrations:
        at_s = ctx.now_s + ctx.limits.migration_retry_s
        ctx.cell.set_migrations(at_s)
        ctx.set_timer(at_s, MigrationDue())
    else:
        ctx.cell.set_migrations(None)


def _leaving(ctx: EventContext) -> list[RequestEntry]:
    """Requests on nodes and instances that are to go, and that may be moved once more."""
    instances = [
        instance
        for instance in ctx.cell.instances.values()
        if instance.requests
        and (instance.node.state is NodeState.DRAINING or instance.state is InstanceState.DRAINING)
    ]
    return [
        request
        for instance in instances
        for request in instance.requests.values()
        if request.migration is None and request.moves < ctx.limits.moves_max
    ]


def begin_all(
    ctx: EventContext,
    requests: Sequence[RequestEntry],
    target: InstanceEntry,
    carry: Carry | None = None,
    *,
    at_once: bool = False,
) -> bool:
    """Have requests move to an instance; those that find room and time there begin to."""
    begun = [
        _begin(ctx, request, target, carry, at_once=at_once)
        for request in requests
        if request.migration is None
    ]
    if any(begun):
        move_soon(ctx)
    return all(begun)


def migrate_and_drain(
    ctx: EventContext, instance: InstanceEntry, to: InstanceEntry | None = None
) -> bool:
    """Have an instance go once all that runs on it has moved, to any other or to the one that is
    given; False if one of them finds no room or time there now, beside those before it, and nothing
    moves. One whose room another of them has taken away after all (`_begin_at`) is looked at again.
    From where weights are swapped they go on at once, since the source may not compute for a while,
    and with their KV blocks alone: computed ahead elsewhere they would hold its memory meanwhile.
    """
    requests = list(instance.requests.values())
    if _under_way(ctx, instance.node) + len(requests) > ctx.limits.migrations_max:
        return False
    moves: list[Price] = []
    for request in requests:
        move = _look(ctx, request, to, before=moves)
        if move is None or (instance.node.swaps and move.transfer is None):
            return False
        moves.append(move)
    for move in moves:
        _begin_at(ctx, move, at_once=instance.node.swaps)
    drain(ctx, instance)
    move_soon(ctx)
    return True


def _begin(
    ctx: EventContext,
    request: RequestEntry,
    to: InstanceEntry | None = None,
    carry: Carry | None = None,
    *,
    at_once: bool = False,
) -> bool:
    """Have the first instance that can take it, or that alone which is given, compute a request
    ahead.
    """
    move = _look(ctx, request, to, carry=carry)
    return move is not None and _begin_at(ctx, move, at_once=at_once)


def _look(
    ctx: EventContext,
    request: RequestEntry,
    to: InstanceEntry | None = None,
    before: Sequence[Price] = (),
    carry: Carry | None = None,
) -> Price | None:
    """The first instance that can take a request, or that alone which is given, were those `before`
    it to go where they are to; one that has no token yet has nothing to go on from.
    """
    source, limits = request.instance, ctx.limits
    owner = ctx.cell.deployments.get(request.original.deployment)
    if source is None or owner is None or not request.output_tokens or request.prefill_left:
        return None
    if request.moves >= limits.moves_max or _under_way(ctx, source.node) >= limits.migrations_max:
        return None
    copy = request.copy(ctx.now_s)
    open_ = _open(ctx, owner.candidates if to is None else (to,), request, before)
    for there in open_:
        beside = going_to(there, before)
        room = room_for(ctx, owner, there, copy, beside)
        if room is None or (room.unloads and copy.slo.best_effort):
            continue
        if not ctx.may_validate:
            break
        sent = [move.transfer for move in before if move.transfer is not None]
        transfer = transfer_of(ctx, source, there, copy, carry, sent)
        plan = Move(requests=(copy,), to=there, carry=carry)
        at = owner, there.node, there, copy, room, beside
        price = Price(ctx, plan, *at, moves=True, transfer=transfer)
        if price.verdict() is Verdict.PASSES:
            return price
    return None


def _open(
    ctx: EventContext,
    instances: Iterable[InstanceEntry],
    request: RequestEntry,
    before: Sequence[Price],
) -> Iterator[InstanceEntry]:
    """Loaded instances on other nodes that may compute a request ahead beside those before it."""
    for instance in instances:
        node, beside = instance.node, len(going_to(instance, before))
        takes = instance.takes_now and node.hello.computes_ahead and instance.free_places > beside
        away = request.instance is not None and node is not request.instance.node
        if (
            takes
            and away
            and instance.deployment == request.deployment
            and _under_way(ctx, node) + beside < ctx.limits.migrations_max
        ):
            yield instance


def _begin_at(ctx: EventContext, move: Price, *, at_once: bool = False) -> bool:
    """Have it compute the request ahead. False, and it is looked for again, where two moves counted
    on unloading idle instances of the same deployment, of which its minimum keeps one.
    """
    copy, instance = move.wanted_by, move.instance
    assert instance is not None, "it does not wait for a load"
    room = move.room_now()
    if room is None:
        return False
    request = ctx.cell.requests[copy.original.request_id]
    source = request.instance if move.transfer is not None else None
    compute_ahead(ctx, move.entry, copy, instance, room, source, request.attempt)
    request.note_move()
    state = MigrationState.COMPUTING if source is None else MigrationState.FETCHING
    began = Migration(request=request, copy=copy, begun_s=ctx.now_s, state=state, at_once=at_once)
    ctx.cell.add_migration(began)
    return True


def _under_way(ctx: EventContext, node: NodeEntry) -> int:
    """Migrations to or from a node."""
    return sum(
        any(of.instance is not None and of.instance.node is node for of in (m.request, m.copy))
        for m in ctx.cell.migrations.values()
    )


def kv_arrived(ctx: EventContext, node: NodeEntry, report: KvArrived) -> None:
    """The target has the blocks that it fetched, or some of them, or none: it computes the rest."""
    migration = ctx.cell.migrations.get(report.request_id)
    if migration is None or migration.copy.attempt != report.attempt:
        return
    if migration.state is MigrationState.FETCHING:
        if not report.error:
            node.note_transfer(report.moved_bytes, report.elapsed_s, ctx.now_s)
        elif report.error == Unavailable.__name__:
            node.note_no_transfer(ctx.now_s)
        migration.advance(MigrationState.COMPUTING)
        migration.copy.note_arrived(report.tokens)
        node.touch()
        copy, target = migration.copy, migration.copy.instance
        assert target is not None, "a copy has its place as long as it moves"
        if migration.at_once and copy.prefill_left <= target.footprint.block_tokens:
            # What is left of its last block it computes with its next token.
            migration.advance(MigrationState.CAUGHT_UP)
            tokens_came(ctx, migration)


def computed_ahead(ctx: EventContext, report: ComputedAhead) -> None:
    """The target has computed all that it was sent; the next token of the source decides, unless it
    goes on at once.
    """
    migration = ctx.cell.migrations.get(report.request_id)
    if migration is None or migration.copy.attempt != report.attempt:
        return
    if migration.state is MigrationState.COMPUTING:
        migration.copy.note_prefill_left(0)
        migration.advance(MigrationState.CAUGHT_UP)
        if migration.at_once:
            tokens_came(ctx, migration)


def tokens_came(ctx: EventContext, migration: Migration) -> None:
    """A request that moves has further tokens at its source. The target is sent them if it has
    caught up with those before; where they are few, it draws further ones, beside the source. Until
    it is level with that, the source leaves out an iteration for every other one of the target.
    """
    if migration.state is MigrationState.DRAWING:
        migration.note_source_drew(ctx.now_s)
    if migration.state is not MigrationState.CAUGHT_UP:
        return
    request, target = migration.request, migration.copy.instance
    assert target is not None, "a copy has its place as long as it moves"
    migration.copy.note_due(request.due_s)
    if migration.at_once:
        _resume_copy(ctx, migration, target)
        _hand_over(ctx, migration, target)
    elif migration.gap_tokens <= ctx.limits.migration_gap_tokens_max:
        if not (request.drawn_apart or target.node.rule.turn_s_max):
            _resume_copy(ctx, migration, target)
        elif _hands_over_another(ctx, target):
            return
        elif _continues_in_time(ctx, migration, target, migration.gap_tokens + 1):
            _resume_copy(ctx, migration, target)
            _hand_over(ctx, migration, target)
    elif migration.rounds < ctx.limits.migration_rounds_max:
        _send_tokens(ctx, migration, target, paused=True)
        migration.note_round()
    else:
        cancel_migration(ctx, migration)


def copy_yielded(ctx: EventContext, migration: Migration, outputs: RequestTokens) -> bool:
    """The target has drawn a token, too. Returns whether it is one for the client, to whom the
    source has brought none of its index: then the source stops. Numbers that differ in a late digit
    may make for another token than the source's: the answer goes on from that, and stays there.
    """
    if migration.state is not MigrationState.DRAWING:
        cancel_migration(ctx, migration)  # it was to draw none
        return False
    request, copy, target = migration.request, migration.copy, migration.copy.instance
    assert target is not None, "a copy has its place as long as it moves"
    first, end = outputs.first_index, outputs.first_index + len(outputs.token_ids)
    if first == len(request.output_tokens):
        _hand_over(ctx, migration, target)
        return True
    same = request.output_tokens[first:end] == list(outputs.token_ids)
    if not same or outputs.finish is not None or migration.drawn >= ctx.limits.migration_drawn_max:
        request.note_drawn_apart()
        cancel_migration(ctx, migration)
    else:
        target.note_tokens(copy, outputs.token_ids, ctx.now_s)
        note_longer(ctx, target, copy)
        _compare(ctx, migration, target)
        migration.note_drawn()
    return False


def _compare(ctx: EventContext, migration: Migration, target: InstanceEntry) -> None:
    """The source stops where the target is level with it, and soon has the next token; where that
    is behind, the source leaves out an iteration for every other one of the target.
    """
    behind = migration.gap_tokens
    can = _continues_in_time(ctx, migration, target, behind + 1)
    level = not behind and migration.source_drew_s is not None
    if not _has_waited(ctx, migration):
        can = can and not _computes_prompts(target.node)
        level = level and _is_close_behind(ctx, migration, target)
    if can and level:
        _hand_over(ctx, migration, target)
    elif behind > ctx.limits.migration_behind_max:
        cancel_migration(ctx, migration)
    else:
        pause(ctx, migration, paused=can and behind > 0 and migration.paused_s is None)


def _has_waited(ctx: EventContext, migration: Migration) -> bool:
    """Long enough for a better moment to hand over: half of the way to where it is given up."""
    limits, waits_s = ctx.limits, ctx.now_s - migration.begun_s
    drawn = 2 * migration.drawn >= limits.migration_drawn_max
    return drawn or 2 * waits_s >= limits.migration_s_max


def _is_close_behind(ctx: EventContext, migration: Migration, target: InstanceEntry) -> bool:
    """Whether the target drew what the source just did within a part of a round of its node, which
    is what the client waits for beside the next one. Where rounds of both are not alike, it comes
    to that.
    """
    drew_s = migration.source_drew_s
    return drew_s is not None and (
        ctx.now_s - drew_s <= BEHIND_SHARE_MAX * round_s(target.node, ctx.now_s)
    )


def _computes_prompts(node: NodeEntry) -> bool:
    """Whether its next iteration may be a long one."""
    return any(r.prefill_left for i in node.instances.values() for r in i.requests.values())


def _continues_in_time(
    ctx: EventContext, migration: Migration, target: InstanceEntry, tokens: int
) -> bool:
    """Whether the target, with so many tokens to compute, has the client's next one when due."""
    request = migration.request
    seconds = continues_s(target, request, tokens, ctx.now_s, ctx.limits)
    return ctx.now_s + seconds <= request.due_s


def _hands_over_another(ctx: EventContext, target: InstanceEntry) -> bool:
    """Whether one that was handed over to it a moment ago has not gone on yet: those of one batch
    would else stop together and prefill there in turn, each in the gap of the others.
    """
    left_max = ctx.limits.migration_gap_tokens_max + 1
    return any(0 < r.prefill_left <= left_max and not r.is_copy for r in target.requests.values())


def _resume_copy(ctx: EventContext, migration: Migration, target: InstanceEntry) -> None:
    """The target draws tokens, too, after those that it still has to compute."""
    _send_tokens(ctx, migration, target, paused=False)
    migration.copy.note_prefill_left(migration.copy.prefill_left + 1)
    migration.advance(MigrationState.DRAWING)


def _hand_over(ctx: EventContext, migration: Migration, target: InstanceEntry) -> None:
    """What the source computes right now is for nobody; the target draws the same tokens."""
    request, copy = migration.request, migration.copy
    migration.advance(MigrationState.HANDED_OVER)
    ctx.cell.remove_migration(migration)
    abort_on_node(ctx, request)
    target.hand_over(request, copy, ctx.now_s)
    note_longer(ctx, target, request)


def _send_tokens(
    ctx: EventContext, migration: Migration, target: InstanceEntry, *, paused: bool
) -> None:
    request, copy = migration.request, migration.copy
    token_ids = request.output_tokens[len(copy.output_tokens) :]
    command = ContinueRequest(
        instance_id=target.instance_id,
        request_id=request.original.request_id,
        attempt=copy.attempt,
        token_ids=tuple(token_ids),
        paused=paused,
        due_in_s=request.due_s - ctx.now_s,
    )
    ctx.send(target.node, command)
    target.note_ahead(copy, token_ids, request.due_s, ctx.now_s)
    note_longer(ctx, target, copy)
