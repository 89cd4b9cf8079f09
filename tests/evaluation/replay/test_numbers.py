"""What is counted of a replay and what is said of it: shares, tables, the page, the record."""

import os
from dataclasses import replace
from pathlib import Path
from xml.dom.minidom import parseString

import pytest

from mesh.domain.errors import StorageError
from mesh.domain.reasons import FinishReason, RefusalReason
from mesh.evaluation.replay.cell import CellCounts, Counted, CountPair, counted
from mesh.evaluation.replay.numbers import ALL, numbers, worker_numbers
from mesh.evaluation.replay.page import page, side, write_page
from mesh.evaluation.replay.record import Record
from mesh.evaluation.replay.report import ReplayReport, remarks
from mesh.evaluation.replay.results import CallResult
from mesh.evaluation.replay.tables import HEADERS, tables, workers
from mesh_workloads.reading import read, recognise
from tests.evaluation.replay.made import PLAN, RESULTS, result


def test_every_call_is_counted_once() -> None:
    whole, chat, code, idle = numbers(RESULTS, ["idle", "chat", "code"])
    assert [n.deployment for n in (whole, chat, code, idle)] == [ALL, "chat", "code", "idle"]
    assert (whole.calls, whole.finished, whole.cancelled) == (8, 4, 1)
    assert whole.refused == (("memory_full", 1),)
    assert whole.failed == (("not_sent", 1), ("unavailable", 1))
    ends = whole.finished + whole.cancelled + sum(n for _, n in (*whole.refused, *whole.failed))
    assert ends == whole.calls
    assert (chat.calls, code.calls, idle.calls) == (6, 2, 0)
    assert code.refused == whole.refused


def test_attainment_is_of_the_calls_that_the_cell_could_answer() -> None:
    whole, chat, code = numbers(RESULTS, ["chat", "code"])
    # Neither the one that was not sent nor the one that was open at the end.
    assert whole.judged == 6
    assert (whole.met, whole.met_in_the_mean) == (2, 2)
    assert whole.attainment == pytest.approx(2 / 6)
    assert whole.attainment_in_the_mean == pytest.approx(2 / 6)
    assert (chat.judged, chat.met) == (4, 2)
    assert (code.judged, code.met) == (2, 0)


def test_promises_are_counted_of_those_admitted_and_by_both_measures() -> None:
    late = [with_grace(10, 2.0, 2.1), with_grace(11, 1.2, 1.3)]
    torn = with_grace(12, end=RefusalReason.NODE_LOST)
    whole, chat, code = numbers([*RESULTS, *late, torn], ["chat", "code"])
    # Not the one that was refused; the one that found no controller was promised nothing, and is
    # counted as not kept.
    assert (whole.promised, whole.promised_met, whole.promised_met_in_the_mean) == (5, 2, 2)
    assert whole.met_of_admitted == pytest.approx(2 / 5)
    assert whole.told_late == chat.told_late == 3
    assert (chat.late_over_told_p50, chat.late_over_told_p95) == pytest.approx((0.4, 2.0))
    assert (code.told_late, code.late_over_told_p50) == (0, None)
    assert (code.met_of_admitted, code.met_of_admitted_in_the_mean) == (0.0, 0.0)


def with_grace(
    number: int, *tokens_s: float, end: FinishReason | RefusalReason = FinishReason.LENGTH
) -> CallResult:
    made = result(number, *tokens_s, end=end)
    return replace(made, outcome=replace(made.outcome, accepted=True, grace_s=0.5))


def test_latencies_and_lateness_are_of_what_was_sent() -> None:
    whole, *_ = numbers(RESULTS, ["chat", "code"])
    assert whole.ttft_s_p50 == pytest.approx(0.5)
    assert whole.ttft_s_p95 == pytest.approx(1.5)
    assert whole.whole_s_p95 == pytest.approx(1.55)
    assert whole.late_ms_p99 == pytest.approx(4.0)
    assert whole.late_ms_p50 == pytest.approx(1.0)
    assert whole.output_tokens == 2 + 4 + 11 + 2 + 1
    # From the first sending to the last end: 0.001 s to 7.501 s.
    assert whole.tokens_per_s == pytest.approx(20 / 7.5)


def test_nothing_has_no_numbers() -> None:
    (whole,) = numbers((), [])
    assert (whole.calls, whole.attainment, whole.ttft_s_p50, whole.tokens_per_s) == (0, 0, None, 0)
    assert (whole.met_of_admitted, whole.met_of_admitted_in_the_mean) == (None, None)


BEFORE = CellCounts(began_s=100.0, served={"chat": 5, "code": 1}, refused={"chat": 0, "code": 7})
AFTER = CellCounts(began_s=100.2, served={"chat": 8, "code": 2}, refused={"chat": 0, "code": 8})


def test_counts_that_agree_differ_by_nothing() -> None:
    found = counted(BEFORE, AFTER, RESULTS, ["chat", "code"])
    assert (found.difference, found.restarted) == (0.0, False)
    assert [(p.served, p.finished) for p in found.pairs] == [(3, 3), (1, 1)]
    assert [(p.refused, p.refused_seen) for p in found.pairs] == [(0, 0), (1, 1)]


def test_a_difference_is_a_share_of_what_was_counted() -> None:
    more = CellCounts(began_s=100.2, served={"chat": 13, "code": 2}, refused=AFTER.refused)
    found = counted(BEFORE, more, RESULTS, ["chat", "code"])
    assert [pair.difference for pair in found.pairs] == [5, 0]
    assert found.difference == 5 / 10


