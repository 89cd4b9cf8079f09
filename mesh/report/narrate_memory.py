"""What is worth telling of KV caches: parked and resumed instances, resizes that had to wait for
another instance or failed, evictions. Caches that grow and shrink with their requests are not.

Whether an instance is parked does not show in one decision, so the story remembers it.
"""

from collections.abc import Iterator

from mesh.core.controller.instances.kv_cache import PARKED_BLOCKS
from mesh.domain.actions import SendCommand
from mesh.domain.events import NodeConnected, NodeReported
from mesh.domain.ids import InstanceId
from mesh.domain.limits import forget_oldest
from mesh.domain.messages import (
    AbortRequest,
    InstanceGone,
    KvResized,
    NodeReport,
    ResizeKv,
    TokensReport,
    UnloadInstance,
)
from mesh.domain.views import CellLine

PARKED_MAX = 1024
"""Instances that are remembered as parked; those of nodes that were lost are among them."""


class MemoryStory:
    def __init__(self) -> None:
        self._parked: dict[InstanceId, None] = {}

    def happened(self, event: object) -> Iterator[CellLine]:
        match event:
            case NodeConnected():
                for instance in event.hello.instances:
                    if instance.kv_blocks == PARKED_BLOCKS:
                        self._park(instance.instance_id)
            case NodeReported(report=KvResized(error=error) as resized) if error:
                kept = f"its KV cache has {resized.kv_blocks} blocks"
                text = f"resize failed: {resized.message}; {kept}"
                yield _line(resized.instance_id, text, fault=True)
            case NodeReported(report=InstanceGone(instance_id=instance_id)):
                self._parked.pop(instance_id, None)

    def decided(self, event: object, action: object) -> Iterator[CellLine]:
        """What an action means that was decided on the event."""
        if isinstance(action, SendCommand):
            report = event.report if isinstance(event, NodeReported) else None
            yield from self._sent(report, action.command)

    def _sent(self, report: NodeReport | None, command: object) -> Iterator[CellLine]:
        match command:
            case ResizeKv(instance_id=instance_id, kv_blocks=kv_blocks):
                if kv_blocks == PARKED_BLOCKS:
                    self._park(instance_id)
                    yield _line(
                        instance_id, "parked: it keeps its weights, and hardly any KV cache"
                    )
                elif instance_id in self._parked:
                    del self._parked[instance_id]
                    yield _line(instance_id, f"resumed with {kv_blocks} KV blocks")
                elif freed := _freed_by(report, instance_id):
                    yield _line(instance_id, f"resize to {kv_blocks} KV blocks, {freed}")
            case UnloadInstance():
                self._parked.pop(command.instance_id, None)
            case AbortRequest() if isinstance(report, TokensReport) and report.starved:
                text = f"evicted from {report.instance_id}, which had no KV blocks left"
                yield CellLine(kind="request", subject=command.request_id, text=text, fault=True)

    def _park(self, instance_id: InstanceId) -> None:
        self._parked[instance_id] = None
        forget_oldest(self._parked, PARKED_MAX)


def _freed_by(report: NodeReport | None, instance_id: InstanceId) -> str:
    """Which other instance's end, or resize, a resize comes after at once; empty for none."""
    match report:
        case InstanceGone() if report.instance_id != instance_id:
            return f"once {report.instance_id} was gone"
        case KvResized() if report.instance_id != instance_id:
            return f"once {report.instance_id} was resized"
    return ""


def _line(instance_id: InstanceId, text: str, *, fault: bool = False) -> CellLine:
    return CellLine(kind="instance", subject=instance_id, text=text, fault=fault)
