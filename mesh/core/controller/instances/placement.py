"""Where a new instance starts: the first node that the policy has it start on, with room and time.

What each node could do for the instance is read from the cell here. Before: `instances.lifecycle`,
which starts it, or a preemption, which only asks.
"""

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Self

from mesh.core.controller.instances.kv_cache import Room, blocks_for_load, start_size
from mesh.core.controller.instances.loading_lane import lane_ends_s
from mesh.core.controller.instances.offer import Offer, relief
from mesh.core.controller.instances.pricing import Price
from mesh.core.controller.state.context import EventContext
from mesh.core.controller.state.deployment import DeploymentEntry
from mesh.core.controller.state.instance import InstanceEntry
from mesh.core.controller.state.node import NodeEntry
from mesh.core.controller.state.request import RequestEntry
from mesh.domain.deployment import DeploymentSpec
from mesh.domain.ids import NodeId
from mesh.domain.lifecycle import NodeState
from mesh.domain.model import Footprint
from mesh.domain.reasons import PolicyFaultKind, Verdict
from mesh.memory.demand import kv_blocks_within
from mesh.policy.plans import Plan, Release, Start

MARGIN_SHARE = 0.1
"""A load that waits for others in its lane is counted on only if its request would be in time even
if the first token came later by this share of the time until it.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class NoTime:
    """Nodes with room have other requests to compute, whose SLOs they could not keep."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NoRoom:
    """What the node that comes nearest would have to hold, and its capacity. Both 0: no node."""

    needed_bytes: int = 0
    largest_bytes: int = 0

    @classmethod
    def nearest(cls, needs: Iterable[tuple[int, int]]) -> Self:
        """The node that lacks least. `needs` has what each node would have to hold and its
        capacity.
        """
        needed_bytes, capacity_bytes = min(needs, key=lambda of: of[0] - of[1], default=(0, 0))
        return cls(needed_bytes=needed_bytes, largest_bytes=capacity_bytes)

    @property
    def in_vain(self) -> bool:
        """No node could hold it, were it empty."""
        return not self.largest_bytes or self.needed_bytes > self.largest_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """An instance is wanted by a request, which is to be in time there, unless it may be `late`.
    One that `moves` runs well where it is, and is not to be late.
    """

    by: RequestEntry
    late: bool = False
    moves: bool = False


class Demand:
    """What an instance for those who wait needs of a node; worked out once a kind of node."""

    def __init__(
        self, ctx: EventContext, entry: DeploymentEntry, waiting: Iterable[RequestEntry]
    ) -> None:
        assert entry.deployment is not None
        self._ctx, self._entry, self.deployment = ctx, entry, entry.deployment
        self._waiting = waiting
        self._known: dict[tuple[str, str, int, int], tuple[int, int]] = {}
        """By engine, device, capacity and weights: nodes' own footprints differ in these."""

    def kv_blocks(self, node: NodeEntry, footprint: Footprint) -> tuple[int, int]:
        """At least, and wanted."""
        hello, weights_bytes = node.hello, footprint.weights_bytes
        kind = (hello.engine, hello.fingerprint, node.capacity_bytes, weights_bytes)
        found = self._known.get(kind)
        if found is None:
            found = blocks_for_load(self._ctx, self._entry, self._waiting, footprint, node)
            self._known[kind] = found
        return found

    def least_bytes(self, node: NodeEntry) -> int:
        """The bytes of the whole instance, with the least KV cache."""
        footprint = node.footprint_of(self.deployment)
        return footprint.instance_bytes(self.kv_blocks(node, footprint)[0])

    def room(self, node: NodeEntry) -> Room | None:
        """Memory that is free, or that idle instances give way for; `None` where neither does."""
        footprint = node.footprint_of(self.deployment)
        least, wanted = self.kv_blocks(node, footprint)
        free_bytes = node.free_bytes_for(self.deployment)
        blocks = kv_blocks_within(footprint, least=least, wanted=wanted, free_bytes=free_bytes)
        if blocks is not None:
            return Room(kv_blocks=blocks, least_blocks=least)
        missing_bytes = footprint.instance_bytes(least) - free_bytes
        reclaim = relief(self._ctx, self._entry, node, missing_bytes)
        return Room(kv_blocks=least, reclaim=reclaim, least_blocks=least) if reclaim else None


