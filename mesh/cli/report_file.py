"""A cell's report to the terminal, to a page and from a file: what `mesh report` and `mesh sim`
share.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from cattrs import BaseValidationError, Converter

from mesh.cli import output
from mesh.domain.errors import InvalidInput, StorageError, system_errors
from mesh.report.cell_page import page, tables
from mesh.report.cell_report import CellReport


def report_of(told: Any, whence: str) -> CellReport:
    """A report from its plain form, or from `mesh sim -o json`, which holds one. Raises
    InvalidInput.
    """
    try:
        return Converter().structure(told.get("report", told), CellReport)
    except (BaseValidationError, AttributeError, KeyError, TypeError, ValueError) as error:
        raise InvalidInput(
            f"{whence} holds no report of a cell",
            hint="`mesh report -o json` writes one, and `mesh sim --html FILE -o json`",
        ) from error


def read_report(path: Path | None) -> CellReport | None:
    """The report in a file, by whose name it is called from then on. Raises InvalidInput."""
    if path is None:
        return None
    hint = "name a file of JSON"
    try:
        with system_errors(InvalidInput, f"{path} cannot be read", hint):
            told = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise InvalidInput(f"{path} is no JSON: {error}", hint=hint) from error
    return replace(report_of(told, str(path)), name=path.stem)


def write_report(path: Path, report: CellReport, beside: CellReport | None) -> None:
    """One page that needs nothing else. Raises StorageError."""
    hint = "choose a file in a folder that is there"
    with system_errors(StorageError, f"the report {path} cannot be written", hint):
        path.write_text(page(report, beside), encoding="utf-8")
    output.message(f"the report is in {path}")


def show_report(report: CellReport, beside: CellReport | None) -> None:
    for number, table in enumerate(tables(report, beside)):
        output.text(("\n" if number else "") + f"{table.title}. {table.note}")
        output.table(output.text_columns(table.headers, table.words), table.rows)
