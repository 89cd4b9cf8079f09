"""Looks at a cell at each refusal: was a link free meanwhile, and is the reason true?

A recorder of the controller's decisions that knows nothing of its policy: it asks every node, one
after the other, whether it has memory for the request once all that idles there has gone, and
whether every token would be in time there were the request to come at that moment. What is there
for best effort alone goes for a request with limits, too, and nothing goes for best effort. Before:
`mesh sim`, the evaluation's cells. After: `RefusalCounts`.
"""

import random
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from math import inf

from mesh.core.controller.instances.kv_cache import request_blocks
from mesh.core.controller.instances.node_schedule import (
    PlannedLoad,
    decodes_share,
    forecast_on,
    forecast_on_start,
    loads_end_s,
    slot_for,
)
from mesh.core.controller.state.deployment import DeploymentEntry
from mesh.core.controller.state.instance import InstanceEntry
from mesh.core.controller.state.node import NodeEntry
from mesh.core.controller.state.request import RequestEntry
from mesh.domain.actions import RefuseRequest
from mesh.domain.events import InvokeRequested
from mesh.domain.ids import InstanceId, RequestId
from mesh.domain.lifecycle import InstanceState
from mesh.domain.outcome import Outcome
from mesh.domain.profile import Profile
from mesh.domain.reasons import DeviceKind, RefusalReason, Verdict
from mesh.domain.slo import ColdStart
from mesh.domain.values import dataclass
from mesh.policy.room import enough, freed_bytes
from mesh.sim.cluster import VirtualCell

DRAWN_MAX = 1000
"""Refusals whose reasons are compared."""
CROWDED = frozenset(
    {
        RefusalReason.QUEUE_TIMEOUT,
        RefusalReason.MEMORY_FULL,
        RefusalReason.FIRST_TOKEN_LATE,
        RefusalReason.DELAYS_RUNNING,
        RefusalReason.TPOT_EXCEEDED,
    }
)
"""The reasons of a cell that has the deployment and a node for it, and no place."""
_TAKES = (True, Verdict.PASSES)
"""A place that has memory and time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RefusalCounts:
    """`refused_beside_free_link`: requests refused, or late by the clock, while a GPU node without
    a load had memory for an instance of their model, and a load of it elsewhere waited for others.
    """

    refused_beside_free_link: int
    reasons_drawn: int
    reasons_agreeing: int

    @property
    def refusal_reasons_agree(self) -> float | None:
        """The share of those drawn; None where nothing was refused."""
        return self.reasons_agreeing / self.reasons_drawn if self.reasons_drawn else None


class RefusalChecks:
    """One cell's; `attach` follows once there is one. `drawn_max` refusals are drawn by `seed`."""

    def __init__(self, *, seed: int = 0, drawn_max: int = DRAWN_MAX) -> None:
        self._drawn_max = drawn_max
        self._random = random.Random(seed)
        self._came: dict[RequestId, tuple[float, InvokeRequested]] = {}
        """Requests that have not been refused, and when they came."""
        self._beside_free_link: set[RequestId] = set()
        """Those that were refused, or had no place when they came."""
        self._agree: list[bool] = []
        """For each refusal, in order, whether its reason was true."""
        self._cell: VirtualCell | None = None

    def attach(self, cell: VirtualCell) -> None:
        self._cell = cell

    def record(self, now_s: float, event: object, actions: Sequence[object]) -> None:
        if self._cell is None:
            return
        if isinstance(event, InvokeRequested):
            request_id = event.request.request_id
            self._came[request_id] = now_s, event
            entry = self._cell.core.cell.requests.get(request_id)
            if entry is not None and entry.instance is None:
                self._note_free_link(event, now_s, now_s)
        for action in actions:
            if isinstance(action, RefuseRequest) and action.reason in CROWDED:
                arrival_s, asked = self._came.pop(action.request_id)
                self._note_free_link(asked, now_s, arrival_s)
                true = _reasons(self._cell, asked, arrival_s, now_s)
                self._agree.append(action.reason in true)

    def counts(self, outcomes: Sequence[Outcome]) -> RefusalCounts:
        """Once all of the cell's requests have ended."""
        missed = (o for o in outcomes if not o.finished or _is_late(o))
        drawn = self._random.sample(self._agree, min(self._drawn_max, len(self._agree)))
        return RefusalCounts(
            refused_beside_free_link=sum(o.request_id in self._beside_free_link for o in missed),
            reasons_drawn=len(drawn),
            reasons_agreeing=sum(drawn),
        )

    def _note_free_link(self, wanted: InvokeRequested, now_s: float, arrival_s: float) -> None:
        """A link is of no use to one that has waited, if the load would be over too late."""
        assert self._cell is not None
        core = self._cell.core.cell
        entry = core.deployments[wanted.request.deployment]
        if entry.replicas() >= entry.spec.scaling.replicas_max or _loads_now(entry, now_s):
            return
        asked = _entry(self._cell, entry, wanted, arrival_s)
        if asked.slo.best_effort:
            return
        for node in _without(core.nodes.values(), entry):
            free = node.device is DeviceKind.GPU and not any(_loads(node))
            _, load_s = _really(self._cell, entry, node)
            late = now_s > arrival_s and now_s + load_s >= asked.due_s
            if free and not late and _room(self._cell, node, entry, asked) is not None:
                self._beside_free_link.add(wanted.request.request_id)
                return


