"""A replay on locust's page: a tab for each of its tables, and two further files to download.

Locust's page asks for new numbers every few seconds; the replay's go along with the answer.
Before: `session`, which makes the report. After: a browser.
"""

import csv
import io
import json
from collections.abc import Callable
from typing import Any

import flask
from locust.web import WebUI

from mesh.cli.replay_report import figures_of
from mesh.evaluation.replay.report import ReplayReport
from mesh.evaluation.replay.tables import HEADERS, deployments, endings, workers
from mesh.report.charts.page import Table

_CSV, _JSON = "/mesh/slo.csv", "/mesh/slo.json"
_STATS = "/stats/requests"
SLO_TAB = "SLO"
"""The first table's tab; the others' have their titles."""


def csv_of(made: ReplayReport) -> str:
    """A line for each deployment that was called, all of them first."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(head.lower() for head in HEADERS)
    writer.writerows(deployments(made.numbers).rows)
    return text.getvalue()


def json_of(made: ReplayReport) -> str:
    return json.dumps(figures_of(made), indent=1)


def extend(web_ui: WebUI, report: Callable[[], ReplayReport]) -> None:
    """Before the page is served. `report` makes one of what has come so far."""
    app = web_ui.app
    assert app is not None, "locust's page has no application"
    shown = _tables(report())
    web_ui.template_args.update(
        extended_tabs=[{"title": title, "key": _key(title)} for title in shown],
        extended_tables=[
            {
                "key": _key(title),
                "structure": [{"key": _key(head), "title": head} for head in table.headers],
            }
            for title, table in shown.items()
        ],
        extended_csv_files=[
            {"href": f".{_CSV}", "title": "Download SLO attainment CSV"},
            {"href": f".{_JSON}", "title": "Download SLO attainment JSON"},
        ],
    )

    def add(response: flask.Response) -> flask.Response:
        if flask.request.path.endswith(_STATS) and response.is_json:
            stats = [
                {"key": _key(title), "data": _data(table)}
                for title, table in _tables(report()).items()
            ]
            response.set_data(json.dumps(response.get_json() | {"extended_stats": stats}))
        return response

    app.after_request(add)
    app.add_url_rule(
        _CSV, "mesh_csv", lambda: flask.Response(csv_of(report()), mimetype="text/csv")
    )
    app.add_url_rule(
        _JSON,
        "mesh_json",
        lambda: flask.Response(json_of(report()), mimetype="application/json"),
    )


def _tables(made: ReplayReport) -> dict[str, Table]:
    """By the title of its tab."""
    others = (endings(made.numbers), workers(made.workers))
    return {SLO_TAB: deployments(made.numbers)} | {table.title: table for table in others}


def _data(table: Table) -> list[dict[str, Any]]:
    keys = [_key(head) for head in table.headers]
    return [
        {
            key: _number(cell) if n >= table.words else cell
            for n, (key, cell) in enumerate(zip(keys, row, strict=True))
        }
        for row in table.rows
    ]


def _key(title: str) -> str:
    """As locust's page takes it: it changes what follows an underscore."""
    return "".join(each for each in title.lower() if each.isalnum())


def _number(cell: str) -> float | str:
    """The number in a cell, by which the page then sorts; other text stays."""
    try:
        return float(cell)
    except ValueError:
        return cell
