"""`sllm+cpu+share`: ServerlessLLM with CPU nodes, two instances to a node. A baseline."""

from mesh.domain.reasons import DeviceKind, TurnRule
from mesh.policy.interface import InstanceView, NodeView, Rank
from mesh.policy.ranks import fullest_instance, fullest_node


class SllmCpuShare:
    """Half a node for an instance, where half a node is enough for the model (LLM-Mesh §8.1)."""

    name = "sllm+cpu+share"
    turns = TurnRule.ALTERNATE
    devices = (DeviceKind.CPU, DeviceKind.GPU)
    partitions = 2
    validates = False
    refuses_late = True
    reclaims = (DeviceKind.CPU,)
    preempts = False
    consolidates = False

    def instance_rank(self, instance: InstanceView) -> Rank:
        return fullest_instance(instance)

    def node_rank(self, node: NodeView) -> Rank:
        return fullest_node(node)
