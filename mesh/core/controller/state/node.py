"""A node as the controller core knows it: what it said last, its memory's books, its instances.

Its version changes whenever it may have got less to compute or more memory, and with that what it
has refused is asked again (`state.refusals`). Owned by the controller core; it is read as the view
that policies and placement take.
"""

from collections import deque
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from math import exp2
from typing import TYPE_CHECKING

from mesh.compute.load_times import PRIORS, LoadTimes
from mesh.core.controller.state.energy import EnergyBook
from mesh.core.controller.state.instance import InstanceEntry
from mesh.core.controller.state.prefetches import NodePrefetches
from mesh.domain.deployment import Deployment, DeploymentSpec
from mesh.domain.energy import NO_ENERGY, EnergyView, Power, together
from mesh.domain.ids import DeploymentName, InstanceId, ModelId, NodeId
from mesh.domain.lifecycle import NODE, InstanceState, NodeState, advance
from mesh.domain.limits import KEPT_CACHES_MAX, forget_oldest
from mesh.domain.messages import Heartbeat, NodeHello
from mesh.domain.model import Footprint, ModelInfo, imported_id
from mesh.domain.node_rule import NodeRule
from mesh.domain.reasons import DeviceKind
from mesh.domain.revision import public_name
from mesh.domain.steps import HeldModel, LoadRate, LoadTier, PrefixChange
from mesh.domain.values import replace
from mesh.memory.demand import estimate_footprint
from mesh.memory.shared_weights import SharedWeights
from mesh.memory.station import ReservationKind, ReservationStation
from mesh.policy.rules.headroom import HEADROOM
from mesh.policy.rules.turns import TurnRule

if TYPE_CHECKING:
    from mesh.core.controller.state.deployment import DeploymentEntry
    from mesh.core.controller.state.request import RequestEntry

FOOTPRINTS_MAX = 256
"""Shapes of which a node's own footprints are kept: those that were loaded there last."""

GROWS = LoadRate(fixed_s=0.0, bytes_per_s=32e9)
"""What times of growing caches are told as ratios to; their sizes count, not this rate."""
KV_RATE_BYTES_LEAST = 1 << 20
KV_RATE_LOSS = 10.0
"""By which the expected rate of a node's transfers falls with one that finds no way."""
KV_RATE_DOUBLES_S = 60.0
KV_RATE_DOUBLINGS_MAX = 64.0
SPAN_S, SPANS = 5.0, 12
"""A node's seconds of computing are kept for the last 12 spans of 5 s, and for the present one."""


