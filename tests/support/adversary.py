"""A policy that asks for whatever comes to its mind, by turns: the core has to put up with it.

Deterministic in the time and the views, so that its runs replay. A file as `--policy` takes it.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from math import inf
from typing import Any

from mesh.domain.reasons import RefusalReason, Verdict
from mesh.domain.slo import Pace, Slo
from mesh.policy.default_answers import DefaultAnswers
from mesh.policy.interface import KvDemand, KvSize, Rank, Tests
from mesh.policy.llm_mesh import LLM_MESH
from mesh.policy.plans import (
    Carry,
    How,
    Join,
    Label,
    Move,
    Plan,
    Prefetch,
    Refuse,
    Release,
    Releases,
    Shortage,
    Start,
)
from mesh.policy.views import (
    AheadView,
    CellView,
    InstanceView,
    NodeView,
    Outlook,
    Place,
    RequestView,
)


def _turn(at: float, of: int) -> int:
    return int(at * 1000.0) % of if at < inf else 0


@dataclass(frozen=True, kw_only=True)
class Adversary(DefaultAnswers):
    name: str = "adversary"
    instances_per_node: int = 2

    def instance_rank(self, instance: InstanceView) -> Rank:
        if instance.batch == 3:
            raise KeyError("three")
        return (float("nan"),) if instance.batch == 5 else (instance.batch % 2,)

    def node_rank(self, node: NodeView) -> Rank:
        names: Any = node.node_id
        return (names,) if node.running == 2 else (node.free_bytes, node.running)

    def places(self, request: RequestView | None, cell: CellView) -> Iterator[Plan]:
        turn = _turn(cell.now_s, 7)
        if request is not None and turn < 3:
            for instance in cell.instances():
                yield Join(request=request, instance=instance)
        if turn == 5:
            yield from (Release(instance=instance) for instance in cell.instances())
        if turn == 1 and request is not None:
            yield Refuse(request=request, why=RefusalReason.MEMORY_FULL)
        for node in cell.nodes():
            yield Start(request=request, node=node)
        if turn == 2:
            raise IndexError("two")
        yield from LLM_MESH.places(request, cell)
        while turn == 4:
            yield from LLM_MESH.places(request, cell)
            yield Start(request=request, node=next(iter(cell.nodes())))

    def passes(self, plan: Plan, tests: Tests) -> Verdict | Shortage:
        turn = _turn(tests.arrives_s(plan), 5)
        if turn == 4:
            return Shortage(message="it is four o'clock")
        if turn == 1 and tests.utilisation(plan) < 3.0 and tests.spare_bytes(plan) > -(2**40):
            return Verdict.PASSES
        return tests.shadow(plan)

    def waits(self, request: RequestView, outlook: Outlook) -> bool | Shortage:
        turn: int = _turn(outlook.load_s() + outlook.place_s(), 6) if outlook.has_node() else 0
        if turn == 1:
            raise KeyError("one")
        said: Any = (True, None, False, Shortage(message="no"), outlook.may_change(), "late")
        return said[turn] or super().waits(request, outlook)

    def may_be_late(self, request: RequestView, outlook: Outlook) -> bool:
        turn = _turn(outlook.now_s, 3)
        if turn == 1:
            raise KeyError("one")
        return turn == 2 or outlook.is_loading()

    def relieve(self, place: Place, missing_bytes: int, cell: CellView) -> Iterator[Releases]:
        hows = tuple(How)
        for instance in cell.instances():
            yield (Release(instance=instance, how=hows[_turn(cell.now_s, 3)]),)
            yield (Release(instance=instance), Release(instance=instance))
        if _turn(missing_bytes / 1e6, 4) == 1:
            yield from (Release(instance=i) for i in cell.neighbours(place))  # type: ignore[misc]
        yield tuple(Release(instance=instance) for instance in cell.neighbours(place))
        yield from LLM_MESH.relieve(place, missing_bytes, cell)

    def evict(self, instance: InstanceView, cell: CellView) -> RequestView:
        turn, requests = _turn(cell.now_s, 3), list(cell.requests(instance))
        if turn == 1:
            raise KeyError("one")
        others = [r for other in cell.instances() for r in cell.requests(other)]
        return others[0] if turn == 2 else requests[-1]

    def idle(self, instance: InstanceView, cell: CellView) -> Release | float:
        turn = _turn(cell.now_s, 5)
        if turn < 3:
            return Release(instance=instance, how=tuple(How)[turn])
        return -1.0 if turn == 3 else LLM_MESH.idle(instance, cell)

    def upkeep(self, cell: CellView) -> Iterator[Plan]:
        turn = _turn(cell.now_s, 3)
        busy = any(instance.batch for instance in cell.instances())
        for deployment in cell.deployments():
            for node in cell.nodes() if busy else ():
                yield Start(node=node, deployment=deployment.name, label="began in upkeep")
            for waiting in cell.waiting(deployment.name):
                yield Refuse(request=waiting, message="it waits")
        for instance in cell.instances():
            yield Label(instance=instance, label="x" * _turn(cell.now_s, 100))
            requests = tuple(cell.requests(instance))
            if turn == 0:
                yield Release(instance=instance, how=tuple(How)[_turn(cell.ready_s(instance), 3)])
            for other in cell.instances():
                if turn == 1 and other.deployment == instance.deployment:
                    yield Move(requests=requests, to=other)
            if turn == 2:
                yield Move(requests=requests, to=instance, carry=Carry.KV)
                for request in requests:
                    yield Refuse(request=request, why=RefusalReason.QUEUE_FULL)

    def prefetch(self, cell: AheadView) -> Iterator[Plan]:
        turn, instances = _turn(cell.now_s, 4), tuple(cell.instances())
        if turn == 1:
            yield Label(instance=instances[0], label="not here")
        for deployment in cell.deployments() if turn == 2 else ():
            for node in cell.nodes():
                yield Prefetch(deployment=deployment.name, node=node, instead_of=instances)
                yield Prefetch(deployment=deployment.name, node=node)
        yield from LLM_MESH.prefetch(cell)

    def kv(self, demand: KvDemand) -> KvSize:
        if demand.required_blocks % 11 == 10:
            return KvSize(required_blocks=9, wanted_blocks=3)
        return LLM_MESH.kv(demand)

    def pace(self, slo: Slo) -> Pace:
        return Pace(share=0.9 if slo.tpot_s < 0.2 else 7.0)


POLICY = Adversary()
