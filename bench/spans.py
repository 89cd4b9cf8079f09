"""Where the seconds of a node went: a kind for each moment of a span of time; pure.

What is computed hides a load beside it: loads count while nothing else is done. Resizes take
milliseconds and are idle time. Before: a node's journal, or what the swapper says of itself. After:
`played`.
"""

from collections.abc import Iterable
from enum import StrEnum
from typing import NamedTuple

from mesh.evaluation.fidelity.observing import Observed


class Kind(StrEnum):
    """What comes first hides what comes later."""

    PREFILL = "prefill"
    DECODE = "decode"
    FIRST_RUN = "first_run"
    """An iteration of a size that a new instance computes once, for nobody."""
    UNLOAD = "unload"
    LOAD = "load"
    IDLE = "idle"


class Span(NamedTuple):
    kind: Kind
    began_s: float
    ended_s: float


def seconds_by_kind(spans: Iterable[Span], from_s: float, until_s: float) -> dict[str, float]:
    """They come to `until_s - from_s` together."""
    changes: list[tuple[float, Kind, int]] = []
    for kind, began_s, ended_s in spans:
        if began_s < until_s and ended_s > from_s:
            changes += [(max(began_s, from_s), kind, 1), (min(ended_s, until_s), kind, -1)]
    seconds = dict.fromkeys(Kind, 0.0)
    under_way = dict.fromkeys(Kind, 0)
    at_s = from_s
    for change_s, kind, more in sorted(changes):
        seconds[next((k for k in Kind if under_way[k]), Kind.IDLE)] += change_s - at_s
        under_way[kind] += more
        at_s = change_s
    seconds[Kind.IDLE] += until_s - at_s
    return {str(kind): value for kind, value in seconds.items()}


def spans_of(observed: Observed) -> list[Span]:
    """The spans of a node's compute and loading lanes."""
    prompts = [(s, Kind.PREFILL if s.shape.prefill_tokens else Kind.DECODE) for s in observed.steps]
    first_runs = [(s, Kind.FIRST_RUN) for s in observed.primings]
    return [
        *(Span(kind, s.began_s, s.began_s + s.took_s) for s, kind in prompts + first_runs),
        *(Span(Kind.UNLOAD, s.began_s, s.began_s + s.took_s) for s in observed.unloads),
        *(Span(Kind.LOAD, s.began_s, s.began_s + s.took_s) for s in observed.loads),
    ]
