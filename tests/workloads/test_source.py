"""A file that is no trace, or a torn one, is refused by file, line and column."""

from pathlib import Path

import pytest

from mesh.domain.errors import InvalidInput, NotFound, StorageError
from mesh_workloads import source
from mesh_workloads.source import header, rows
from tests.workloads.conftest import WriteFile


def test_rows_have_cells_by_name_and_the_line_in_the_file(write_file: WriteFile) -> None:
    found = list(rows(write_file("\ufeffa,b\r\n1,x\r\n\r\n2,y")))
    assert [(row.line, dict(row.cells)) for row in found] == [
        (2, {"a": "1", "b": "x"}),
        (4, {"a": "2", "b": "y"}),
    ]


def test_a_torn_line_names_the_column_that_is_missing(write_file: WriteFile) -> None:
    path = write_file("a,b,c\n1,2,3\n4,5")
    with pytest.raises(InvalidInput, match=r"trace.csv:3: column c is missing.*2 of 3"):
        list(rows(path))


def test_a_line_with_too_many_columns_is_refused(write_file: WriteFile) -> None:
    with pytest.raises(InvalidInput, match=r"trace.csv:2: column 3 has no name"):
        list(rows(write_file("a,b\n1,2,3\n")))


def test_an_open_quote_is_refused(write_file: WriteFile) -> None:
    with pytest.raises(InvalidInput, match=r"trace.csv:2: no line of CSV"):
        list(rows(write_file('a,b\n"1,2\n')))


@pytest.mark.parametrize("torn", ['{"a": 1, "b"', '{"a": 1}, {', "{" * 50_000])
def test_a_torn_json_object_is_refused(write_file: WriteFile, torn: str) -> None:
    with pytest.raises(InvalidInput, match=r"trace.csv:2: column \d+: not valid JSON"):
        list(rows(write_file('{"a": 1}\n' + torn)))


def test_a_line_among_json_objects_that_is_none_is_refused(write_file: WriteFile) -> None:
    with pytest.raises(InvalidInput, match=r"trace.csv:2: column 1: '1,2' begins no JSON object"):
        list(rows(write_file('{"a": 1}\n1,2\n')))


def test_a_line_without_end_is_refused(
    write_file: WriteFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(source, "LINE_CHARS_MAX", 10)
    assert len(list(rows(write_file("a\n123456789\n")))) == 1
    with pytest.raises(InvalidInput, match=r"trace.csv:2: .* longer than 10 characters"):
        list(rows(write_file("a\n12345678901\n")))


def test_bytes_that_are_no_text_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "trace.rar"
    path.write_bytes(b"Rar!\x1a\x07\x01\x00\xff\xfe")
    with pytest.raises(InvalidInput, match=r"trace.rar:1: not UTF-8"):
        header(path)


def test_an_empty_file_has_no_header(write_file: WriteFile) -> None:
    with pytest.raises(InvalidInput, match="the file is empty"):
        header(write_file("\n\n"))


def test_a_file_that_cannot_be_read_says_so(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="there is no file"):
        header(tmp_path / "none.csv")
    with pytest.raises(StorageError, match="cannot be read"):
        header(tmp_path)


@pytest.mark.parametrize("cell", ["", " ", "x", "-1", "1.5", "1_0", "١", "9" * 16, "true"])
def test_a_whole_number_is_digits(write_file: WriteFile, cell: str) -> None:
    row = next(rows(write_file(f"a,b\n{cell},1\n")))
    with pytest.raises(InvalidInput, match=r"trace.csv:2: column a is"):
        row.integer("a", 10**18)


@pytest.mark.parametrize("cell", ["", "x", "-1", "nan", "inf", "1_0", "101"])
def test_a_number_is_finite_and_within_bounds(write_file: WriteFile, cell: str) -> None:
    row = next(rows(write_file(f"a,b\n{cell},1\n")))
    with pytest.raises(InvalidInput, match=r"trace.csv:2: column a is"):
        row.number("a", 100.0)
    assert row.number("b", 100.0) == 1.0
