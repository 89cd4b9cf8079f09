"""`fcfs`: first come, first served, and nobody is turned away for an SLO. A baseline."""

from mesh.domain.reasons import DeviceKind, TurnRule
from mesh.policy.interface import InstanceView, NodeView, Rank
from mesh.policy.ranks import fullest_instance, fullest_node


class FirstComeFirstServed:
    """Places requests as `llm-mesh` does, but computes them in the order of their arrival."""

    name = "fcfs"
    turns = TurnRule.FIRST_COME
    devices = (DeviceKind.CPU, DeviceKind.GPU)
    partitions = None
    validates = False
    refuses_late = False
    reclaims = (DeviceKind.CPU, DeviceKind.GPU)
    preempts = False
    consolidates = False

    def instance_rank(self, instance: InstanceView) -> Rank:
        return fullest_instance(instance)

    def node_rank(self, node: NodeView) -> Rank:
        return fullest_node(node)
