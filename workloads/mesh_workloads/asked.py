"""What is asked of a trace file: a window, a sample of its functions, and how gaps are filled."""

import math
from dataclasses import dataclass

from mesh.domain.errors import InvalidInput
from mesh_workloads.formats import Record
from mesh_workloads.lengths import Lengths
from mesh_workloads.published import AZURE_CONVERSATION
from mesh_workloads.sampling import Sample
from mesh_workloads.trace import DURATION_S_MAX


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """Which part of a file is read, and how what it lacks is drawn."""

    start_s: float = 0.0
    duration_s: float | None = None
    """From `start_s`; None for the whole rest."""
    sample: Sample | None = None
    """The functions that are read; `None` stands for all, numbered as they appear."""
    lengths: Lengths = AZURE_CONVERSATION
    """The lengths of requests whose source has none."""
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.start_s <= DURATION_S_MAX:
            raise InvalidInput(
                f"start_s is {self.start_s:g}; it must be from 0 to {DURATION_S_MAX:g}"
            )
        if self.duration_s is not None and not 0 < self.duration_s <= DURATION_S_MAX:
            raise InvalidInput(
                f"duration_s is {self.duration_s:g}; it must be above 0 and at most "
                f"{DURATION_S_MAX:g}"
            )

    @property
    def end_s(self) -> float:
        return math.inf if self.duration_s is None else self.start_s + self.duration_s

    def overlaps(self, record: Record) -> bool:
        """Whether the record's moments may lie within the window."""
        begun = record.at_s >= self.start_s or record.at_s + record.over_s > self.start_s
        return begun and record.at_s < self.end_s


ALL = Asked()
