"""What holds of a controller core after every event: each book says what the others say.

Nodes, instances, deployments, requests and operations are held against each other, sums are added
up anew, and what is kept from event to event (refusals, the order of candidates, who waits) is
worked out anew. Nothing is under way in a cell that has come to rest. Before: whoever watches a
cell. After: `memory`, for the books of each node.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import assert_never

from mesh.core.controller.core import ControllerCore
from mesh.core.controller.state.cell import Cell
from mesh.core.controller.state.deployment import DeploymentEntry
from mesh.core.controller.state.instance import InstanceEntry
from mesh.core.controller.state.node import NodeEntry
from mesh.core.controller.state.request import RequestEntry
from mesh.domain.ids import NodeId, RequestId
from mesh.domain.lifecycle import (
    DeploymentState,
    InstanceState,
    MigrationState,
    NodeState,
    RequestState,
)
from mesh.domain.limits import CellLimits
from mesh.domain.reasons import OperationKind
from mesh.domain.revision import public_name
from mesh.sim.invariants.memory import check_books
from mesh.sim.invariants.rule import hold
from mesh.sim.virtual_engine import VirtualEngine

UNDER_WAY = (
    MigrationState.FETCHING,
    MigrationState.COMPUTING,
    MigrationState.CAUGHT_UP,
    MigrationState.DRAWING,
)
EMPTY = (InstanceState.LOADING, InstanceState.PARKED)
"""Instances without requests."""


def check_cell(core: ControllerCore, now_s: float) -> None:
    """All of it. `now_s` is the time of the last event."""
    cell, limits = core.cell, core._limits
    hold(len(cell.links) == len(cell.nodes), "{} links, {} nodes", len(cell.links), len(cell.nodes))
    here = sum(len(node.instances) for node in cell.nodes.values())
    hold(len(cell.instances) == here, "{} instances, {} on nodes", len(cell.instances), here)
    for node in cell.nodes.values():
        _check_node(cell, node, core.policy.instances_per_node)
        check_books(node)
    for instance in cell.instances.values():
        _check_instance(cell, instance)
    for entry in cell.deployments.values():
        _check_deployment(core, entry)
        if entry.queue:
            _check_queue(core, entry, now_s)
    _check_requests(cell, limits)
    _check_operations(cell, limits)
    for kind in cell.wanted.values():
        within = kind.wanted is None or kind.range.least <= kind.wanted <= kind.range.most
        hold(within, "{} nodes are wanted, beyond {}", kind.wanted, kind.range)
    check_refusals(core)


def check_callers(cell: Cell, open_ids: Iterable[RequestId]) -> None:
    """Who waits for an answer is known, and nobody else is."""
    known = sorted(request_id for request_id in cell.requests if request_id not in cell.orphans)
    waiting = sorted(open_ids)
    hold(known == waiting, "requests {}, not {}", known, waiting)


def _check_node(cell: Cell, node: NodeEntry, instances_max: int) -> None:
    name = node.node_id
    hold(cell.nodes.get(name) is node, "{} is known by another name", name)
    hold(cell.links.get(node.link_id) is node, "{} is not on its link", name)
    hold(node.state in (NodeState.READY, NodeState.DRAINING), "{} is {}", name, node.state)
    hold(node.deployments is cell.deployments, "{} protects no minimum", name)
    running = sum([instance.batch for instance in node.instances.values()])
    hold(node.running == running, "{} counts {} requests of {}", name, node.running, running)
    started_s = node.iteration_started_s
    computes = (started_s is None) == node.is_idle()
    hold(computes, "{}: an iteration began at {}, idle is {}", name, started_s, node.is_idle())
    serving = [i for i in node.instances.values() if i.state is not InstanceState.UNLOADING]
    names = [instance.deployment for instance in serving]
    most = max(Counter(names).values(), default=0)
    hold(most <= instances_max, "{} serves a deployment too often: {}", name, names)
    if node.state is NodeState.DRAINING:
        idle = [instance.instance_id for instance in serving if not instance.requests]
        hold(not idle, "{} is draining, and keeps {}", name, idle)


def _check_instance(cell: Cell, instance: InstanceEntry) -> None:
    name, state, node = instance.instance_id, instance.state, instance.node
    hold(cell.instances.get(name) is instance, "{} is known by another id", name)
    hold(cell.nodes.get(node.node_id) is node, "{} is on a node that is gone", name)
    hold(node.instances.get(name) is instance, "{} is not on its node", name)
    requests = instance.requests.values()
    tokens = sum([request.tokens for request in requests])
    hold(instance.tokens == tokens, "{} has {} tokens, not {}", name, instance.tokens, tokens)
    required, blocks = instance.required_blocks, sum([r.required_blocks for r in requests])
    hold(required == blocks, "{} requires {} blocks, not {}", name, required, blocks)
    hold(instance.batch <= instance.batch_max, "{} has {} requests", name, instance.batch)
    _check_expected(cell, instance)
    hold(all(r.instance is instance for r in requests), "{} has another's requests", name)
    hold(state is not InstanceState.GONE, "{} is gone, and in the books", name)
    hold(
        state not in EMPTY or not requests, "{} is {} with {} requests", name, state, len(requests)
    )
    drains = state is not InstanceState.DRAINING or requests
    hold(drains, "{} is draining without requests", name)
    if state is not InstanceState.UNLOADING:
        owner = cell.deployments.get(instance.deployment)
        known = owner is not None and owner.instances.get(name) is instance
        hold(known, "{} is {}, and its deployment knows nothing of it", name, state)
        hold(instance.profile is not None, "{} serves without a profile", name)
    measured = any(operation.instance is instance for operation in cell.operations.values())
    hold(instance.profiling == measured, "{} is measured: {}", name, measured)


def _check_expected(cell: Cell, instance: InstanceEntry) -> None:
    """Those who wait for its load wait in its deployment's queue, and it takes them."""
    owner, name = cell.deployments.get(instance.deployment), instance.instance_id
    hold(not instance.expected or instance.takes_requests, "{} takes none, and is expected", name)
    for request_id, request in instance.expected.items():
        hold(request.waits_for is instance, "{} does not wait for {}", request_id, name)
        queued = owner is not None and request in owner.queue
        hold(queued, "{} waits for {}, and is not queued", request_id, name)


