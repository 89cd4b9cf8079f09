"""Charts: axes that fit, shapes at known places, a page that needs nothing else, PNG files."""

import struct
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest

from mesh.evaluation.paper.charts import cell_charts, over_time, overview_charts, page, run_charts
from mesh.evaluation.paper.evaluation import Reference
from mesh.report.charts.chart import BarChart, Bars, Chart, Line, LineChart, log_ticks, ticks, y_top
from mesh.report.charts.svg import BOTTOM, HEIGHT, LEFT, RIGHT, TOP, WIDTH, names, svg
from tests.evaluation.evaluated import evaluation, run

LINES = LineChart(
    name="lines",
    title="Lines & more",
    x_label="minutes",
    y_label="%",
    lines=(Line(name="a<b", points=((0.0, 0.0), (5.0, 50.0), (10.0, 100.0))),),
    y_most=100.0,
)
BARS = BarChart(
    name="bars",
    title="Bars",
    y_label="nodes",
    groups=("3B/32", "7B/32"),
    bars=(
        Bars(name="sllm", values=(4.0, None), marks=(2.0, None)),
        Bars(name="llm-mesh", values=(1.0, 0.0), marks=(None, 8.0)),
    ),
)


def shapes(chart: Chart, kind: str) -> list[ElementTree.Element]:
    """Elements of the SVG whose class begins so."""
    root = ElementTree.fromstring(svg(chart))
    return [e for e in root.iter() if e.get("class", "").split(" ")[0] == kind]


@pytest.mark.parametrize(
    ("top", "expected"),
    [
        (100.0, [0, 20, 40, 60, 80, 100]),
        (4.2, [0, 1, 2, 3, 4]),
        (0.3, [0, 0.1, 0.2, 0.3]),
        (1e-9, None),
    ],
)
def test_ticks_are_round_and_within(top: float, expected: list[float] | None) -> None:
    made = ticks(top)
    assert 2 < len(made) <= 8
    assert made[-1] <= top * 1.0001
    if expected is not None:
        assert made == pytest.approx(expected)


def test_ticks_of_a_logarithm_are_ones_twos_and_fives() -> None:
    assert log_ticks(0.04, 3.0) == pytest.approx([0.05, 0.1, 0.2, 0.5, 1, 2])
    assert log_ticks(0.01, 100.0) == pytest.approx([0.01, 0.1, 1, 10, 100])


def test_the_axis_reaches_over_bars_and_marks() -> None:
    assert y_top(BARS) == pytest.approx(8.4)
    assert y_top(LINES) == 100.0
    assert y_top(replace(LINES, lines=(), y_most=None)) > 0


def test_a_line_runs_from_corner_to_corner() -> None:
    (line,) = shapes(LINES, "line")
    base = HEIGHT - BOTTOM
    middle = f"{(LEFT + WIDTH - RIGHT) / 2:.1f} {(TOP + base) / 2:.1f}"
    ends = f"M{LEFT:.1f} {base:.1f}", f"{WIDTH - RIGHT:.1f} {TOP:.1f}"
    assert line.get("d") == f"{ends[0]}L{middle}L{ends[1]}"
    assert names(LINES) == ["a<b"]
    levels = [grid.get("d", "") for grid in shapes(LINES, "grid")][:6]
    heights = [float(d.split()[1].partition("H")[0]) for d in levels]
    assert (heights[0], heights[-1]) == (base, TOP), "0 % is below, 100 % on top"
    assert heights == sorted(heights, reverse=True)


def test_bars_are_as_high_as_their_values_and_absent_where_there_is_none() -> None:
    first, *rest = shapes(BARS, "bar")
    assert len(rest) == 2
    span = HEIGHT - TOP - BOTTOM
    assert float(first.get("height", "")) == pytest.approx(4.0 / 8.4 * span, abs=0.1)
    assert first[0].text == "3B/32 sllm: 4"
    assert len(shapes(BARS, "mark")) == 2


def test_an_slo_is_an_upright_line() -> None:
    assert shapes(LINES, "limit") == []
    assert len(shapes(replace(LINES, x_limit=2.5), "limit")) == 1


def test_an_evaluation_is_drawn_with_a_line_for_each_policy_and_each_node() -> None:
    made = evaluation(run(), run(policy="sllm"))
    assert {c.name for c in overview_charts(made)} == {"slo-met", "gpu-nodes", "cpu-nodes"}
    for chart in cell_charts(made, "7B/64"):
        assert names(chart) == ["llm-mesh", "sllm"]
    decode, memory, loads = run_charts(made.runs[0])
    assert names(decode) == names(loads) == ["cpu-1", "gpu-1", "gpu-2"]
    assert isinstance(memory, LineChart)
    assert memory.lines[0].points[0] == (0.0, 2.5)
    assert over_time([6.0] * 240)[-1] == (238 / 60, 6.0)


def test_ablations_have_bars_of_their_own() -> None:
    made = evaluation(run(cell="3B/32"), run(), run(policy="llm-mesh-no-cpu"))
    whole, *_, part = overview_charts(made)
    assert (names(whole), whole.groups) == (["llm-mesh"], ("3B/32", "7B/64"))
    assert (names(part), part.groups) == (["llm-mesh", "llm-mesh-no-cpu"], ("7B/64",))


class Links(HTMLParser):
    """What a page would fetch, and which elements it has."""

    def __init__(self) -> None:
        super().__init__()
        self.fetched: list[str] = []
        self.tags: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        wanted = [value or "" for key, value in attrs if key in ("src", "href", "xlink:href")]
        self.fetched += [value for value in wanted if not value.startswith("#")]


def test_a_page_needs_nothing_else_and_follows_the_readers_light() -> None:
    text = page(evaluation(run(reference=Reference(met=4)), run(policy="<b>")))
    found = Links()
    found.feed(text)
    assert found.fetched == []
    assert "http" not in text
    assert not {"script", "link", "img", "iframe", "b"} & set(found.tags)
    assert "prefers-color-scheme: dark" in text
    assert found.tags.count("table") == 5
    assert found.tags.count("figure") == 3 + 6 + 2 * 3
    assert "&lt;b&gt;" in text
    assert text == page(evaluation(run(reference=Reference(met=4)), run(policy="<b>")))


def test_charts_are_drawn_as_png_files(tmp_path: Path) -> None:
    from mesh.report.charts.png import draw_all  # matplotlib takes half a second of each worker

    log = replace(LINES, name="log", log_x=True, x_limit=2.0)
    paths = draw_all([("7B/64", LINES), ("7B/64", log), ("", BARS)], tmp_path)
    assert [path.name for path in paths] == ["lines.png", "log.png", "bars.png"]
    for path in paths:
        head = path.read_bytes()[:24]
        assert head.startswith(b"\x89PNG")
        width, height = struct.unpack(">II", head[16:24])
        assert width > height > 100
