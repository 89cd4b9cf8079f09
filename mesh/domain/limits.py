"""Every bound of a cell and of a node, by name. A queue, retry or wait without one is a bug."""

from typing import Any

from mesh.domain.reasons import DeviceKind
from mesh.domain.values import dataclass

PREFILL_TOKENS_MAX = 256
"""The most prompt tokens of one iteration: a longer prompt is computed in chunks, so that it does
not hold up other requests.
"""
TURN_S_MAX = 0.0
"""Decodes of an instance that take no longer than this together are one turn, unless a request
would be late: an iteration of a GPU may take less time than deciding and reporting it. With 0, each
decode is a turn by itself.
"""
BATCH_MAX = 256
"""The most requests in one iteration of an instance, unless its engine can carry fewer."""
KV_MOVE_BYTES_MAX = 1 << 30
"""The most KV cache of one request that goes to another node: its target holds it in the host's
memory until all of it is there.
"""
KV_SLICE_BYTES = 4 << 20
"""Iterations wait for copies of about so many bytes of KV blocks at a time, or of one block."""
KEPT_OUTPUTS_MAX = 512
"""The most outputs of one request that its node keeps for a next controller."""
ORPHANS_MAX = 1024
"""The most requests of a cell that nodes have brought along and no client has come for."""
KEPT_CACHES_MAX = 64
"""The most unloaded instances of a node whose cached KV blocks are kept for their next loads."""
HEARTBEAT_S = 1.0
"""A node reports at least this often."""
RESUME_S_MAX = 15.0
"""From the break of an answer's stream until it goes on, at a client or a front: a lease, a few
dials, and a node's way back.
"""
AWAY_S_MAX = 5.0
"""Until a controller takes a call that none has accepted yet: a lease, and a few dials."""
NODES_S_MAX = 5.0
"""Until a leader that has just begun has nodes."""
BREAKS_MAX = 5
"""Streams of an answer that may break one after the other without a token: it may be what ends the
controllers.
"""
NODES_MAX = 1024
"""The most nodes of a kind that a cell may ask for: as many may be linked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeRange:
    """How many nodes of a kind a cell may ask for: at least, and at most."""

    device: DeviceKind
    least: int
    most: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CellLimits:
    """The controller core's bounds."""

    queue_requests_max: int = 256
    """The most requests of one deployment that may wait."""
    queue_wait_s_max: float = 30.0
    """A request waits no longer than this for a place. One that was promised a load waits until
    that load ends.
    """
    attempts_max: int = 3
    """The most submissions of one request to nodes, the first included."""
    load_attempts_max: int = 2
    """After this many failed loads of a deployment in a row, its waiting requests are refused."""
    load_retry_s: float = 2.0
    """The pause after a failed load before that deployment is loaded again. It doubles
    each time.
    """
    load_retry_doublings_max: int = 5
    node_lease_s: float = 10.0
    """A node that is silent for longer counts as lost."""
    node_ranges: tuple[NodeRange, ...] = ()
    """The kinds of nodes of which somebody starts and stops as many as the cell wants."""
    node_pause_s: float = 60.0
    """The time between two changes of how many nodes of a kind are wanted."""
    node_idle_s: float = 300.0
    """Fewer nodes are wanted once nothing has lacked one for so long; how many work is a mean over
    as long. Bursts of 100 s every 400 s (two seeds, machines of 30 s): 25 and 32 % refused with
    120 s and 2.0 nodes in the mean, 19 and 16 % with 300 s and 2.7.
    """
    node_settle_s: float = 60.0
    """A controller says only after so long how many nodes it wants: those of the one before it join
    first, and those that start.
    """
    node_late_s: float = 45.0
    """Nodes that are wanted for longer, and have not joined, are reported."""
    lease_check_s: float = 1.0
    import_s_max: float = 3600.0
    """The longest that any administrative call may take; imports and measurements are the long
    ones.
    """
    load_s_max: float = 600.0
    rollout_s_max: float = 600.0
    """A revision whose instances are not ready by then is given up."""
    operations_max: int = 64
    """The most administrative calls that may be under way."""
    batch_max: int = BATCH_MAX
    """The most requests in one iteration of an instance, whatever its engine could carry."""
    kv_watermark_share: float = 0.25
    """The watermark w of LLM-Mesh §6.2: the share that a KV cache gets beyond what its requests are
    expected to need.
    """
    kv_tokens_least: int = 1024
    """The least KV cache in tokens that an instance serves with (L_min of §6.1), or its context
    limit if that is less; 0 means that there is no minimum. The paper takes a full context, much of
    which lies unused while other requests wait for memory.
    """
    kv_tokens_profiled: int = 16384
    """The KV cache of an instance in tokens while it is measured, where memory allows it."""
    parked_s_max: float = 600.0
    """After its keep-alive, an instance stays parked, without KV cache, for this long at most."""
    prefetch_load_s_max: float = 2.0
    """A load that nobody waits for is begun only if it is expected to take no longer than this: a
    request for another model may have to wait until it ends.
    """
    prefetch_s_max: float = 600.0
    """An import that nobody waits for is given up after this time."""
    evictions_max: int = 8
    """How often one request may be evicted for want of KV blocks."""
    preempted_max: int = 2
    """The most moves of one request that are made for another instance, evictions included. A
    request that has been moved this often stays where it is.
    """
    migrations_max: int = 4
    """The most migrations to or from one node that may be under way."""
    kv_move_bytes_max: int = KV_MOVE_BYTES_MAX
    """The most KV cache of one request that goes with it; a longer one is computed anew."""
    migration_rounds_max: int = 8
    """A migration sends its target the tokens that came meanwhile this often at most; then it is
    given up.
    """
    migration_gap_tokens_max: int = 4
    """A target begins to draw when at most this many tokens are left to compute: next to nothing
    beside an iteration.
    """
    migration_drawn_max: int = 128
    """A target draws this many tokens beside the source at most; then the migration is given up.
    After half of them, or half of `migration_s_max`, the target may take over even if it computes
    prompts and is not close behind the source.
    """
    migration_behind_max: int = 8
    """A target that is more than this many tokens behind the source is given up."""
    migration_s_max: float = 30.0
    """A migration that takes longer than this is given up."""
    migration_retry_s: float = 0.25
    """The time between two searches for places for requests that are to move."""
    moves_max: int = 8
    """The most migrations of one request that may be begun."""
    grow_retry_s: float = 2.0
    """The pause after a KV cache failed to grow before it is to grow again."""
    history_store_s: float = 30.0
    """The time between two writes of a deployment's output lengths to the registry."""
    prefill_tokens_max: int = PREFILL_TOKENS_MAX
    turn_s_max: float = TURN_S_MAX
    """The controller tells its nodes this value and the one above."""
    overtaken_max: int = 8
    """The most later requests that may get a place before an earlier one that wants to compute
    there.
    """
    adopted_s_max: float = 10.0
    """A request that a node has brought along waits so long for its client; then it is cancelled.
    """
    place_retry_s: float = 0.05
    """The time between two attempts to place requests that wait for headroom."""
    validations_max: int = 32
    """The most shadow validations for one event, so that no event takes the core more than
    milliseconds.
    """
    delivery_s_max: float = 0.05
    """The time that a request is expected to take to its node, and its tokens from there to their
    client.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeLimits:
    """The node core's bounds."""

    prefill_tokens_max: int = PREFILL_TOKENS_MAX
    primed_tokens_max: int = 128
    """Iterations of up to so many tokens are computed once, when there is nothing else to do, so
    that the engine has its kernels for them. 0: none are.
    """
    primed_batch_max: int = 32
    """Decodes of more requests than this are not computed ahead: they are rare, and an iteration of
    theirs takes longer than building its kernels does.
    """
    hold_s_max: float = 5.0
    """It computes on so long without a controller, and until its next heartbeat."""
    deadline_margin_s_max: float = 0.01
    """This much is kept of a deadline, but no more than a quarter of the TPOT SLO: for iterations
    that take longer than predicted, and for the way of the tokens to their clients.
    """


def forget_oldest(kept: dict[Any, Any], most: int) -> None:
    """Keep so many entries of a dictionary, those that were put into it last."""
    while len(kept) > most:
        del kept[next(iter(kept))]