def _check_deployment(core: ControllerCore, entry: DeploymentEntry) -> None:
    cell, name, scaling = core.cell, entry.spec.name, entry.spec.scaling
    hold(cell.deployments.get(name) is entry, "{} is known by another name", name)
    for instance_id, instance in entry.instances.items():
        hold(cell.instances.get(instance_id) is instance, "{} has {} yet", name, instance_id)
        hold(instance.deployment == name, "{} has {}", name, instance_id)
    if entry.instances or entry.candidates:
        replicas = entry.replicas()
        hold(replicas <= scaling.replicas_max, "{} has {} instances", name, replicas)
        tried = [(core.policy.instance_rank(i), i.instance_id) for i in entry.candidates]
        hold(tried == sorted(tried), "{}: candidates out of order: {}", name, tried)
        known = sorted([instance_id for _, instance_id in tried])
        hold(known == sorted(entry.instances), "{}: candidates are {}", name, known)
    _check_state(cell, entry)


def _check_state(cell: Cell, entry: DeploymentEntry) -> None:
    """It is ready, or it comes or goes, and somebody has asked for that."""
    name = entry.spec.name
    if entry.state is DeploymentState.READY:
        hold(entry.deployment is not None, "{} is ready without a model", name)
        return
    kinds = {o.kind for o in cell.operations.values() if o.name == name}
    match entry.state:
        case DeploymentState.IMPORTING | DeploymentState.SAVING:
            hold(OperationKind.DEPLOY in kinds, "{} is {}, and nobody asked", name, entry.state)
            # One of an earlier deployment of that name may still be on its way out.
            going = all(i.state is InstanceState.UNLOADING for i in entry.instances.values())
            hold(not entry.queue and going, "{} serves before it is ready", name)
        case DeploymentState.STARTING:
            hold(not entry.queue, "{} serves before it is ready", name)
            hold(_comes(cell, entry), "{} starts, and is to follow nobody", name)
        case DeploymentState.RETIRING:
            rollout = cell.rollouts.get(public_name(name))
            known_so = rollout is not None and rollout.retiring.get(name) is entry
            hold(known_so, "{} retires, and nobody follows", name)
        case DeploymentState.DELETING:
            hold(OperationKind.DELETE in kinds, "{} is {}, and nobody asked", name, entry.state)
        case DeploymentState.GONE | DeploymentState.FAILED:
            hold(False, "{} is {}, and in the books", name, entry.state)
        case _:
            assert_never(entry.state)


def _comes(cell: Cell, entry: DeploymentEntry) -> bool:
    rollout = cell.rollouts.get(public_name(entry.name))
    return rollout is not None and rollout.coming is entry


