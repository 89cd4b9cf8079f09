"""Writes a replay down as it goes: a line as each call ends, so that a kill leaves what was.

The file is a trace again, of the format `replay`. Before: `running`. After:
`mesh_workloads.reading`.
"""

import csv
from collections.abc import Iterable
from pathlib import Path

from mesh.domain.errors import StorageError
from mesh.evaluation.replay.results import CallResult
from mesh_workloads.formats import REPLAY_COLUMNS


class Record:
    """A context; the file is written anew. Raises StorageError when it cannot be begun; what fails
    later is in `failure`, and the replay goes on without it.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            # Every line goes out at once.
            self._file = path.open("w", buffering=1, encoding="utf-8", newline="")
        except OSError as error:
            raise self._unwritten(error) from error
        self._writer = csv.writer(self._file, lineterminator="\n")
        self.failure = self._line(REPLAY_COLUMNS)
        if self.failure is not None:
            self.close()
            raise self.failure

    def __enter__(self) -> "Record":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        try:
            self._file.close()
        except OSError as error:
            self.failure = self.failure or self._unwritten(error)

    def write(self, result: CallResult) -> None:
        """Nothing of a call that was not sent, after a failure, or once it is closed."""
        if self.failure or self._file.closed or not result.sent:
            return
        call, outcome = result.call, result.outcome
        whole_s = outcome.ended_s - outcome.arrival_s
        self.failure = self._line(
            (
                *(_short(call.at_s), call.function, call.input_tokens, call.output_tokens),
                *(call.deployment, f"{1000 * result.late_s:.3f}", str(outcome.end)),
                *(len(outcome.tokens_s), _seconds(outcome.ttft_s), _seconds(outcome.tpot_s)),
                *(_seconds(whole_s), _seconds(outcome.grace_s)),
                *(int(outcome.met), int(outcome.met_in_the_mean)),
            )
        )

    def _line(self, cells: Iterable[object]) -> StorageError | None:
        try:
            self._writer.writerow(cells)
        except OSError as error:
            return self._unwritten(error)
        return None

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
