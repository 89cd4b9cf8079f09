"""Sort keys that policies are made of. Smaller sorts first."""

from mesh.domain.reasons import DeviceKind
from mesh.policy.interface import InstanceView, NodeView

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
