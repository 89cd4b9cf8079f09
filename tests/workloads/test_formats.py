"""Every public format is recognised by its header, and its rows mean what their source says."""

import pytest

from mesh.domain.errors import InvalidInput
from mesh_workloads.formats import FORMATS
from mesh_workloads.reading import read, recognise
from mesh_workloads.trace import TOKENS_MAX, Trace
from tests.workloads import samples
from tests.workloads.conftest import WriteFile

Rows = list[tuple[float, int, int, int]]


def rows_of(trace: Trace) -> Rows:
    return [(a.t_s, a.function, a.input_tokens, a.output_tokens) for a in trace.arrivals]


@pytest.mark.parametrize(
    ("text", "name"),
    [
        (samples.PLAIN, "csv"),
        (samples.AZURE_FUNCTIONS_2019, "azure-functions-2019"),
        (samples.AZURE_FUNCTIONS_2021, "azure-functions-2021"),
        (samples.AZURE_LLM_2023, "azure-llm"),
        (samples.AZURE_LLM_2024, "azure-llm"),
        (samples.BURSTGPT, "burstgpt"),
        (samples.BURSTGPT_SESSIONS, "burstgpt"),
        (samples.MOONCAKE, "mooncake"),
        (samples.REPLAY_RECORD, "replay"),
    ],
)
def test_the_header_tells_the_format(write_file: WriteFile, text: str, name: str) -> None:
    path = write_file(text)
    assert recognise(path).name == name
    first = text.splitlines()[0]
    assert [f.name for f in FORMATS if f.matches(tuple(first.split(",")))] in ([name], [])


def test_an_unknown_header_is_answered_with_the_known_ones(write_file: WriteFile) -> None:
    with pytest.raises(InvalidInput, match=r"trace.csv:1: the columns 'when,what'") as caught:
        recognise(write_file("when,what\n1,2\n"))
    assert all(known.columns in caught.value.hint for known in FORMATS)


