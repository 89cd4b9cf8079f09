"""A deployment as the controller core knows it: its queue, its instances, how its loads went.

Owned by the controller core, like all entries. What its requests have been refused is in
`state.refusals`.
"""

from bisect import insort
from collections import deque
from dataclasses import field
from math import exp, inf, log1p

from mesh.core.controller.state.instance import InstanceEntry
from mesh.core.controller.state.request import RequestEntry
from mesh.domain.deployment import Deployment, DeploymentSpec
from mesh.domain.energy import NO_ENERGY, EnergyView, together
from mesh.domain.history import PRIOR_COUNT, OutputHistory
from mesh.domain.ids import DeploymentName, InstanceId, NodeId
from mesh.domain.lifecycle import DEPLOYMENT, DeploymentState, InstanceState, advance
from mesh.domain.limits import CellLimits, forget_oldest
from mesh.domain.model import Footprint
from mesh.domain.slo import Slo
from mesh.domain.values import dataclass, replace
from mesh.domain.views import Arrivals, PlannedView
from mesh.request.candidates import Candidates

CALLS_FORGOTTEN_S = 300.0
"""A call counts for 1/e in its deployment's rate after so long."""
FORECAST_S = 60.0
"""Calls are forecast for so long."""
CALLS_KEPT = 512
"""The last calls of which times and lengths are kept, to plan by."""
PLANS_KEPT = 6
"""As many instances are wanted as the most of so many plans asked for: a lull unloads nothing that
the next burst would wait for.
"""

AVOIDED_MAX = 256
"""Nodes that are avoided; more have failed to load it than any cell has."""


@dataclass(slots=True, kw_only=True, eq=False)
class ClassCounts:
    """What became of the requests of one SLO class."""

    served: int = 0
    met: int = 0
    """How many of those were in time with TTFT and mean TPOT, as was promised."""
    refused: int = 0

    def add(self, *, served: int = 0, met: int = 0, refused: int = 0) -> None:
        self.served += served
        self.met += met
        self.refused += refused


