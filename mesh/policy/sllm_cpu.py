"""`sllm+cpu`: ServerlessLLM that also takes CPU nodes, and those first. A baseline."""

from mesh.domain.reasons import DeviceKind, TurnRule
from mesh.policy.interface import InstanceView, NodeView, Rank
from mesh.policy.ranks import fullest_instance, fullest_node


class SllmCpu:
    """As many requests on a CPU node as keep their TPOT SLO (LLM-Mesh §8.1)."""

    name = "sllm+cpu"
    turns = TurnRule.ALTERNATE
    devices = (DeviceKind.CPU, DeviceKind.GPU)
    partitions = 1
    validates = False
    refuses_late = True
    reclaims = (DeviceKind.CPU,)
    preempts = False
    consolidates = False

    def instance_rank(self, instance: InstanceView) -> Rank:
        return fullest_instance(instance)

    def node_rank(self, node: NodeView) -> Rank:
        return fullest_node(node)
