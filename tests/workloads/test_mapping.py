"""Every function that is called becomes one deployment, the same in every run."""

from pathlib import Path

import pytest

from mesh.domain.errors import InvalidInput, NotFound
from mesh_workloads import mapping
from mesh_workloads.mapping import by_hash, by_popularity, by_table, read_table
from mesh_workloads.trace import Arrival, Trace
from tests.workloads.conftest import WriteFile

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
