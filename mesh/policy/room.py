"""Where requests go, who waits or is late, who gives way for whom, which nodes have room, and what
is loaded ahead: what policies share of it.

Idle instances go first, as few as do, in the order in which the cell offers them. After LLM-Mesh
§7.1 an instance that cannot grow takes the memory of instances with a smaller batch on its node,
the smallest first, so that many requests never wait for a few, and two instances never preempt each
other in turn.
"""

from collections.abc import Iterable, Iterator, Sequence
from heapq import nsmallest

from mesh.domain.slo import ColdStart
from mesh.domain.steps import LoadTier
from mesh.memory.demand import recommended
from mesh.policy.interface import KvDemand, KvSize
from mesh.policy.plans import Join, Plan, Prefetch, Start
from mesh.policy.views import (
    AheadView,
    CellView,
    DeploymentView,
    InstanceView,
    NodeView,
    Outlook,
    Place,
    RequestView,
)

LIKELIER = 0.4
"""A model is brought nearer where its call within a minute is so much likelier than that of each
instance that gives way to it. The difference is what the load spares callers; what is left to 1 is
read in vain (docs/memory.md says what was measured).
"""
LIKELY_MAX = 32
"""Deployments that one look tries to bring nearer."""


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
        outlook.may_load_by(latest_s)
        or outlook.may_change()
        or outlook.place_s() <= latest_s
        or not outlook.has_node()
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
    neighbours: Iterable[InstanceView], place: Place, missing_bytes: int
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


def likeliest_nearer(cell: AheadView) -> Iterator[Prefetch]:
    """What is likely to be called and is loaded nowhere, the likeliest first, where its model is
    nearest among the nodes that rest; nothing while a request waits.
    """
    if any(made.queued for made in cell.deployments()):
        return
    nodes = [node for node in cell.nodes() if node.prefetch_bytes and cell.rests(node)]
    likely = [
        (chance, made, about)
        for made in (cell.deployments() if nodes else ())
        if not made.instances and (chance := _chance(made, cell))
        if (about := cell.about(made.name)) is not None
    ]
    likeliest = nsmallest(LIKELY_MAX, likely, key=lambda of: (-of[0], of[1].name))
    for chance, made, about in likeliest:
        resting = (node for node in about.starts() if cell.rests(node))
        for node in sorted(resting, key=lambda n: (-about.tier(n).nearness, n.node_id)):
            remote = about.tier(node) is LoadTier.REMOTE
            quick = remote or about.load_s(node) <= cell.load_s_max
            given = _given_ahead(chance, node, about) if quick else None
            if given is not None:
                yield Prefetch(deployment=made.name, node=node, instead_of=given)
                if remote or not cell.rests(node):
                    break


def _chance(made: DeploymentView, cell: AheadView) -> float:
    """The probability of a call within a minute, or 0 where that is not worth a load. What nobody
    has called for as long as a parked instance stays is judged by the times between its calls
    alone: by their rate it would come back as soon as it was unloaded.
    """
    lately = cell.now_s - made.called_s <= cell.parked_s_max
    chance = made.call_chance(cell.now_s, rated=lately)
    return chance if chance >= LIKELIER else 0.0


def _given_ahead(chance: float, node: NodeView, cell: AheadView) -> tuple[InstanceView, ...] | None:
    """Which idle instances give way to one that is loaded ahead and called by this `chance`: those
    whose models' calls are less likely by LIKELIER. None where it has no room. What was loaded
    ahead, too, goes before the others: the node's budget is for both.
    """
    if cell.tier(node) is LoadTier.REMOTE:
        return ()  # It is imported, which takes no memory.

    def gives_way(instance: InstanceView) -> bool:
        owner = cell.deployment(instance.deployment)
        others = 0.0 if owner is None else owner.call_chance(cell.now_s)
        return chance - others >= LIKELIER and (instance.prefetched or instance.is_parked)

    lacks_bytes = cell.lacks_bytes(node)
    over_bytes = (
        freed_bytes([i for i in cell.instances(node) if i.prefetched]) - node.prefetch_bytes
    )
    over_bytes += lacks_bytes + node.free_bytes
    missing_bytes = lacks_bytes + cell.growth_bytes(node)
    lesser = [instance for instance in cell.idle(node) if gives_way(instance)]
    within = enough([instance for instance in lesser if instance.prefetched], over_bytes)
    if over_bytes > 0 and not within:
        return None
    others = [instance for instance in lesser if instance not in within]
    given = (*within, *enough(others, missing_bytes - freed_bytes(within)))
    return given if freed_bytes(given) >= missing_bytes else None


def by_demand(
    demand: KvDemand, tokens_least: int | None = None, watermark_share: float | None = None
) -> KvSize:
    """M_require and M_recommend; None: as the cell is set."""
    tokens = demand.tokens_least if tokens_least is None else tokens_least
    share = demand.watermark_share if watermark_share is None else watermark_share
    least = -(-min(tokens, demand.context_tokens) // demand.block_tokens)
    required = max(demand.required_blocks, least)
    wanted = recommended(required, share)
    kept_max = wanted * (1.0 + share)
    return KvSize(required_blocks=required, wanted_blocks=wanted, kept_blocks_max=kept_max)
