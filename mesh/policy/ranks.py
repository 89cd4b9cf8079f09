"""Sort keys that policies are made of. Smaller sorts first."""

from mesh.domain.reasons import DeviceKind
from mesh.policy.interface import Rank
from mesh.policy.views import InstanceView, NodeView

_DEVICE_ORDER = {DeviceKind.CPU: 0, DeviceKind.GPU: 1}


def fullest_instance(instance: InstanceView) -> Rank:
    """CPU before GPU, which is the scarce one (LLM-Mesh §4); there the largest batch, so that small
    ones drain and go (§7.2).
    """
    return _DEVICE_ORDER[instance.device], -instance.batch


def any_instance(instance: InstanceView) -> Rank:
    """No consolidation: the cheaper device, and there the one with the least id, full or empty."""
    return (_DEVICE_ORDER[instance.device],)


def fullest_node(node: NodeView) -> Rank:
    """The cheaper device, and there the best fit, which keeps whole nodes free for large models."""
    return _DEVICE_ORDER[node.device], node.free_bytes