def test_azure_functions_2019_are_counts_by_the_minute(write_file: WriteFile) -> None:
    trace = read(write_file(samples.AZURE_FUNCTIONS_2019))
    assert trace.labels == ("a1/f1", "a2/f1")
    minutes = sorted((a.function, int(a.t_s // 60)) for a in trace.arrivals)
    assert minutes == [(0, 0), (0, 0), (0, 2), (1, 1), (1, 1), (1, 1)]
    assert all(a.input_tokens >= 1 and a.output_tokens >= 1 for a in trace.arrivals)


def test_azure_functions_2021_arrive_when_they_begin(write_file: WriteFile) -> None:
    trace = read(write_file(samples.AZURE_FUNCTIONS_2021))
    assert [(a.t_s, trace.labels[a.function]) for a in trace.arrivals] == [
        (3.0, "a1/f2"),
        (5.0, "a1/f1"),
        (60.5, "a1/f1"),
    ]


def test_azure_llm_counts_from_the_first_row_across_midnight(write_file: WriteFile) -> None:
    trace = read(write_file(samples.AZURE_LLM_2023))
    assert rows_of(trace) == [(0.0, 0, 374, 44), (4.314579, 0, 396, 109)]
    assert trace.left_out == 1
    later = read(write_file(samples.AZURE_LLM_2024))
    assert rows_of(later) == [(0.0, 0, 2162, 5), (0.5, 0, 2399, 6)]


def test_burstgpt_has_a_function_a_model_and_leaves_failures_out(write_file: WriteFile) -> None:
    trace = read(write_file(samples.BURSTGPT))
    assert trace.labels == ("ChatGPT", "GPT-4")
    assert rows_of(trace) == [(0.0, 0, 472, 18), (40.0, 1, 1087, 230), (1124.0, 0, 1305, 477)]
    assert trace.left_out == 1
    sessions = read(write_file(samples.BURSTGPT_SESSIONS))
    assert rows_of(sessions) == [(0.0, 0, 906, 446), (51.5, 1, 36, 29)]


def test_mooncake_is_in_milliseconds(write_file: WriteFile) -> None:
    trace = read(write_file(samples.MOONCAKE))
    assert [a.blocks for a in trace.arrivals] == [(0, 1, 2), (0, 14), ()]
    assert rows_of(trace) == [(0.0, 0, 6755, 500), (3.0, 0, 7319, 490), (3.0, 0, 12, 3)]


def test_a_format_may_be_named(write_file: WriteFile) -> None:
    path = write_file(samples.MOONCAKE)
    assert recognise(path, "mooncake").name == "mooncake"
    with pytest.raises(InvalidInput, match="are of another format than burstgpt") as caught:
        read(path, format_name="burstgpt")
    assert "Request tokens" in caught.value.hint
    with pytest.raises(InvalidInput, match="no trace format 'parquet'") as caught:
        read(path, format_name="parquet")
    assert "azure-functions-2019" in caught.value.hint


@pytest.mark.parametrize(
    ("text", "behind"),
    [
        (samples.AZURE_FUNCTIONS_2019, 0),
        (samples.AZURE_FUNCTIONS_2021, 1),
        (samples.BURSTGPT.replace("1106", "1130"), 1),
        (samples.REPLAY_RECORD, 1),
    ],
)
def test_formats_without_an_order_are_sorted_and_that_is_said(
    write_file: WriteFile, text: str, behind: int
) -> None:
    trace = read(write_file(text))
    assert trace.out_of_order == behind
    times = [arrival.t_s for arrival in trace.arrivals]
    assert times == sorted(times)


def test_a_record_is_a_trace_with_its_labels(write_file: WriteFile) -> None:
    trace = read(write_file(samples.REPLAY_RECORD))
    assert [(a.t_s, trace.label(a.function), a.output_tokens) for a in trace.arrivals] == [
        (0.25, "a2/f1", 430),
        (2.5, "a1/f1", 112),
    ]


def test_plain_functions_keep_their_numbers(write_file: WriteFile) -> None:
    assert rows_of(read(write_file(samples.PLAIN))) == [
        (0.125, 0, 396, 112),
        (0.25, 3, 1056, 430),
        (1.5, 3, 1112, 395),
    ]


@pytest.mark.parametrize(
    ("text", "old", "new", "place"),
    [
        (samples.AZURE_FUNCTIONS_2019, "timer,0", "timer,x", "3: column 1 is 'x'"),
        (samples.AZURE_FUNCTIONS_2019, "0,3,0", "0,3", "4: column 3 is missing"),
        (samples.AZURE_FUNCTIONS_2021, "4.5,", "4.5s,", "3: column end_timestamp is '4.5s'"),
        (samples.AZURE_FUNCTIONS_2021, "61.0,0.5", "61.0,-0.5", "5: column duration is -0.5"),
        (samples.AZURE_FUNCTIONS_2021, "a2,f1", ",f1", "4: column app is empty"),
        (samples.AZURE_LLM_2023, "396", f"{TOKENS_MAX + 1}", "3: column ContextTokens is 1677"),
        (samples.AZURE_LLM_2023, "-16 18:15:50", "-16T18:61:50", "3: column TIMESTAMP is '2023"),
        (samples.AZURE_LLM_2024, "05-13", "05-11", "3: column TIMESTAMP is 172799.500 s before"),
        (samples.MOONCAKE, "3000", "-3", "2: column timestamp is -3"),
        (samples.MOONCAKE, '"timestamp": 0', '"timestamp": 3006', "2: column timestamp is 0.006 s"),
        (samples.BURSTGPT, "\n45,", "\n4,", "3: column Timestamp is 1.000 s before the first row"),
        (samples.PLAIN, "1.5", "0.15", "4: column t_s is 0.100 s before the line before it"),
        (samples.BURSTGPT, "GPT-4,1087", "GPT-4,1087.5", "3: column Request tokens is '1087.5'"),
        (samples.MOONCAKE, '"output_length": 490, ', "", "2: column output_length is missing"),
        (samples.MOONCAKE, "7319", "[7]", "2: column input_length is '[7]'"),
        (samples.MOONCAKE, ": 3}", "", "4: column"),
        (samples.MOONCAKE, "[0, 14]", "[0, -1]", "2: column hash_ids must be a list of whole"),
        (samples.MOONCAKE, "[0, 14]", '"[0, 14"', "2: column hash_ids must be a list of whole"),
        (samples.PLAIN, "0.125,0", "0.125,-1", "2: column function is '-1'"),
        (samples.PLAIN, "1.5", "1e99", "4: column t_s is 1e99"),
    ],
)
def test_a_bad_cell_is_named(
    write_file: WriteFile, text: str, old: str, new: str, place: str
) -> None:
    assert old in text
    with pytest.raises(InvalidInput) as caught:
        read(write_file(text.replace(old, new, 1)))
    assert f"trace.csv:{place}" in caught.value.message
