"""An instance on its node: what it serves, how it is predicted and what it holds.

Before: `instances`, which brings it up and takes it down. After: `state`, which has all of them.
"""

from collections import deque
from collections.abc import Collection
from dataclasses import dataclass, field
from enum import StrEnum
from math import inf

from mesh.compute.learned_correction import LearnedCorrection
from mesh.compute.refining import Refinement
from mesh.compute.times import Times
from mesh.core.node.local_cache import LocalCache
from mesh.core.node.request import LocalRequest
from mesh.domain.ids import InstanceId, RequestId
from mesh.domain.messages import InstanceReport, LoadInstance, ProfileRefined
from mesh.domain.model import Footprint
from mesh.domain.profile import IterationShape, Profile
from mesh.domain.reasons import ProfileSource
from mesh.domain.steps import part_bytes
from mesh.policy.rules.run_queues import Prompt, RunQueue

ERRORS_KEPT = 256
"""Iterations by which it is told how far predictions are off."""
SURVEYED_PART = 4
"""A survey that nobody asked for may have one part in so many of a KV cache that is full of
prefixes: those that were used longest ago go for it, and no others.
"""
FACTOR_KEPT_S = 0.05
"""Time in which a correction of the times fades by next to nothing."""


class LocalState(StrEnum):
    """An instance on its node. WAITING: to be loaded, once what the controller does not know of, or
    weights that are to make room, have left its memory. ABANDONED: it loads, and will be dropped as
    soon as it has.
    """

    WAITING = "waiting"
    LOADING = "loading"
    ABANDONED = "abandoned"
    READY = "ready"
    UNLOADING = "unloading"


