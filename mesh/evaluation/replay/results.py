"""What came of one call of a replay.

A call that was sent has an outcome, judged as every other of mesh's is; one too many at once was
not sent. Before: `running`. After: `numbers`, `record`, `page`.
"""

from mesh.domain.outcome import Outcome
from mesh.domain.reasons import FinishReason, RefusalReason
from mesh.domain.values import dataclass
from mesh.evaluation.load_client import NOT_SENT, STOPPED
from mesh_workloads.replay_plan import Call


@dataclass(frozen=True, slots=True, kw_only=True)
class CallResult:
    call: Call
    outcome: Outcome
    """Times count from the replay's start."""
    late_s: float
    """By how much it was sent after its time."""
    failed: str = ""
    """The status of one that neither finished nor was refused."""

    @property
    def sent(self) -> bool:
        return self.failed != NOT_SENT

    @property
    def cancelled(self) -> bool:
        """It was open when the replay was stopped."""
        return self.failed == STOPPED

    @property
    def judged(self) -> bool:
        """The cell had its chance: it was sent, and nobody ended it from outside."""
        return self.sent and not self.cancelled

    @property
    def finished(self) -> bool:
        return self.outcome.finished

    @property
    def refused(self) -> str:
        """The reason."""
        return str(self.outcome.end) if isinstance(self.outcome.end, RefusalReason) else ""

    @property
    def broke(self) -> bool:
        """It failed: neither an answer in full nor a refusal, or it was never sent."""
        return self.outcome.end is FinishReason.FAILED
