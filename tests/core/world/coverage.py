"""What happened in a world, how often: runs in which nothing rare happens prove little."""

from collections import Counter

from mesh.core.controller.state.cell import Cell
from mesh.domain.events import InvokeRequested, KeepAliveExpired, NodeReported, PlaceRetryDue
from mesh.domain.ids import InstanceId, RequestId
from mesh.domain.lifecycle import InstanceState
from mesh.domain.messages import TokensReport

LOADED = (InstanceState.READY, InstanceState.PARKED)


class Coverage:
    def __init__(self) -> None:
        self.seen: Counter[str] = Counter()
        self._states: dict[InstanceId, InstanceState] = {}
        self._evictions: dict[RequestId, int] = {}
        """The evictions of each request, like `_states` as the event before left them."""

    def note(self, cell: Cell, event: object) -> None:
        """The controller has decided upon an event."""
        seen = self.seen
        seen["controller events"] += 1
        for instance_id, instance in cell.instances.items():
            before, after = self._states.get(instance_id), instance.state
            seen["parks"] += after is InstanceState.PARKED and after is not before
            seen["resumes"] += before is InstanceState.PARKED and after is InstanceState.READY
            if before in LOADED and after is InstanceState.UNLOADING:
                seen["reclaims"] += isinstance(event, InvokeRequested | PlaceRetryDue)
                seen["expiries"] += isinstance(event, KeepAliveExpired)
        seen["prefetches"] = max(seen["prefetches"], cell.prefetches.view.begun)
        seen["prefetches used"] = max(seen["prefetches used"], cell.prefetches.view.used)
        for request_id, request in cell.requests.items():
            seen["evictions"] += request.evictions > self._evictions.get(request_id, 0)
        if isinstance(event, NodeReported) and isinstance(event.report, TokensReport):
            seen["starvations"] += bool(event.report.starved)
        self._states = {i: instance.state for i, instance in cell.instances.items()}
        self._evictions = {r: request.evictions for r, request in cell.requests.items()}
