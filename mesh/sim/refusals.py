"""Looks at a cell at each refusal: was a link free meanwhile, and is the reason true?

A recorder of the controller's decisions that knows nothing of its policy: it asks every node, one
after the other, whether it has memory for the request once all that idles there has gone, and
whether every token would be in time there were the request to come at that moment. Before:
`mesh sim`, the evaluation's cells. After: `RefusalCounts`.
"""

import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from mesh.core.controller.instances.kv_cache import least_blocks, request_blocks
from mesh.core.controller.instances.loading_lane import slot_for
from mesh.core.controller.instances.node_schedule import (
    decodes_share,
    forecast_on,
    forecast_on_start,
)
from mesh.core.controller.state.deployment import DeploymentEntry
from mesh.core.controller.state.instance import InstanceEntry
from mesh.core.controller.state.node import NodeEntry
from mesh.core.controller.state.request import RequestEntry
from mesh.domain.actions import RefuseRequest
from mesh.domain.events import InvokeRequested
from mesh.domain.ids import RequestId
from mesh.domain.lifecycle import InstanceState
from mesh.domain.limits import CellLimits
from mesh.domain.outcome import Outcome
from mesh.domain.reasons import DeviceKind, RefusalReason
from mesh.domain.request import Request
from mesh.request.shadow import Verdict
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
"""Of a cell that has the deployment and a node for it, and no place."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RefusalCounts:
    """`refused_beside_free_link`: requests refused, or late by the clock, while a GPU node without
    a load had memory for an instance of their model and no load of it had begun elsewhere.
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
        self._came: dict[RequestId, tuple[float, Request]] = {}
        """Requests that have not been refused, and when they came."""
        self._beside_free_link: set[RequestId] = set()
        """Those that were refused, or had no place when they came."""
        self._agree: list[bool] = []
        """Of each refusal, in their order."""
        self._cell: VirtualCell | None = None

    def attach(self, cell: VirtualCell) -> None:
        self._cell = cell

    def record(self, now_s: float, event: object, actions: Sequence[object]) -> None:
        if self._cell is None:
            return
        if isinstance(event, InvokeRequested):
            request = event.request
            self._came[request.request_id] = now_s, request
            entry = self._cell.core.cell.requests.get(request.request_id)
            if entry is not None and entry.instance is None:
                self._note_free_link(request)
        for action in actions:
            if isinstance(action, RefuseRequest) and action.reason in CROWDED:
                arrival_s, request = self._came.pop(action.request_id)
                self._note_free_link(request)
                true = _reasons(self._cell, request, arrival_s, now_s)
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

    def _note_free_link(self, request: Request) -> None:
        assert self._cell is not None
        core = self._cell.core.cell
        entry = core.deployments[request.deployment]
        if entry.replicas() >= entry.spec.scaling.replicas_max or _loads_now(entry):
            return
        asked = _entry(entry, request, 0.0)
        for node in _without(core.nodes.values(), entry):
            free = node.device is DeviceKind.GPU and not any(_loads(node))
            if free and _has_room(node, entry, asked, self._cell.plan.limits):
                self._beside_free_link.add(request.request_id)
                return


def _loads_now(entry: DeploymentEntry) -> bool:
    """Whether an instance of the deployment loads with no other load before it on its node."""
    return any(next(_loads(i.node), None) is i for i in entry.instances.values())


def _loads(node: NodeEntry) -> Iterator[InstanceEntry]:
    """In the order in which they run."""
    return (i for i in node.instances.values() if i.state is InstanceState.LOADING)


def _is_late(outcome: Outcome) -> bool:
    """Its first token, by the clock."""
    return outcome.ttft_s is not None and outcome.tokens_s[0] > outcome.due_s(0)


def _entry(known: DeploymentEntry, request: Request, arrival_s: float) -> RequestEntry:
    """As if it had come at that time."""
    return RequestEntry(original=request, slo=known.spec.slo, arrival_s=arrival_s)


