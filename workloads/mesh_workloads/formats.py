"""The formats of trace files that mesh reads: each one's header, and what a row of it means.

`FORMATS` lists them. A row's records follow from the row alone, so that files are read as streams.
Before: `source`, which yields rows. After: `reading`, which tells a file's format by its header.
"""

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TextIO

from mesh_workloads.source import Row, shown
from mesh_workloads.trace import DURATION_S_MAX, FUNCTIONS_MAX, TOKENS_MAX, Trace


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """`count` requests for a function, at moments between `at_s` and `at_s + over_s`.

    Lengths are None where the source counts invocations only.
    """

    at_s: float
    function: str
    count: int = 1
    over_s: float = 0.0
    input_tokens: int | None = None
    output_tokens: int | None = None
    blocks: tuple[int, ...] = ()
    """See `Arrival.blocks`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    name: str
    columns: str
    """As a message shows them."""
    matches: Callable[[tuple[str, ...]], bool]
    """Whether these are its columns."""
    records: Callable[[Row], Iterable[Record]]
    from_first: bool = False
    """Times count from the first row's; otherwise from the file's own zero."""
    in_order: bool = False
    """Rows come in the order of their times, so that one which does not is a torn file's; other
    files are sorted when they are read.
    """


def _format(
    name: str,
    records: Callable[[Row], Iterable[Record]],
    *headers: tuple[str, ...],
    from_first: bool = False,
    in_order: bool = False,
) -> Format:
    """A format with one of these headers; a message shows the first."""
    return Format(
        name=name,
        columns=",".join(headers[0]),
        matches=lambda header: header in headers,
        records=records,
        from_first=from_first,
        in_order=in_order,
    )


_PLAIN_COLUMNS = ("t_s", "function", "input_tokens", "output_tokens")


def _plain(row: Row) -> Iterator[Record]:
    yield Record(
        at_s=row.number("t_s", DURATION_S_MAX),
        function=str(row.integer("function", FUNCTIONS_MAX - 1)),
        input_tokens=row.integer("input_tokens", TOKENS_MAX),
        output_tokens=row.integer("output_tokens", TOKENS_MAX),
    )


PLAIN_CSV = _format("csv", _plain, _PLAIN_COLUMNS, in_order=True)
"""The plain format, which mesh also writes. Functions are numbers from 0 and keep them."""


def write(trace: Trace, file: TextIO) -> None:
    """The trace's arrivals in the plain format; reading them back gives equal ones."""
    file.write(PLAIN_CSV.columns + "\n")
    for a in trace.arrivals:
        file.write(f"{a.t_s!r},{a.function},{a.input_tokens},{a.output_tokens}\n")


REPLAY_COLUMNS = (
    *_PLAIN_COLUMNS,
    *("deployment", "late_ms", "end", "tokens", "ttft_s", "tpot_s", "whole_s", "grace_s"),
    *("met", "met_in_the_mean"),
)
"""`end` is how it ended: stop, length, the reason of a refusal, failed, or cancelled, which is
left when the replay was stopped. `grace_s` is by how much it was told to be late, 0 in time. `met`
(1 or 0) is with every token in time or as late as told, `met_in_the_mean` with TTFT and mean TPOT.
"""


def _replayed(row: Row) -> Iterator[Record]:
    yield Record(
        at_s=row.number("t_s", DURATION_S_MAX),
        function=row.text("function"),
        input_tokens=row.integer("input_tokens", TOKENS_MAX),
        output_tokens=row.integer("output_tokens", TOKENS_MAX),
    )


_REPLAY = _format("replay", _replayed, REPLAY_COLUMNS)
"""The record of a replay: the plain format with what came of each request; a trace again. Rows come
as requests end, so they are not in the order of their times. `t_s` and the lengths are what was
asked for, whatever came of it; functions keep their labels.
"""

_NAMED = ("HashOwner", "HashApp", "HashFunction", "Trigger")
MINUTES_MAX = 1440
MINUTE_COUNT_MAX = 10_000_000
"""Invocations of one function in one minute; the busiest of the trace has about 300,000."""


def _counts_minutes(header: tuple[str, ...]) -> bool:
    minutes = header[len(_NAMED) :]
    return (
        header[: len(_NAMED)] == _NAMED
        and 1 <= len(minutes) <= MINUTES_MAX
        and minutes == tuple(str(minute + 1) for minute in range(len(minutes)))
    )


def _minutes(row: Row) -> Iterator[Record]:
    label = f"{row.text('HashApp')}/{row.text('HashFunction')}"
    for minute in range(len(row.cells) - len(_NAMED)):
        count = row.integer(str(minute + 1), MINUTE_COUNT_MAX)
        if count:
            yield Record(at_s=60.0 * minute, over_s=60.0, function=label, count=count)


_AZURE_FUNCTIONS_2019 = Format(
    name="azure-functions-2019",
    columns="HashOwner,HashApp,HashFunction,Trigger,1,2,…,1440",
    matches=_counts_minutes,
    records=_minutes,
)
"""Invocations of every function, counted minute by minute: a day each in
`invocations_per_function_md.anon.d01.csv` to `d14` (M. Shahrad et al., "Serverless in the Wild",
ATC '20; CC-BY). When within its minute an invocation comes is not recorded, nor are any lengths.
"""


