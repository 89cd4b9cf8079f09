"""The documents name files, and docs/mechanisms.md what is defined in them, that there are."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
NAMED = sorted(
    set(re.findall(r"`([\w/]+\.py(?:::\w+)?)`", (ROOT / "docs/mechanisms.md").read_text()))
)


def test_every_mechanism_names_its_code_and_its_test() -> None:
    rows = [
        line.strip("| ").split("|")
        for line in (ROOT / "docs/mechanisms.md").read_text().splitlines()
        if line.startswith("| ") and "§" not in line
    ]
    assert len(rows) > 30
    for _, _, code, test in rows:
        assert code.startswith(" `mesh/"), code
        assert test.startswith(" `tests/"), test


@pytest.mark.parametrize("named", NAMED)
def test_it_is_there(named: str) -> None:
    path, _, name = named.partition("::")
    tree = ast.parse((ROOT / path).read_text())
    defined = {
        node.name
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
    }
    assert not name or name in defined


def test_all_pages_name_files_that_there_are() -> None:
    file = re.compile(r"`((?:mesh|nodes|loader|tests|bench)/[\w/]+\.(?:py|toml|js))`")
    pages = {page.name: page.read_text() for page in (ROOT / "docs").glob("*.md")}
    found = {(page, named) for page, text in pages.items() for named in file.findall(text)}
    assert len(found) > 50
    assert [name for name in sorted(found) if not (ROOT / name[1]).exists()] == []
