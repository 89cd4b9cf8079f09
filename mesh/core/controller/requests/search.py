"""The search for a place: the plans of a policy, in its order, until one has room and passes.

A plan has a request join an instance, loaded or loading, or has an instance start on a node. Each
is held against the books, then priced (`instances.pricing`), then shown to the policy. What has
refused is remembered and not validated again. Before: whoever wants a place (`queueing`,
`preemption`, `replicas`). After: `submitting`, which books the price that was found.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice

from mesh.core.controller.instances.kv_cache import Room, batch_max, blocks_for_load, room_for
from mesh.core.controller.instances.node_schedule import node_prompts_s, times_of
from mesh.core.controller.instances.open_options import OpenOptions, idle_to_unload
from mesh.core.controller.instances.pricing import Price, going_to, must_give_way
from mesh.core.controller.requests.ending import RETRY_AFTER_S, refuse
from mesh.core.controller.state.context import EventContext
from mesh.core.controller.state.deployment import DeploymentEntry
from mesh.core.controller.state.instance import InstanceEntry
from mesh.core.controller.state.node import NodeEntry
from mesh.core.controller.state.refusals import RequestRefusals
from mesh.core.controller.state.request import RequestEntry
from mesh.domain.ids import InstanceId, NodeId
from mesh.domain.lifecycle import InstanceState, RequestState
from mesh.domain.model import Footprint
from mesh.domain.reasons import PolicyFaultKind, Verdict
from mesh.memory.demand import kv_blocks_within
from mesh.policy.plans import Join, Label, Plan, Refuse, Release, Start
from mesh.policy.views import InstanceView, NodeView


class InstanceNeeds:
    """What an instance for those who wait needs of a node; worked out once a kind of node."""

    def __init__(
        self, ctx: EventContext, entry: DeploymentEntry, waiting: Iterable[RequestEntry]
    ) -> None:
        self._ctx, self._entry, self.deployment = ctx, entry, entry.made
        self._waiting = waiting
        self._known: dict[tuple[str, str, int, int, bool], tuple[int, int]] = {}
        """By engine, device, capacity and weights, in which nodes' own footprints differ, and by
        whether the node swaps.
        """
        self._least_bytes: dict[NodeId, int] = {}
        """What the instance needs at least, by the nodes that were asked and take one more."""

    def kv_blocks(self, node: NodeEntry, footprint: Footprint) -> tuple[int, int]:
        """At least, and wanted."""
        hello, weights_bytes = node.hello, footprint.weights_bytes
        capacity_bytes = node.capacity_bytes
        kind = hello.engine, hello.fingerprint, capacity_bytes, weights_bytes, node.swaps
        found = self._known.get(kind)
        if found is None:
            found = blocks_for_load(self._ctx, self._entry, self._waiting, footprint, node)
            self._known[kind] = found
        return found

    def with_room(
        self, nodes: Iterable[NodeEntry], memo: RequestRefusals | None
    ) -> list[NodeEntry]:
        """Those of the nodes that take one more instance, and have the memory for it, or could have
        it; of the others that is noted in `memo`.
        """
        ctx, roomy = self._ctx, []
        for node in nodes:
            least_bytes = 0
            if ctx.takes_another(node, self._entry):
                footprint = node.footprint_of(self.deployment)
                least_bytes = footprint.instance_bytes(self.kv_blocks(node, footprint)[0])
                self._least_bytes[node.node_id] = least_bytes
            if least_bytes and least_bytes <= ctx.obtainable_bytes(node, self._entry):
                roomy.append(node)
            elif memo is not None:
                memo.note_no_start(node, least_bytes, ctx.now_s)
        return roomy

    def least_bytes(self, node_id: NodeId) -> int:
        """The bytes of the whole instance there with the least KV cache; 0 where none may be."""
        return self._least_bytes.get(node_id, 0)

    def nearest(self) -> tuple[int, int]:
        """What the node that lacks least would have to hold, and its capacity; 0, 0 without one."""
        nodes, least = self._ctx.cell.nodes, self._least_bytes
        needs = ((most, nodes[name].capacity_bytes) for name, most in least.items())
        return min(needs, key=lambda of: of[0] - of[1], default=(0, 0))

    def room(self, node: NodeEntry) -> Room | None:
        """Memory that is free, or that idle instances give way for; `None` where neither does."""
        footprint = node.footprint_of(self.deployment)
        least, wanted = self.kv_blocks(node, footprint)
        free_bytes = node.free_bytes_for(self.deployment)
        blocks = kv_blocks_within(footprint, least=least, wanted=wanted, free_bytes=free_bytes)
        if blocks is not None:
            return Room(kv_blocks=blocks, least_blocks=least)
        missing_bytes = footprint.instance_bytes(least) - free_bytes
        unloads = idle_to_unload(self._ctx, self._entry, node, missing_bytes)
        return Room(kv_blocks=least, unloads=unloads, least_blocks=least) if unloads else None


@dataclass(slots=True, eq=False)
class StartNodes:
    """The nodes where an instance may start, and what came of those that a search has tried."""

    among: Callable[[], Collection[NodeEntry]]
    free: bool = False
    """Whether only nodes come into question that take no memory and no time from other loads."""
    needs: InstanceNeeds | None = None
    """`None` until a node is asked."""
    roomy: list[NodeEntry] | None = None
    """Those of them with room; `None` until they are looked for."""
    fresh: bool = False
    """Whether there are nodes with room where no load of it has failed, and they come first."""
    failed_before: list[Plan] = field(default_factory=list)
    """Starts where the last load failed, which come after all others."""
    tight: list[Price] = field(default_factory=list)
    """Starts by which the request is in time by a hair, behind the loads of others."""
    no_time: bool = False
    """Nodes with room have other requests to compute, whose SLOs they could not keep."""


@dataclass(slots=True, kw_only=True, eq=False)
class Search(OpenOptions):
    """What a policy is offered for a request, and what comes of its plans."""

    entry: DeploymentEntry
    request: RequestEntry | None = None
    """`None` when an instance starts that no request waits for."""
    late: bool = False
    """Whether the request may be late."""
    before: Sequence[Price] | None = None
    """Where a request that runs moves: the moves that are to happen with its own. `None` for one
    that waits.
    """
    joins: Iterable[InstanceEntry] | None = None
    """The instances that are tried; `None` for those that a request which waits may join. The
    iterable must not refer to the search: a reference cycle keeps both in memory until the garbage
    collector runs.
    """
    last: InstanceEntry | None = field(default=None, init=False)
    """The instance that the policy was offered last."""
    offered: dict[InstanceId, int] = field(default_factory=dict, init=False)
    """The instances that the policy was offered, with their positions among the candidates."""
    starts_asked: bool = field(default=False, init=False)
    """Whether the policy has asked for nodes to start on."""
    start_nodes: StartNodes | None = None
    """The nodes where an instance may start; `None` when none may."""
    loaded: bool = False
    """Whether loads are looked for only later, once every queue has been tried."""
    stopped: bool = field(default=False, init=False)
    """No more can be looked at."""
    deferred: bool = field(default=False, init=False)
    """The policy would rather start an instance, which is looked at later."""

    def first(self) -> Price | None:
        """The first of the policy's plans for the request that has room and passes. Starts come
        last where a load failed, or would be over just in time.
        """
        found = self._first_of(self.ctx.policy.places(self.request, self))
        on = self.start_nodes
        if found is not None or on is None or self._is_refused():
            return found
        self._roomy(on)
        if not on.tight:
            on.fresh = False
            found = self._first_of(on.failed_before)
        return on.tight[0] if found is None and on.tight else found

    def _first_of(self, plans: Iterable[Plan]) -> Price | None:
        for plan in plans:
            if isinstance(plan, Start):
                price = self._start(plan)
            else:
                price = self._join(plan, self._instance_of(plan))
            if price is not None:
                return price
            if self.stopped:
                break
        return None

    def never_has_room(self) -> tuple[int, int] | None:
        """After a search in vain: the bytes that the node which lacks least would have to hold, and
        its capacity; `None` when an instance may have room later, or memory is not what is missing.
        """
        on = self.start_nodes
        if on is None or on.no_time or on.needs is None or self._is_refused():
            return None
        needed_bytes, largest_bytes = on.needs.nearest()
        return (needed_bytes, largest_bytes) if 0 < largest_bytes < needed_bytes else None

    def without_room(self, instances: Iterable[InstanceEntry]) -> Iterator[Price]:
        """The prices of those instances where the request would be in time, were there memory and
        places for it.
        """
        assert self.request is not None, "somebody waits"
        for instance in instances:
            plan = Join(request=self.request, instance=instance)
            price = self._join(plan, instance, has_room=False)
            if price is not None:
                yield price
            elif self.stopped:
                return

    # What the policy is offered.

    def candidates(self) -> Iterator[InstanceEntry]:
        for position, instance in self._in_order():
            request = self.request
            fits = not instance.is_full if request is None else instance.has_places_for(request)
            if fits and (instance.takes_now or not self.loaded):
                self.offered[instance.instance_id], self.last = position, instance
                yield instance

    def _in_order(self) -> Iterable[tuple[int, InstanceEntry]]:
        """The instances as the policy has them, from where the last event had to stop; before all
        others the one that was promised, or that has computed the beginning of the request.
        """
        request, candidates = self.request, self.entry.candidates
        if request is None or self.joins is not None:
            return enumerate(self.joins or ())
        if not self.loaded:
            again = self.late or request.request_id in self.ctx.deferred
            there = (i for i in candidates if i.takes_now) if again else ()
            return enumerate(chain(there, self._loading()))
        first, start = request.waits_for, 0
        if first is None and request.leader is not None:
            first = next((i for i in candidates if i is request.leader.instance), None)
        if first is None:
            start = self.entry.take_resumes_at()
            first = None if start else preferred(candidates, request, self.ctx.now_s)
        if first is not None:
            return enumerate(chain((first,), (i for i in candidates if i is not first)))
        if not start:
            return enumerate(candidates)
        start = min(start, len(candidates))
        return chain(
            islice(enumerate(candidates), start, None), islice(enumerate(candidates), start)
        )

    def _loading(self) -> Iterator[InstanceEntry]:
        for instance in self.entry.instances.values():
            if instance.state is InstanceState.LOADING and instance.takes_requests:
                yield instance

    def starts(self) -> Sequence[NodeEntry]:
        self.starts_asked = True
        if self.start_nodes is None:
            return ()
        promises = self.request is not None and self.ctx.policy.promises
        self.looks_max = self.ctx.limits.validations_max if promises else len(self.ctx.cell.nodes)
        return self.ctx.ranked(self._roomy(self.start_nodes), self.entry.made)

    def lacks_bytes(self, node: NodeView) -> int:
        free_bytes = self.ctx.cell.nodes[node.node_id].free_bytes_for(self.entry.made)
        needs = None if self.start_nodes is None else self.start_nodes.needs
        least_bytes = 0 if needs is None else needs.least_bytes(node.node_id)
        return least_bytes - free_bytes

    def _roomy(self, on: StartNodes) -> Sequence[NodeEntry]:
        """Those of the nodes with room, looked for once."""
        if on.roomy is not None:
            return on.roomy
        ctx, entry, on.roomy = self.ctx, self.entry, []
        nodes = on.among()
        if on.free:
            nodes = [node for node in nodes if self._is_free(node)]
        if self.request is not None and self.request.mates:
            answers = 1 + len(self.request.mates)
            nodes = [node for node in nodes if batch_max(ctx, entry, node) >= answers]
        asked = nodes
        memo = self._memo()
        if memo is not None:
            if not ctx.may_validate:
                on.no_time = self.stopped = True
                return ()
            asked = memo.worth_starting_on(
                nodes, ctx.now_s, lambda node: ctx.obtainable_bytes(node, entry)
            )
            on.no_time = len(asked) < len(nodes)
        if not asked:  # In overload most often no node has changed since it refused.
            return ()
        on.needs = InstanceNeeds(ctx, entry, self._waiting())
        on.roomy = on.needs.with_room(asked, memo)
        on.fresh = not {node.node_id for node in on.roomy} <= entry.avoided.keys()
        return on.roomy

    def _is_free(self, node: NodeEntry) -> bool:
        """Whether a load there waits for no other: its lane is free, or it has the memory now. Best
        effort needs both.
        """
        request, deployment = self.request, self.entry.made
        assert request is not None, "somebody is late, or of best effort"
        there, loading = node.instances.values(), InstanceState.LOADING
        loads = any(i.state is loading and not i.prefetched for i in there)
        if loads == request.slo.best_effort:
            return not loads
        footprint = node.footprint_of(deployment)
        least, _ = blocks_for_load(self.ctx, self.entry, (request,), footprint)
        return footprint.instance_bytes(least) <= node.free_bytes_for(deployment)

    def _waiting(self) -> Iterable[RequestEntry]:
        """Those whom a new instance is for, the request first."""
        if self.before is not None and self.request is not None:
            return (self.request,)
        waiting = [request for request in self.entry.queue if request.waits_for is None]
        waiting.sort(key=lambda request: request is not self.request)
        return waiting

    def _memo(self) -> RequestRefusals | None:
        """What nodes have said of a start for a request that waits; `None` where that is another
        question: what moves is to be in time, and what may be late may be later.
        """
        waits = self.request is not None and self.before is None and not self.late
        return self.request.refusals if waits and self.request is not None else None

    # What comes of its plans.

    def _join(
        self, plan: Plan, instance: InstanceEntry | None, *, has_room: bool = True
    ) -> Price | None:
        """The price of a join that the policy lets be, and that has room unless it is looked for
        without; if there is none the request knows why. What was promised with a load was tested
        then, and others with it in mind, unless by an estimate that the first of them is to try
        out.
        """
        request, moves = self.request, self.before is not None
        if instance is None or request is None:
            return None
        if not moves and instance.is_loaded and self._gives_way(instance.node):
            return None
        beside: Sequence[RequestEntry] = ()
        if self.before:
            beside = going_to(instance, self.before)
        elif not instance.correction.trial_left:  # An estimate is tried out by one answer alone.
            beside = request.mates
        room = room_for(self.ctx, self.entry, instance, request, beside)
        if room is not None and room.unloads and request.slo.best_effort:
            room = None
        if room is None and has_room:
            if not moves:
                request.refusals.note_no_room()
            return None
        if not self.ctx.may_validate:
            self.stopped = True
            if self.loaded:
                self.entry.note_stopped(self.offered.get(instance.instance_id, 0))
            return None
        late = self.late or (request.accepted and not moves)
        at = self.entry, instance.node, instance, request
        price = Price(self.ctx, plan, *at, room, beside, late=late, moves=moves)
        waits_here = request.waits_for is instance and not moves
        if waits_here and instance.profile and instance.profile.measured:
            return price
        verdict = price.verdict()
        if verdict is not Verdict.PASSES and not moves:
            request.refusals.note(verdict)
        return price if verdict is Verdict.PASSES else None

    def _start(self, plan: Start) -> Price | None:
        """The price of a start that has room and that the policy lets be, and not just in time.
        What the node said, or else the policy, is remembered.
        """
        request, on, memo = self.request, self.start_nodes, self._memo()
        node = None if on is None else self._node_of_start(plan, on)
        if node is None or on is None or on.needs is None:
            return None
        room = on.needs.room(node)
        if room is None:
            if memo is not None:
                memo.note_no_start(node)
            return None
        if request is None:
            return Price(self.ctx, plan, self.entry, node, None, None, room)
        if not self.ctx.may_validate:
            self.stopped = on.no_time = True
            return None
        moves = self.before is not None
        if not moves and self._gives_way(node):
            on.no_time = True
            return None
        late = self.late or (request.accepted and not moves)
        price = Price(self.ctx, plan, self.entry, node, None, request, room, late=late, moves=moves)
        verdict = price.verdict()
        passes, answer = verdict is Verdict.PASSES, price.seen.verdict if price.seen else verdict
        if answer is not Verdict.PASSES:
            request.refusals.note(answer)
        if memo is not None:
            memo.note_start(node, answer if isinstance(answer, Verdict) else Verdict.POLICY)
        if not self.late and passes and price.is_tight():
            on.tight.append(price)
            passes = False
        on.no_time = on.no_time or not passes
        return price if passes else None

    def _gives_way(self, node: NodeEntry) -> bool:
        """Whether the request is of best effort, and has just left its place to others, or others
        wait for such a node, under whatever policy.
        """
        request = self.request
        if request is None or not request.slo.best_effort:
            return False
        just_left = request.request_id in self.ctx.evicted
        if gives_way := just_left or must_give_way(self.ctx, node, request):
            request.refusals.note(Verdict.DELAYS_RUNNING)
        return gives_way

    def _instance_of(self, plan: Plan) -> InstanceEntry | None:
        """The instance that the request is to join or to move to, as far as the books go. What is
        not up now, as a start is before all queues were tried, is passed over.
        """
        ctx, request, there = self.ctx, self.request, None
        if isinstance(plan, Join) and plan.request is request:
            if self.loaded and self.starts_asked and request.waits_for is None:
                self.stopped = self.deferred = True
                ctx.defer(request)
                return None
            there = plan.instance
        if there is not None and there is self.last:
            return self.last  # it was looked at as it was offered, a moment ago
        if self.before is not None:
            there = there if there and there.instance_id in self.offered else None
            return None if there is None else known(ctx, there)
        if there is None or request is None:
            carry_out(ctx, plan, request)
            self.stopped = self.stopped or self._is_refused()
            return None
        instance = known(ctx, there)
        if instance is None or instance.deployment != request.deployment:
            not_in_books(ctx, plan, f"{request.request_id} cannot join {there.instance_id}")
        elif instance.takes_requests and instance.has_places_for(request):
            return instance if instance.is_loaded or not self.loaded else None
        return None

    def _node_of_start(self, plan: Start, on: StartNodes) -> NodeEntry | None:
        """The node where an instance is to start now; where its last load failed, only later."""
        if self.stopped:
            return None
        node, roomy = self.ctx.cell.nodes.get(plan.node.node_id), self._roomy(on)
        if node is None or node is not plan.node:
            not_in_books(self.ctx, plan, f"there is no node {plan.node.node_id}")
        elif node in roomy:
            if not on.fresh or node.node_id not in self.entry.avoided:
                return node
            on.failed_before.append(plan)
        return None

    def _is_refused(self) -> bool:
        """Whether a plan has refused the request."""
        return self.request is not None and self.request.state is RequestState.ENDED


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


def preferred(
    candidates: Iterable[InstanceEntry], request: RequestEntry, now_s: float
) -> InstanceEntry | None:
    """The candidate to try before the policy's first: where more of the request is computed than
    what lies before it there takes longer. None: the policy's order is as good.
    """
    heads = {digests[0] for _, digests in request.original.digests if digests}
    if not heads:
        return None
    holders = [i for i in candidates if not heads.isdisjoint(i.prefixes) and _is_open(i)]
    first = next((i for i in candidates if _is_open(i)), None) if holders else None
    best, best_s = None, 0.0
    for instance in holders:
        saved = instance.cached_tokens(request)
        if saved and instance.profile is not None:
            gain_s = times_of(instance, now_s).prefill_s(saved, 0)
            gain_s -= node_prompts_s(instance.node, now_s)
            if best is None or gain_s > best_s:
                best, best_s = instance, gain_s
    if first is None or best is None or best is first:
        return None
    return best if best_s > -node_prompts_s(first.node, now_s) else None


def _is_open(instance: InstanceEntry) -> bool:
    return instance.takes_now and not instance.is_full
