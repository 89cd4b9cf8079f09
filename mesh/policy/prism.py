"""`prism`: memory that moves between models, by the ratio of KV pressure.

A page beside the paper (Prism): §6.1 places models where the pressure on KV memory is least
(algorithm 1), moves them, and lets idle ones go where memory is short; §6.2 orders the prompts of a
node so that as many as possible are in time (algorithm 2, the turn rule ARBITRATION). KV caches
grow and shrink by what requests need (§5). Nothing is promised and nobody is refused.
docs/policy-aegaeon-prism.md says what differs from the paper.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from math import inf

from mesh.domain.ids import DeploymentName
from mesh.domain.reasons import DeviceKind
from mesh.policy.default_answers import DefaultAnswers
from mesh.policy.interface import Rank
from mesh.policy.plans import How, Join, Label, Plan, Release, Releases, Start
from mesh.policy.rules.arbitration import ARBITRATION
from mesh.policy.rules.turns import TurnRule
from mesh.policy.views import CellView, InstanceView, NodeView, Place, RequestView

TARGET = "target since "
"""How the label of an instance begins that its deployment's other one is to move into; then comes
when that was decided.
"""


@dataclass(frozen=True, kw_only=True)
class Prism(DefaultAnswers):
    name: str = "prism"
    rule: TurnRule = ARBITRATION
    devices: tuple[DeviceKind, ...] = (DeviceKind.GPU,)
    idle_s_min: float = 45.0
    """An instance gives way once it has been idle for so long (§A.4: 45 s is best)."""
    gain_min: float = 0.2
    """A model moves only where that lowers the pressure by this share (algorithm 1, line 8)."""
    target_s_max: float = 120.0
    """A move that has not come about after so long is given up: both instances stay, until one has
    been idle.
    """
    promises: bool = False
    refuses_late: bool = False
    prefetches: bool = False
    upkeep_s: float = 0.25

    # §6.1: a model that is called again starts where the pressure is least. How many instances a
    # model has is not Prism's question: here it has one.

    def instance_rank(self, instance: InstanceView) -> Rank:
        return (-instance.batch,)

    def places(self, request: RequestView | None, cell: CellView) -> Iterator[Plan]:
        if request is not None:
            for instance in sorted(cell.candidates(), key=lambda i: not _is_target(i)):
                yield Join(request=request, instance=instance)
            made = cell.deployment(request.deployment)
            if made is not None and made.instances:
                return

        def pressure(node: NodeView) -> tuple[float, str]:
            weights_bytes = max(cell.lacks_bytes(node) + node.free_bytes, 0)
            name = None if request is None else request.deployment
            return _on(node, cell).pressure(_demand(name, cell), weights_bytes), node.node_id

        for node in sorted(cell.starts(), key=pressure):
            yield Start(request=request, node=node)

    # §6.1: an idle model keeps its weights until others lack memory, and goes then if it has been
    # idle for longer than the threshold. Its KV cache others have at once (§5).

    def idle(self, instance: InstanceView, cell: CellView) -> Release | float:
        if instance.is_parked:
            return self.idle_s_min
        return Release(instance=instance, how=How.PARK)

    def relieve(self, place: Place, missing_bytes: int, cell: CellView) -> Iterator[Releases]:
        return iter(())

    def _evicted(self, cell: CellView) -> Iterator[Plan]:
        """The instance that has been idle for the longest, if that is long enough and a model waits
        that lacks memory: it has no instance, or one that is loaded.
        """
        lacking = any(
            made.queued and all(instance.takes_now for instance in made.instances.values())
            for made in cell.deployments()
        )
        last_s = cell.now_s - self.idle_s_min
        found = [i for i in cell.instances() if i.may_go and i.idle_since_s <= last_s]
        if lacking and found:
            yield Release(instance=min(found, key=lambda i: (i.idle_since_s, i.instance_id)))

    # §6.1, algorithm 1: the models with the most demand first, each goes where the pressure is
    # least with those before it. It moves once another instance of it is loaded there.

    def upkeep(self, cell: CellView) -> Iterator[Plan]:
        yield from self._evicted(cell)
        yield from self._finish(cell)
        serving = [i for i in cell.instances() if i.device in self.devices and i.batch]
        places = {n.node_id: n for n in cell.nodes() if n.device in self.devices}
        nodes = {name: _Books(node.capacity_bytes) for name, node in places.items()}
        order = sorted(serving, key=lambda i: (-_demand(i.deployment, cell), i.instance_id))
        for instance in order:
            demand, weights_bytes = _demand(instance.deployment, cell), instance.weights_bytes
            pressures = {name: b.pressure(demand, weights_bytes) for name, b in nodes.items()}
            best = min(pressures, key=lambda name: (pressures[name], name))
            here = instance.node.node_id
            gains = pressures[best] < pressures[here] * (1.0 - self.gain_min)
            made = cell.deployment(instance.deployment)
            if gains and made and len(made.instances) == 1 < made.replicas_max:
                label = f"{TARGET}{cell.now_s:.0f}"
                yield Start(node=places[best], deployment=instance.deployment, label=label)
                here = best
            nodes[here].add(demand, weights_bytes)

    def _finish(self, cell: CellView) -> Iterator[Plan]:
        """Whoever has a target that is loaded moves into it, and goes."""
        for target in cell.instances():
            made = cell.deployment(target.deployment)
            if not _is_target(target) or made is None:
                continue
            others = [other for other in made.instances.values() if other is not target]
            for other in others:
                if target.takes_now and other.may_go:
                    yield Release(instance=other)
                elif target.takes_now and other in cell.neighbours(other.node):
                    yield Release(instance=other, to=target)
            since_s = float(target.label.removeprefix(TARGET))
            if not others or cell.now_s - since_s > self.target_s_max:
                yield Label(instance=target, label="")


PRISM = Prism()


def _is_target(instance: InstanceView) -> bool:
    return instance.label.startswith(TARGET)


@dataclass(slots=True)
class _Books:
    """The demand and the memory of a node."""

    shared_bytes: int
    demand: float = 0.0

    def add(self, demand: float, weights_bytes: int) -> None:
        self.demand += demand
        self.shared_bytes -= weights_bytes

    def pressure(self, demand: float, weights_bytes: int) -> float:
        """KVPR of the node with one model more: infinite where that leaves no KV cache."""
        left_bytes = self.shared_bytes - weights_bytes
        return (self.demand + demand) / left_bytes if left_bytes > 0 else inf


def _on(node: NodeView, cell: CellView) -> _Books:
    books = _Books(node.capacity_bytes)
    for instance in cell.instances(node):
        books.add(_demand(instance.deployment, cell), instance.weights_bytes)
    return books


def _demand(name: DeploymentName | None, cell: CellView) -> float:
    """Tokens that a model comes to hold each second, the more for a tight SLO: w of §6.1."""
    made = None if name is None else cell.deployment(name)
    if made is None:
        return 0.0
    return cell.calls_per_s(made.name) * made.answer_tokens / made.slo.tpot_s
