"""An instance as the controller core knows it: what it holds, its requests, how its load went.

Its requests, their tokens and their KV blocks change together, by `add`, `note_tokens`,
`note_demand` and `remove`; those who wait for its load by `expect` and `expect_no_more`. Each tells
the node what that means for it. Owned by the controller core, like all entries; it is read as the
view that policies and placement take.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import TYPE_CHECKING, cast

from mesh.compute.correction import Correction
from mesh.core.controller.state.refusals import InstanceRefusals
from mesh.core.controller.state.request import RequestEntry
from mesh.domain.ids import DeploymentName, InstanceId, ModelId, RequestId
from mesh.domain.lifecycle import INSTANCE, InstanceState, NodeState, advance
from mesh.domain.messages import InstanceReport, LoadInstance, ProfileRefined
from mesh.domain.model import Footprint
from mesh.domain.profile import Profile, Stalls
from mesh.domain.reasons import DeviceKind
from mesh.domain.steps import LoadTier, PrefixChange
from mesh.memory.shared_weights import SharedWeights
from mesh.policy.plans import LABEL_CHARS_MAX
from mesh.policy.views import InstanceView, T

if TYPE_CHECKING:
    from mesh.core.controller.state.node import NodeEntry


WORKED_OUT_MAX = 8
"""Results that are kept of what policies have worked out of an instance's requests."""


