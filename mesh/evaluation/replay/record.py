"""Writes a replay down as it goes: a line as each call ends, so that a kill leaves what was.

The file is a trace again, of the format `replay`. Before: `running`. After:
`mesh_workloads.reading`.
"""

import csv
from pathlib import Path
from types import TracebackType

from mesh.domain.errors import StorageError
from mesh.evaluation.replay.results import CallResult
from mesh_workloads.formats.replay_record import COLUMNS


class Record:
    """A context; the file is written anew. Raises StorageError when it cannot be."""

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            # Every line goes out at once.
            self._file = path.open("w", buffering=1, encoding="utf-8", newline="")
            self._writer = csv.writer(self._file, lineterminator="\n")
            self._writer.writerow(COLUMNS)
        except OSError as error:
            raise self._unwritten(error) from error

    def __enter__(self) -> "Record":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._file.close()

    def write(self, result: CallResult) -> None:
        call, outcome = result.call, result.outcome
        if not result.sent:
            return
        whole_s = outcome.ended_s - outcome.arrival_s
        row = (
            *(_short(call.at_s), call.function, call.input_tokens, call.output_tokens),
            *(call.deployment, f"{1000 * result.late_s:.3f}", str(outcome.end)),
            *(len(outcome.tokens_s), _seconds(outcome.ttft_s), _seconds(outcome.tpot_s)),
            *(_seconds(whole_s), _seconds(outcome.grace_s)),
            *(int(outcome.met), int(outcome.met_in_the_mean)),
        )
        try:
            self._writer.writerow(row)
        except OSError as error:
            raise self._unwritten(error) from error

    def _unwritten(self, error: OSError) -> StorageError:
        return StorageError(
            f"the record {self._path} cannot be written: {(error.strerror or str(error)).lower()}",
            hint="choose a file in a folder that is there, on a disk with room",
        )


def _short(seconds: float) -> str:
    """To a microsecond, without what is not there."""
    return f"{seconds:.6f}".rstrip("0").rstrip(".")


def _seconds(seconds: float | None) -> str:
    return "" if seconds is None else f"{seconds:.6f}"