def _really(cell: VirtualCell, entry: DeploymentEntry, node: NodeEntry) -> tuple[Profile, float]:
    """How the deployment's model computes there, and the seconds of a load."""
    assert entry.deployment is not None
    (plan,) = (made.plan for made in cell.nodes if made.node_id == node.node_id)
    profile = plan.models[entry.deployment.model.model_id].profile
    return profile, plan.costs.load_time_s(profile.weights_bytes)


def _loads_now(entry: DeploymentEntry, now_s: float) -> bool:
    """Whether an instance of the deployment loads and waits for no other load on its node."""
    loading = (i for i in entry.instances.values() if i.state is InstanceState.LOADING)
    return any(loads_end_s(i.node, now_s)[i.instance_id] <= now_s + i.load_s for i in loading)


def _loads(node: NodeEntry) -> Iterator[InstanceEntry]:
    return (i for i in node.instances.values() if i.state is InstanceState.LOADING)


def _is_late(outcome: Outcome) -> bool:
    """Its first token, by the clock."""
    return outcome.ttft_s is not None and outcome.tokens_s[0] > outcome.due_s(0)


def _entry(
    cell: VirtualCell, known: DeploymentEntry, wanted: InvokeRequested, arrival_s: float
) -> RequestEntry:
    """As if it had come at that time."""
    slo, request = wanted.slo or known.spec.slo, wanted.request
    pace = cell.core.policy.pace(slo)
    answer_tokens = min(known.history.mean_of(slo.name), request.sampling.max_tokens)
    slack_s = pace.slack_s(slo, answer_tokens)
    return RequestEntry(original=request, slo=slo, pace=pace, arrival_s=arrival_s, slack_s=slack_s)


def _without(nodes: Iterable[NodeEntry], entry: DeploymentEntry) -> Iterator[NodeEntry]:
    """Those that could take an instance of the deployment, and have none."""
    taken = {instance.node.node_id for instance in entry.instances.values()}
    for node in nodes:
        if node.takes(entry.spec) and node.node_id not in taken:
            yield node


def _room(
    cell: VirtualCell, node: NodeEntry, entry: DeploymentEntry, request: RequestEntry
) -> list[InstanceId] | None:
    """Idle instances that go for a new one that could take the request, those that share weights
    with it last; None where it has no room, though all went.
    """
    deployment = entry.deployment
    assert deployment is not None
    footprint, context = node.footprint_of(deployment), deployment.context_tokens_max
    blocks = request_blocks(entry, request, footprint, context)
    size = cell.core.policy.kv_of(blocks, footprint.block_tokens, context)
    needed_bytes = footprint.instance_bytes(size.required_blocks)
    if needed_bytes > node.obtainable_bytes(deployment):
        return None
    lacks_bytes = needed_bytes - node.free_bytes_for(deployment)
    if request.slo.best_effort:
        return [] if lacks_bytes <= 0 else None
    may_go = [*node.idle_instances(cell.clock.now_s(), deployment), *_with_best_effort_alone(node)]
    taken = enough(may_go, lacks_bytes)
    return [instance.instance_id for instance in taken]


