"""What is said of a replay, as a value: to tables, to JSON and to a page.

Before: `numbers`, `cell`, `simulating`. After: the command line; `page`.
"""

from mesh.domain.values import dataclass
from mesh.evaluation.replay.cell import Counted
from mesh.evaluation.replay.numbers import ReplayNumbers, WorkerNumbers
from mesh.evaluation.replay.results import CallResult
from mesh_workloads.replay_plan import ReplayPlan

LATE_MS_MAX = 20.0
"""A sender that is later than this for more than a hundredth of the calls cannot keep up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayReport:
    plan: ReplayPlan
    results: tuple[CallResult, ...]
    """The results of the calls that were due before the replay was stopped."""
    numbers: tuple[ReplayNumbers, ...]
    """The numbers of all calls together, and then of each deployment."""
    simulated: tuple[ReplayNumbers, ...] = ()
    """The same calls in a simulated cell."""
    simulated_results: tuple[CallResult, ...] = ()
    counted: Counted | None = None
    """None when the controller could not be asked afterwards."""
    stopped: bool = False
    """Before its end."""
    workers: tuple[WorkerNumbers, ...] = ()
    """The numbers of each process, where several sent the replay."""

    @property
    def whole(self) -> ReplayNumbers:
        return self.numbers[0]

    @property
    def unsent(self) -> int:
        """Calls that were still to come when it was stopped."""
        return len(self.plan.calls) - len(self.results)

    @property
    def broke(self) -> int:
        """Calls that failed, or were not sent for there were too many."""
        return sum(count for _, count in self.whole.failed)

    @property
    def kept_up(self) -> bool:
        return self.whole.late_ms_p99 <= LATE_MS_MAX


def remarks(report: ReplayReport) -> list[str]:
    """What a reader has to know of the figures; a sentence each."""
    plan, whole = report.plan, report.whole
    found = []
    if plan.left_out:
        found.append(f"{plan.left_out} requests without a prompt or an answer are left out.")
    if plan.too_long:
        done = "are cut to it" if plan.clipped else "keep their prompts"
        found.append(f"{plan.too_long} calls are longer than the context they go to: they {done}.")
    if report.stopped:
        found.append(f"Stopped early: {report.unsent} of {len(plan.calls)} calls were not due yet.")
    if whole.cancelled:
        found.append(f"{whole.cancelled} calls were open then; they are in no share.")
    if not report.kept_up:
        found.append(
            f"The sender did not keep up: {whole.late_ms_p99:.0f} ms late for one call in a "
            "hundred. TTFT counts from the sending; the load came later than the trace's."
        )
    for worker in report.workers:
        if worker.late_ms_p99 > LATE_MS_MAX and len(report.workers) > 1:
            found.append(
                f"Worker {worker.worker} did not keep up: {worker.late_ms_p99:.0f} ms late for one "
                f"call in a hundred, {worker.late_ms_max:.0f} ms at most: take more workers."
            )
        if worker.ended < worker.calls and not report.stopped:
            found.append(
                f"Worker {worker.worker} went away: nothing is known of "
                f"{worker.calls - worker.ended} of its {worker.calls} calls."
            )
    if report.counted is not None and report.counted.restarted:
        found.append("The controller began anew meanwhile: its counts say nothing of this replay.")
    return found
