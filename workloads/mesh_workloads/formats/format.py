"""What a format is to the reader: a name, a header and the meaning of a row."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from mesh_workloads.source import Row


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
    """A row's records follow from the row alone, so that files are read as streams."""

    name: str
    columns: str
    """As a message shows them."""
    matches: Callable[[tuple[str, ...]], bool]
    """Whether these are its columns."""
    records: Callable[[Row], Iterable[Record]]
    from_first: bool
    """Times count from the first row's; otherwise from the file's own zero."""
    in_order: bool
    """Rows come in the order of their times, so that one which does not is a torn file's; other
    files are sorted when they are read.
    """
