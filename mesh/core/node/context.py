"""The context of one event in the node core: the time, and what has been decided so far."""

from dataclasses import field

from mesh.core.node.state import LocalNode
from mesh.domain.actions import NodeAction, SendReport
from mesh.domain.ids import RequestId
from mesh.domain.messages import NodeReport, RequestReturned
from mesh.domain.values import dataclass


@dataclass(slots=True, kw_only=True, eq=False)
class NodeEventContext:
    now_s: float
    node: LocalNode
    _engine: list[NodeAction] = field(default_factory=list)
    _reports: list[NodeAction] = field(default_factory=list)

    def engine(self, action: NodeAction) -> None:
        """Something to do on this node."""
        self._engine.append(action)

    def report(self, said: NodeReport) -> None:
        """Something to tell the controller; nobody is there to hear it without a link."""
        if self.node.linked:
            self._reports.append(SendReport(report=said))

    def give_back(
        self, request_id: RequestId, attempt: int, message: str, error: str = "Unavailable"
    ) -> None:
        """Tell the controller that a request is not computed here any more, and why."""
        self.report(
            RequestReturned(request_id=request_id, attempt=attempt, error=error, message=message)
        )

    def ordered(self) -> list[NodeAction]:
        """The engine's work first: it should compute on while the tokens travel."""
        return self._engine + self._reports
