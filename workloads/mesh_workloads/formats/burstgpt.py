"""BurstGPT: requests for ChatGPT and GPT-4 in a university's region of Azure OpenAI.

Files `BurstGPT_*.csv` (Y. Wang et al., "BurstGPT", KDD '25; CC-BY). The later ones also name the
session and the elapsed time. Timestamps are seconds. Each model is a function; failed requests
have an answer of 0 tokens.
"""

from collections.abc import Iterator

from mesh_workloads.formats.format import Format, Record
from mesh_workloads.source import Row
from mesh_workloads.trace import DURATION_S_MAX, TOKENS_MAX

_LENGTHS = ("Model", "Request tokens", "Response tokens", "Total tokens", "Log Type")
_HEADERS = (
    ("Timestamp", *_LENGTHS),
    ("Timestamp", "Session ID", "Elapsed time", *_LENGTHS),
)


def _records(row: Row) -> Iterator[Record]:
    yield Record(
        at_s=row.number("Timestamp", DURATION_S_MAX),
        function=row.text("Model"),
        input_tokens=row.integer("Request tokens", TOKENS_MAX),
        output_tokens=row.integer("Response tokens", TOKENS_MAX),
    )


FORMAT = Format(
    name="burstgpt",
    columns=",".join(_HEADERS[0]),
    matches=lambda header: header in _HEADERS,
    records=_records,
    from_first=True,
    in_order=False,
)
