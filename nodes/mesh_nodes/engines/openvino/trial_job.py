"""A trial of precisions as it goes to the process that makes it, and what comes back.

Before: `precision_choice`, after: `precision_trial`, and the other way round.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from mesh.domain.model import ComputePrecision, KvPrecision
from mesh_nodes.engines.openvino.architecture import Architecture, Rope
from mesh_nodes.engines.openvino.precisions import Precisions, Timed

_DONE = "done "


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialJob:
    """The order for a trial: the model's shape, of which a few layers, all alike, are timed, and
    the precisions that are settled already.
    """

    architecture: Architecture
    threads: int
    compute: ComputePrecision | None = None
    kv: KvPrecision | None = None

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "TrialJob":
        fields = json.loads(text)
        shape = fields["architecture"]
        rope = Rope(**{**shape["rope"], "short_factors": ()})
        return cls(
            architecture=Architecture(**{**shape, "rope": rope, "windows": ()}),
            threads=fields["threads"],
            compute=fields["compute"] and ComputePrecision(fields["compute"]),
            kv=fields["kv"] and KvPrecision(fields["kv"]),
        )


def timings_json(timed: Sequence[Timed]) -> str:
    """As one line of JSON."""
    return json.dumps([asdict(each) for each in timed])


def read_timings(content: Any) -> tuple[Timed, ...]:
    """The timings in what `timings_json` wrote. Raises KeyError, TypeError or ValueError, also if
    nothing was timed.
    """
    timed = tuple(_timed(**each) for each in content)
    if not any(each.rounds for each in timed):
        raise ValueError("no precision was timed")
    return timed


def _timed(precisions: dict[str, str], error: float, rounds: list[list[float]]) -> Timed:
    compute, kv = ComputePrecision(precisions["compute"]), KvPrecision(precisions["kv"])
    if not all(each > 0.0 for seconds in rounds for each in seconds):
        raise ValueError(f"{compute}, KV {kv} took {rounds} s")
    return Timed(
        precisions=Precisions(compute=compute, kv=kv),
        error=float(error),
        rounds=tuple(map(tuple, rounds)),
    )


def progress_line(share: float) -> str:
    """A line that says how much of the trial is done, 0 to 1."""
    return f"{_DONE}{share:.3f}"


def read_progress(line: bytes) -> float | None:
    """The share in a `progress_line`; `None` for any other line."""
    text = line.decode("ascii", "replace").strip()
    try:
        return float(text.removeprefix(_DONE)) if text.startswith(_DONE) else None
    except ValueError:
        return None