@dataclass(slots=True, kw_only=True, eq=False)
class NodeEntry:
    hello: NodeHello
    node_id: NodeId = field(init=False)
    device: DeviceKind = field(init=False)
    link_id: int
    rule: NodeRule
    """By which it was told to run."""
    turns: TurnRule = HEADROOM
    """The turn rule that it names."""
    station: ReservationStation
    last_seen_s: float
    state: NodeState = NodeState.READY
    base_bytes: int = field(init=False)
    """What its process holds beside all instances: as it stated, or more, as heartbeats have told.
    """
    footprints: dict[str, Footprint] = field(default_factory=dict)
    """What an instance of a shape takes here, as the last one that was loaded said."""
    _footprint_of: dict[DeploymentName, tuple[Deployment, Footprint]] = field(default_factory=dict)
    """What `footprint_of` said last, as long as nothing else is known of the deployment."""
    rss_bytes: int = 0
    engine_bytes: int = 0
    iteration_started_s: float | None = None
    """When the iteration under way began, as far as reports tell; None when it has no work."""
    computed: deque[tuple[int, dict[DeploymentName, list[float]]]] = field(
        default_factory=lambda: deque(maxlen=SPANS + 1)
    )
    """Spans of time, by their number, the seconds in which it computed for deployments, and the
    squares of those of each turn, summed.
    """
    load_slowdown: float = 1.0
    slowdown_known: bool = False
    """A heartbeat has told it; a node that knows none says 1."""
    models: dict[ModelId, list[HeldModel]] | None = field(default=None, init=False)
    """The models that it has at hand, as it said last, with what has become of that since; None: it
    has not said.
    """
    version: int = 0
    """Counts the times that it may have got less to compute or more memory, heartbeats included.
    A refusal is remembered with its version, and holds until the version changes.
    """
    running: int = 0
    """Requests on its instances."""
    request_changes: int = 0
    """Times that one of them, or one that waits for a load, came or went."""
    instances: dict[InstanceId, InstanceEntry] = field(default_factory=dict)
    deployments: "dict[DeploymentName, DeploymentEntry]" = field(default_factory=dict)
    """The cell's deployments: their `replicas_min` keeps instances from being reclaimed."""
    prefetches: NodePrefetches = field(default_factory=NodePrefetches)
    kv_shown_bytes_per_s: float = field(init=False)
    """What transfers of KV blocks to it carried, as the last ones have shown."""
    kv_shown_s: float = 0.0
    """When the last of them did."""
    swap_times: LoadTimes = field(default_factory=lambda: LoadTimes(1.0))
    """How long swaps took that brought weights to its device, from the host's memory."""
    grow_times: LoadTimes = field(default_factory=lambda: LoadTimes(1.0))
    """How long KV caches took to grow, by their new size."""
    energy: EnergyView = NO_ENERGY
    energy_told_s: float | None = None
    """When it last told its joules."""
    energy_since_s: float = 0.0
    """When it began to; its first are of about a heartbeat before."""
    computed_s: float = 0.0
    """How long it has computed since."""
    energy_book: EnergyBook[DeploymentName] = field(default_factory=EnergyBook)
    left: dict[DeploymentName, set[int]] = field(default_factory=dict)
    """By deployment, the digests of cached KV blocks that its next instance here would find."""

    def __post_init__(self) -> None:
        self.node_id, self.device = self.hello.node_id, self.hello.device
        self.base_bytes = self.hello.base_bytes
        self.kv_shown_bytes_per_s = self.hello.kv_bytes_per_s
        if self.hello.models is not None:
            self.models = _by_id(self.hello.models)

    @property
    def free_bytes(self) -> int:
        return self.station.free_bytes

    @property
    def capacity_bytes(self) -> int:
        return self.station.capacity_bytes

    @property
    def prefetch_bytes(self) -> int:
        return self.hello.prefetch_bytes

    def note_left(self, deployment: DeploymentName, change: PrefixChange) -> None:
        """Blocks of an unloaded instance are there for the next one of the deployment, or gone."""
        digests = self.left.pop(deployment, set()).union(change.came).difference(change.went)
        if digests:
            self.left[deployment] = digests
            for name in tuple(self.left)[:-KEPT_CACHES_MAX]:
                del self.left[name]
        if change.came:
            self.touch()

    def left_tokens(self, deployment: Deployment, request: "RequestEntry") -> int:
        """How many of the request's tokens an instance that it loads need not compute: what
        unloaded ones have left to it.
        """
        digests = self.left.get(deployment.spec.name)
        if not digests:
            return 0
        return request.found_tokens(digests, self.footprint_of(deployment).block_tokens)

    def take_left(self, deployment: DeploymentName) -> set[int]:
        """An instance of the deployment is about to find them."""
        return self.left.pop(deployment, set())

    @property
    def swaps(self) -> bool:
        """Whether it swaps weights by its turn rule."""
        return self.station.pools

    @property
    def moves_kv(self) -> bool:
        """Whether requests that run move to it and from it with their KV blocks."""
        return bool(self.hello.kv_address) and self.hello.computes_ahead

    def copy_s(self, weights_bytes: int) -> float:
        """Seconds in which a swap brings weights to the device: as its last swaps did; until there
        was one, as it states for loads from the host's memory.
        """
        if self.swap_times.tier(LoadTier.HOST) is None:
            return self._host_rate.load_s(weights_bytes)
        return self.swap_times.planned_s(LoadTier.HOST, weights_bytes)

    @property
    def away_s(self) -> float:
        """Seconds in which all weights of an instance leave the device: a swap's fixed part."""
        return self._host_rate.fixed_s

    def grow_s(self, kv_bytes: int) -> float:
        """Seconds in which a KV cache grows to this size, in the place of iterations: as the last
        ones did. Nothing is known of the first.
        """
        known = self.grow_times.tier(LoadTier.HOST) is not None
        return self.grow_times.planned_s(LoadTier.HOST, kv_bytes) if known else 0.0

    def note_grown(self, kv_bytes: int, seconds: float) -> None:
        """A KV cache has grown to this size."""
        self.grow_times.learn(LoadTier.HOST, GROWS, kv_bytes, seconds)

    @property
    def _host_rate(self) -> LoadRate:
        return dict(self.hello.load_rates).get(LoadTier.HOST, PRIORS[LoadTier.HOST])

    def load_bytes(self, weights_bytes: int, tier: LoadTier) -> int:
        """The bytes that a load moves: where weights are swapped, they come after it."""
        return 0 if self.swaps and tier is not LoadTier.REMOTE else weights_bytes

    def is_idle(self) -> bool:
        """Whether no request is on it."""
        return self.running == 0

    def rests(self) -> bool:
        """Whether it has nothing to do: no request, no load, and nobody who waits for one."""
        return self.is_idle() and not any(
            i.state is InstanceState.LOADING or i.expected for i in self.instances.values()
        )

    def is_loading(self) -> bool:
        """Whether a load runs on it, which slows its iterations down."""
        return any(self._load_runs(i) for i in self.instances.values())

    def computes_beside_load(self) -> bool:
        """Whether it will compute beside one more load: for requests that it has, or for those that
        the loads before that one are for.
        """
        return self.running > 0 or any(
            i.state is InstanceState.LOADING for i in self.instances.values()
        )

    def takes(self, spec: DeploymentSpec) -> bool:
        """Whether it takes new instances of a deployment now."""
        return self.state is NodeState.READY and self.suits(spec)

    def suits(self, spec: DeploymentSpec) -> bool:
        """Whether it has the kind of device for a deployment, enough of them for an instance, and
        an engine for its task.
        """
        enough = spec.tensor_parallel <= self.hello.tensor_parallel_max
        computes = spec.task is None or self.hello.embeds
        return enough and computes and self.device in spec.devices

    def could_hold(self, entry: "DeploymentEntry") -> bool:
        """Whether it could hold an instance of a deployment with nothing else on it."""
        if entry.deployment is None or not self.suits(entry.spec):
            return self.suits(entry.spec)
        return self.footprint_of(entry.deployment).instance_bytes(1) <= self.capacity_bytes

    def footprint_of(self, deployment: Deployment) -> Footprint:
        """As instances of the shape said here; else as an engine of its kind stated, or about. It
        is that of the deployment's context limit, which theirs may differ from.
        """
        of, known = self._footprint_of.get(deployment.spec.name, (None, None))
        if known is not None and of is deployment:
            return known
        stated = dict(deployment.footprints).get(self.hello.engine)
        found = self.footprints.get(deployment.model.shape) or stated
        found = found or estimate_footprint(deployment.model)
        found = found.at_context(deployment.context_tokens_max)
        if len(self._footprint_of) >= FOOTPRINTS_MAX:
            self._footprint_of.clear()
        self._footprint_of[deployment.spec.name] = deployment, found
        return found

    def shared_weights(
        self, model_id: ModelId, context_tokens_max: int, footprint: Footprint
    ) -> SharedWeights | None:
        """What an instance has in common with others of its model here, or of a pool with all; None
        where nothing is.
        """
        if self.swaps:
            return SharedWeights(key=None, size_bytes=footprint.weights_bytes)
        if not self.hello.shares_weights:
            return None
        return SharedWeights(key=(model_id, context_tokens_max), size_bytes=footprint.shared_bytes)

    def shared_weights_of(self, deployment: Deployment) -> SharedWeights | None:
        """What an instance of the deployment shares with others on this node."""
        if not self.swaps and not self.hello.shares_weights:
            return None
        footprint = self.footprint_of(deployment)
        return self.shared_weights(
            deployment.model.model_id, deployment.context_tokens_max, footprint
        )

    def spared_bytes(self, deployment: Deployment) -> int:
        """How much an instance of the deployment would not take, because others of its model are
        promised it already.
        """
        shared = self.shared_weights_of(deployment)
        return 0 if shared is None else self.station.spared_bytes(shared)

    def free_bytes_for(self, deployment: Deployment) -> int:
        """How large an instance of the deployment may be, with what it would share."""
        return self.free_bytes + self.spared_bytes(deployment)

    def tier_of(self, deployment: Deployment, without: Collection[InstanceId] = ()) -> LoadTier:
        """From where it would load the deployment's model, were it to begin next, `without` the
        weights of instances that go for it, or of the one whose load begins.
        """
        return self._tier_beside(self._sharers(deployment, without), deployment)

    def _tier_beside(
        self, sharers: Collection["InstanceEntry"], deployment: Deployment
    ) -> LoadTier:
        if sharers:
            return LoadTier.HOST
        if self.models is None:
            return LoadTier.DISK
        model_id = deployment.model.model_id
        tiers = [
            model.tier
            for model in self.models.get(model_id, ())
            if model.context_tokens_max in (0, deployment.context_tokens_max)
        ]
        plain = self.models.get(imported_id(model_id), ())
        tiers += [model.tier for model in plain if model.tier is LoadTier.DISK]
        return max(tiers, key=lambda tier: tier.nearness, default=LoadTier.REMOTE)

    def asleep(self) -> tuple[ModelId, ...]:
        """Models whose weights the host keeps without an instance: each that sleeps, and those of
        which it has but the weights, which are for loads of any context.
        """
        loaded = {instance.model_id for instance in self.instances.values()}
        names: list[ModelId] = []
        for model_id, every in (self.models or {}).items():
            host = [model for model in every if model.tier is LoadTier.HOST]
            sleeping = sum(model.context_tokens_max > 0 for model in host)
            alone = bool(host) and model_id not in loaded
            names += [model_id] * max(sleeping, int(alone))
        return tuple(names)

    def _sharers(
        self, deployment: Deployment, without: Collection[InstanceId] = ()
    ) -> list[InstanceEntry]:
        """Whose weights an instance of the deployment would take: those that are loaded, or whose
        load runs. A load that waits may come after it, and then takes them from it.
        """
        if not self.hello.shares_weights:
            return []
        kind = deployment.model.model_id, deployment.context_tokens_max
        return [
            i
            for i in self.instances.values()
            if (i.model_id, i.context_tokens_max) == kind
            and i.instance_id not in without
            and (i.is_loaded or (i.state is InstanceState.LOADING and not self.load_waits(i)))
        ]

    def load_waits(self, instance: InstanceEntry) -> bool:
        """Whether the node has not been told of its load."""
        name = instance.instance_id
        return self.station.load_kind(name) is not None and self.station.running(name) is None

    def _load_runs(self, instance: InstanceEntry) -> bool:
        loading = instance.state is InstanceState.LOADING
        return loading and self.station.running(instance.instance_id) is not None

    def source_of(
        self, deployment: Deployment, without: Collection[InstanceId] = ()
    ) -> tuple[LoadTier, ReservationKind]:
        """From where one more load of the deployment's model would come, and with which loads it
        would queue, `without` as above. One that shares weights which are still being loaded waits
        for the end of that load, as other loads do.
        """
        sharers = self._sharers(deployment, without)
        tier = self._tier_beside(sharers, deployment)
        if tier is LoadTier.REMOTE:
            return tier, ReservationKind.IMPORT
        comes_after = bool(sharers) and not any(i.is_loaded for i in sharers)
        wakes = tier is LoadTier.HOST and not comes_after
        return tier, ReservationKind.WAKE if wakes else ReservationKind.LOAD

    def idle_instances(
        self, now_s: float, sparing: Deployment | None = None
    ) -> list[InstanceEntry]:
        """Idle instances in the order in which they go: the least recently used first. Where models
        are loaded ahead, the least likely to be called first: what was loaded for its next caller
        would else be the last to go. Those whose weights one of the deployment `sparing` would
        share go last.
        """
        idle = [i for i in self.instances.values() if self.may_go(i)]
        spared = self._sharers(sparing) if sparing is not None else []
        by_calls = self.hello.prefetch_bytes > 0

        def rank(instance: InstanceEntry) -> tuple[bool, float, float, InstanceId]:
            owner = self.deployments.get(instance.deployment) if by_calls else None
            chance = 0.0 if owner is None else owner.call_chance(now_s)
            return instance in spared, chance, instance.idle_since_s, instance.instance_id

        return sorted(idle, key=rank)

    def obtainable_bytes(self, deployment: Deployment) -> int:
        """For an instance of the deployment: free, shared, or of idle ones that may go now."""
        idle = [i.instance_id for i in self.instances.values() if self.may_go(i)]
        freed_bytes = self.station.freed_bytes(idle, self.shared_weights_of(deployment))
        return self.free_bytes_for(deployment) + freed_bytes

    def may_go(self, instance: InstanceEntry) -> bool:
        """Whether an instance is idle, and nobody wants it to stay: no promise, no minimum, and no
        measurement. One that is being loaded ahead goes as soon as it is there.
        """
        there = instance.is_loaded or (instance.prefetched and self._load_runs(instance))
        if instance.requests or instance.expected or instance.profiling or not there:
            return False
        owner = self.deployments.get(instance.deployment)
        return owner is None or owner.replicas() > owner.spec.scaling.replicas_min

    def touch(self) -> None:
        """It may have got less to compute or more memory: what it has refused is asked again."""
        self.version += 1

    def advance(self, to: NodeState) -> None:
        self.state = advance(NODE, self.state, to)

    def seen(self, now_s: float) -> None:
        """It has said something."""
        self.last_seen_s = now_s

    def note_heartbeat(self, heartbeat: Heartbeat) -> None:
        """What it says of its process and its engine."""
        self.rss_bytes, self.engine_bytes = heartbeat.rss_bytes, heartbeat.engine_bytes
        self.load_slowdown = max(heartbeat.load_slowdown, 1.0)
        self.slowdown_known = heartbeat.load_slowdown != 1.0
        if heartbeat.models is not None:
            self.models = _by_id(heartbeat.models)
        if heartbeat.base_bytes > self.base_bytes:
            self.base_bytes = heartbeat.base_bytes
            self.station.limit(max(self.hello.memory_bytes - heartbeat.base_bytes, 0))
        if heartbeat.swapped_bytes:
            seconds = heartbeat.swapped_s
            self.swap_times.learn(LoadTier.HOST, self._host_rate, heartbeat.swapped_bytes, seconds)
        # Time alone changes it, too: `Correction.planned` forgets the worst of the last seconds.
        self.touch()

    def note_energy(self, told: EnergyView, busy_s: float, now_s: float) -> None:
        """It has told its joules since its heartbeat before, `busy_s` of which it computed."""
        self.energy = replace(together((self.energy, told)), reason=told.reason)
        if self.energy_told_s is None:
            self.energy_since_s = now_s
        self.energy_told_s = now_s
        self.computed_s += busy_s

    def power(self) -> Power | None:
        """What it draws, by all that it has told; `None` where it does not know its joules."""
        idle_j, busy_j = self.energy.idle_j, self.energy.busy_j
        idle_s = (self.energy_told_s or 0.0) - self.energy_since_s - self.computed_s
        if idle_j is None or busy_j is None or self.computed_s <= 0 or idle_s <= 0:
            return None
        idle_watts = idle_j / idle_s
        busy_watts = max(busy_j / self.computed_s, idle_watts)
        return Power(idle_watts=idle_watts, busy_watts=busy_watts)

    def kv_bytes_per_s(self, now_s: float) -> float:
        """What transfers of KV blocks to it are expected to carry: what the last ones have shown,
        which doubles each KV_RATE_DOUBLES_S until it is what the node stated, so that a bad one is
        not the last.
        """
        doublings = min((now_s - self.kv_shown_s) / KV_RATE_DOUBLES_S, KV_RATE_DOUBLINGS_MAX)
        shown = self.kv_shown_bytes_per_s
        return min(shown * exp2(doublings), max(shown, self.hello.kv_bytes_per_s))

    def note_transfer(self, moved_bytes: int, elapsed_s: float, now_s: float) -> None:
        """KV blocks have come to it. Short transfers say little of the rate."""
        if moved_bytes >= KV_RATE_BYTES_LEAST and elapsed_s > 0.0:
            before = self.kv_bytes_per_s(now_s)
            self.kv_shown_bytes_per_s = (before + moved_bytes / elapsed_s) / 2
            self.kv_shown_s = now_s

    def note_no_transfer(self, now_s: float) -> None:
        """It could not reach the node that has them: for now, computing is the quicker way."""
        self.kv_shown_bytes_per_s = self.kv_bytes_per_s(now_s) / KV_RATE_LOSS
        self.kv_shown_s = now_s

    def note_footprint(self, model: ModelInfo, footprint: Footprint) -> None:
        """A load has shown what an instance of the model's shape takes here."""
        self._footprint_of.clear()
        self.footprints.pop(model.shape, None)
        self.footprints[model.shape] = footprint
        forget_oldest(self.footprints, FOOTPRINTS_MAX)

    def note_stored(self, model_id: ModelId) -> None:
        """Its store has the model now, which it says by itself only with its next heartbeat."""
        if self.models is not None and model_id not in self.models:
            self.models[model_id] = [HeldModel(model_id=model_id, tier=LoadTier.DISK)]

    def note_woken(self, model: HeldModel) -> None:
        """A load has used up weights that its host kept."""
        stored = (self.models or {}).get(model.model_id, [])
        if model in stored:
            stored.remove(model)

    def note_computed(self, deployment: DeploymentName, now_s: float) -> None:
        """The turn under way was one of this deployment, and has ended."""
        if self.iteration_started_s is None:
            return
        span, took_s = int(now_s // SPAN_S), now_s - self.iteration_started_s
        if not self.computed or self.computed[-1][0] != span:
            self.computed.append((span, {}))
        by = self.computed[-1][1]
        if (sums := by.get(deployment)) is None:
            sums = by[deployment] = [0.0, 0.0]
        sums[0] += took_s
        sums[1] += took_s * took_s

    def left_share(self, deployment: DeploymentName, now_s: float) -> float:
        """The share of its time that a deployment can have beside the others of the last minute:
        what they left, or as much as each of those that took more. In steps of 5 %, so that many
        nodes are alike.
        """
        spent = sorted(seconds for seconds, _ in self._of_others(deployment, now_s).values())
        most_s = left_s = share_s = now_s % SPAN_S + SPANS * SPAN_S
        for more, seconds in zip(range(len(spent), 0, -1), spent, strict=True):
            share_s = left_s / (more + 1)
            if seconds > share_s:
                break
            left_s -= seconds
            share_s = left_s
        return max(round(20 * share_s / most_s), 1) / 20

    def turn_of_others_s(self, deployment: DeploymentName, now_s: float) -> float:
        """How long a turn of the others takes that somebody comes upon, by those of the last
        minute: E[S²] / E[S], of which half is left (Pollaczek and Khinchine). 0 without any.
        """
        spent = self._of_others(deployment, now_s).values()
        total_s = sum(seconds for seconds, _ in spent)
        return sum(squares for _, squares in spent) / total_s if total_s else 0.0

    def _of_others(
        self, deployment: DeploymentName, now_s: float
    ) -> dict[DeploymentName, tuple[float, float]]:
        """The seconds that each other deployment took in the last minute, and the squares of those
        of its turns, summed.
        """
        first, others = int(now_s // SPAN_S) - SPANS, dict[DeploymentName, tuple[float, float]]()
        for span, by in self.computed:
            for revision, (seconds, squares) in by.items():
                name = public_name(revision)
                if span >= first and name != deployment:
                    before = others.get(name, (0.0, 0.0))
                    others[name] = before[0] + seconds, before[1] + squares
        return others

    def note_iteration(self, now_s: float) -> None:
        """An iteration has ended, and if there is work the next one began at once."""
        self.iteration_started_s = now_s if self.running else None

    def request_joins(self, now_s: float) -> None:
        """A request is about to be added to one of its instances."""
        if self.running == 0:
            self.iteration_started_s = now_s
        self.running += 1
        self.request_changes += 1

    def note_waiting(self) -> None:
        """A request waits for the load of one of its instances, or does so no more."""
        self.request_changes += 1

    def request_left(self) -> None:
        """A request has been removed from one of its instances."""
        self.running -= 1
        self.request_changes += 1
        if self.running == 0:
            self.iteration_started_s = None
        self.touch()

    def add(self, instance: InstanceEntry) -> None:
        self.instances[instance.instance_id] = instance
        if self.hello.shares_weights:
            # A further one of its model may fit now.
            self.touch()

    def remove(self, instance: InstanceEntry) -> None:
        del self.instances[instance.instance_id]
        self.touch()


def _by_id(models: Iterable[HeldModel]) -> dict[ModelId, list[HeldModel]]:
    by_id: dict[ModelId, list[HeldModel]] = {}
    for model in models:
        by_id.setdefault(model.model_id, []).append(model)
    return by_id