def test_a_controller_that_began_anew_is_noticed() -> None:
    anew = CellCounts(began_s=130.0, served={}, refused={})
    assert counted(BEFORE, anew, RESULTS, ["chat"]).restarted


def test_nothing_counted_differs_by_nothing() -> None:
    assert counted(BEFORE, BEFORE, (), ["chat"]).difference == 0.0


def test_what_the_prefix_cache_had_counts_from_the_replays_start() -> None:
    before = replace(BEFORE, prompt_tokens={"chat": 100}, cached_tokens={"chat": 90})
    after = replace(AFTER, prompt_tokens={"chat": 500}, cached_tokens={"chat": 190})
    chat, code = counted(before, after, RESULTS, ["chat", "code"]).pairs
    assert (chat.cached_share, code.cached_share) == (0.25, None)


NUMBERS = numbers(RESULTS, PLAN.deployments)
COUNTED = Counted(
    pairs=(CountPair(deployment="chat", served=3, finished=3, refused=1, refused_seen=0),),
    restarted=False,
)
REPORT = ReplayReport(plan=PLAN, results=RESULTS, numbers=NUMBERS, counted=COUNTED, stopped=True)


def test_remarks_say_what_the_figures_leave_out() -> None:
    assert remarks(REPORT) == [
        "2 requests without a prompt or an answer are left out.",
        "3 calls are longer than the context they go to: they are cut to it.",
        "Stopped early: 1 of 9 calls were not due yet.",
        "1 calls were open then; they are in no share.",
    ]


def test_a_sender_that_does_not_keep_up_says_by_how_much() -> None:
    late = (result(0, 0.5, late_s=0.3),)
    report = replace(REPORT, results=late, numbers=numbers(late, ["chat"]))
    assert not report.kept_up
    assert any("300 ms late for one call in a hundred" in line for line in remarks(report))


def test_workers_that_were_late_or_went_away_are_named() -> None:
    late = worker_numbers("a", 2, [result(0, 0.5), result(1, 0.5, late_s=0.5)])
    gone = worker_numbers("b", 3, [result(2, 0.5)])
    both = replace(REPORT, workers=(late, gone), stopped=False)
    said = " ".join(remarks(both))
    assert "Worker a did not keep up: 500 ms late" in said
    assert "Worker b went away: nothing is known of 2 of its 3 calls." in said
    assert [row[:3] for row in workers((late, gone)).rows] == [("a", "2", "2"), ("b", "3", "1")]
    assert "Worker b" not in " ".join(remarks(replace(both, stopped=True)))


def test_counts_of_a_controller_that_began_anew_are_not_shown() -> None:
    report = replace(REPORT, counted=replace(COUNTED, restarted=True))
    assert "The controller's own counts" not in [table.title for table in tables(report)]
    assert any("began anew" in line for line in remarks(report))


def test_a_table_has_a_row_for_each_deployment_that_was_called() -> None:
    deployments, promises, endings, counts = tables(REPORT)
    assert deployments.headers == HEADERS
    assert [row[0] for row in deployments.rows] == ["all", "chat", "code"]
    assert deployments.rows[0][1:5] == ("8", "4", "1", "2")
    assert promises.rows[0] == ("all", "5", "40.0", "40.0", "0", "-", "-")
    assert ("code", "refused", "memory_full", "1") in endings.rows
    assert counts.rows == (("chat", "3", "3", "1", "0", "1", "-"),)


def test_both_sides_stand_beside_each_other() -> None:
    report = replace(REPORT, simulated=NUMBERS, simulated_results=RESULTS)
    beside = next(t for t in tables(report) if t.title == "Beside a simulation")
    assert all(live == simulated for _, live, simulated in beside.rows)
    assert beside.rows[0] == ("CALLS", "8", "8")
    assert ">simulated<" in page(report)


def test_the_report_has_the_numbers_of_the_replay() -> None:
    """As `-o json` has them: the shares, the counts and the percentiles of each deployment."""
    told = {one.deployment: one for one in side("live", RESULTS, REPORT).calls}
    assert set(told) == {said.deployment for said in NUMBERS if said.judged}
    for name, found in told.items():
        said = next(each for each in NUMBERS if each.deployment == name)
        assert found.finished == said.finished
        assert (found.judged, dict(found.refused)) == (said.judged, dict(said.refused))
        assert (found.attainment or 0.0) == said.attainment
        assert (found.attainment_in_the_mean or 0.0) == said.attainment_in_the_mean
        for seconds, p50, p95 in (
            (found.ttft_s, said.ttft_s_p50, said.ttft_s_p95),
            (found.tpot_s, said.tpot_s_p50, said.tpot_s_p95),
        ):
            assert (seconds[50], seconds[95]) == (p50, p95) if seconds else (p50 is None)


def test_the_page_has_all_of_it_and_is_well_formed() -> None:
    text = page(replace(REPORT, plan=replace(PLAN, name="<made>")))
    assert "Replay of &lt;made&gt;" in text
    assert text.count('role="img"') == 1 + 2 * 3 + 2
    assert "Stopped early" in text
    for start in (i for i in range(len(text)) if text.startswith("<svg", i)):
        parseString(text[start : text.index("</svg>", start) + 6])


def test_a_page_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match=r"the report .*page.html cannot be written"):
        write_page(REPORT, tmp_path / "nowhere" / "page.html")


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
