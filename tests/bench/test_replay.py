"""The second reading of a file, and the comparison of what was sent with it."""

from collections import Counter
from pathlib import Path

import pytest

from bench.replay import LOAD, are_of, file_lengths, rate_scale, scaled, tokens_scale, trace_lengths
from mesh_workloads.asked import Asked
from mesh_workloads.reading import read
from mesh_workloads.trace import Arrival, Trace
from tests.workloads import samples


@pytest.mark.parametrize(
    ("text", "suffix", "seconds"),
    [
        (samples.PLAIN, ".csv", 1.0),
        (samples.AZURE_LLM_2023, ".csv", 60.0),
        (samples.AZURE_LLM_2024, ".csv", 0.4),
        (samples.BURSTGPT, ".csv", 600.0),
        (samples.MOONCAKE.replace("\n\n", "\n"), ".jsonl", 2.0),
        (samples.MOONCAKE.replace("\n\n", "\n"), ".jsonl", 60.0),
    ],
)
def test_both_readings_find_the_same_rows(
    tmp_path: Path, text: str, suffix: str, seconds: float
) -> None:
    path = tmp_path / f"trace{suffix}"
    path.write_text(text)
    trace = read(path, Asked(duration_s=seconds))
    assert file_lengths(path, seconds) == trace_lengths(trace)


def test_what_was_sent_is_there_as_often_and_cut_to_the_context() -> None:
    there = [(10, 5), (10, 5), (900, 200)]
    assert are_of(Counter([(10, 5), (10, 5)]), there, 1024)
    assert are_of(Counter([(824, 200)]), there, 1024)
    assert not are_of(Counter([(10, 5)] * 3), there, 1024)
    assert not are_of(Counter([(900, 200)]), there, 1024)
    assert not are_of(Counter([(11, 5)]), there, 1024)


def test_the_rate_is_what_the_cores_hold_and_never_above_the_traces() -> None:
    lengths = [(400, 200)] * 100
    assert rate_scale(lengths, 100.0) == pytest.approx(LOAD / 2)
    assert rate_scale(lengths, 1000.0) == 1.0


def test_lengths_are_scaled_only_where_many_rows_are_too_long() -> None:
    def made(*inputs: int) -> Trace:
        arrivals = (
            Arrival(t_s=float(n), function=0, input_tokens=tokens, output_tokens=48)
            for n, tokens in enumerate(inputs)
        )
        return Trace(name="t", arrivals=tuple(arrivals), duration_s=100.0)

    assert tokens_scale(made(*[2000] * 20, 9000)) == 1.0
    assert tokens_scale(made(*[8144] * 20)) == 0.25
    assert list(scaled(Counter({(10, 3): 2}), 0.25)) == [(2, 1), (2, 1)]