@dataclass(slots=True, kw_only=True, eq=False)
class LocalInstance:
    command: LoadInstance
    profile: Profile
    state: LocalState = LocalState.WAITING
    footprint: Footprint | None = None
    """None until it is loaded."""
    kv_blocks: int = 0
    """In force."""
    kv_blocks_used: int = 0
    resizing: deque[int] = field(default_factory=deque)
    """KV blocks that the resizes under way are to bring about, in their order."""
    resizing_unasked: int = 0
    """How many of them, from the first, were asked for over an earlier link; nobody waits
    for them.
    """
    resize_waiting: int | None = None
    """KV blocks to resize to once all that is `unbooked`, or weights that are to go, have left the
    memory, and its own weights are not on their way.
    """
    here: float = 1.0
    """The share of its weights that is on the device."""
    swap_failures: int = 0
    """How many swaps of it have failed in a row."""
    pace_s: float = inf
    """The quickest pace of its requests: each decode gives all of them a token."""
    promising: bool = True
    """False while its iteration is under way, and after one that computed nothing for want of KV
    blocks: it gets no turn then, but for one at each heartbeat, until the engine is asked for
    something that may help.
    """
    requests: dict[RequestId, LocalRequest] = field(default_factory=dict)
    correction: LearnedCorrection = field(default_factory=LearnedCorrection)
    refinement: Refinement = field(init=False)
    unprimed: deque[IterationShape] = field(default_factory=deque)
    """Sizes of iterations that the engine has not met on it yet; see `priming`."""
    surveyed_chunk: int = 0
    """The largest chunk of a prompt that is timed while the node rests; 0: nothing is."""
    surveyed: ProfileSource = ProfileSource.ESTIMATE
    """The last survey of it that came to its end while the node rested."""
    errors: deque[float] = field(default_factory=lambda: deque(maxlen=ERRORS_KEPT))
    """By what share its last iterations took longer or shorter than predicted."""
    copied: float = 0.0
    """The share of its weights that has come since all were there last, in `copied_s`."""
    copied_s: float = 0.0
    passed: int = 0
    """Turns in a row that passed it over."""
    kept_run_queue: RunQueue | None = None
    """Its work as `run_queue` gave it last; None once its requests or its profile have changed."""
    kept_until_s: float = 0.0
    """Until when its times are near enough to be used as they are, while no load begins or ends."""
    kept_slowdown: float = 1.0
    """The slowdown by loads that its times were worked out with."""
    cache: LocalCache = field(default_factory=LocalCache)
    unbooked: bool = False
    """It was leaving when the link opened: the controller does not know of its memory."""
    error: str = ""
    """Why it is being unloaded, when it broke."""
    message: str = ""

    def __post_init__(self) -> None:
        self.refinement = Refinement(self.profile)

    @property
    def instance_id(self) -> InstanceId:
        return self.command.instance_id

    @property
    def kv_blocks_next(self) -> int:
        """What a call that the engine gets now will find."""
        return self.resizing[-1] if self.resizing else self.kv_blocks

    @property
    def kv_bytes(self) -> int:
        """What its KV cache takes, with what stays beside it, or will once the engine has done all
        that it was told.
        """
        if self.footprint is None:
            return 0 if self.state is LocalState.WAITING else self.command.swapped_bytes
        return self.footprint.size(max((self.kv_blocks, *self.resizing))).kv_bytes

    @property
    def out(self) -> bool:
        """Whether weights of it are off the device."""
        return self.here < 1.0

    @property
    def weights_bytes(self) -> int:
        """The bytes of its weights on the device."""
        return 0 if self.footprint is None else part_bytes(self.footprint.weights_bytes, self.here)

    @property
    def waiting_bytes(self) -> int:
        """What it waits for."""
        if self.state is LocalState.WAITING:
            return self.command.swapped_bytes
        if self.resize_waiting is None or self.footprint is None:
            return 0
        if self.state is not LocalState.READY:
            return 0
        return max(self.footprint.size(self.resize_waiting).kv_bytes - self.kv_bytes, 0)

    def begin_load(self) -> None:
        """The engine loads it: at once, or when the memory that it waited for is free."""
        self.state = LocalState.LOADING

    def note_loaded(self, footprint: Footprint, kv_blocks: int) -> None:
        self.state = LocalState.READY
        self.footprint, self.kv_blocks = footprint, kv_blocks
        self.here = 0.0 if self.command.swapped_bytes else 1.0

    def unload_when_loaded(self) -> None:
        """Nobody wants it any more: it goes as soon as it is loaded."""
        self.state = LocalState.ABANDONED

    def unload(self) -> list[LocalRequest]:
        """The engine unloads it. Returns the requests that were on it."""
        self.state = LocalState.UNLOADING
        requests = list(self.requests.values())
        self.requests.clear()
        self.pace_s = inf
        self.kept_run_queue = None
        return requests

    def note_broken(self, error: str, message: str) -> None:
        self.error, self.message = error, message

    def link_opened(self) -> None:
        """A hello names only what is ready. What broke since then is in the controller's books, and
        waiting for it, too, does no harm.
        """
        self.unbooked = self.state is not LocalState.READY

    def link_closed(self) -> None:
        """No controller knows what it is in the midst of."""
        if self.state is LocalState.LOADING:
            self.unload_when_loaded()
        self.resizing_unasked, self.resize_waiting = len(self.resizing), None

    def add(self, request: LocalRequest) -> None:
        self.requests[request.request_id] = request
        self.pace_s = min(self.pace_s, request.pace_s)
        self.request_changed()

    def remove(self, request: LocalRequest) -> None:
        del self.requests[request.request_id]
        if request.pace_s <= self.pace_s:
            self.pace_s = min([other.pace_s for other in self.requests.values()], default=inf)
        self.kept_run_queue = None

    def encourage(self) -> None:
        """There may be KV blocks now for which it computed nothing."""
        self.promising = True

    def note_turn(self, passed: int) -> None:
        """A turn was given; so many in a row have passed it over."""
        self.passed = passed

    def begin_turn(self) -> None:
        self.promising = False

    def note_iteration(self, kv_blocks_used: int) -> None:
        """Its requests have got tokens, or have fewer of their prompts left to compute."""
        self.kv_blocks_used, self.kept_run_queue = kv_blocks_used, None

    def note_blocks_used(self, kv_blocks: int) -> None:
        self.kv_blocks_used = kv_blocks

    def wait_to_resize(self, kv_blocks: int) -> None:
        """Until all that is `unbooked` has left the memory, weights have made room for it, and its
        own are not on their way.
        """
        self.resize_waiting = kv_blocks

    def begin_resize(self, kv_blocks: int) -> None:
        self.resize_waiting = None
        self.resizing.append(kv_blocks)
        self.encourage()

    def end_resize(self, kv_blocks: int) -> bool:
        """The oldest resize has led to so many blocks. Returns whether this link asked for it."""
        self.resizing.popleft()
        self.kv_blocks = kv_blocks
        asked = not self.resizing_unasked
        self.resizing_unasked = max(self.resizing_unasked - 1, 0)
        return asked

    def use_profile(self, profile: Profile) -> None:
        """What was learned about another one does not hold for it."""
        self.correction = LearnedCorrection.of(profile)
        self._predict_by(profile)

    def refine_profile(self, profile: Profile) -> None:
        """The same one, nearer to what its iterations take."""
        self.correction.refined(Times(self.profile), Times(profile))
        self._predict_by(profile)

    def tell_profile(self, now_s: float) -> ProfileRefined:
        """What predicts it from now on, and by what that is corrected."""
        return ProfileRefined(
            instance_id=self.instance_id,
            profile=self.profile,
            correction=self.correction.factor(now_s),
            correction_planned=self.correction.planned(now_s),
        )

    def _predict_by(self, profile: Profile) -> None:
        self.profile, self.refinement = profile, Refinement(profile)
        self.errors.clear()
        self.kept_run_queue = None

    def computes(self, first: RequestId | None) -> bool:
        """Whether it has this request, whose prompt is not computed yet."""
        request = None if first is None else self.requests.get(first)
        return request is not None and request.prefill_left > 0

    def follow_another(self, gone: LocalRequest) -> None:
        """Where a request has gone before its prompt was computed, the first of those who waited
        for that computes it, and the others wait for this one.
        """
        first: RequestId | None = None
        for request in self.requests.values() if gone.prefill_left else ():
            if request.fetching and request.order.request.first == gone.request_id:
                request.follow(first)
                first = first or request.request_id

    def has_work(self) -> bool:
        """Whether a request is on it that is not just paused."""
        return any(
            (not r.paused or r.prefill_left) and not r.fetching for r in self.requests.values()
        )

    def request_changed(self) -> None:
        """One of its requests has more to compute."""
        self.kept_run_queue = None
        self.encourage()

    def prime(self, shapes: deque[IterationShape], surveyed_chunk: int) -> None:
        """What to compute, and then to time, while there is nothing else to do."""
        self.unprimed, self.surveyed_chunk = shapes, surveyed_chunk

    def note_surveyed(self, source: ProfileSource) -> None:
        self.surveyed = source

    def wants_survey(self, source: ProfileSource) -> bool:
        """Whether its times would be better known by such a survey, which it has not had."""
        ready = self.state is LocalState.READY and self.surveyed_chunk > 0
        known = max(self.profile.origin.rank, self.surveyed.rank)
        return ready and known < source.rank and self.surveyed_blocks > 1

    @property
    def surveyed_blocks(self) -> int:
        """KV blocks for a survey that nobody asked for: those that hold nothing, and those of the
        oldest prefixes where these are less than a part of the cache.
        """
        unused = self.kv_blocks_next - self.kv_blocks_used
        return max(unused - self.cache.kv_blocks, min(unused, self.kv_blocks_next // SURVEYED_PART))

    def note_swapped(self, here: float, seconds: float, *, failed: bool) -> None:
        """Its weights are where they were to go, which took so long, or where they were."""
        self.swap_failures = self.swap_failures + 1 if failed else 0
        if failed:
            return
        if here > self.here:
            self.copied, self.copied_s = self.copied + here - self.here, self.copied_s + seconds
        self.here = here

    def take_copied_s(self) -> float | None:
        """Seconds in which all of its weights come, as the parts did that are complete now; None
        while they are not, and when it has been told.
        """
        if self.out or not self.copied:
            return None
        whole_s = self.copied_s / self.copied
        self.copied = self.copied_s = 0.0
        return whole_s

    def note_error(self, measured_s: float, predicted_s: float) -> None:
        """An iteration took so long that was predicted to take so long, correction included."""
        if predicted_s > 0.0:
            self.errors.append(abs(measured_s / predicted_s - 1.0))

    def note_primed(self, shape: IterationShape) -> None:
        self.unprimed.remove(shape)

    def run_queue(
        self, now_s: float, margin_s: float, slowdown: float, overestimate: float
    ) -> RunQueue | None:
        """Its work as the turn rule sees it; None when it has none, cannot do it or is not ready.

        Times are overestimated, as in the validation that let the requests in; `slowdown`, of a
        load beside them, lengthens them further. Deadlines come `margin_s` earlier, but no more
        than a quarter of the TPOT SLO; see `NodeLimits.deadline_margin_s_max`.
        """
        if not self.promising or self.state is not LocalState.READY or not self.requests:
            return None
        run_queue = self.kept_run_queue
        if run_queue is not None and now_s < self.kept_until_s and slowdown == self.kept_slowdown:
            return run_queue
        factor = self.correction.factor(now_s) * overestimate * slowdown
        if run_queue is None:
            run_queue = self.kept_run_queue = self._filled_run_queue(now_s, margin_s, factor)
        elif run_queue.times.factor != factor:
            run_queue.slow_down(factor)
            if run_queue.late_s < inf or run_queue.due_s < now_s:
                run_queue.sort_dues(now_s)
        self.kept_until_s, self.kept_slowdown = now_s + FACTOR_KEPT_S, slowdown
        return run_queue

    def best_effort_queue(self, now_s: float, overestimate: float) -> RunQueue | None:
        """The same of its requests of best effort, of which there are some: `run_queue` leaves them
        out.
        """
        if not self.promising or self.state is not LocalState.READY:
            return None
        factor = self.correction.factor(now_s) * overestimate
        return self._filled_run_queue(now_s, 0.0, factor, best_effort=True)

    @property
    def has_best_effort(self) -> bool:
        """Whether requests of best effort are on it."""
        return any(request.order.slo.best_effort for request in self.requests.values())

    @property
    def best_effort_since_s(self) -> float:
        """When the oldest of them came; infinite where there are none."""
        of = (r.start_s for r in self.requests.values() if r.order.slo.best_effort)
        return min(of, default=inf)

    def _filled_run_queue(
        self, now_s: float, margin_s: float, factor: float, *, best_effort: bool = False
    ) -> RunQueue:
        requests = [r for r in self.requests.values() if r.order.slo.best_effort is best_effort]
        margin_s = min(margin_s, self.pace_s / 4)
        run_queue = RunQueue(
            instance_id=self.instance_id,
            times=Times(self.profile, factor),
            tpot_s=self.pace_s,
            passed=self.passed,
        )
        dues_s, oldest_s, context_tokens = run_queue.dues_s, inf, 0
        running, mixed = run_queue.running, False
        for request in requests:
            if request.start_s < oldest_s:
                oldest_s = request.start_s
            left = request.prefill_left
            if request.fetching or (request.paused and not left):
                continue
            if left:
                due_s = request.due_s - margin_s
                slack_s = inf if request.output_tokens else request.order.slack_s
                past = request.tokens - left
                prompt = Prompt(
                    request_id=request.request_id,
                    left=left,
                    past=past,
                    due_s=due_s,
                    slack_s=slack_s,
                    tpot_s=request.pace_s,
                    first=not request.output_tokens,
                )
                run_queue.prompts.append(prompt)
            else:
                dues_s.append(request.due_s - margin_s)
                running.append(request.request_id)
                context_tokens += request.tokens
                if request.pace_s != self.pace_s:
                    mixed = True
        run_queue.batch, run_queue.context_tokens, run_queue.oldest_s = (
            len(dues_s),
            context_tokens,
            oldest_s,
        )
        if mixed:
            on = [self.requests[request_id] for request_id in running]
            run_queue.divide(
                [
                    (r.request_id, due_s, r.tokens, r.pace_s)
                    for r, due_s in zip(on, dues_s, strict=True)
                ],
                now_s,
            )
        else:
            run_queue.sort_dues(now_s)
        run_queue.predict()
        return run_queue

    def report(
        self, now_s: float, *, whole: bool = False, swaps_to: float | None = None
    ) -> InstanceReport | None:
        """None while it is not loaded; `whole`: for a controller that knows nothing of it;
        `swaps_to`: the share of its weights that will be on the device, where they are on their
        way. Its KV blocks are the most that it has until the resizes under way are done: a
        controller that does not know of those must not give the rest away.
        """
        if self.footprint is None or self.state is not LocalState.READY:
            return None
        return InstanceReport(
            instance_id=self.instance_id,
            deployment=self.command.deployment,
            model_id=self.command.model.model_id,
            footprint=self.footprint,
            kv_blocks=max((self.kv_blocks, *self.resizing)),
            kv_blocks_used=self.kv_blocks_used,
            context_tokens_max=self.command.context_tokens_max,
            batch_max=self.command.batch_max,
            batch=len(self.requests),
            correction=self.correction.factor(now_s),
            correction_planned=self.correction.planned(now_s),
            stalls=self.correction.stalls(now_s),
            kv_blocks_cached=self.cache.kv_blocks,
            off_p50=_quantile(self.errors, 0.5),
            off_p95=_quantile(self.errors, 0.95),
            prefixes=tuple(self.cache.digests) if whole else (),
            out=self.out,
            here=self.here if self.out else 0.0,
            swapping=swaps_to is not None,
            swaps_to=swaps_to or 0.0,
        )


def _quantile(values: Collection[float], share: float) -> float:
    """0 of none."""
    ascending = sorted(values)
    return ascending[int(share * (len(ascending) - 1))] if ascending else 0.0
