"""A record is written line by line, and is a trace again."""

import os
from pathlib import Path

import pytest

from mesh.domain.errors import StorageError
from mesh.evaluation.replay.record import Record
from mesh_workloads.reading import read, recognise
from tests.evaluation.replay.made import RESULTS


def test_a_record_reads_back_as_the_calls_that_were_sent(tmp_path: Path) -> None:
    path = tmp_path / "run.csv"
    with Record(path) as record:
        for result in reversed(RESULTS):
            record.write(result)
    assert recognise(path).name == "replay"
    trace = read(path)
    sent = [r.call for r in RESULTS if r.sent]
    assert [
        (a.t_s, trace.label(a.function), a.input_tokens, a.output_tokens) for a in trace.arrivals
    ] == [(c.at_s, c.function, c.input_tokens, c.output_tokens) for c in sent]
    assert trace.out_of_order == len(sent) - 1


def test_what_came_of_a_call_is_in_its_line(tmp_path: Path) -> None:
    path = tmp_path / "run.csv"
    with Record(path) as record:
        record.write(RESULTS[1])
        record.write(RESULTS[4])
        # A kill now would leave both.
        lines = path.read_text().splitlines()[1:]
    assert lines == [
        "1,f/1,10,4,chat,4.000,length,4,0.500000,0.166667,1.000000,0.000000,1,0",
        "4,f/1,10,1,code,1.000,memory_full,0,,,0.250000,0.000000,0,0",
    ]


def test_a_disk_that_is_full_in_mid_run_is_kept_as_the_failure(tmp_path: Path) -> None:
    with Record(tmp_path / "run.csv") as record, open("/dev/full", "w") as full:
        os.dup2(full.fileno(), record._file.fileno())
        record.write(RESULTS[0])
        record.write(RESULTS[1])
    assert record.failure is not None
    assert "cannot be written: no space left on device" in record.failure.message
    record.write(RESULTS[2])


def test_a_disk_that_is_full_at_once_is_an_error() -> None:
    with pytest.raises(StorageError, match="no space left on device"):
        Record(Path("/dev/full"))


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match=r"the record .*run.csv cannot be written: no such file"):
        Record(tmp_path / "nowhere" / "run.csv")