def _invocations(row: Row) -> Iterator[Record]:
    end_s = row.number("end_timestamp", DURATION_S_MAX)
    start_s = end_s - row.number("duration", DURATION_S_MAX)
    label = f"{row.text('app')}/{row.text('func')}"
    if start_s >= 0:
        yield Record(at_s=round(start_s, 6), function=label)


_AZURE_FUNCTIONS_2021 = _format(
    "azure-functions-2021", _invocations, ("app", "func", "end_timestamp", "duration")
)
"""Every invocation, with its end and duration in seconds:
`AzureFunctionsInvocationTraceForTwoWeeksJan2021.txt` (Y. Zhang et al., "Faster and Cheaper
Serverless Computing on Harvested Resources", SOSP '21; CC-BY). A request arrives when its
invocation begins, at the end less the duration; one that began before the trace is none.
"""


def _azure_llm(row: Row) -> Iterator[Record]:
    yield Record(
        at_s=_unix_s(row),
        function="azure-llm",
        input_tokens=row.integer("ContextTokens", TOKENS_MAX),
        output_tokens=row.integer("GeneratedTokens", TOKENS_MAX),
    )


def _unix_s(row: Row) -> float:
    text = row.text("TIMESTAMP")
    try:
        at = datetime.fromisoformat(text)
    except ValueError as error:
        raise row.wrong(
            "TIMESTAMP", f"is {shown(text)}; it must be like 2023-11-16 18:17:03.9799600"
        ) from error
    return (at if at.tzinfo else at.replace(tzinfo=UTC)).timestamp()


_AZURE_LLM = _format(
    "azure-llm",
    _azure_llm,
    ("TIMESTAMP", "ContextTokens", "GeneratedTokens"),
    from_first=True,
    in_order=True,
)
"""Prompts and answers of one LLM service each, in tokens: `AzureLLMInferenceTrace_{conv,code}.csv`
(P. Patel et al., "Splitwise", ISCA '24) and `AzureLLMInferenceTrace_{conv,code}_1week.csv`
(J. Stojkovic et al., "DynamoLLM", HPCA '25); CC-BY. Timestamps are ISO 8601 to 100 ns, the second
with a UTC offset; they are read to a microsecond.
"""


def _burstgpt(row: Row) -> Iterator[Record]:
    yield Record(
        at_s=row.number("Timestamp", DURATION_S_MAX),
        function=row.text("Model"),
        input_tokens=row.integer("Request tokens", TOKENS_MAX),
        output_tokens=row.integer("Response tokens", TOKENS_MAX),
    )


_LENGTHS = ("Model", "Request tokens", "Response tokens", "Total tokens", "Log Type")
_BURSTGPT = _format(
    "burstgpt",
    _burstgpt,
    ("Timestamp", *_LENGTHS),
    ("Timestamp", "Session ID", "Elapsed time", *_LENGTHS),
    from_first=True,
)
"""Requests for ChatGPT and GPT-4 in a university's region of Azure OpenAI: `BurstGPT_*.csv`
(Y. Wang et al., "BurstGPT", KDD '25; CC-BY). The later ones also name the session and the elapsed
time. Timestamps are seconds. Each model is a function; failed requests have an answer of 0 tokens.
"""

_KEYS = ("timestamp", "input_length", "output_length")
BLOCK_ID_MAX = 1 << 39
"""The largest id of a block: in the simulator, each of its 512 tokens has a number of its own."""


def _mooncake(row: Row) -> Iterator[Record]:
    for key in _KEYS:
        if key not in row.cells:
            raise row.wrong(key, "is missing")
    yield Record(
        at_s=row.number("timestamp", DURATION_S_MAX * 1000) / 1000,
        function="mooncake",
        input_tokens=row.integer("input_length", TOKENS_MAX),
        output_tokens=row.integer("output_length", TOKENS_MAX),
        blocks=_blocks(row),
    )


def _blocks(row: Row) -> tuple[int, ...]:
    if "hash_ids" not in row.cells:
        return ()
    try:
        ids = json.loads(row.cells["hash_ids"])
    except ValueError:
        ids = None
    if not isinstance(ids, list) or not all(type(i) is int and 0 <= i <= BLOCK_ID_MAX for i in ids):
        raise row.wrong("hash_ids", "must be a list of whole numbers, 0 or more")
    return tuple(ids)


_MOONCAKE = Format(
    name="mooncake",
    columns='{"timestamp": …, "input_length": …, "output_length": …, "hash_ids": […]}',
    matches=lambda header: set(_KEYS) <= set(header),
    records=_mooncake,
    in_order=True,
)
"""Requests for Kimi with long contexts, one JSON object a line: `mooncake_trace.jsonl`,
`conversation_trace.jsonl`, `toolagent_trace.jsonl`, `synthetic_trace.jsonl` (R. Qin et al.,
"Mooncake", FAST '25). Timestamps are milliseconds; `hash_ids` are of the prompt's blocks of 512
tokens, and the same for the same beginning.
"""

FORMATS = (
    *(PLAIN_CSV, _AZURE_FUNCTIONS_2019, _AZURE_FUNCTIONS_2021, _AZURE_LLM, _BURSTGPT, _MOONCAKE),
    _REPLAY,
)
