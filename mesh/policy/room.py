"""Where requests go, who waits or is late, who gives way for whom, and which nodes have room: what
policies share of it.

Idle instances go first, as few as do, in the order in which the cell offers them. After LLM-Mesh
§7.1 an instance that cannot grow takes the memory of instances with a smaller batch on its node,
the smallest first, so that many requests never wait for a few, and two instances never preempt each
other in turn.
"""

from collections.abc import Iterable, Iterator, Sequence

from mesh.domain.slo import ColdStart
from mesh.policy.plans import Join, Plan, Start
from mesh.policy.views import CellView, InstanceView, NodeView, Outlook, RequestView


def joins_first(request: RequestView | None, cell: CellView) -> Iterator[Plan]:
    """Whatever is loaded, then what loads, then new instances."""
    if request is not None:
        for instance in cell.candidates():
            yield Join(request=request, instance=instance)
    for node in roomy_first(cell):
        yield Start(request=request, node=node)


def may_be_in_time(request: RequestView, outlook: Outlook, *, validated: bool) -> bool:
    """Whether a way is open for its first token to be in time: a load, or a place. Where places are
    not `validated`, it is served late by the load that it waits for.
    """
    latest_s = outlook.latest_start_s
    if latest_s < request.arrival_s:
        return False
    if not validated:
        return outlook.now_s < latest_s or outlook.is_loading()
    return outlook.now_s < latest_s and (
        not outlook.has_node()
        or outlook.may_load_by(latest_s)
        or outlook.may_change()
        or outlook.place_s() <= latest_s
    )


def late_by_load_alone(request: RequestView, outlook: Outlook) -> bool:
    """Whether nothing but a load keeps the request from being in time, and its deployment wants it
    late then: none is loaded, alone it would be in time, and it has just come. One that has waited
    for room first would take it from those who need not be late.
    """
    return (
        request.slo.cold_start is ColdStart.LATE
        and outlook.has_just_come()
        and not outlook.is_loaded()
        and outlook.latest_start_s >= request.arrival_s
    )


def longest_headroom(requests: Iterable[RequestView]) -> RequestView:
    """The request whose next token is due last (LLM-Mesh §6.4). There has to be one."""
    return max(requests, key=lambda request: (request.due_s, request.request_id))


def roomy_first(cell: CellView) -> Iterator[NodeView]:
    """Nodes for a new instance: those with room, then those that idle instances can make room on.
    If more have room than are looked at, half of the looks go to the first of them, and half to the
    last: they have the least to do; and one more, at which it shows that there were others. Where
    the weights are already, an instance takes the least.
    """
    full: list[NodeView] = []
    roomy: list[NodeView] = []
    for node in cell.starts():
        (full if cell.lacks_bytes(node) > 0 else roomy).append(node)
    roomy.sort(key=lambda node: not cell.shares_bytes(node))
    if len(roomy) > cell.looks_max:
        last = cell.looks_max // 2
        first = cell.looks_max - last
        roomy = [*roomy[:first], *roomy[: -last - 1 : -1], roomy[first]]
    yield from roomy
    yield from full


def enough(idle: Iterable[InstanceView], missing_bytes: int) -> Sequence[InstanceView]:
    """The first of the idle instances that together free what is missing; none if all do not."""
    taken: list[InstanceView] = []
    for instance in idle:
        if missing_bytes <= 0:
            break
        taken.append(instance)
        missing_bytes -= instance.freed_bytes(taken[:-1])
    return taken if missing_bytes <= 0 else ()


def freed_bytes(instances: Sequence[InstanceView]) -> int:
    """The bytes that a node has for others once all of these have gone."""
    return sum(instance.freed_bytes(instances[:n]) for n, instance in enumerate(instances))


def victims(
    neighbours: Iterable[InstanceView], place: InstanceView | NodeView, missing_bytes: int
) -> Sequence[InstanceView]:
    """Those that give their memory to an instance that lacks so many bytes; none when all that are
    smaller do not hold as much.
    """
    batch = getattr(place, "batch", 0)
    smaller = [neighbour for neighbour in neighbours if neighbour.batch < batch]
    smaller.sort(key=lambda neighbour: (neighbour.batch, neighbour.instance_id))
    taken = list(enough(smaller, missing_bytes))
    # The last one may have made an earlier one needless.
    for neighbour in tuple(taken):
        others = [other for other in taken if other is not neighbour]
        if freed_bytes(others) >= missing_bytes:
            taken = others
    return taken
