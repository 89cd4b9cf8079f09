"""From the phases that an import tells of to the seconds of each; pure."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """A phase was told of."""

    at_s: float
    phase: str


def seconds_by_step(marks: Sequence[Mark], end_s: float) -> dict[str, float]:
    """Each phase lasts until another is told of, the last one until the end. What follows a comma
    in a phase is how far it is; a download is one step, whatever its file is called.
    """
    steps: dict[str, float] = {}
    ends_s = [mark.at_s for mark in marks[1:]] + [end_s]
    for mark, until_s in zip(marks, ends_s, strict=True):
        name = mark.phase.partition(", ")[0]
        step = "download" if name.startswith("download ") else name
        steps[step] = steps.get(step, 0.0) + until_s - mark.at_s
    return steps
