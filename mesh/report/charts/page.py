"""Sections of tables and charts as one HTML page: no script, no link to anywhere, light or dark as
the reader is.

Layout and colours are in `page.html`. Before: whoever has something to show. After: a file.
"""

from collections.abc import Iterable, Sequence
from importlib import resources

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from mesh.domain.values import dataclass
from mesh.report.charts.chart import Chart, LineChart
from mesh.report.charts.svg import DASHES, SERIES_MAX, names, svg


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Cells are text; the columns after the first `words` are numbers."""

    title: str
    note: str
    headers: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    words: int = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawn:
    title: str
    names: list[str]
    svg: Markup
    dashed: bool
    """Whether its legend shows lines, which differ without colours, too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    title: str
    notes: tuple[str, ...] = ()
    table: Table | None = None
    wide: tuple[Drawn, ...] = ()
    charts: tuple[Drawn, ...] = ()
    folded: tuple[tuple[str, tuple[Drawn, ...]], ...] = ()
    """Charts that are shown when their heading is asked for."""

    @property
    def anchor(self) -> str:
        return file_name(self.title).replace(" ", "-")


NONE = "-"
"""A cell of a figure that is not there."""


def figure(value: float | None, digits: int, times: float = 1.0) -> str:
    """A cell with so many digits after the point."""
    return NONE if value is None else f"{times * value:.{digits}f}"


def of_table(table: Table) -> Section:
    return Section(title=table.title, notes=(table.note,), table=table)


def drawn(charts: Iterable[Chart]) -> tuple[Drawn, ...]:
    return tuple(
        Drawn(
            title=chart.title,
            names=names(chart),
            svg=Markup(svg(chart)),
            dashed=isinstance(chart, LineChart),
        )
        for chart in charts
    )


def render(title: str, about: Sequence[str], sections: Sequence[Section]) -> str:
    """The whole text of the page."""
    environment = Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=StrictUndefined
    )
    source = resources.files("mesh.report.charts").joinpath("page.html").read_text("utf-8")
    return environment.from_string(source).render(
        title=title, about=about, sections=sections, series=SERIES_MAX, dashes=DASHES
    )


def file_name(words: str) -> str:
    """7B/128 is 7b-128, sllm+cpu is sllm-cpu."""
    return words.lower().replace("/", "-").replace("+", "-")
