"""The controller's books of a node, added up anew, and held against what its engine really has.

What must hold of any cell after every event, live, simulated or in a test's world. Before: whoever
watches a cell. After: nothing; a rule that is broken raises.
"""

from collections.abc import Iterable

from mesh.core.controller.state.instance import InstanceEntry
from mesh.core.controller.state.node import NodeEntry
from mesh.domain.lifecycle import InstanceState
from mesh.domain.steps import InstanceMemory
from mesh.memory.station import Reservation, ReservationKind


class RuleBroken(AssertionError):
    """Something that holds of every cell does not hold of this one: a fault of mesh."""


def hold(rule: bool, broken: str, *values: object) -> None:
    """Raises RuleBroken with what is said of it, `values` put in the place of its braces."""
    if not rule:
        raise RuleBroken(broken.format(*values))


def check_books(node: NodeEntry) -> None:
    """Memory is promised and tracked as instances and reservations say, and within the capacity.

    More may be promised than there is only where a node turned out to hold more than was promised
    of it; no more is ever tracked.
    """
    station, held = node.station, set(node.instances)
    name = node.node_id
    hold(
        set(station.holders()) == held, "{}: {} hold memory, not {}", name, station.holders(), held
    )
    promised = sum(station.size_bytes(i) for i in held)
    tracked = sum(station.held_bytes(i) for i in held)
    hold(station.promised_bytes == promised, "{}: promised {} B", name, station.promised_bytes)
    hold(station.tracked_bytes == tracked, "{}: tracked {} B", name, station.tracked_bytes)
    whole = station.promised_bytes + station.free_bytes
    hold(whole == station.capacity_bytes, "{}: promised and free are {} B", name, whole)
    hold(
        tracked <= station.capacity_bytes, "{}: {} B of {} B", name, tracked, station.capacity_bytes
    )
    waiting = {reservation.instance_id for reservation in station.waiting()}
    for instance_id, instance in node.instances.items():
        check_instance(instance, station.running(instance_id), instance_id in waiting)


def check_instance(instance: InstanceEntry, running: Reservation | None, waits: bool) -> None:
    """Its state, its requests and its reservations say the same; `waits`: a reservation does."""
    name, state = instance.instance_id, instance.state
    held = instance.requests.values()
    required = sum(request.required_blocks for request in held)
    hold(
        instance.required_blocks == required,
        "{} requires {} blocks",
        name,
        instance.required_blocks,
    )
    hold(state is not InstanceState.GONE, "{} is gone, and in the books", name)
    hold(instance.batch <= instance.batch_max, "{} has {} requests", name, instance.batch)
    kind = running.kind if running is not None else None
    match state:
        case InstanceState.LOADING:
            loads = waits or kind is ReservationKind.LOAD
            hold(loads, "{} is loading, and nothing loads it", name)
        case InstanceState.PARKED:
            hold(not held, "{} is parked with {} requests", name, len(held))
        case InstanceState.READY | InstanceState.DRAINING:
            resizes = kind in (None, ReservationKind.RESIZE)
            hold(resizes, "{} is {}, and its node is to {} it", name, state, kind)
        case _:
            pass  # it broke, or its load has ended although it was given up
    for request in held:
        asked = request.original.request_id
        tokens = min(request.tokens, instance.context_tokens_max)
        has, needs = request.required_blocks, instance.footprint.blocks_for(tokens)
        hold(has >= needs, "{} counts with {} blocks, and takes {}", asked, has, needs)
        hold(request.instance is instance, "{} is not where its instance says", asked)


def check_engine(node: NodeEntry, memory: Iterable[InstanceMemory]) -> None:
    """What an engine has of the instances in the books is no more than is tracked of them."""
    for found in memory:
        name = found.instance_id
        used, blocks = found.kv_blocks_used, found.kv_blocks
        hold(used <= blocks, "{} uses {} KV blocks of {}", name, used, blocks)
        if name in node.instances:
            tracked, has = node.station.held_bytes(name), found.weights_bytes + found.kv_held_bytes
            hold(has <= tracked, "{} holds {} B, and {} B are tracked", name, has, tracked)
