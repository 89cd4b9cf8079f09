"""Azure LLM 2023 and 2024: prompts and answers of one LLM service each, in tokens.

Files `AzureLLMInferenceTrace_{conv,code}.csv` (P. Patel et al., "Splitwise", ISCA '24) and
`AzureLLMInferenceTrace_{conv,code}_1week.csv` (J. Stojkovic et al., "DynamoLLM", HPCA '25); CC-BY.
Timestamps are ISO 8601 to 100 ns, the second with a UTC offset; they are read to a microsecond.
"""

from collections.abc import Iterator
from datetime import UTC, datetime

from mesh_workloads.formats.format import Format, Record
from mesh_workloads.source import Row, shown
from mesh_workloads.trace import TOKENS_MAX

_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
FUNCTION = "azure-llm"


def _records(row: Row) -> Iterator[Record]:
    yield Record(
        at_s=_unix_s(row),
        function=FUNCTION,
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


FORMAT = Format(
    name="azure-llm",
    columns=",".join(_COLUMNS),
    matches=lambda header: header == _COLUMNS,
    records=_records,
    from_first=True,
    in_order=True,
)
