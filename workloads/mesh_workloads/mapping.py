"""Which deployment a trace's function becomes: by its name's hash, by its popularity, by a table.

The choice is the same in every run and on every machine. A function is named by its label, or by
its number where the trace has no labels. Before: `scaling`. After: `replay_plan`.
"""

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from mesh.domain.errors import InvalidInput, NotFound
from mesh_workloads.source import header, rows, shown
from mesh_workloads.trace import FUNCTIONS_MAX, Trace

HASH = "hash"
POPULARITY = "popularity"
REST = "*"
"""In a table: every function that has no line of its own."""
NAMED_MAX = 5
"""Names in a message."""
_COLUMNS = ("function", "deployment")


def by_hash(trace: Trace, deployments: Sequence[str]) -> dict[int, str]:
    """Every function where its label's SHA-256 points: it goes there in every window of the trace,
    and several may share a deployment while another has none.
    """
    return {
        function: deployments[_hashed(trace.label(function)) % len(deployments)]
        for function in trace.functions()
    }


def by_popularity(trace: Trace, deployments: Sequence[str]) -> dict[int, str]:
    """The busiest function is the first deployment, the next one the second, and round again;
    equal counts are ranked by number.
    """
    counts = Counter(arrival.function for arrival in trace.arrivals)
    ranked = sorted(counts, key=lambda function: (-counts[function], function))
    return {f: deployments[rank % len(deployments)] for rank, f in enumerate(ranked)}


def by_table(trace: Trace, table: Mapping[str, str], deployments: Sequence[str]) -> dict[int, str]:
    """`table` gives a label's deployment, or `*` that of all others.

    Raises InvalidInput for functions without one, for labels that the trace does not have, and for
    deployments that there are not.
    """
    labels = {trace.label(function): function for function in trace.functions()}
    _none_of(
        sorted(set(table.values()) - set(deployments)),
        "deployments in the table that are not among those asked for",
        "`mesh get` lists the cell's; correct the table, or deploy them",
    )
    _none_of(
        [label for label in table if label not in labels and label != REST],
        f"functions in the table that trace {trace.name} does not call in this window",
        "correct or remove their lines",
    )
    if REST not in table:
        _none_of(
            [label for label in labels if label not in table],
            f"functions of trace {trace.name} without a line in the table",
            f"add them, or a line {REST},DEPLOYMENT for all others",
        )
    return {function: table.get(label, table.get(REST, "")) for label, function in labels.items()}


def read_table(path: Path) -> dict[str, str]:
    """A CSV file of two columns, `function,deployment`.

    Raises InvalidInput with the line, NotFound or StorageError when it cannot be read.
    """
    try:
        columns = header(path)
    except NotFound as error:
        hint = f"a mapping is {HASH}, {POPULARITY}, or the path of a table"
        raise NotFound(error.message, hint=hint) from error
    if columns != _COLUMNS:
        raise InvalidInput(
            f"{path}:1: the columns {shown(','.join(columns))} are not {','.join(_COLUMNS)}",
            hint="a table has a line for each function: its label and a deployment's name",
        )
    table: dict[str, str] = {}
    for row in rows(path):
        label = row.text("function")
        if label in table:
            raise row.wrong("function", f"{shown(label)} is there twice")
        if len(table) >= FUNCTIONS_MAX:
            raise row.wrong("function", f"is one of more than {FUNCTIONS_MAX}")
        table[label] = row.text("deployment")
    return table


def _hashed(label: str) -> int:
    return int.from_bytes(hashlib.sha256(label.encode()).digest()[:8])


def _none_of(names: Sequence[str], what: str, hint: str) -> None:
    if names:
        more = f" and {len(names) - NAMED_MAX} more" if len(names) > NAMED_MAX else ""
        raise InvalidInput(f"{len(names)} {what}: {', '.join(names[:NAMED_MAX])}{more}", hint=hint)
