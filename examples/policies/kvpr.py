"""`kvpr`: placement by the ratio of KV pressure of Prism, without its migration.

The pressure of a node is the KV cache that its models will ask for, each weighted by how tight its
SLO is, over the memory that they share for it. A model starts where the pressure is least after
that, so that memory that ballooning can move is near those who will need it. Requests are promised
by shadow validation; idle models go as soon as their memory is wanted, the least called first.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from math import inf

from mesh.domain.ids import DeploymentName
from mesh.policy.default_answers import DefaultAnswers, releases
from mesh.policy.interface import Rank
from mesh.policy.plans import Join, Plan, Release, Start
from mesh.policy.room import enough
from mesh.policy.views import CellView, InstanceView, NodeView, RequestView


@dataclass(frozen=True, kw_only=True)
class Kvpr(DefaultAnswers):
    name: str = "kvpr"
    prefetches: bool = False

    def instance_rank(self, instance: InstanceView) -> Rank:
        return (-instance.batch,)

    def node_rank(self, node: NodeView) -> Rank:
        return (-node.free_bytes,)

    def places(self, request: RequestView | None, cell: CellView) -> Iterator[Plan]:
        if request is not None:
            for instance in cell.candidates():
                yield Join(request=request, instance=instance)

        def pressure(node: NodeView) -> tuple[float, str]:
            return _pressure_after(node, request, cell), node.node_id

        for node in sorted(cell.starts(), key=pressure):
            yield Start(request=request, node=node)

    def relieve(
        self, place: InstanceView | NodeView, missing_bytes: int, cell: CellView
    ) -> Iterator[tuple[Release, ...]]:
        def calls(instance: InstanceView) -> tuple[float, str]:
            return cell.calls_per_s(instance.deployment), instance.instance_id

        idle = sorted(cell.idle(place), key=calls)
        yield releases(enough(idle, missing_bytes))


def _pressure_after(node: NodeView, request: RequestView | None, cell: CellView) -> float:
    """KVPR of the node, were the request's model there too."""
    weights_bytes = max(cell.lacks_bytes(node) + node.free_bytes, 0)
    shared_bytes = node.capacity_bytes - weights_bytes
    demand = 0.0 if request is None else _demand(request.deployment, cell)
    for instance in cell.instances(node):
        shared_bytes -= instance.weights_bytes
        demand += _demand(instance.deployment, cell)
    return demand / shared_bytes if shared_bytes > 0 else inf


def _demand(name: DeploymentName, cell: CellView) -> float:
    """Tokens that a model will hold for each second, the more for a tight SLO."""
    deployment = cell.deployment(name)
    if deployment is None:
        return 0.0
    return cell.calls_per_s(name) * deployment.answer_tokens / deployment.slo.tpot_s


POLICY = Kvpr()
