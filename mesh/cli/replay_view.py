"""What is shown while a replay runs: on a terminal a bar and a line for each deployment, elsewhere
a line now and then.

A thread draws it, so that drawing does not hold up the sender. Before: `running`, which tells of
each call. After: the terminal.
"""

import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from rich.live import Live
from rich.text import Text

from mesh.cli import output
from mesh.cli.output import table_lines, text_columns
from mesh.cli.progress import Report, progress
from mesh.evaluation.replay.results import CallResult
from mesh.report.distribution import Distribution
from mesh_workloads.replay_plan import ReplayPlan

PICTURES_PER_S = 1.0
BAR_CELLS = 32
LINES_BESIDE = 4
"""The lines of the screen that are not for deployments: the bar, the heads, and what is there
already.
"""
LATEST_MAX = 2_000
"""First tokens that the percentiles of a picture are of."""
HEADERS = ("DEPLOYMENT", "DUE", "OPEN", "FINISHED", "REFUSED", "FAILED", "SLO_%", "TTFT_S_P95")


class _Tally:
    """Counts what came of the calls of one deployment, or of all."""

    def __init__(self) -> None:
        self.ended = self.finished = self.refused = self.failed = self.met = 0
        self.ttft_s: list[float] = []

    def add(self, result: CallResult) -> None:
        self.ended += 1
        self.finished += result.finished
        self.refused += bool(result.refused)
        self.failed += result.broke
        self.met += result.outcome.met
        if result.outcome.ttft_s is not None:
            self.ttft_s.append(result.outcome.ttft_s)

    def row(self, name: str, due: int) -> tuple[str, ...]:
        ttft_s = Distribution.of(self.ttft_s[-LATEST_MAX:]).at(95)
        return (
            *(name, str(due), str(max(due - self.ended, 0)), str(self.finished)),
            *(str(self.refused), str(self.failed)),
            f"{100 * self.met / self.ended:.1f}" if self.ended else "",
            "" if ttft_s is None else f"{ttft_s:.3f}",
        )


class ReplayView:
    """`ended` hears of each call, `at` of the time since the replay's start."""

    def __init__(self, plan: ReplayPlan) -> None:
        self._plan = plan
        self._at_s = 0.0
        self._all = _Tally()
        called = Counter(call.deployment for call in plan.calls)
        self._each = {name: _Tally() for name, _ in called.most_common()}
        self._due: Counter[str] = Counter()
        self._next = 0
        """The first call whose time has not come."""
        self._report: Report = _nothing

    def ended(self, result: CallResult) -> None:
        self._all.add(result)
        self._each[result.call.deployment].add(result)

    def at(self, at_s: float) -> None:
        self._at_s = max(at_s, 0.0)
        self._report("calls", min(self._all.ended / len(self._plan.calls), 1.0))

    @contextmanager
    def shown(self) -> Iterator[None]:
        if not sys.stderr.isatty():
            with progress("replay") as self._report:
                yield
            return
        console = output.console(sys.stderr)
        with Live(
            console=console,
            get_renderable=lambda: Text("\n").join(self.picture(console.height)),
            refresh_per_second=PICTURES_PER_S,
            transient=True,
        ):
            yield

    def picture(self, height: int) -> list[Text]:
        """As many lines as there is room for, the busiest deployments first."""
        self._count_due()
        rows: Sequence[tuple[str, ...]] = [
            self._all.row("all", self._next),
            *(tally.row(name, self._due[name]) for name, tally in self._each.items()),
        ]
        return [
            self._bar(),
            *table_lines(text_columns(HEADERS), rows[: max(height - LINES_BESIDE, 1)]),
        ]

    def _count_due(self) -> None:
        """Calls whose time has come since the last picture."""
        calls = self._plan.calls
        while self._next < len(calls) and calls[self._next].at_s <= self._at_s:
            self._due[calls[self._next].deployment] += 1
            self._next += 1

    def _bar(self) -> Text:
        share = min(self._at_s / self._plan.duration_s, 1.0)
        full = round(share * BAR_CELLS)
        line = Text("━" * full, style="green", end="")
        line.append("━" * (BAR_CELLS - full), style="dim")
        line.append(
            f"  {self._at_s:.0f} of {self._plan.duration_s:.0f} s, {self._all.ended} of "
            f"{len(self._plan.calls)} calls ended",
            style="none",
        )
        return line


def _nothing(phase: str, share: float) -> None:
    """On a terminal the picture says it."""