def _without(nodes: Iterable[NodeEntry], entry: DeploymentEntry) -> Iterator[NodeEntry]:
    """Those that could take an instance of the deployment, and have none."""
    taken = {instance.node.node_id for instance in entry.instances.values()}
    for node in nodes:
        if node.takes(entry.spec) and node.node_id not in taken:
            yield node


def _reclaimable_bytes(node: NodeEntry) -> int:
    return node.free_bytes + sum(size_bytes for _, size_bytes in node.reclaimable())


def _has_room(
    node: NodeEntry, entry: DeploymentEntry, request: RequestEntry, limits: CellLimits
) -> bool:
    """For a new instance that could take the request, with all idle ones gone."""
    deployment = entry.deployment
    assert deployment is not None
    footprint, context = node.footprint_of(deployment), deployment.context_tokens_max
    blocks = max(
        least_blocks(limits, footprint, context), request_blocks(entry, request, footprint, context)
    )
    return footprint.instance_bytes(blocks) <= _reclaimable_bytes(node)


def _reasons(
    cell: VirtualCell, request: Request, arrival_s: float, now_s: float
) -> frozenset[RefusalReason]:
    """Why no place takes the request, were it to come now. Nearest to one is a node that lacks
    memory alone; without it those that have memory say what their time lacks. Where there is a
    place it has waited for too long, or it is late there by now.
    """
    entry = cell.core.cell.deployments[request.deployment]
    full = frozenset({RefusalReason.MEMORY_FULL})
    places = list(_places(cell, entry, _entry(entry, request, now_s), now_s))
    if (True, Verdict.PASSES) in places:
        late = _places(cell, entry, _entry(entry, request, arrival_s), now_s)
        return _of_time(late) | {RefusalReason.QUEUE_TIMEOUT}
    if (False, Verdict.PASSES) in places:
        return full
    return _of_time(places) or full


def _of_time(places: Iterable[tuple[bool, Verdict]]) -> frozenset[RefusalReason]:
    """What those that have memory say."""
    said = (verdict for room, verdict in places if room and verdict is not Verdict.PASSES)
    return frozenset(RefusalReason(verdict) for verdict in said)


def _places(
    cell: VirtualCell, entry: DeploymentEntry, request: RequestEntry, now_s: float
) -> Iterator[tuple[bool, Verdict]]:
    """Of each instance of the deployment, and of each node that could have another: whether there
    is memory, and what validation says of its time, the load included.
    """
    limits, core, deployment = cell.plan.limits, cell.core.cell, entry.deployment
    assert deployment is not None
    for instance in entry.instances.values():
        if instance.takes_now and not instance.is_full:
            forecast = forecast_on(instance, request, now_s=now_s, limits=limits)
            yield _can_grow(instance, entry, request), forecast.verdict
    virtual = {node.node_id: node.plan for node in cell.nodes}
    for node in _without(core.nodes.values(), entry):
        plan = virtual[node.node_id]
        profile = plan.models[deployment.model.model_id].profile
        load_s = plan.costs.load_time_s(profile.weights_bytes)
        forecast = forecast_on_start(
            node,
            profile,
            slot_for(node, load_s, request.due_s, now_s).ready_s,
            request,
            share=decodes_share(node, now_s),
            now_s=now_s,
            limits=limits,
        )
        yield _has_room(node, entry, request, limits), forecast.verdict


def _can_grow(instance: InstanceEntry, entry: DeploymentEntry, request: RequestEntry) -> bool:
    """Whether the request's KV cache fits, with all idle neighbours gone."""
    footprint, node = instance.footprint, instance.node
    blocks = request_blocks(entry, request, footprint, instance.context_tokens_max)
    more = instance.required_blocks + blocks - instance.promised_blocks
    idle = node.reclaimable()
    own_bytes = sum(size for instance_id, size in idle if instance_id == instance.instance_id)
    return more * footprint.kv_block_bytes <= _reclaimable_bytes(node) - own_bytes