def _with_best_effort_alone(node: NodeEntry) -> list[InstanceEntry]:
    return [i for i in node.instances.values() if 0 < i.batch == len(i.best_effort)]


def _reasons(
    cell: VirtualCell, wanted: InvokeRequested, arrival_s: float, now_s: float
) -> frozenset[RefusalReason]:
    """Why no place takes the request. Nearest to it is one that would, were it to come now: it has
    waited there for too long; where it would be in time even so, its last try was late. Then one
    that lacks memory alone, then one that lacks time alone, by the cases of `Verdict` in their
    order. Without any place all are full.
    """
    entry = cell.core.cell.deployments[wanted.request.deployment]
    places = list(_places(cell, entry, _entry(cell, entry, wanted, now_s), now_s))
    if _TAKES in places:
        waited = _places(cell, entry, _entry(cell, entry, wanted, arrival_s), now_s)
        late = (v for new, (_, v) in zip(places, waited, strict=True) if new == _TAKES)
        return frozenset(reason for verdict in late for reason in _waited(verdict))
    if (False, Verdict.PASSES) in places:
        return frozenset({RefusalReason.MEMORY_FULL})
    said = [verdict for room, verdict in places if room]
    if said:
        return frozenset({RefusalReason(min(said, key=list(Verdict).index))})
    return frozenset({RefusalReason.MEMORY_FULL if places else RefusalReason.QUEUE_TIMEOUT})


def _waited(verdict: Verdict) -> tuple[RefusalReason, ...]:
    if verdict is not Verdict.PASSES:
        return (RefusalReason(verdict),)
    return RefusalReason.FIRST_TOKEN_LATE, RefusalReason.QUEUE_TIMEOUT


def _places(
    cell: VirtualCell, entry: DeploymentEntry, request: RequestEntry, now_s: float
) -> Iterator[tuple[bool, Verdict]]:
    """Each instance of the deployment, loading ones too, and each node that could have another one:
    whether there is memory, and what validation says of its time, the load included. A request that
    comes now may be late for a load, if its deployment wants that and has nothing loaded.
    """
    limits, core = cell.plan.limits, cell.core.cell
    loaded = any(instance.is_loaded for instance in entry.instances.values())
    comes = request.arrival_s == now_s
    late = comes and request.slo.cold_start is ColdStart.LATE and not loaded
    for instance in entry.instances.values():
        evictable = 0 if request.slo.best_effort else len(instance.best_effort)
        if not instance.takes_requests or instance.free_places + evictable <= 0:
            continue
        forecast = forecast_on(instance, request, now_s=now_s, limits=limits, late=late)
        yield _can_grow(instance, entry, request, now_s), forecast.verdict
    if entry.replicas() >= entry.spec.scaling.replicas_max:
        return
    for node in _without(core.nodes.values(), entry):
        if request.slo.best_effort and any(_loads(node)):
            continue
        profile, load_s = _really(cell, entry, node)
        assert entry.deployment is not None
        room = _room(cell, node, entry, request)
        _, kind = node.source_of(entry.deployment, room or ())
        planned = PlannedLoad(kind=kind, load_s=load_s)
        slot = slot_for(node, planned, inf if late else request.due_s, now_s)
        forecast = forecast_on_start(
            node,
            profile,
            partial(getattr, slot, "ready_s"),
            request,
            share=decodes_share(node, now_s),
            cached=node.left_tokens(entry.deployment, request),
            now_s=now_s,
            limits=limits,
            late=late,
        )
        yield room is not None, forecast.verdict


def _can_grow(
    instance: InstanceEntry, entry: DeploymentEntry, request: RequestEntry, now_s: float
) -> bool:
    """Whether the request's KV cache fits, with all gone that goes for it."""
    footprint, node = instance.footprint, instance.node
    blocks = request_blocks(entry, request, footprint, instance.context_tokens_max)
    others = instance.required_blocks + instance.expected_blocks
    may_go: list[InstanceEntry] = []
    if not request.slo.best_effort:
        others -= sum(other.required_blocks for other in instance.best_effort)
        may_go = [*node.idle_instances(now_s), *_with_best_effort_alone(node)]
        may_go = [i for i in may_go if i is not instance]
    more = others + blocks - instance.promised_blocks
    return more * footprint.kv_block_bytes <= node.free_bytes + freed_bytes(may_go)
