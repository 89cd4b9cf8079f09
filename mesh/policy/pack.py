"""`pack`: CPU before GPU, large batches before small ones, full nodes before empty ones."""

from collections.abc import Iterable, Sequence

from mesh.policy.interface import Instance, Node
from mesh.policy.parts import cpu_first, largest_batch_first, tightest_first


class Pack:
    """Bin-packing after LLM-Mesh §7.2."""

    name = "pack"

    def order_instances(self, instances: Iterable[Instance]) -> Sequence[Instance]:
        return sorted(
            instances, key=lambda i: (cpu_first(i), largest_batch_first(i), i.instance_id)
        )

    def order_nodes(self, nodes: Iterable[Node]) -> Sequence[Node]:
        return sorted(nodes, key=lambda n: (cpu_first(n), tightest_first(n), n.node_id))
