"""`warm-pair`: `llm-mesh` that keeps a spare instance ready for whoever is called most.

An example of loads in `upkeep` and of labels. The deployment that is called most has one instance
more than its calls need, on the node with the most free memory that has none of it; its label says
what it is for, until a call takes it. It goes when another deployment is called twice as often.

    mesh sim workloads/faults.toml --check --policy examples/policies/warm_pair.py
"""

from collections.abc import Iterator
from dataclasses import dataclass

from mesh.policy.llm_mesh import LlmMesh
from mesh.policy.plans import Label, Plan, Release, Start
from mesh.policy.views import CellView, InstanceView

SPARE = "spare"


@dataclass(frozen=True, kw_only=True)
class WarmPair(LlmMesh):
    name: str = "warm-pair"
    calls_per_s_least: float = 0.01
    """Deployments that are called more rarely get no spare instance."""

    def upkeep(self, cell: CellView) -> Iterator[Plan]:
        instances = list(cell.instances())
        for instance in instances:
            if instance.label == SPARE and instance.batch:
                yield Label(instance=instance, label="")  # A call has taken it.
        spares = [i for i in instances if i.label == SPARE and not i.batch]
        called = sorted(cell.deployments(), key=lambda d: (cell.calls_per_s(d.name), d.name))
        if not called:
            return
        busiest = called[-1]
        calls_per_s = cell.calls_per_s(busiest.name)
        for spare in spares:
            if 2 * cell.calls_per_s(spare.deployment) < calls_per_s and spare.may_go:
                yield Release(instance=spare)
        if not spares and calls_per_s >= self.calls_per_s_least:
            there = {i.node.node_id for i in instances if i.deployment == busiest.name}
            nodes = [node for node in cell.nodes() if node.node_id not in there]
            for node in sorted(nodes, key=lambda n: (-n.free_bytes, n.node_id))[:1]:
                yield Start(node=node, deployment=busiest.name, label=SPARE)

    def idle(self, instance: InstanceView, cell: CellView) -> Release | float:
        return 60.0 if instance.label == SPARE else super().idle(instance, cell)


POLICY = WarmPair()
