"""What the node core knows: its instances and the requests on each, with their deadlines."""

from dataclasses import field
from math import inf
from statistics import fmean

from mesh.compute.correction import Correction
from mesh.compute.operators import OperatorSurvey
from mesh.compute.survey import Survey
from mesh.core.node.energy import EnergyMeter
from mesh.core.node.local_cache import LocalCache
from mesh.core.node.local_instance import LocalInstance, LocalState
from mesh.core.node.request import LocalRequest
from mesh.domain.energy import Energy
from mesh.domain.ids import DeploymentName, InstanceId, OperationId, RequestId
from mesh.domain.limits import KEPT_CACHES_MAX
from mesh.domain.messages import Heartbeat, HeldRequest, InstanceReport
from mesh.domain.node_events import HeartbeatDue
from mesh.domain.node_rule import CELL_RULE, NodeRule
from mesh.domain.reasons import ProfileSource
from mesh.domain.steps import HeldModel, LoadTier, part_bytes
from mesh.domain.values import dataclass
from mesh.policy.rules.headroom import HEADROOM
from mesh.policy.rules.run_queues import RunQueue
from mesh.policy.rules.swapping import Swap, by_parts
from mesh.policy.rules.turns import Grant, TurnRule, note_turn

LOAD_SLOWDOWN = 2.0
"""By which a load lengthens the iterations beside it, until this node has learned its own."""


@dataclass(slots=True, kw_only=True, eq=False)
class BesideLoads:
    """For how long a node computed beside each of its loads: what lengthens loads that share its
    cores. Counts the seconds of all turns, those that are under way included; a load begins and
    ends with what was counted by then, and its report tells the controller.
    """

    _ended_s: float = 0.0
    """The seconds of all turns that are over."""
    _turn_s: float | None = None
    """When the one under way began."""
    _before_s: dict[InstanceId, float] = field(default_factory=dict)
    """The seconds that were computed before each load that is under way in the engine."""

    def turn_began(self, now_s: float) -> None:
        self._turn_s = now_s

    def turn_ended(self, now_s: float) -> None:
        self._ended_s, self._turn_s = self.computed_s(now_s), None

    def load_began(self, instance_id: InstanceId, now_s: float) -> None:
        self._before_s[instance_id] = self.computed_s(now_s)

    def load_ended(self, instance_id: InstanceId, now_s: float) -> float:
        """Seconds that were computed since it began."""
        return self.computed_s(now_s) - self._before_s.pop(instance_id)

    @property
    def under_way(self) -> int:
        """Loads."""
        return len(self._before_s)

    def computed_s(self, now_s: float) -> float:
        return self._ended_s + self.turn_s(now_s)

    def turn_s(self, now_s: float) -> float:
        """Seconds so far of the turn under way."""
        return 0.0 if self._turn_s is None else now_s - self._turn_s


@dataclass(slots=True, kw_only=True, eq=False)
class LocalSurvey:
    """A profile in the making."""

    operation_id: OperationId | None
    """The operation that asked for it, or `None` when nobody did and it is made while the node
    rests.
    """
    instance: LocalInstance
    survey: Survey
    counted: tuple[OperatorSurvey, ...] = ()
    """What is counted before the survey where operators are wanted, one after the other."""
    source: ProfileSource = ProfileSource.SURVEY
    predicted_s: float = 0.0
    """The predicted seconds of all that has been timed so far."""
    short_rests: int = 0
    """How many rests in a row were too short for its next shape."""
    rest_began_s: float = -inf
    """When the last of them began."""
    left_out_s: float = inf
    """Shapes that take so long are left out, since rests are too short for them."""
    asked: bool = False
    """One of its shapes is being timed."""
    told_share: float = 0.0

    def ask(self) -> None:
        self.asked, self.short_rests = True, 0

    def note_short_rest(self, began_s: float, expected_s: float, rests_max: int) -> None:
        """The rest that began then is too short so far for the next shape, which takes so long."""
        if began_s != self.rest_began_s:
            self.rest_began_s, self.short_rests = began_s, self.short_rests + 1
        if self.short_rests > rests_max:
            self.left_out_s = min(self.left_out_s, expected_s)

    def answered(self) -> None:
        self.asked = False

    @property
    def share(self) -> float:
        """The share that is done, 0 to 1."""
        return fmean([self.survey.share, *(each.share for each in self.counted)])

    @property
    def counting(self) -> OperatorSurvey | None:
        """What is being counted, while anything is."""
        return next((each for each in self.counted if each.next_shape() is not None), None)

    @property
    def slower(self) -> float:
        """By how much what was timed took longer than predicted, in sum."""
        return self.survey.measured_s / self.predicted_s if self.predicted_s else 1.0

    def note_predicted(self, predicted_s: float) -> None:
        """A shape has been timed that was predicted to take so long."""
        self.predicted_s += predicted_s

    def note_told(self, share: float) -> None:
        self.told_share = share


