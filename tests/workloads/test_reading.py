"""Reading: what the window and the sample leave, in order, the same for the same seed."""

from dataclasses import replace
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mesh.domain.errors import InvalidInput
from mesh_workloads import collecting, formats
from mesh_workloads.asked import Asked
from mesh_workloads.published import AZURE_CODE
from mesh_workloads.reading import read
from mesh_workloads.sampling import Sample
from mesh_workloads.trace import Arrival, Trace
from tests.workloads import samples
from tests.workloads.conftest import WriteFile

ARRIVALS = st.builds(
    Arrival,
    t_s=st.floats(0, 1000),
    function=st.integers(0, 20),
    input_tokens=st.integers(1, 5000),
    output_tokens=st.integers(1, 5000),
)
COUNTS = st.lists(st.lists(st.integers(0, 9), min_size=5, max_size=5), min_size=1, max_size=12)


def day(counts: list[list[int]]) -> str:
    """A file of the Azure Functions 2019 format with these counts by function and minute."""
    lines = ["HashOwner,HashApp,HashFunction,Trigger,1,2,3,4,5"]
    lines += [f"o,a,f{i:02},http,{','.join(map(str, row))}" for i, row in enumerate(counts)]
    return "\n".join(lines) + "\n"


@given(st.lists(ARRIVALS, min_size=1))
def test_a_trace_that_is_written_and_read_is_the_same(arrivals: list[Arrival]) -> None:
    ordered = sorted(arrivals, key=lambda a: (a.t_s, a.function))
    trace = Trace(name="t", arrivals=tuple(ordered), duration_s=1000.0)
    text = StringIO()
    formats.write(trace, text)
    with TemporaryDirectory() as folder:
        path = Path(folder) / "t.csv"
        path.write_text(text.getvalue(), encoding="utf-8")
        assert read(path, Asked(duration_s=1000.1)).arrivals == trace.arrivals


@given(COUNTS, st.integers(0, 3), st.integers(1, 5), st.integers(0, 5))
def test_counts_become_as_many_arrivals_in_the_window(
    counts: list[list[int]], first: int, minutes: int, seed: int
) -> None:
    expected = [sum(row[first : first + minutes]) for row in counts]
    asked = Asked(start_s=60.0 * first, duration_s=60.0 * minutes, seed=seed)
    with TemporaryDirectory() as folder:
        path = Path(folder) / "day.csv"
        path.write_text(day(counts), encoding="utf-8")
        if not sum(expected):
            with pytest.raises(InvalidInput, match="has no arrivals"):
                read(path, asked)
            return
        trace = read(path, asked)
        assert read(path, asked) == trace
    found = dict.fromkeys(trace.labels, 0)
    for arrival in trace.arrivals:
        found[trace.labels[arrival.function]] += 1
        assert 0 <= arrival.t_s <= 60.0 * minutes
    assert {k: n for k, n in found.items() if n} == {
        f"a/f{i:02}": n for i, n in enumerate(expected) if n
    }


def test_another_seed_draws_other_moments(write_file: WriteFile) -> None:
    path = write_file(samples.AZURE_FUNCTIONS_2019)
    one, two = (read(path, Asked(seed=seed)) for seed in (1, 2))
    assert len(one.arrivals) == len(two.arrivals) == 6
    assert not {a.t_s for a in one.arrivals} & {a.t_s for a in two.arrivals}


def test_lengths_are_drawn_as_asked(write_file: WriteFile) -> None:
    path = write_file(day([[900, 900, 900, 900, 900]]))
    summary = read(path, Asked(lengths=AZURE_CODE)).summary()
    assert summary.output_tokens.mean == pytest.approx(AZURE_CODE.output.mean(), rel=0.15)
    assert summary.input_tokens.p50 == pytest.approx(AZURE_CODE.input.at(0.5), rel=0.1)


def test_a_window_counts_from_its_start(write_file: WriteFile) -> None:
    path = write_file(samples.PLAIN)
    trace = read(path, Asked(start_s=0.25, duration_s=1.0))
    assert [(a.t_s, a.function) for a in trace.arrivals] == [(0.0, 3)]
    assert trace.duration_s == 1.0
    with pytest.raises(InvalidInput, match="no arrivals from 5 s on"):
        read(path, Asked(start_s=5.0))


@pytest.mark.parametrize("start_s", [-1.0, float("nan"), float("inf")])
def test_a_window_is_within_bounds(start_s: float) -> None:
    with pytest.raises(InvalidInput, match="start_s is"):
        Asked(start_s=start_s)
    with pytest.raises(InvalidInput, match="duration_s is"):
        Asked(duration_s=start_s)


def test_a_smaller_sample_of_functions_has_the_same_requests(write_file: WriteFile) -> None:
    path = write_file(day([[9 - i, 0, 3, 0, 1] for i in range(9)]))
    large = read(path, Asked(sample=Sample(strata=3, per_stratum=3)))
    small = read(path, Asked(sample=Sample(strata=3, per_stratum=1)))
    assert large.labels == tuple(f"a/f{i:02}" for i in range(9))
    assert small.labels == ("a/f01", "a/f04", "a/f07")
    of_large = [replace(a, function=a.function // 3) for a in large.arrivals if a.function % 3 == 1]
    assert list(small.arrivals) == of_large


def test_moments_are_spread_over_the_whole_minute(write_file: WriteFile) -> None:
    trace = read(write_file(day([[0, 2000, 0, 0, 0]])))
    tenths = [0] * 10
    for arrival in trace.arrivals:
        tenths[int((arrival.t_s - 60.0) // 6)] += 1
    assert min(tenths) > 140
    assert max(tenths) < 260


def test_a_sample_counts_requests_within_the_window_only(write_file: WriteFile) -> None:
    path = write_file(day([[9, 1, 9, 0, 0], [0, 2, 0, 0, 0], [0, 3, 0, 0, 0]]))
    asked = Asked(start_s=60.0, duration_s=60.0, sample=Sample(strata=3, per_stratum=1))
    trace = read(path, asked)
    assert trace.labels == ("a/f02", "a/f01", "a/f00")
    assert sorted(a.function for a in trace.arrivals) == [0, 0, 0, 1, 1, 2]


def test_arrivals_are_bounded(write_file: WriteFile, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collecting, "ARRIVALS_MAX", 5)
    with pytest.raises(InvalidInput, match="more than 5 arrivals"):
        read(write_file(samples.AZURE_FUNCTIONS_2019))


def test_functions_are_bounded(write_file: WriteFile, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collecting, "FUNCTIONS_MAX", 1)
    with pytest.raises(InvalidInput, match="more than 1 functions"):
        read(write_file(samples.AZURE_FUNCTIONS_2019))
