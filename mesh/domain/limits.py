"""Every bound of a cell and of a node, by name. A queue, retry or wait without one is a bug."""

from dataclasses import dataclass

PREFILL_TOKENS_MAX = 256
"""Prompt tokens of one iteration, so that a long prompt does not hold up what comes meanwhile."""
TURN_S_MAX = 0.0
"""Decodes of an instance that take no longer together are one turn, as far as nobody is late for
it: an iteration of a GPU may take less than deciding and reporting it. 0: each is a turn by itself.
"""
BATCH_MAX = 256
"""Requests that one iteration of an instance may carry, unless its engine carries fewer."""
HEARTBEAT_S = 1.0
"""A node reports at least this often."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CellLimits:
    """The controller core's bounds."""

    queue_requests_max: int = 256
    """Requests of one deployment that may wait."""
    queue_wait_s_max: float = 30.0
    """A request waits no longer than this for a place; for a load that it was promised, until that
    ends.
    """
    attempts_max: int = 3
    """Submissions of one request to nodes, the first included."""
    load_attempts_max: int = 2
    """Failed loads of a deployment in a row before its waiting requests are refused."""
    load_retry_s: float = 2.0
    """Pause after a failed load before that deployment is loaded again; doubles each time."""
    load_retry_doublings_max: int = 5
    node_lease_s: float = 10.0
    """A node that is silent for longer counts as lost."""
    lease_check_s: float = 1.0
    import_s_max: float = 3600.0
    """The longest that any administrative call may take; imports and measurements are the long
    ones.
    """
    load_s_max: float = 600.0
    rollout_s_max: float = 600.0
    """A revision whose instances are not ready by then is given up."""
    operations_max: int = 64
    """Administrative calls under way."""
    batch_max: int = BATCH_MAX
    """Requests that one iteration of an instance may carry, whatever its engine could."""
    kv_watermark_share: float = 0.25
    """w of LLM-Mesh §6.2: what a KV cache gets over what its requests are expected to need."""
    kv_tokens_least: int = 1024
    """L_min of §6.1, the least KV cache that an instance serves with, but no more than its context;
    0: none. The paper's is a full context, much of which lies unused while others wait for memory.
    """
    kv_tokens_profiled: int = 16384
    """KV cache of an instance while it is measured, where memory allows."""
    parked_s_max: float = 600.0
    """After its keep-alive an instance stays, without KV cache, for so long at most."""
    prefetch_load_s_max: float = 2.0
    """A load that nobody waits for is begun only where it is expected to take no longer: whoever
    calls another model meanwhile may have to wait for its end.
    """
    prefetch_s_max: float = 600.0
    """An import that nobody waits for is given up then."""
    evictions_max: int = 8
    """How often one request may be evicted for want of KV blocks."""
    preempted_max: int = 2
    """Moves of one request for another instance's sake, evictions counted; one that has been moved
    so often stays.
    """
    migrations_max: int = 4
    """Migrations under way to or from one node."""
    migration_rounds_max: int = 8
    """Times that one is sent the tokens that came meanwhile before it is given up."""
    migration_gap_tokens_max: int = 4
    """Tokens that may be left to compute when a target begins to draw: next to nothing beside an
    iteration.
    """
    migration_drawn_max: int = 128
    """Tokens that it draws beside the source before it is given up; after half of them, or of
    `migration_s_max`, it need not be free of prompts, nor close behind, any more.
    """
    migration_behind_max: int = 8
    """Tokens by which it may be behind the source; one that is further behind is given up."""
    migration_s_max: float = 30.0
    """One that takes longer is given up."""
    migration_retry_s: float = 0.25
    """Between two looks for places of requests that are to move."""
    moves_max: int = 8
    """Migrations of one request that may be begun."""
    grow_retry_s: float = 2.0
    """Pause after a KV cache did not grow as asked before it is to grow again."""
    history_store_s: float = 30.0
    """Between two writes of a deployment's output lengths to the registry."""
    prefill_tokens_max: int = PREFILL_TOKENS_MAX
    turn_s_max: float = TURN_S_MAX
    """The nodes are told."""
    overtaken_max: int = 8
    """Later requests that may get a place before an earlier one that wants to compute there."""
    place_retry_s: float = 0.05
    """Between two tries to place requests that wait for headroom."""
    validations_max: int = 32
    """Shadow validations for one event, so that none takes the core more than milliseconds."""
    delivery_s_max: float = 0.05
    """The way of a request to its node, and of its tokens from there to their client."""


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
    delivery_s_max: float = 0.01
    """This much is kept of a deadline, but no more than a quarter of the TPOT SLO: for iterations
    that take longer than predicted, and for the way of the tokens to their clients.
    """