def _check_queue(core: ControllerCore, entry: DeploymentEntry, now_s: float) -> None:
    """Its requests wait where they should, in their order, and will be tried again."""
    cell, limits, name = core.cell, core._limits, entry.spec.name
    for request in entry.queue:
        asked, state = request.original.request_id, request.state
        hold(state is RequestState.QUEUED, "{} is queued, and {}", asked, state)
        hold(request.original.deployment == name, "{} is queued for {}", asked, name)
        promised = request.waits_for is not None
        free = request.instance is None and (promised or not request.required_blocks)
        hold(free, "{} is queued, and holds {} blocks", asked, request.required_blocks)
        hold(request.accepted or not promised, "{} is promised a load, and not told", asked)
    ranks = [request.rank for request in entry.queue]
    hold(ranks == sorted(ranks), "{}: the queue is out of order", name)
    fresh = [r for r in entry.queue if not r.attempt and not r.resumed]
    by_class = Counter(request.slo.name for request in fresh)
    new = max(by_class.values(), default=0)
    hold(new <= limits.queue_requests_max, "{}: {} new requests are queued", name, new)
    hold(name in cell.waiting, "{} has a queue, and is not looked at", name)
    retry_at_s = cell.retry_at_s
    soon = retry_at_s is not None and retry_at_s <= now_s + limits.place_retry_s
    hold(soon, "{} has a queue, which is tried again at {}", name, retry_at_s)


def _check_requests(cell: Cell, limits: CellLimits) -> None:
    """Every request is queued or running, in one place."""
    places = [r.original.request_id for d in cell.deployments.values() for r in d.queue]
    places += [
        request_id
        for instance in cell.instances.values()
        for request_id, request in instance.requests.items()
        if not request.is_copy
    ]
    hold(sorted(places) == sorted(cell.requests), "requests in {}", sorted(places))
    for request_id, request in cell.requests.items():
        hold(request.original.request_id == request_id, "{} has another id", request_id)
        _check_request(request, limits)
    _check_migrations(cell, limits)


def _check_migrations(cell: Cell, limits: CellLimits) -> None:
    """Who moves runs at its source, and is computed ahead at one other node, with the same tokens
    as far as they go; nobody else is.
    """
    copies = [r for i in cell.instances.values() for r in i.requests.values() if r.is_copy]
    known = sorted(cell.migrations)
    hold(sorted(r.original.request_id for r in copies) == known, "copies are not of {}", known)
    moving = sorted(name for name, request in cell.requests.items() if request.migration)
    hold(moving == known, "{} move, not {}", known, moving)
    hold(not known or cell.migrations_at_s is not None, "{} move, and nobody looks", known)
    for name, migration in cell.migrations.items():
        request, copy = migration.request, migration.copy
        hold(cell.requests.get(name) is request, "{} has another id", name)
        hold(request.migration is migration, "{} does not know that it moves", name)
        hold(migration.state in UNDER_WAY, "{} moves, and is {}", name, migration.state)
        source, target = request.instance, copy.instance
        if source is None or target is None:
            hold(False, "{} moves from {} to {}", name, source, target)
            return
        hold(source.node is not target.node, "{} moves within {}", name, source.node.node_id)
        hold(target.requests.get(name) is copy, "{} has no place at {}", name, target.instance_id)
        sent = len(copy.output_tokens)
        same = request.output_tokens[:sent] == copy.output_tokens
        hold(same, "{} was sent tokens that it does not have", name)
        hold(request.attempt < copy.attempt, "{} and its copy are one attempt", name)
        hold(migration.rounds <= limits.migration_rounds_max, "{} moves round and round", name)
        hold(request.moves <= limits.moves_max, "{} has moved {} times", name, request.moves)
    if not known:
        return
    for node in cell.nodes.values():
        ends = [e for m in cell.migrations.values() for e in (m.request, m.copy)]
        here = sum(e.instance is not None and e.instance.node is node for e in ends)
        hold(here <= limits.migrations_max, "{} has {} migrations", node.node_id, here)


def _check_request(request: RequestEntry, limits: CellLimits) -> None:
    name, attempt, evictions = request.original.request_id, request.attempt, request.evictions
    tokens = len(request.original.prompt_tokens) + len(request.output_tokens)
    hold(request.tokens == tokens, "{} has {} tokens, not {}", name, request.tokens, tokens)
    hold(request.overtaken <= limits.overtaken_max, "{} is overtaken too often", name)
    failed = request.failures
    hold(failed <= limits.attempts_max, "{} is in its attempt {}", name, attempt)
    hold(attempt <= request.submissions, "{} is in attempt {}, not submitted", name, attempt)
    often = max(limits.evictions_max, limits.preempted_max)
    bounded = evictions <= often or request.slo.best_effort
    hold(bounded, "{} was evicted {} times", name, evictions)
    expects = request.waits_for
    hold(expects is None or name in expects.expected, "{} waits for a load in vain", name)
    if request.instance is None:
        return
    hold(request.accepted, "{} runs, and its client was not told", name)
    hold(expects is None, "{} runs, and waits for a load", name)
    hold(request.state is RequestState.RUNNING, "{} runs, and is {}", name, request.state)
    hold(attempt, "{} runs, and was never submitted", name)
    left = request.prefill_left
    hold(0 <= left <= tokens, "{} has {} of {} tokens to compute", name, left, tokens)
    hold(name in request.instance.requests, "{} is not where it runs", name)


