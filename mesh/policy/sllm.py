"""`sllm`: ServerlessLLM, an instance on a GPU of its own. A baseline."""

from mesh.domain.reasons import DeviceKind, TurnRule
from mesh.policy.interface import InstanceView, NodeView, Rank
from mesh.policy.ranks import fullest_instance, fullest_node


class Sllm:
    """Loads quickly and serves as many requests as a GPU holds (LLM-Mesh §8.1)."""

    name = "sllm"
    turns = TurnRule.ALTERNATE
    devices = (DeviceKind.GPU,)
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
