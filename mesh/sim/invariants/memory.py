"""The controller's books of a node's memory, added up anew, and held against what its engine has.

Before: whoever watches a cell. After: nothing; a rule that is broken raises.
"""

from collections.abc import Callable, Iterable

from mesh.core.controller.state.instance import InstanceEntry
from mesh.core.controller.state.node import NodeEntry
from mesh.domain.ids import InstanceId
from mesh.domain.lifecycle import InstanceState
from mesh.domain.steps import InstanceMemory
from mesh.memory.station import LOADS, OVERTAKEN_MAX, Reservation, ReservationKind
from mesh.sim.invariants.rule import hold


def check_books(node: NodeEntry) -> None:
    """Memory is promised and tracked as instances and reservations say, and within what the node
    said first that it has.

    More is tracked only where a node says itself that it holds more, for a model's footprint was
    underestimated. What is left once it has said that it has less, and how much may be promised,
    is a matter of time: see `Watch`.
    """
    station, known = node.station, set(node.instances)
    name, capacity = node.node_id, station.capacity_bytes
    hold(set(station.holders()) == known, "{}: {} hold memory", name, station.holders())
    promised = _once(node, lambda name: station.size(name).bytes)
    tracked = _once(node, lambda name: station.held(name).bytes)
    hold(station.promised_bytes == promised, "{}: promised {} B", name, station.promised_bytes)
    hold(station.tracked_bytes == tracked, "{}: tracked {} B", name, station.tracked_bytes)
    hold(promised + station.free_bytes == capacity, "{}: free {} B", name, station.free_bytes)
    said = said_bytes(node)
    first = max(node.hello.memory_bytes - node.hello.base_bytes, 0)
    hold(tracked <= max(first, said), "{}: {} B of {} B", name, tracked, first)
    most = max([h.overtaken for h in station._holdings.values()], default=0)
    hold(most <= OVERTAKEN_MAX, "{}: a reservation was overtaken {} times", name, most)
    waiting = {reservation.instance_id for reservation in station.waiting()}
    for instance_id, instance in node.instances.items():
        _check_instance(instance, station.running(instance_id), instance_id in waiting)


def said_bytes(node: NodeEntry) -> int:
    """What its instances hold, as it told last."""

    def told_bytes(name: InstanceId) -> int:
        instance = node.instances[name]
        return instance.footprint.instance_bytes(instance.kv_blocks)

    return _once(node, told_bytes)


def _once(node: NodeEntry, size_bytes: Callable[[InstanceId], int]) -> int:
    """The sum over the node's instances. What several share counts once, at the most that one of
    them has of it.
    """
    if node.swaps:
        sizes = [(i.weights_bytes, size_bytes(name)) for name, i in node.instances.items()]
        pool_bytes = sum(sorted(min(of) for of in sizes)[-2:])
        return pool_bytes + sum(max(size - weights, 0) for weights, size in sizes)
    if not node.hello.shares_weights:
        return sum([size_bytes(name) for name in node.instances])
    total, common = 0, dict[object, int]()
    for name, instance in node.instances.items():
        held_bytes, shared = size_bytes(name), instance.shared_weights
        common_bytes = min(shared.size_bytes, held_bytes) if shared is not None else 0
        total += held_bytes - common_bytes
        if shared is not None:
            common[shared.key] = max(common.get(shared.key, 0), common_bytes)
    return total + sum(common.values())


def _check_instance(instance: InstanceEntry, running: Reservation | None, waits: bool) -> None:
    """Its state, its cache and its reservations say the same; `waits`: one does."""
    name, state, station = instance.instance_id, instance.state, instance.node.station
    kind = running.kind if running is not None else None
    size_bytes = instance.footprint.instance_bytes(instance.kv_blocks)
    match state:
        case InstanceState.LOADING:
            loads = waits or kind in LOADS
            hold(loads, "{} is loading, and nothing loads it", name)
            load_bytes = running.size_bytes if running is not None else instance.promised_bytes
            hold(load_bytes == size_bytes, "{} loads with other than promised", name)
        case InstanceState.READY | InstanceState.PARKED | InstanceState.DRAINING:
            resizes = kind in (None, ReservationKind.RESIZE)
            hold(resizes, "{} is {}, and its node is to {} it", name, state, kind)
            held_bytes = station.held(name).bytes
            as_told = running is not None or held_bytes == size_bytes
            hold(as_told, "{} has {} B, and {} B are tracked", name, size_bytes, held_bytes)
        case _:
            pass  # it broke, or its load has ended although it was given up
    for request in instance.requests.values():
        asked = request.original.request_id
        tokens = min(request.tokens, instance.context_tokens_max)
        has, needs = request.held_blocks, instance.footprint.blocks_for(tokens)
        hold(has >= needs, "{} counts with {} blocks, and takes {}", asked, has, needs)


def check_engine(node: NodeEntry, memory: Iterable[InstanceMemory]) -> None:
    """What an engine has of the instances in the books, beside what is cached beyond their sizes in
    force, is no more than is tracked of them, each and all together, and nobody's blocks were taken
    away.
    """
    all_bytes = 0
    for found in memory:
        name = found.instance_id
        used, blocks = found.kv_blocks_used, found.kv_blocks
        beyond_bytes = max(used + found.kv_blocks_cached - blocks, 0) * found.kv_block_bytes
        hold(used <= blocks, "{} uses {} KV blocks of {}", name, used, blocks)
        if name in node.instances:
            tracked = node.station.held(name).bytes
            has = found.weights_bytes + found.kv_held_bytes - beyond_bytes
            hold(has <= tracked, "{} holds {} B, and {} B are tracked", name, has, tracked)
            all_bytes += has
    # A pool may take all that the KV caches leave.
    swaps, station = node.swaps, node.station
    tracked = max(station.tracked_bytes, station.capacity_bytes * swaps)
    hold(all_bytes <= tracked, "{}: {} B held, {} B tracked", node.node_id, all_bytes, tracked)