def _check_operations(cell: Cell, limits: CellLimits) -> None:
    """Calls under way are about what is there, and in the state that they brought it into."""
    hold(len(cell.operations) <= limits.operations_max, "{} operations", len(cell.operations))
    for operation_id, operation in cell.operations.items():
        hold(operation.operation_id == operation_id, "{} has another id", operation_id)
        entry, node = cell.deployments.get(operation.name), operation.node
        lost = node is not None and cell.nodes.get(node.node_id) is not node
        hold(not lost, "{} waits for a node that is gone", operation_id)
        state = entry.state if entry is not None else None
        match operation.kind:
            case OperationKind.DEPLOY:
                saving = operation.pending is not None
                due = DeploymentState.SAVING if saving else DeploymentState.IMPORTING
                hold(state is due, "{} is {} while it is deployed", operation.name, state)
                hold(saving or node is not None, "{} is imported nowhere", operation.name)
            case OperationKind.DELETE:
                deleting = state is DeploymentState.DELETING
                hold(deleting, "{} is {} while it is deleted", operation.name, state)
            case OperationKind.SCALE | OperationKind.ROLLOUT:
                hold(operation.pending is not None, "{} is not being stored", operation_id)
            case OperationKind.PROFILE:
                measures = operation.measuring and operation.pending_profile is None
                known = not measures or operation.instance is not None
                hold(known, "{} measures nothing", operation_id)


def check_refusals(core: ControllerCore) -> None:
    """A node that lacked bytes of a new instance for the head of a queue, and whose version is the
    same, lacks them.
    """
    cell = core.cell
    for entry in cell.deployments.values():
        if not entry.queue or entry.replicas() >= entry.spec.scaling.replicas_max:
            continue
        for node in cell.nodes.values():
            known = entry.queue[0].refusals.starts.get(node.link_id)
            if known is not None and known.version == node.version and known.needed_bytes:
                assert entry.deployment is not None
                lacks = known.needed_bytes > node.obtainable_bytes(entry.deployment)
                hold(lacks, "{} could hold {} by now", node.node_id, entry.spec.name)


RESTS = (InstanceState.READY, InstanceState.PARKED)


def check_rest(cell: Cell, engines: Mapping[NodeId, VirtualEngine]) -> None:
    """Nothing is left under way, and each node's engine has what the books say; all nodes joined
    again.
    """
    hold(not cell.requests, "requests are stuck: {}", list(cell.requests))
    hold(not cell.operations, "operations are stuck: {}", list(cell.operations))
    hold(set(cell.nodes) == set(engines), "{} of {} are in", set(cell.nodes), set(engines))
    for name, node in cell.nodes.items():
        _check_idle(node, engines[name])


def _check_idle(node: NodeEntry, engine: VirtualEngine) -> None:
    station, name = node.station, node.node_id
    under_way = (*station.running_reservations(), *station.waiting())
    hold(node.state is NodeState.READY, "{} is {}", name, node.state)
    hold(not under_way, "{}: reservations are stuck: {}", name, under_way)
    promised, tracked = station.promised_bytes, station.tracked_bytes
    hold(promised == tracked, "{}: {} B promised, {} B tracked", name, promised, tracked)
    hold(not engine.has_requests(), "{} computes for nobody", name)
    found = {memory.instance_id: memory for memory in engine.memory()}
    known = set(node.instances)
    hold(set(found) == known, "{} has {}, not {}", name, set(found), known)
    for instance_id, instance in node.instances.items():
        hold(instance.state in RESTS, "{} is {} for ever", instance_id, instance.state)
        hold(not instance.profiling, "{} is kept for a profile for ever", instance_id)
        blocks, real = instance.kv_blocks, found[instance_id].kv_blocks
        hold(blocks == real, "{} has {} KV blocks, not {}", instance_id, real, blocks)
        promised_blocks = instance.promised_blocks
        kept = blocks == promised_blocks >= 1
        hold(kept, "{} has {} KV blocks, {} promised", instance_id, blocks, promised_blocks)
        used = instance.kv_blocks_used
        hold(not used, "{} uses {} KV blocks for nobody", instance_id, used)
