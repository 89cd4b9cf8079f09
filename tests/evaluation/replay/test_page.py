"""What is said of a replay: remarks, tables, and the page."""

from dataclasses import replace
from pathlib import Path
from xml.dom.minidom import parseString

import pytest

from mesh.domain.errors import StorageError
from mesh.evaluation.replay.cell import Counted, CountPair
from mesh.evaluation.replay.numbers import numbers, worker_numbers
from mesh.evaluation.replay.page import page, side, write_page
from mesh.evaluation.replay.report import ReplayReport, remarks
from mesh.evaluation.replay.tables import HEADERS, tables, workers
from tests.evaluation.replay.made import PLAN, RESULTS, result

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
    assert text.count("<svg") == 1 + 2 * 3 + 2
    assert "Stopped early" in text
    for start in (i for i in range(len(text)) if text.startswith("<svg", i)):
        parseString(text[start : text.index("</svg>", start) + 6])


def test_a_page_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match=r"the report .*page.html cannot be written"):
        write_page(REPORT, tmp_path / "nowhere" / "page.html")