@dataclass(slots=True, kw_only=True, eq=False)
class InstanceEntry:
    instance_id: InstanceId
    deployment: DeploymentName
    model_id: ModelId
    node: "NodeEntry"
    state: InstanceState
    footprint: Footprint
    profile: Profile | None
    """What predicts its iterations. None only for an instance that a node brought along and that is
    unloaded at once, since no deployment wants it.
    """
    kv_blocks: int
    """In force, as its node reports it; of one that loads, those that it will have."""
    context_tokens_max: int
    batch_max: int
    requests: dict[RequestId, RequestEntry] = field(default_factory=dict)
    tokens: int = 0
    required_blocks: int = 0
    """Both summed over its requests."""
    worked_out: dict[object, object] = field(default_factory=dict)
    """What a policy has worked out of its requests: see `CellView.of_requests`."""
    expected: dict[RequestId, RequestEntry] = field(default_factory=dict)
    """Requests to which its load was promised: they wait for it, and then for their place."""
    kv_blocks_used: int = 0
    kv_blocks_cached: int = 0
    prefixes: set[int] = field(default_factory=set)
    """Digests of the keys of its KV blocks, as its node told; see `PrefixChange`."""
    correction: Correction = field(default_factory=Correction)
    """As its node reports it."""
    stalls: Stalls = field(default_factory=Stalls)
    off_p50: float = 0.0
    off_p95: float = 0.0
    """By what share predictions of its last iterations were off. All as its node told last."""
    _measurements: int = field(default=0, init=False)
    """Operations that have its model measured on it."""
    grow_again_s: float = 0.0
    """When a grow may be tried again after one that its node could not do."""
    to_load: LoadInstance | None = None
    """The command that loads it, sent once its memory is free; None for one that a node brought
    along.
    """
    load_s: float = 0.0
    """Seconds that its load is planned with, by itself."""
    load_expected_s: float = 0.0
    """Seconds that it was expected to take when it began."""
    needed_s: float = 0.0
    """When its load has to be over, for those who wait for it."""
    label: str = ""
    """What the policy remembers of it."""
    prefetched: bool = False
    """Whether it was loaded before anybody called, and still waits for the first call."""
    tier: LoadTier | None = None
    """From where it was loaded; None until then, and for one that a node brought along."""
    load_started_s: float = 0.0
    """When its node was told to load it; until then, when that was decided."""
    loaded_at_s: float = 0.0
    refusals: InstanceRefusals = field(default_factory=InstanceRefusals)
    """What it has refused."""
    mixed_slos: bool = False
    """Whether one of its requests is of a class, has an SLO of its own or an answer of one token,
    or one did while the others were there: their paces differ.
    """
    resident_share: float = 0.0
    """The share of its weights that is on the device, as its node told last."""
    swaps_to: float = 0.0
    """The share that will be, where they are on their way."""
    swap_began_s: float | None = None
    """When its weights were told to be on their way; `None` where they are not."""
    has_served: bool = False
    """A token has come from it."""
    idle_since_s: float = 0.0
    phase: str = ""
    share: float = 0.0

    @property
    def device(self) -> DeviceKind:
        return self.node.device

    def note_label(self, label: str) -> None:
        """See `mesh.policy.plans.Label`."""
        self.label = label[:LABEL_CHARS_MAX]

    @property
    def profiling(self) -> bool:
        """Its model is being measured on it: it stays."""
        return self._measurements > 0

    @property
    def batch(self) -> int:
        return len(self.requests)

    @property
    def takes_requests(self) -> bool:
        """Whether requests may wait for it: loaded or loading, on a node that takes new work."""
        serves = self.is_loaded or self.state is InstanceState.LOADING
        return serves and self.node.state is NodeState.READY

    @property
    def takes_now(self) -> bool:
        """Whether a request may be submitted to it, if there is room and time."""
        return self.is_loaded and self.node.state is NodeState.READY

    @property
    def is_loaded(self) -> bool:
        """Whether it is loaded, and not about to be unloaded."""
        return self.state in (InstanceState.READY, InstanceState.PARKED)

    @property
    def free_places(self) -> int:
        """How many places of its batch no request has or waits for."""
        return self.batch_max - self.batch - len(self.coming)

    @property
    def is_full(self) -> bool:
        return self.free_places <= 0

    def has_places_for(self, request: RequestEntry) -> bool:
        """Whether its batch has places for the request and the other answers of its call."""
        return self.free_places > len(request.mates)

    @property
    def best_effort(self) -> list[RequestEntry]:
        """Its requests of best effort, in the order in which they came."""
        if not self.mixed_slos:
            return []
        return [r for r in self.requests.values() if r.slo.best_effort and not r.is_copy]

    @property
    def promised_bytes(self) -> int:
        """What it holds, weights included, once all that was issued for it is done."""
        return self.node.station.size(self.instance_id).bytes

    @property
    def shared_weights(self) -> SharedWeights | None:
        """What it holds with others of its model; None on a node that shares nothing."""
        return self.node.shared_weights(self.model_id, self.context_tokens_max, self.footprint)

    def freed_bytes(self, after: Sequence[InstanceView] = ()) -> int:
        """See `InstanceView`."""
        if self.shared_weights is None:
            return self.promised_bytes
        station, before = self.node.station, [other.instance_id for other in after]
        both_bytes = station.freed_bytes([*before, self.instance_id])
        return both_bytes - station.freed_bytes(before)

    @property
    def weights_bytes(self) -> int:
        return self.footprint.weights_bytes

    @property
    def kv_bytes(self) -> int:
        """The size of its KV cache, and of what stays beside it, once all that was issued for it is
        done.
        """
        return self.node.station.size(self.instance_id).kv_bytes

    @property
    def resident(self) -> bool:
        """Whether its weights are on the device."""
        return bool(self.loaded_at_s) and self.resident_share >= 1.0

    @property
    def is_parked(self) -> bool:
        return self.state is InstanceState.PARKED

    @property
    def may_go(self) -> bool:
        return self.node.may_go(self)

    @property
    def next_due_s(self) -> float:
        """When the first of its next tokens is due; infinite where it has no request."""
        return min((request.due_s for request in self.requests.values()), default=inf)

    @property
    def promised_blocks(self) -> int:
        """KV blocks that it will have when all that was issued for it is done."""
        return self.footprint.kv_blocks(self.node.station.size(self.instance_id))

    @property
    def coming(self) -> dict[RequestId, RequestEntry]:
        """Those who join when its load is over; none once it is."""
        return self.expected if self.state is InstanceState.LOADING else {}

    @property
    def pace_s(self) -> float:
        """The quickest pace of the requests that run on it, or that join when its load is over:
        each decode gives all of them a token. There must be one.
        """
        work = (self.requests or self.coming).values()
        if self.mixed_slos:
            return min([request.pace_s for request in work])
        return next(iter(work)).pace_s

    @property
    def expected_blocks(self) -> int:
        """KV blocks that those who are expected will need."""
        return sum(request.required_blocks for request in self.expected.values())

    def add(
        self,
        request: RequestEntry,
        *,
        blocks: int,
        now_s: float,
        cached_tokens: int = 0,
        shared_blocks: int = 0,
    ) -> None:
        """A request is submitted to it, which is expected to need so many KV blocks; see
        `RequestEntry.submitted`. A parked instance is woken.
        """
        if self.state is InstanceState.PARKED:
            self.unpark()
        self.prefetched = False
        self.node.request_joins(now_s)
        request.submitted(
            self,
            blocks=blocks,
            now_s=now_s,
            cached_tokens=cached_tokens,
            shared_blocks=shared_blocks,
        )
        self.requests[request.original.request_id] = request
        self._note_slo(request)
        self._note_change(request.tokens)
        self.required_blocks += blocks

    def of_requests(self, work_out: Callable[[Iterable[RequestEntry]], T]) -> T:
        """What a policy works out of its requests, until these change."""
        if work_out not in self.worked_out:
            while len(self.worked_out) >= WORKED_OUT_MAX:
                del self.worked_out[next(iter(self.worked_out))]
            self.worked_out[work_out] = work_out(self.requests.values())
        return cast(T, self.worked_out[work_out])

    def _note_change(self, tokens: int) -> None:
        """Its requests are others, or have so many tokens more."""
        self.tokens += tokens
        if self.worked_out:
            self.worked_out.clear()

    def _note_slo(self, request: RequestEntry) -> None:
        own = request.has_own_slo or bool(request.slo.name) or request.pace_s == inf
        self.mixed_slos = self.mixed_slos or own

    def remove(self, request: RequestEntry) -> None:
        """A request runs here no more, for whatever reason."""
        del self.requests[request.original.request_id]
        self.mixed_slos = self.mixed_slos and bool(self.requests)
        self._note_change(-request.tokens)
        self.required_blocks -= request.required_blocks
        if request.original.is_one_of_several:
            self._pass_on_blocks(request)
        request.left()
        self.node.request_left()
        if request.prefill_left:
            # As its node does: the first of those who waited for its prompt computes it.
            others = [r for r in self.requests.values() if r.leader is request and r.prefill_left]
            for place, other in enumerate(others):
                other.follow(others[0] if place else None)

    def _pass_on_blocks(self, gone: RequestEntry) -> None:
        """The first of those that share the blocks of its prompt is counted with them now."""
        sharing = [r for r in self.requests.values() if r.shared_blocks and r.leader is gone]
        for heir in sharing[:1]:
            self.note_demand(heir, heir.held_blocks)
            for other in sharing[1:]:
                other.follow(heir)

    def note_ahead(
        self, copy: RequestEntry, token_ids: Sequence[int], due_s: float, now_s: float
    ) -> None:
        """A copy on it has these further tokens to compute."""
        copy.note_ahead(token_ids, due_s, now_s)
        self._note_change(len(token_ids))

    def hand_over(self, request: RequestEntry, copy: RequestEntry, now_s: float) -> None:
        """A request that ran elsewhere until now goes on here in place of its copy."""
        request.handed_over(copy, self, now_s)
        copy.left()
        self.requests[request.original.request_id] = request
        self._note_change(request.tokens - copy.tokens)

    def expect(self, request: RequestEntry, blocks: int) -> None:
        """A request waits for its load, for which it is expected to need so many KV blocks."""
        request.wait_for(self, blocks)
        self.expected[request.original.request_id] = request
        self._note_slo(request)
        self.node.note_waiting()
        self.prefetched = False

    def expect_no_more(self, request: RequestEntry, place: "InstanceEntry | None" = None) -> None:
        """A request has its place, or waits for another one, or is over. Unless its place is here,
        the first of those that follow it there takes over its prompt.
        """
        self.expected.pop(request.original.request_id, None)
        request.wait_for(None)
        self.node.touch()
        self.node.note_waiting()
        if place is self or not request.original.is_one_of_several:
            return
        following = [r for r in self.expected.values() if r.leader is request]
        for heir in following[:1]:
            size = self.footprint.block_tokens
            heir.wait_for(self, heir.required_blocks + heir.led_tokens(size) // size)
            heir.follow(None)
            for other in following[1:]:
                other.follow(heir)

    def expect_nobody(self) -> None:
        """It takes no requests any more."""
        waited = tuple(self.expected.values())
        self.expected.clear()
        for request in waited:
            self.expect_no_more(request)

    def note_tokens(self, request: RequestEntry, token_ids: Sequence[int], now_s: float) -> None:
        """A request on it has these further tokens."""
        request.note_tokens(token_ids, now_s)
        self._note_change(len(token_ids))
        self.has_served = True

    def note_demand(self, request: RequestEntry, blocks: int, shared_blocks: int = 0) -> None:
        """A request on it needs so many KV blocks, all in all, of which it shares some."""
        self.required_blocks += blocks - shared_blocks - request.required_blocks
        request.note_demand(blocks - shared_blocks, shared_blocks)

    def advance(self, to: InstanceState) -> None:
        self.state = advance(INSTANCE, self.state, to)

    def unpark(self) -> None:
        if self.state is InstanceState.PARKED:
            self.advance(InstanceState.READY)

    def note_unloading(self) -> None:
        """It is unloaded, or its load given up: what it holds is promised to others."""
        self.expect_nobody()
        self.advance(InstanceState.UNLOADING)
        self.node.touch()

    def note_progress(self, phase: str, share: float) -> None:
        """How far its load is."""
        self.phase, self.share = phase, share

    def note_size(self, kv_blocks: int, footprint: Footprint | None = None) -> None:
        """Its KV cache has so many blocks now, and a load has shown its footprint."""
        self.kv_blocks = kv_blocks
        if footprint is not None:
            self.footprint = footprint
        self.node.touch()

    def note_needed(self, needed_s: float) -> None:
        """Its load has to be over by then, for the sake of somebody who waits for it."""
        self.needed_s = needed_s

    def plan_load(self, load_s: float) -> None:
        """Its load, which has not begun, is planned with so much now."""
        self.load_s = load_s

    def note_load_begun(self, expected_s: float, now_s: float) -> None:
        """Its node is told to load it now. One that is loaded ahead may go from then on."""
        self.load_expected_s, self.load_started_s = expected_s, now_s
        if self.prefetched:
            self.node.touch()

    def note_loaded(self, tier: LoadTier, now_s: float) -> None:
        """Its load has ended well."""
        self.advance(InstanceState.READY)
        self.tier, self.loaded_at_s = tier, now_s
        self.resident_share = 0.0 if self.node.swaps else 1.0
        self.note_progress("", 1.0)

    def note_report(self, report: InstanceReport, now_s: float) -> None:
        """What a heartbeat, or a hello, says of it, but for the size of its KV cache, and what is
        in that.
        """
        self.kv_blocks_used, self.kv_blocks_cached = report.kv_blocks_used, report.kv_blocks_cached
        self.correction.note_factor(report.correction, now_s, planned=report.correction_planned)
        here = report.here if report.out else 1.0
        # A node that moves whole weights may be of a version that says no more than `out`.
        by_parts = self.node.hello.swaps_parts
        swaps_to = report.swaps_to if by_parts or not report.swapping else float(report.out)
        if not report.swapping:
            self.swap_began_s = None
        elif self.swap_began_s is None or (self.resident_share, self.swaps_to) != (
            here,
            swaps_to,
        ):
            self.swap_began_s = now_s
        self.stalls, self.resident_share, self.swaps_to = report.stalls, here, swaps_to
        self.off_p50, self.off_p95 = report.off_p50, report.off_p95

    def cached_tokens(self, request: RequestEntry) -> int:
        """How many of the request's tokens it need not compute, by what its node has told of its
        cache and as far as the prompt goes, or that are on their way to it; what it was answered
        may be there, too. Answers to the same prompt go where it is computed, and take its full
        blocks. What the node told may be out of date: it says so when a request misses what it was
        submitted with.
        """
        if request.carried_tokens:
            return request.carried_tokens
        block_tokens = self.footprint.block_tokens
        if request.follows_to(self):
            return request.led_tokens(block_tokens)
        return request.found_tokens(self.prefixes, block_tokens)

    def note_all_prefixes(self, digests: Sequence[int]) -> None:
        """Notes the digests of the blocks in its KV cache, as a hello or the end of its load
        states them.
        """
        self.prefixes = set(digests)

    def forget_prefix(self, request: RequestEntry, cached_tokens: int) -> None:
        """Forgets those of the request's blocks that follow so many cached tokens: they are gone,
        whether the node said so or not.
        """
        size = self.footprint.block_tokens
        self.prefixes.difference_update(request.digests(size)[cached_tokens // size :])

    def note_prefixes(self, change: PrefixChange) -> None:
        """Blocks with these keys have come to its KV cache and gone."""
        self.prefixes.update(change.came)
        self.prefixes.difference_update(change.went)
        if change.came:
            self.node.touch()

    def note_grow_failed(self, again_s: float) -> None:
        """Its node could not do a grow; the next is not tried before `again_s`."""
        self.grow_again_s = again_s

    def note_idle(self, now_s: float) -> None:
        """It has no request, from now on or anew."""
        self.idle_since_s = now_s
        self.node.touch()

    def use_profile(self, profile: Profile) -> None:
        """Predict by a profile that was measured; what an earlier one was off by does not count."""
        self.profile, self.correction = profile, Correction()
        self.node.touch()

    def refine_profile(self, report: ProfileRefined, now_s: float) -> None:
        """Predict by the same one, nearer to what its iterations take, and by what is left to
        correct of it: both at once, so that nothing is counted twice.
        """
        self.profile = report.profile
        if report.correction is not None:
            self.correction.note_factor(report.correction, now_s, planned=report.correction_planned)
        self.node.touch()

    def keep_for_profile(self) -> None:
        """One more operation has it measured."""
        self._measurements += 1

    def release_from_profile(self) -> None:
        """One operation less."""
        self._measurements -= 1