@dataclass(slots=True, kw_only=True, eq=False)
class LocalNode:
    instances: dict[InstanceId, LocalInstance] = field(default_factory=dict)
    imports: dict[OperationId, str] = field(default_factory=dict)
    """Sources being imported."""
    survey: LocalSurvey | None = None
    rest_surveys: dict[InstanceId, LocalSurvey] = field(default_factory=dict)
    """Surveys that nobody asked for, each kept until it has come to its end."""
    rule: NodeRule = CELL_RULE
    """As the controller said last."""
    turns: TurnRule = HEADROOM
    """The turn rule that it names."""
    disturbed_s: float = 0.0
    """When it last had something to do, or was told something."""
    steps_started: int = 0
    stepping: InstanceId | None = None
    """The instance whose iteration is under way, a measured one or a real one."""
    step_started_s: float = 0.0
    step_beside_load: bool = False
    step_beside_swap: bool = False
    """Weights were on their way during the iteration under way, or are."""
    beside_loads: BesideLoads = field(default_factory=BesideLoads)
    energy: EnergyMeter = field(default_factory=EnergyMeter)
    swapping: InstanceId | None = None
    """The instance whose weights are on their way."""
    swapping_to: float = 0.0
    """The share of them that will be on the device."""
    swap_started_s: float = 0.0
    copy_bytes_per_s: float = inf
    """What the last swap that brought weights carried."""
    turn_of: InstanceId | None = None
    """The instance that had the last turn."""
    turns_in_row: int = 0
    """How many it has had since another one had one."""
    row_began_s: float = 0.0
    load_slowdown: Correction = field(
        default_factory=lambda: Correction(LOAD_SLOWDOWN, forgetting_s=inf)
    )
    left: dict[InstanceId, tuple[DeploymentName, LocalCache]] = field(default_factory=dict)
    """Unloaded instances that may have left cached KV blocks to the next one of a deployment."""
    linked: bool = False
    unlinked_s: float = 0.0
    """When the last link closed."""
    ended: dict[RequestId, HeldRequest] = field(default_factory=dict)
    """Requests that have ended while there was no controller to be told."""
    rss_bytes: int = 0
    engine_bytes: int = 0
    """The bytes of the engine's books; like `rss_bytes` as of the last heartbeat."""
    leaves: bool = False
    """The node is to stop."""
    models: tuple[HeldModel, ...] | None = None
    """Those at hand; None until they have been looked at."""
    woken: bool = False
    """A load has used up one that slept since the controller was told of them."""
    beside_bytes: int = 0
    """What the process held beside the engine's books at the last heartbeat; 0 while any load,
    unload, swap or transfer of KV blocks was under way.
    """
    base_bytes: int = 0
    """See `Heartbeat.base_bytes`."""
    base_at_link_bytes: int = 0
    """The same when the link opened: `NodeRule.swap_bytes` is without it."""

    def loading(self) -> bool:
        """Whether a load takes part of the machine."""
        return self.beside_loads.under_way > 0

    @property
    def slowdown(self) -> float:
        """By how much iterations take longer that begin now, for a load beside them."""
        return self.load_slowdown.latest if self.loading() else 1.0

    def has_unbooked(self) -> bool:
        """Whether something takes memory that no controller knows of."""
        return any(instance.unbooked for instance in self.instances.values())

    def waits(self, more_bytes: int) -> bool:
        """Whether so much more has to wait for memory: for what no controller knows of to leave it,
        or for weights to make room.
        """
        return self.has_unbooked() or more_bytes > self._free_bytes()

    def pool_bytes(self) -> int:
        """What the pool of weights has beside those on the device; below 0 some have to go."""
        waiting = sum(instance.waiting_bytes for instance in self.instances.values())
        return int(self._free_bytes()) - waiting

    def _free_bytes(self) -> float:
        if not self.rule.swap_bytes:
            return inf
        every = self.instances.values()
        held_bytes = sum(instance.kv_bytes + instance.weights_bytes for instance in every)
        if self.swapping is not None and (coming := self.instances.get(self.swapping)):
            weights_bytes = 0 if coming.footprint is None else coming.footprint.weights_bytes
            more_bytes = part_bytes(weights_bytes, self.swapping_to) - coming.weights_bytes
            held_bytes += max(more_bytes, 0)
        more_base_bytes = self.base_bytes - self.base_at_link_bytes
        return self.rule.swap_bytes - more_base_bytes - held_bytes

    def moves_beside_resize(self, instance: LocalInstance) -> bool:
        """Whether its weights may begin to move, as far as resizes of its KV cache go."""
        return not instance.resizing or by_parts(self.turns)

    def resizes_beside_move(self, instance: LocalInstance) -> bool:
        """Whether its KV cache may be resized, as far as moves of its weights go."""
        return self.swapping != instance.instance_id or by_parts(self.turns)

    def begin_swap(self, swap: Swap, now_s: float) -> None:
        (self.swapping, self.swapping_to), self.swap_started_s = swap, now_s
        self.step_beside_swap = True

    def end_swap(self, now_s: float, *, failed: bool) -> LocalInstance | None:
        """The instance whose weights are on their way no more, if it is still there."""
        name, self.swapping = self.swapping, None
        instance = self.instances.get(name) if name is not None else None
        if instance is not None:
            instance.note_swapped(self.swapping_to, now_s - self.swap_started_s, failed=failed)
        return instance

    def note_copied(self, weights_bytes: int, seconds: float) -> None:
        """Weights have come to the device."""
        self.copy_bytes_per_s = weights_bytes / seconds if seconds > 0.0 else inf

    @property
    def shows_all(self) -> bool:
        """Whether its turn rule is shown instances without weights on the device, too."""
        return getattr(self.turns, "whole", False)

    def place(self, queue: RunQueue, now_s: float) -> None:
        """Set what a rule that is `whole` knows of an instance beside its work."""
        instance = self.instances[queue.instance_id]
        assert instance.footprint is not None, "it is loaded"
        turns = self.turns_in_row if self.turn_of == queue.instance_id else 0
        queue.place(
            out=not self.computes(instance),
            copy_s=instance.footprint.weights_bytes / self.copy_bytes_per_s,
            turns=turns,
            turns_s=now_s - self.row_began_s if turns else 0.0,
        )

    def computes(self, instance: LocalInstance) -> bool:
        """Whether its weights are on the device, and stay there."""
        return not instance.out and self.swapping != instance.instance_id

    def weights_come(self) -> bool:
        """Whether weights are on their way, or leave for others, while requests with limits wait
        for theirs: an iteration of best effort that begins now might be under way still.
        """
        return self.swapping is not None and any(
            not request.order.slo.best_effort
            for instance in self.instances.values()
            if not self.computes(instance)
            for request in instance.requests.values()
        )

    def expects(self) -> bool:
        """Whether weights or KV blocks are on their way, or requests with limits wait for some.
        What those that wait were promised counts on others getting ahead meanwhile.
        """
        return self.swapping is not None or any(
            instance.state is not LocalState.READY
            or any(
                request.fetching or not (self.computes(instance) or request.order.slo.best_effort)
                for request in instance.requests.values()
            )
            for instance in self.instances.values()
        )

    def link_opened(self, rule: NodeRule, turns: TurnRule) -> None:
        self.linked, self.rule, self.turns = True, rule, turns
        self.base_at_link_bytes = self.base_bytes
        for instance in self.instances.values():
            instance.link_opened()

    def held(self, now_s: float) -> tuple[HeldRequest, ...]:
        """What it has computed on without a controller."""
        runs = (
            request.held(instance.instance_id, now_s)
            for instance in self.instances.values()
            for request in instance.requests.values()
        )
        return tuple([held for held in (*self.ended.values(), *runs) if held is not None])

    def note_ended(self, instance: LocalInstance, request: LocalRequest, now_s: float) -> None:
        held = request.held(instance.instance_id, now_s)
        if held is not None:
            self.ended[request.request_id] = held

    def forget_ended(self) -> None:
        """They have been told, or nobody has come for them."""
        self.ended.clear()

    def link_closed(self, now_s: float) -> None:
        """Nobody waits for imports and profiles, nor for what is not loaded yet."""
        if self.linked:
            self.unlinked_s = now_s
        self.linked = False
        self.imports.clear()
        self.end_survey()
        for instance in list(self.instances.values()):
            if instance.state is LocalState.WAITING:
                self.remove(instance)
            instance.link_closed()

    def add(self, instance: LocalInstance) -> None:
        self.instances[instance.instance_id] = instance

    def remove(self, instance: LocalInstance) -> None:
        del self.instances[instance.instance_id]
        self.rest_surveys.pop(instance.instance_id, None)
        if instance.cache.in_use:
            # What it leaves is told anew.
            self.left[instance.instance_id] = instance.command.deployment, LocalCache()
            for instance_id in tuple(self.left)[:-KEPT_CACHES_MAX]:
                del self.left[instance_id]

    def take_left(self, deployment: DeploymentName) -> None:
        """An instance of the deployment is loaded, which has found what others left."""
        self.left = {i: left for i, left in self.left.items() if left[0] != deployment}

    def begin_load(self, instance: LocalInstance, now_s: float) -> None:
        instance.begin_load()
        self.beside_loads.load_began(instance.instance_id, now_s)

    def end_load(self, instance: LocalInstance, tier: LoadTier | None, now_s: float) -> float:
        """`tier`: from where the weights came; None for one that failed. Seconds computed in it."""
        self.woken |= tier is LoadTier.HOST
        return self.beside_loads.load_ended(instance.instance_id, now_s)

    def begin_turn(self, grant: Grant, now_s: float) -> None:
        """The engine computes for one instance; the others are passed over."""
        note_turn(grant)
        for run_queue in (*grant.passed, grant.queue):
            self.instances[run_queue.instance_id].note_turn(run_queue.passed)
        self.stepping = grant.queue.instance_id
        if self.stepping != self.turn_of:
            self.turn_of, self.turns_in_row, self.row_began_s = self.stepping, 0, now_s
        self.turns_in_row += 1
        self.instances[self.stepping].begin_turn()
        self.steps_started += 1
        self.step_started_s, self.step_beside_load = now_s, self.loading()
        self.step_beside_swap = self.swapping is not None
        self.beside_loads.turn_began(now_s)

    def begin_measured(self, instance: LocalInstance, now_s: float) -> None:
        """The engine computes an iteration of no request, to time it or to prime the instance."""
        self.stepping = instance.instance_id
        self.beside_loads.turn_began(now_s)

    def end_turn(self, now_s: float) -> None:
        self.stepping = None
        self.beside_loads.turn_ended(now_s)

    def note_disturbed(self, now_s: float) -> None:
        """Its rest, if it had one, is over."""
        self.disturbed_s = now_s

    def begin_survey(self, survey: LocalSurvey) -> None:
        """Begin it, or go on with it; another one that nobody asked for waits."""
        if self.survey is not survey:
            self.end_survey()
        self.survey = survey
        if survey.operation_id is None:
            self.rest_surveys[survey.instance.instance_id] = survey

    def end_survey(self) -> None:
        """End it, or leave it for a later rest. What is timed for it just now does not count."""
        if self.survey is not None:
            self.survey.answered()
        self.survey = None

    def forget_rest_survey(self, instance_id: InstanceId) -> None:
        """It has come to its end."""
        del self.rest_surveys[instance_id]

    def begin_import(self, operation_id: OperationId, source: str) -> None:
        self.imports[operation_id] = source

    def end_import(self, operation_id: OperationId) -> bool:
        """False if there is no such import."""
        return self.imports.pop(operation_id, None) is not None

    def beat(self, due: HeartbeatDue) -> tuple[HeldModel, ...] | None:
        """What the process and its engine say of themselves; starved instances may try again. The
        models to tell the controller of: after a wake also those that are as they were, for what it
        has struck off its list may sleep again.
        """
        self.rss_bytes, self.engine_bytes = due.rss_bytes, due.engine_bytes
        self.leaves = due.leaves
        told = due.models
        if told is not None:
            self.models = told
        elif self.woken:
            told = self.models
        self.woken = False
        beside_bytes = due.rss_bytes - due.engine_bytes if self._settled() else 0
        # Both sizes are read one after the other: a single reading may be amid a change.
        self.base_bytes = max(self.base_bytes, min(beside_bytes, self.beside_bytes))
        self.beside_bytes = beside_bytes
        cached = dict(due.kv_blocks_cached)
        for instance in self.instances.values():
            instance.encourage()
            instance.cache.note_blocks(cached.get(instance.instance_id, 0))
        return told

    def take_energy(self, due: HeartbeatDue, now_s: float) -> Energy | None:
        """What it has taken since the heartbeat before."""
        turns = self.beside_loads
        return self.energy.beat(
            due.energy,
            now_s,
            computed_s=turns.computed_s(now_s),
            turn_s=turns.turn_s(now_s),
            loads=self.loading(),
        )

    def _settled(self) -> bool:
        """Whether nothing is on its way into the engine's memory or out of it."""
        every = self.instances.values()
        fetching = any(of.fetching for instance in every for of in instance.requests.values())
        moving = self.loading() or self.swapping is not None or fetching
        return not moving and all(instance.state is LocalState.READY for instance in every)

    def heartbeat(
        self,
        now_s: float,
        models: tuple[HeldModel, ...] | None = None,
        energy: Energy | None = None,
    ) -> Heartbeat:
        """`models`: those at hand, where the controller does not know them yet."""
        return Heartbeat(
            rss_bytes=self.rss_bytes,
            engine_bytes=self.engine_bytes,
            base_bytes=self.base_bytes,
            instances=self.reports(now_s),
            load_slowdown=self.load_slowdown.latest,
            models=models,
            leaves=self.leaves,
            energy=energy,
        )

    def reports(self, now_s: float, *, whole: bool = False) -> tuple[InstanceReport, ...]:
        reports = (
            instance.report(
                now_s, whole=whole, swaps_to=self.swapping_to if name == self.swapping else None
            )
            for name, instance in self.instances.items()
        )
        return tuple(report for report in reports if report is not None)