class StartSearch:
    """Where one new instance may start. Whoever asks the policy for places has each of its starts
    tried by `take`, and then, where none did, what was put last by `rest`: nodes where its last
    load failed, and one where it would be in time by a hair, behind others' loads.

    `waiting`: those whom the instance is for. `among`: the nodes, all unless given. `worth`: nodes
    that have refused the request and have not changed are passed over.
    """

    def __init__(
        self,
        ctx: EventContext,
        entry: DeploymentEntry,
        wanted: Wanted | None,
        *,
        waiting: Callable[[], Iterable[RequestEntry]],
        among: Callable[[], Collection[NodeEntry]] | None = None,
        worth: bool = False,
    ) -> None:
        self._ctx, self._entry, self._wanted = ctx, entry, wanted
        self._waiting, self._asked, self._worth = waiting, among, worth
        self._prepared = False
        self._demand: Demand | None = None
        """None where no node is asked."""
        self._nodes: list[NodeEntry] = []
        self._roomy: list[NodeEntry] = []
        self._fresh: list[NodeEntry] = []
        """Those with room where no load of it has failed."""
        self._tight: list[Price] = []
        self._passed_over = False
        self._among: list[NodeEntry] = []
        self._left: set[NodeId] = set()
        self._busy = False
        self.stopped = False
        """No more can be looked at."""

    @property
    def looks_max(self) -> int:
        promises = self._wanted is not None and self._ctx.policy.promises
        return self._ctx.limits.validations_max if promises else len(self._ctx.cell.nodes)

    def offer(self, joins: Iterable[tuple[int, InstanceEntry]] = ()) -> Offer:
        """What the policy is offered: the nodes, and these instances to join."""
        return Offer(
            ctx=self._ctx,
            entry=self._entry,
            joins=joins,
            on=self._nodes_now,
            looks_max=self.looks_max,
            needed_bytes=self._needed_bytes,
        )

    def run(self) -> Price | NoRoom | NoTime:
        """Ask the policy for starts alone."""
        self._prepare()
        return self._round(self._among) or self.rest()

    def take(self, plan: Plan) -> Price | None:
        """Try a start: the first of the policy's that has room and time."""
        self._prepare()
        node = None if self.stopped else _node_of(self._ctx, plan, self._among)
        if node is None:
            return None
        self._left.discard(node.node_id)
        for tight in self._tight:
            if tight.node is node:
                return tight
        room = self._known_demand.room(node)
        if room is None:
            return None
        ctx, entry, wanted = self._ctx, self._entry, self._wanted
        if wanted is None:
            return Price(ctx, plan, entry, node, None, None, room)
        if ctx.policy.promises and not ctx.validations_left:
            ctx.cell.refusals.note_not_all_tried(entry.spec.name, wanted.by)
            self.stopped = True
        else:
            by, late = wanted.by, wanted.late or (wanted.by.accepted and not wanted.moves)
            price = Price(ctx, plan, entry, node, None, by, room, late=late, moves=wanted.moves)
            if self._takes(price, wanted):
                return price
        self._busy = True
        return None

    def rest(self) -> Price | NoRoom | NoTime:
        """What was put last; why there is none if that does not do either."""
        self._prepare()
        found = self._end_round()
        if not isinstance(found, Price) and self._fresh and len(self._fresh) < len(self._roomy):
            found = self._round(self._roomy) or self._end_round()
        if isinstance(found, Price):
            return found
        if self._passed_over or isinstance(found, NoTime):
            return NoTime()
        needs = ((self._known_demand.least_bytes(n), n.capacity_bytes) for n in self._nodes)
        return NoRoom.nearest(needs)

    @property
    def _known_demand(self) -> Demand:
        assert self._demand is not None, "nodes are asked"
        return self._demand

    def _needed_bytes(self, node: NodeEntry) -> int:
        return self._known_demand.least_bytes(node)

    def _nodes_now(self) -> Sequence[NodeEntry]:
        self._prepare()
        return self._among

    def _prepare(self) -> None:
        """Find the nodes that come into question, once."""
        if self._prepared:
            return
        self._prepared = True
        ctx, entry, wanted = self._ctx, self._entry, self._wanted
        if self._worth and wanted and ctx.policy.promises and not ctx.validations_left:
            self._passed_over = self.stopped = True
            return
        nodes = ctx.cell.nodes.values() if self._asked is None else self._asked()
        asked: Collection[NodeEntry] = nodes
        if self._worth and wanted and not wanted.late:
            asked = ctx.cell.refusals.worth_starting_on(
                entry, wanted.by, nodes, lambda node: ctx.obtainable_bytes(node, entry)
            )
            self._passed_over = len(asked) < len(nodes)
        if not asked:
            return  # No node has changed since it refused, which is usual in overload.
        self._demand = Demand(ctx, entry, self._waiting())
        self._nodes = [n for n in asked if ctx.takes_another(n, entry)]
        self._roomy = [n for n in self._nodes if self._has_room(n)]
        self._fresh = [n for n in self._roomy if n.node_id not in entry.avoided]
        self._begin(self._fresh or self._roomy)

    def _has_room(self, node: NodeEntry) -> bool:
        needed_bytes = self._known_demand.least_bytes(node)
        if needed_bytes <= self._ctx.obtainable_bytes(node, self._entry):
            return True
        if self._wanted is not None and not self._wanted.late:
            refusals = self._ctx.cell.refusals
            refusals.note_no_room(self._entry.spec.name, self._wanted.by, node, needed_bytes)
        return False

    def _begin(self, among: list[NodeEntry]) -> None:
        self._among, self._left = among, {node.node_id for node in among}
        self._busy = self.stopped = False

    def _round(self, among: list[NodeEntry]) -> Price | None:
        """Ask the policy for starts on these nodes."""
        if not among:
            return None
        self._begin(among)
        by = None if self._wanted is None else self._wanted.by
        for plan in self._ctx.policy.places(by, self.offer()):
            price = self.take(plan)
            if price is not None:
                return price
            if self.stopped:
                break
        return None

    def _end_round(self) -> Price | NoRoom | NoTime:
        """What a round in vain says: the first node where it would be in time by a hair, if any."""
        found = self._why_none()
        if isinstance(found, NoTime) and self._tight:
            return self._round([self._tight[0].node]) or self._why_none()
        return found

    def _why_none(self) -> NoRoom | NoTime:
        if self._left and self._wanted is not None and not self.stopped:
            # The policy would not have it there, now: that says nothing about their memory.
            self._ctx.cell.refusals.note_not_all_tried(self._entry.spec.name, self._wanted.by)
        return NoTime() if self._busy else NoRoom()

    def _takes(self, price: Price, wanted: Wanted) -> bool:
        """Whether the policy has it start there, where it is in time by more than a hair. What the
        node said, or else the policy, is remembered.
        """
        request, late, refusals = wanted.by, wanted.late, self._ctx.cell.refusals
        said, seen = price.verdict(), price.seen
        if seen is not None:
            if not late:
                refusals.note_start(self._entry.spec.name, request, price.node, seen.verdict)
            if seen.verdict is not Verdict.PASSES:
                request.refusals.note(seen.verdict)
        elif said is not Verdict.PASSES and not late:
            request.refusals.note(said)
            why = request.refusals.verdict or Verdict.POLICY
            refusals.note_start(self._entry.spec.name, request, price.node, why)
        if said is not Verdict.PASSES or late or not price.validated or not _is_tight(price):
            return said is Verdict.PASSES
        self._tight.append(price)
        return False


