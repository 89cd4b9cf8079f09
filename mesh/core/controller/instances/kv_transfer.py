"""How long the KV blocks of a request take from one node to another, which spares their target the
prefill.

Nodes send blocks to each other directly. The books see a node's end as a queue: transfers from it
and to it follow each other, at the rate that the slower of both ends has shown. Before: a move of a
request (`requests.migration`). After: the request's node fetches them (docs/migration.md).
"""

from collections.abc import Iterable
from ipaddress import ip_address

from mesh.compute.times import Times
from mesh.core.controller.state.context import EventContext
from mesh.core.controller.state.instance import InstanceEntry
from mesh.core.controller.state.node import NodeEntry
from mesh.core.controller.state.request import RequestEntry
from mesh.domain.lifecycle import MigrationState
from mesh.domain.values import dataclass
from mesh.policy.plans import Carry


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """The blocks of a request's first `tokens` go to another node, and are there at `arrives_s`."""

    source: NodeEntry
    tokens: int
    arrives_s: float


def can_carry(source: InstanceEntry, target: InstanceEntry) -> bool:
    """Whether an instance can use the KV blocks of the other one, and can get them."""
    ends = source.node.hello, target.node.hello
    # From another machine, a loopback address would be that machine's own.
    return (
        all(hello.kv_address and hello.computes_ahead for hello in ends)
        and _is_local(ends[0].kv_address) == _is_local(ends[1].kv_address)
        and ends[0].kv_format == ends[1].kv_format != ""
        and source.model_id == target.model_id
        and source.context_tokens_max == target.context_tokens_max
        and source.footprint.block_tokens == target.footprint.block_tokens
    )


def _is_local(address: str) -> bool:
    """Whether it is reached from its own machine alone."""
    host = address.rpartition(":")[0].strip("[]")
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def transfer_of(
    ctx: EventContext,
    source: InstanceEntry,
    target: InstanceEntry,
    request: RequestEntry,
    carry: Carry | None,
    before: Iterable[Transfer],
) -> Transfer | None:
    """The transfer of a request's whole blocks after those under way and those `before` it; `None`
    where there is nothing to carry, no way to, or where to compute them is quicker and `carry` does
    not say which it is. Its copy is due accordingly.
    """
    request.note_carried(0, ctx.now_s, ctx.now_s)
    footprint = target.footprint
    # A request computes at least one token where it goes on.
    blocks = (request.tokens - 1) // footprint.block_tokens
    tokens, moved_bytes = blocks * footprint.block_tokens, blocks * footprint.kv_block_bytes
    if carry is Carry.TOKENS or moved_bytes > ctx.limits.kv_move_bytes_max:
        return None
    if not can_carry(source, target) or tokens <= target.cached_tokens(request):
        return None
    begins_s = max([ctx.now_s, *_ends_s(ctx, source, target), *(one.arrives_s for one in before)])
    bytes_per_s = min(end.node.kv_bytes_per_s(ctx.now_s) for end in (source, target))
    arrives_s = begins_s + moved_bytes / bytes_per_s
    transfer = Transfer(source=source.node, tokens=tokens, arrives_s=arrives_s)
    if carry is None and not _is_quicker(transfer, target, request, ctx.now_s):
        return None
    request.note_carried(tokens, arrives_s, ctx.now_s)
    return transfer


def _ends_s(ctx: EventContext, source: InstanceEntry, target: InstanceEntry) -> Iterable[float]:
    """When the transfers end that either node takes part in."""
    nodes = source.node, target.node
    for migration in ctx.cell.migrations.values():
        ends = migration.request.instance, migration.copy.instance
        if migration.state is MigrationState.FETCHING and any(
            end is not None and end.node in nodes for end in ends
        ):
            yield migration.copy.carried_s


def _is_quicker(
    transfer: Transfer, target: InstanceEntry, request: RequestEntry, now_s: float
) -> bool:
    """Whether the request would be computed sooner with the blocks than without them."""
    assert target.profile is not None, "it serves"
    times = Times(target.profile, target.node.rule.overestimate)
    cached = target.cached_tokens(request)
    without_s = times.prefill_s(request.tokens - cached, cached)
    with_s = times.prefill_s(request.tokens - transfer.tokens, transfer.tokens)
    return transfer.arrives_s - now_s + with_s < without_s
