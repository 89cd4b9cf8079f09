"""Sort keys that policies are made of, and the ranks made of them. Smaller sorts first."""

from mesh.domain.reasons import DeviceKind
from mesh.policy.interface import InstanceView, NodeView, Rank

_DEVICE_ORDER = {DeviceKind.CPU: 0, DeviceKind.GPU: 1}


def cpu_first(view: InstanceView | NodeView) -> int:
    """CPU nodes before GPU nodes: GPUs are the scarce ones (LLM-Mesh §4)."""
    return _DEVICE_ORDER[view.device]


def largest_batch_first(view: InstanceView) -> int:
    """Fill large instances so that small ones drain and go (LLM-Mesh §7.2)."""
    return -view.batch


def tightest_first(view: NodeView) -> int:
    """Best fit: the least free memory first, which keeps whole nodes free for large models."""
    return view.free_bytes


def fullest_instance(instance: InstanceView) -> Rank:
    """The order of LLM-Mesh for loaded instances: consolidate on few of the cheaper device."""
    return cpu_first(instance), largest_batch_first(instance), instance.instance_id


def any_instance(instance: InstanceView) -> Rank:
    """No consolidation: the cheaper device, and there the one with the least id, full or empty."""
    return cpu_first(instance), instance.instance_id


def fullest_node(node: NodeView) -> Rank:
    """The same for nodes that might take a new instance."""
    return cpu_first(node), tightest_first(node), node.node_id