def _node_of(ctx: EventContext, plan: Plan, among: list[NodeEntry]) -> NodeEntry | None:
    """Where a plan has an instance start, if it may there. What is not up now is passed over."""
    if isinstance(plan, Release):
        ctx.wish(plan)
    if not isinstance(plan, Start):
        return None
    node = ctx.cell.nodes.get(plan.node.node_id)
    if node is None or node is not plan.node:
        message = f"there is no node {plan.node.node_id}"
        ctx.policy.fault(PolicyFaultKind.NOT_IN_BOOKS, "Start", message)
    return node if node in among else None


def priced_on(
    ctx: EventContext, entry: DeploymentEntry, node: NodeEntry, plan: Start
) -> Price | None:
    """A start on this node of an instance that nobody waits for; `None` where it has no room."""
    room = Demand(ctx, entry, ()).room(node)
    return None if room is None else Price(ctx, plan, entry, node, None, None, room)


def _is_tight(price: Price) -> bool:
    """Whether its load waits for others, and a little delay would make the request late."""
    now_s, first_s, request = price.ctx.now_s, price.first_token_s, price.request
    assert request is not None
    waits = lane_ends_s(price.node, now_s, price.slot.load.kind) > now_s
    return waits and first_s + MARGIN_SHARE * (first_s - now_s) > request.due_s


def why_no_node(ctx: EventContext, spec: DeploymentSpec, purpose: str = "") -> tuple[str, str]:
    """Where no node takes instances of a deployment: what is missing, and what to do about it."""
    usable = [d for d in spec.devices if d in ctx.policy.devices]
    nodes = [n for n in ctx.cell.nodes.values() if n.device in usable]
    if spec.task is not None and nodes and not any(n.hello.embeds for n in nodes):
        engines = ", ".join(sorted({n.hello.engine for n in nodes}))
        message = f"{spec.name!r} has task {spec.task}; no node that is up computes it ({engines})"
        return message, "start a CPU node, whose engine does, and leave cpu in spec.devices"
    spans = [n.hello.tensor_parallel_max for n in nodes if n.state is NodeState.READY]
    widest = max(spans, default=0)
    if not 0 < widest < spec.tensor_parallel:
        return _why_none_is_ready(nodes, " or ".join(spec.devices), purpose)
    message = (
        f"instances of {spec.name!r} are to span {spec.tensor_parallel} devices "
        f"(tensor_parallel); those of the nodes that are up can span {widest}"
    )
    return message, f"deploy it with tensor_parallel: {widest}, or start a node whose engine can"


def _why_none_is_ready(nodes: list[NodeEntry], devices: str, purpose: str) -> tuple[str, str]:
    """Nodes are counted and not named: tenants are told this, too. The cell forgets a lost node at
    once, so what it has beside those that are ready is draining."""
    if nodes:
        return (
            f"no {devices} node takes new work{purpose}: {len(nodes)} draining",
            "`mesh drain NODE --undo` has a node take work again; `mesh nodes` names them",
        )
    return f"no {devices} node is up{purpose}", "start one with `mesh node --join …`"


def batch_max(ctx: EventContext, entry: DeploymentEntry, node: NodeEntry) -> int:
    """What the node's engine can carry, and the policy has an instance there serve at a time."""
    deployment = entry.deployment
    assert deployment is not None
    most = min(node.hello.batch_max, ctx.limits.batch_max)
    served_max = start_size(ctx, entry, 0, node.footprint_of(deployment), node).batch_max
    return most if served_max is None else min(served_max, most)
