"""Traces: in order and within their time, refused where torn, sampled and mapped."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mesh.domain.errors import InvalidInput, NotFound, StorageError
from mesh_workloads import mapping, source
from mesh_workloads.mapping import by_hash, by_popularity, by_table, read_table
from mesh_workloads.sampling import KEPT, Sample, load_for
from mesh_workloads.source import header, rows
from mesh_workloads.trace import Arrival, Trace, percentile
from tests.workloads.conftest import WriteFile


def trace(times: list[float], duration_s: float = 10.0, functions: int = 1) -> Trace:
    arrivals = tuple(
        Arrival(t_s=t, function=i % functions, input_tokens=10 * (i + 1), output_tokens=i + 1)
        for i, t in enumerate(times)
    )
    return Trace(name="t", arrivals=arrivals, duration_s=duration_s)


def test_a_summary_counts_what_is_there() -> None:
    summary = trace([0.0, 1.0, 1.0, 2.0, 9.0], functions=2).summary()
    assert (summary.arrivals, summary.functions) == (5, 2)
    assert summary.rate_per_s == 0.5
    assert summary.busiest_tenth == 0.6
    assert summary.input_tokens.mean == 30
    assert (summary.input_tokens.p50, summary.input_tokens.p90) == (30, 50)
    assert (summary.output_tokens.p99, summary.output_tokens.most) == (5, 5)


def test_a_trace_without_arrivals_has_a_summary() -> None:
    summary = trace([]).summary()
    assert (summary.arrivals, summary.rate_per_s, summary.busiest_tenth) == (0, 0.0, 0.0)
    assert summary.input_tokens.most == 0


@pytest.mark.parametrize("times", [[1.0, 0.5], [-0.5], [11.0], [float("nan")]])
def test_arrivals_out_of_order_or_time_are_refused(times: list[float]) -> None:
    with pytest.raises(InvalidInput, match="trace t: an arrival"):
        trace(times)


@pytest.mark.parametrize("duration_s", [0.0, -1.0, float("inf"), float("nan")])
def test_a_trace_has_a_duration(duration_s: float) -> None:
    with pytest.raises(InvalidInput, match="its duration is"):
        trace([], duration_s)


def test_dispersion_tells_even_arrivals_from_bursts() -> None:
    even = [i + 0.5 for i in range(10)]
    assert trace(even).dispersion(1.0) == 0.0
    # 10 in one of ten windows: mean 1, variance 9.
    assert trace([3.5] * 10).dispersion(1.0) == pytest.approx(9.0)
    assert trace([]).dispersion(1.0) == 0.0


@pytest.mark.parametrize("window_s", [0.0, -1.0, 5.1])
def test_dispersion_needs_two_windows(window_s: float) -> None:
    with pytest.raises(InvalidInput, match="less than two windows"):
        trace([1.0]).dispersion(window_s)


@given(st.lists(st.integers(0, 1000), min_size=1), st.floats(0, 100))
def test_a_percentile_is_a_value_that_so_many_do_not_exceed(values: list[int], p: float) -> None:
    ordered = sorted(values)
    found = percentile(ordered, p)
    assert found in ordered
    assert sum(v <= found for v in ordered) >= len(ordered) * p / 100 - 1e-9
    assert sum(v < found for v in ordered) <= len(ordered) * p / 100


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


def test_lines_are_bounded(write_file: WriteFile, monkeypatch: pytest.MonkeyPatch) -> None:
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


def counted(counts: list[int]) -> Trace:
    """A trace in which function f has counts[f] arrivals."""
    arrivals = tuple(
        Arrival(t_s=0.0, function=function, input_tokens=1, output_tokens=1)
        for function, count in enumerate(counts)
        for _ in range(count)
    )
    return Trace(name="t", arrivals=arrivals, duration_s=1.0)


def test_the_middle_of_every_stratum_is_taken() -> None:
    requests = {f"f{i}": 100 - i for i in range(10)} | {"idle": 0}
    assert Sample(strata=2, per_stratum=1).of(requests) == ("f2", "f7")
    assert Sample(strata=2, per_stratum=3).of(requests) == ("f1", "f2", "f3", "f6", "f7", "f8")


def test_functions_as_busy_as_each_other_are_ranked_by_label() -> None:
    requests = {"b": 1, "c": 1, "a": 1}
    assert Sample(strata=3, per_stratum=1).of(requests) == ("a", "b", "c")


@given(st.lists(st.integers(1, 50), min_size=128, max_size=300))
def test_a_sample_has_distinct_functions_busiest_stratum_first(counts: list[int]) -> None:
    requests = {str(i): n for i, n in enumerate(counts)}
    taken = Sample().of(requests)
    assert len(set(taken)) == len(taken) == 128
    ranked = [requests[label] for label in taken]
    assert ranked == sorted(ranked, reverse=True)


def test_too_few_functions_are_refused() -> None:
    with pytest.raises(InvalidInput, match=r"127 functions have requests.*need 128"):
        Sample().of({str(i): 1 for i in range(127)} | {"idle": 0})
    with pytest.raises(InvalidInput, match="both must be 1 or more"):
        Sample(strata=0)


def test_loads_have_the_same_share_of_every_stratum_and_contain_each_other() -> None:
    # 8 functions of each of 16 strata, with the stratum's count.
    trace = counted([64 - 4 * (function // 8) for function in range(128)])
    loads = {models: load_for(trace, models) for models in KEPT}
    for models, load in loads.items():
        assert load.name == f"t-{models}"
        functions = {a.function for a in load.arrivals}
        assert len(functions) == models
        assert len(load.arrivals) * 128 == len(trace.arrivals) * models
    assert {a.function for a in loads[32].arrivals} < {a.function for a in loads[64].arrivals}
    assert loads[128].arrivals == trace.arrivals


def test_other_loads_are_refused() -> None:
    with pytest.raises(InvalidInput, match="no load for 16 models"):
        load_for(counted([1]), 16)
    with pytest.raises(InvalidInput, match="has a function 128"):
        load_for(counted([1] * 129), 32)


NAMES = ("a", "b", "c")


def trace_of(*functions: int, labels: tuple[str, ...] = ()) -> Trace:
    arrivals = tuple(
        Arrival(t_s=float(i), function=f, input_tokens=1, output_tokens=1)
        for i, f in enumerate(functions)
    )
    return Trace(name="t", arrivals=arrivals, duration_s=100.0, labels=labels)


def test_a_hash_is_the_same_in_every_window_and_run() -> None:
    whole = by_hash(trace_of(*range(50)), NAMES)
    assert set(whole.values()) == set(NAMES)
    assert by_hash(trace_of(7, 31), NAMES) == {7: whole[7], 31: whole[31]}
    # Not Python's own hash, which differs from run to run.
    assert [whole[f] for f in range(6)] == HASHED


HASHED = ["a", "b", "b", "b", "b", "c"]


def test_a_hash_goes_by_the_label() -> None:
    assert by_hash(trace_of(0, labels=("5",)), NAMES)[0] == HASHED[5]


def test_the_busiest_function_is_the_first_deployment() -> None:
    trace = trace_of(5, 5, 5, 2, 2, 9, 4)
    assert by_popularity(trace, NAMES) == {5: "a", 2: "b", 4: "c", 9: "a"}


def test_a_table_says_each_or_the_rest() -> None:
    trace = trace_of(0, 1, 2, labels=("x", "y", "z"))
    assert by_table(trace, {"x": "a", "y": "b", "z": "b"}, NAMES) == {0: "a", 1: "b", 2: "b"}
    assert by_table(trace, {"y": "b", "*": "c"}, NAMES) == {0: "c", 1: "b", 2: "c"}


@pytest.mark.parametrize(
    ("table", "said"),
    [
        ({"x": "a"}, "1 functions of trace t without a line in the table: y"),
        ({"x": "a", "y": "b", "w": "b"}, "1 functions in the table that trace t does not call"),
        ({"x": "nil", "*": "void"}, "2 deployments in the table .*: nil, void"),
    ],
)
def test_what_a_table_lacks_or_invents_is_named(table: dict[str, str], said: str) -> None:
    with pytest.raises(InvalidInput, match=said) as caught:
        by_table(trace_of(0, 1, labels=("x", "y")), table, NAMES)
    assert caught.value.hint


def test_many_missing_functions_are_counted() -> None:
    with pytest.raises(InvalidInput, match=r"9 functions .*: 0, 1, 2, 3, 4 and 4 more"):
        by_table(trace_of(*range(9)), {}, NAMES)


def test_a_table_is_a_csv_file(write_file: WriteFile, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_file("function,deployment\nx,a\n*,b\n")
    assert read_table(path) == {"x": "a", "*": "b"}
    with pytest.raises(InvalidInput, match=r"trace.csv:3: column function 'x' is there twice"):
        read_table(write_file("function,deployment\nx,a\nx,b\n"))
    with pytest.raises(InvalidInput, match=r"trace.csv:2: column deployment is missing"):
        read_table(write_file("function,deployment\nx\n"))
    with pytest.raises(InvalidInput, match=r"trace.csv:1: the columns 'x,a' are not function,depl"):
        read_table(write_file("x,a\n"))
    with pytest.raises(NotFound) as caught:
        read_table(Path("populair"))
    assert "popularity" in caught.value.hint
    monkeypatch.setattr(mapping, "FUNCTIONS_MAX", 1)
    with pytest.raises(InvalidInput, match="is one of more than 1"):
        read_table(write_file("function,deployment\nx,a\ny,b\n"))