@dataclass(slots=True, kw_only=True, eq=False)
class DeploymentEntry:
    spec: DeploymentSpec
    state: DeploymentState
    candidates: Candidates[InstanceEntry]
    """Its instances, in the policy's order."""
    history: OutputHistory = field(default_factory=OutputHistory)
    """Lengths of its answers so far."""
    deployment: Deployment | None = None
    """None until its model is imported."""
    queue: deque[RequestEntry] = field(default_factory=deque)
    instances: dict[InstanceId, InstanceEntry] = field(default_factory=dict)
    history_stored_s: float = 0.0
    resumes_at: int = 0
    """The place among the candidates where validations ran out, where the next look goes on."""
    served: int = 0
    refused: int = 0
    by_class: dict[str, ClassCounts] = field(default_factory=dict)
    """The same by the names of its SLO classes."""
    prompt_tokens: int = 0
    """The prompt tokens of requests that have had a first token."""
    cached_tokens: int = 0
    """How many of those were cached."""
    energy: EnergyView = NO_ENERGY
    phase: str = ""
    """While it is imported: what its node is at, and the share that is done."""
    share: float = 0.0
    load_failures: int = 0
    """In a row. An instance that ended by itself before its first token counts as one, too."""
    load_error: str = ""
    paused_until_s: float = 0.0
    avoided: dict[NodeId, str] = field(default_factory=dict)
    """Nodes whose last load of it failed, and why; tried only when no other has room."""
    return_at_s: float = 0.0
    """When the last of those that were refused has been told to come again."""
    called_s: float = -inf
    """When it was called last, unless an operator has had it unloaded since."""
    calls_log: float = -inf
    """How often it is called: log of its calls' sum, each counting e^(its time over
    CALLS_FORGOTTEN_S). Such rates decay alike, so that whose is higher does not depend on when that
    is asked.
    """
    arrivals: deque[tuple[float, int]] = field(default_factory=lambda: deque(maxlen=CALLS_KEPT))
    """When the last calls came, and the tokens of their prompts."""
    planned: PlannedView | None = None
    planned_s: float = -inf
    """When it was planned last."""
    _plans: deque[int] = field(default_factory=lambda: deque(maxlen=PLANS_KEPT))
    """What the last plans asked for."""

    @property
    def name(self) -> DeploymentName:
        return self.spec.name

    @property
    def warm(self) -> int:
        """Instances that its plan wants loaded as long as nobody else needs their memory."""
        scaling = self.spec.scaling
        if scaling.plan is None or self.planned is None:
            return 0
        return min(max(scaling.replicas_min, self.planned.wanted), scaling.replicas_max)

    @property
    def slo(self) -> Slo:
        return self.spec.slo

    @property
    def queued(self) -> int:
        """Requests that wait."""
        return len(self.queue)

    @property
    def answer_tokens(self) -> float:
        """Mean length of its answers."""
        return self.history.mean_tokens

    def answer_tokens_of(self, slo_class: str) -> float:
        """The same of one SLO class; of all, before an answer of it has ended."""
        return self.history.mean_of(slo_class)

    @property
    def replicas_max(self) -> int:
        return self.spec.scaling.replicas_max

    @property
    def served_share(self) -> float:
        """The share of its ended requests that were served; 1 before the first has ended."""
        ended = self.served + self.refused
        return self.served / ended if ended else 1.0

    @property
    def made(self) -> Deployment:
        """What it is made of, once its model is imported."""
        assert self.deployment is not None, "its model is not imported yet"
        return self.deployment

    def calls_per_s(self, now_s: float) -> float:
        """How often it is called, the last CALLS_FORGOTTEN_S counting most."""
        return exp(self.calls_log - now_s / CALLS_FORGOTTEN_S) / CALLS_FORGOTTEN_S

    def call_chance(self, now_s: float, *, rated: bool = True) -> float:
        """The probability of a call within FORECAST_S, by the rate of calls, unless it is not to be
        `rated`, and by the times between them; 0 where none is known.
        """
        if self.called_s == -inf:
            return 0.0
        calls_per_s = self.calls_per_s(now_s) if rated else 0.0
        return self.history.gaps.chance(now_s - self.called_s, FORECAST_S, calls_per_s)

    def replicas(self) -> int:
        """Instances that take new requests or will."""
        return sum([i.takes_requests for i in self.instances.values()])

    def may_park(self) -> bool:
        """Whether more than its minimum keep their KV caches: then one need not."""
        taking = [i for i in self.instances.values() if i.takes_requests]
        ready = sum(i.state is not InstanceState.PARKED for i in taking)
        return ready > self.spec.scaling.replicas_min

    def advance(self, to: DeploymentState) -> None:
        self.state = advance(DEPLOYMENT, self.state, to)

    def note_progress(self, phase: str, share: float) -> None:
        """What the import of its model is at."""
        self.phase, self.share = phase, share

    def use(self, deployment: Deployment) -> None:
        """It is stored so: the minimum that kept its instances may be another one now."""
        self.deployment, self.spec = deployment, deployment.spec
        names = [slo.name for slo in deployment.spec.classes]
        self.by_class = {name: counts for name, counts in self.by_class.items() if name in names}
        kept = tuple([of for of in self.history.classes if of[0] in names])
        self.history = replace(self.history, classes=kept)
        self.ease_nodes()

    @property
    def footprints(self) -> tuple[tuple[str, Footprint], ...]:
        """As its instances have shown them."""
        return self.deployment.footprints if self.deployment is not None else ()

    def succeed(self, old: "DeploymentEntry") -> None:
        """It serves in the place of an earlier revision, and is called as that was."""
        known = old.history if self.history.count <= PRIOR_COUNT else self.history
        self.history = replace(known, gaps=old.history.gaps)
        self.called_s, self.calls_log = old.called_s, old.calls_log
        self.arrivals, self.planned, self._plans = old.arrivals, old.planned, old._plans

    def note_retired(self, old: "DeploymentEntry") -> None:
        """An earlier revision has gone: what it has served counts on."""
        self.served += old.served
        self.refused += old.refused
        for name, was in old.by_class.items():
            if counts := self._counts_of(name):
                counts.add(served=was.served, met=was.met, refused=was.refused)
        self.note_prompt(old.prompt_tokens, old.cached_tokens)
        self.note_energy(old.energy)

    def enqueue(self, request: RequestEntry, now_s: float) -> None:
        """By arrival, best effort behind all others: one that has run before goes ahead of those
        that came later. The queue may grow beyond its bound by such requests, of which there are no
        more than places.
        """
        request.queued(now_s)
        if not self.queue or self.queue[-1].rank <= request.rank:
            self.queue.append(request)
        else:
            insort(self.queue, request, key=lambda waiting: waiting.rank)

    def note_return_at(
        self, at_s: float, interval_s: float, *, now_s: float, wait_s_max: float
    ) -> float:
        """One more is refused, and a place expected at `at_s`, infinite where nobody knows: when it
        is to come again, so much after the one that was told before it, but no longer from now than
        anyone is told: what was told in an overload does not outlast it.
        """
        next_s = max(self.return_at_s + interval_s, at_s if at_s < inf else now_s)
        self.return_at_s = min(next_s, now_s + wait_s_max)
        return self.return_at_s

    def dequeue(self, request: RequestEntry) -> None:
        """It waits no more, for no load either."""
        self.queue.remove(request)
        if request.waits_for is not None:
            request.waits_for.expect_no_more(request)

    def add(self, instance: InstanceEntry) -> None:
        """One instance more: the minimum may have kept others till now."""
        self.ease_nodes()
        self.instances[instance.instance_id] = instance
        self.candidates.rank(instance)

    def remove(self, instance: InstanceEntry) -> None:
        """The instance is gone. It may be one of an earlier deployment of the same name."""
        self.instances.pop(instance.instance_id, None)
        self.candidates.discard(instance)

    def rank(self, instance: InstanceEntry) -> None:
        """The batch of an instance has changed, perhaps of an earlier one of the same name."""
        if instance.instance_id in self.instances:
            self.candidates.rank(instance)

    def ease_nodes(self) -> None:
        """More of its instances may go than before."""
        for instance in self.instances.values():
            instance.node.touch()

    def note_stopped(self, place: int) -> None:
        """Validations ran out there."""
        self.resumes_at = place

    def take_resumes_at(self) -> int:
        """The place to begin at, this time."""
        place, self.resumes_at = self.resumes_at, 0
        return place

    def note_unloaded(self) -> None:
        """By an operator: nothing brings it back but a call."""
        self.called_s = -inf
        self.arrivals.clear()
        self._plans.clear()
        self.planned = None

    def received(self, now_s: float, within_s: float) -> Arrivals:
        """What has come lately, with answers as long as those so far."""
        calls = [call for call in self.arrivals if call[0] > now_s - within_s]
        if len(calls) == CALLS_KEPT:
            within_s = max(now_s - calls[0][0], 1e-6)
        return Arrivals(
            rate_per_s=len(calls) / within_s,
            prompts=tuple(sorted(tokens for _, tokens in calls)),
            answer_tokens=self.answer_tokens,
        )

    def note_plan(self, needed: int, why: str, now_s: float) -> None:
        """So many instances are needed; the most of the last plans are wanted."""
        self.planned_s = now_s
        self._plans.append(needed)
        most = max(self._plans)
        if most > needed:
            why = f"{why}; {most} were, within the last {PLANS_KEPT} plans"
        self.planned = PlannedView(wanted=most, why=why)

    def note_arrival(self, prompt_tokens: int, now_s: float) -> None:
        """A call has come, with a prompt of so many tokens."""
        self.arrivals.append((now_s, prompt_tokens))

    def note_call(self, now_s: float) -> None:
        """Somebody asks for it, in vain or not."""
        if self.called_s > -inf:
            self.history = self.history.called(now_s - self.called_s)
        call_log = now_s / CALLS_FORGOTTEN_S
        more, less = max(self.calls_log, call_log), min(self.calls_log, call_log)
        self.called_s, self.calls_log = now_s, more + log1p(exp(less - more))

    def queued_of(self, slo_class: str) -> int:
        """Requests of a class that wait."""
        # Without classes there are those of batch files, behind all others.
        if not self.spec.classes and not (self.queue and self.queue[-1].slo.best_effort):
            return len(self.queue)
        return sum([request.slo.name == slo_class for request in self.queue])

    def note_served(
        self, output_tokens: int, slo_class: str = "", *, met: bool = False, loads: bool = False
    ) -> None:
        """A request has ended well, with an answer of so many tokens. `loads`: it was asked for to
        have the model loaded, and its answer is none.
        """
        self.served += 1
        counts = self._counts_of(slo_class)
        if not loads:
            self.history = self.history.after(output_tokens, slo_class if counts else "")
        if counts:
            counts.add(served=1, met=int(met))
        self.forgive_loads()

    def note_energy(self, taken: EnergyView) -> None:
        self.energy = together((self.energy, taken))

    def note_prompt(self, tokens: int, cached_tokens: int) -> None:
        """A request has its first token; so many of its prompt were in the cache."""
        self.prompt_tokens += tokens
        self.cached_tokens += min(cached_tokens, tokens)

    def note_history_stored(self, now_s: float) -> None:
        self.history_stored_s = now_s

    def note_refused(self, slo_class: str = "") -> None:
        self.refused += 1
        if counts := self._counts_of(slo_class):
            counts.add(refused=1)

    def _counts_of(self, slo_class: str) -> ClassCounts | None:
        """Nothing is counted of a class that its spec has no more."""
        if slo_class not in {slo.name for slo in self.spec.classes}:
            return None
        return self.by_class.setdefault(slo_class, ClassCounts())

    def note_footprint(self, engine: str, footprint: Footprint) -> None:
        """An instance says what the deployment takes on its engine, unless that is known whole: an
        earlier release said nothing of what grows with the context.
        """
        if self.deployment is None:
            return
        footprints = dict(self.deployment.footprints)
        known = footprints.get(engine)
        if known is None or (footprint.context_token_bytes and not known.context_token_bytes):
            footprints[engine] = footprint
            self.deployment = replace(self.deployment, footprints=tuple(footprints.items()))

    def note_loaded(self) -> None:
        """A load has ended well."""
        self.paused_until_s = 0.0
        self.avoided.clear()

    def note_load_failure(
        self, node_id: NodeId, message: str, now_s: float, limits: CellLimits
    ) -> None:
        """A load has failed there. The pause before the next is longer each time, up to a bound."""
        doublings = min(self.load_failures, limits.load_retry_doublings_max)
        self.load_failures += 1
        self.load_error = self.avoided[node_id] = message
        forget_oldest(self.avoided, AVOIDED_MAX)
        self.paused_until_s = now_s + limits.load_retry_s * 2**doublings

    def pause_left_s(self, now_s: float) -> float:
        """Until it is loaded again after a failure."""
        return max(self.paused_until_s - now_s, 0.0)

    def forgive_loads(self) -> None:
        """An instance has served, or lived until it was let go."""
        self.load_failures, self.load_error = 0, ""
