"""What is left of a run: its record, its page, its tables and the exit code.

The report is that of `mesh replay`, with a row for each worker. It is written whenever a run stops,
be it over or not. Before: `session`. After: files, the terminal.
"""

from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from locust.env import Environment

from mesh.cli import output
from mesh.cli.main import DONE, FAILED
from mesh.cli.output import Format
from mesh.cli.replay_report import judge, show
from mesh.domain.errors import MeshError, Unavailable
from mesh.evaluation.replay.cell import CellCounts, Counted, counted, counts
from mesh.evaluation.replay.numbers import numbers, worker_numbers
from mesh.evaluation.replay.page import write_page, write_text
from mesh.evaluation.replay.record import Record
from mesh.evaluation.replay.report import ReplayReport
from mesh.evaluation.replay.results import CallResult
from mesh.wire.client import MeshClient
from mesh_load.master import Master
from mesh_load.options import Options
from mesh_load.page import csv_of, json_of
from mesh_workloads.replay_plan import ReplayPlan


class Ending:
    """The end of one master's runs; the last of them is reported."""

    def __init__(
        self, environment: Environment, options: Options, plan: ReplayPlan, master: Master
    ) -> None:
        """Raises StorageError when there is no place for the record."""
        self._environment = environment
        self._options = options
        self._plan = plan
        self._master = master
        self._before: CellCounts | None = None
        self._record: Record | None = None
        self._made: ReplayReport | None = None
        self._failure: MeshError | None = None
        self.stopped = False
        """Before its end."""
        self._reopen()

    def _reopen(self) -> None:
        if self._record is not None:
            self._record.close()
        if self._options.record is not None:
            self._record = Record(self._options.record)
            self._master.on_result = self._record.write

    def begin(self) -> None:
        self._made, self._failure, self.stopped = None, None, False
        self._reopen()
        self._before = self._counts()

    def report(self) -> ReplayReport:
        """The report of the results that have come so far."""
        master = self._master
        results = tuple(master.results[number] for number in sorted(master.results))
        of_workers: list[list[CallResult]] = [[] for _ in master.parts]
        for result in results:
            of_workers[result.call.number % len(of_workers)].append(result)
        return ReplayReport(
            plan=self._plan,
            results=results,
            numbers=numbers(results, self._plan.deployments),
            stopped=self.stopped,
            workers=tuple(
                worker_numbers(part.worker, part.calls, of_worker)
                for part, of_worker in zip(master.parts.values(), of_workers, strict=True)
            ),
        )

    def write(self, **_: Any) -> None:
        """The files, and what the process is to end with."""
        made = self._made = replace(self.report(), counted=self._counted())
        if self._record is not None:
            self._record.close()
            self._failure = self._record.failure
        try:
            self._write_files(made)
            judge(made)
        except MeshError as error:
            self._failure = self._failure or error
        whole = not (self._failure or made.unsent)
        self._environment.process_exit_code = DONE if whole else FAILED

    def _write_files(self, made: ReplayReport) -> None:
        parsed = self._environment.parsed_options
        assert parsed is not None, "locust was started without options"
        if self._options.report is not None:
            write_page(made, self._options.report)
        for prefix, name, text in (
            (parsed.csv_prefix, "_slo.csv", csv_of),
            (parsed.json_file, "_slo.json", json_of),
        ):
            if prefix:
                path = Path(f"{prefix}{name}")
                with suppress(OSError):  # which the writing tells
                    path.parent.mkdir(parents=True, exist_ok=True)
                write_text(text(made), path)

    def _counts(self) -> CellCounts | None:
        try:
            with MeshClient(self._options.address) as client:
                return counts(client)
        except Unavailable:
            return None

    def _counted(self) -> Counted | None:
        after = self._counts()
        if self._before is None or after is None:
            return None
        results = tuple(self._master.results.values())
        return counted(self._before, after, results, sorted(self._master.share.slos))

    def show(self, **_: Any) -> None:
        """When locust has said what it has to say."""
        if self._made is None:
            return
        parsed = self._environment.parsed_options
        if parsed is None or not parsed.json:
            show(self._made, Format.TABLE)
        if self._options.report is not None:
            output.message(f"the report is in {self._options.report}")
        if self._failure is not None:
            output.error(self._failure)
