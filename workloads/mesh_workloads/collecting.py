"""Makes arrivals of a source's records: within the window, with a length, in order.

Where a source has counts only, moments and lengths are drawn from a stream seeded by the function's
label: a function's requests stay the same whichever others are taken.
"""

import random
from collections.abc import Callable
from pathlib import Path

from mesh.domain.errors import InvalidInput
from mesh_workloads.asked import Asked
from mesh_workloads.formats import Record
from mesh_workloads.trace import ARRIVALS_MAX, DURATION_S_MAX, FUNCTIONS_MAX, Arrival, Trace


class AsTheyAppear:
    """Numbers for labels: their own where they are numbers, else 0, 1, 2 as they are met."""

    def __init__(self, path: Path, *, keep: bool) -> None:
        self._path = path
        self._keep = keep
        self._numbers: dict[str, int] = {}

    def number(self, label: str) -> int:
        if self._keep:
            return int(label)
        number = self._numbers.setdefault(label, len(self._numbers))
        if number >= FUNCTIONS_MAX:
            raise InvalidInput(f"{self._path} has more than {FUNCTIONS_MAX} functions")
        return number

    def labels(self) -> tuple[str, ...]:
        return tuple(self._numbers)


class Collecting:
    """Collects arrivals; `number` gives a label's function, or None for one not taken."""

    def __init__(self, path: Path, asked: Asked, number: Callable[[str], int | None]) -> None:
        self._path = path
        self._asked = asked
        self._number = number
        self._streams: dict[int, random.Random] = {}
        self._arrivals: list[Arrival] = []
        self._left_out = 0

    def add(self, record: Record) -> None:
        if not self._asked.overlaps(record):
            return
        function = self._number(record.function)
        if function is None:
            return
        if len(self._arrivals) + record.count > ARRIVALS_MAX:
            raise InvalidInput(
                f"{self._path} has more than {ARRIVALS_MAX} arrivals in the window asked for",
                hint="ask for a shorter one, or for a sample of the functions",
            )
        if record.input_tokens == 0 or record.output_tokens == 0:
            self._left_out += record.count
            return
        self._place(record, function)

    def _place(self, record: Record, function: int) -> None:
        asked = self._asked
        for _ in range(record.count):
            at_s = record.at_s
            if record.over_s:
                at_s = round(at_s + record.over_s * self._stream(record, function).random(), 6)
            if record.input_tokens is None or record.output_tokens is None:
                tokens = asked.lengths.draw(self._stream(record, function))
            else:
                tokens = record.input_tokens, record.output_tokens
            if asked.start_s <= at_s < asked.end_s:
                self._arrivals.append(
                    Arrival(
                        t_s=min(at_s - asked.start_s, asked.duration_s or DURATION_S_MAX),
                        function=function,
                        input_tokens=tokens[0],
                        output_tokens=tokens[1],
                        blocks=record.blocks,
                    )
                )

    def _stream(self, record: Record, function: int) -> random.Random:
        draw = self._streams.get(function)
        if draw is None:
            draw = random.Random(f"{self._asked.seed}/{record.function}")
            self._streams[function] = draw
        return draw

    def trace(self, labels: tuple[str, ...]) -> Trace:
        arrivals = sorted(self._arrivals, key=lambda arrival: (arrival.t_s, arrival.function))
        if not arrivals:
            raise InvalidInput(
                f"{self._path} has no arrivals from {self._asked.start_s:g} s {self._until()}",
                hint=f"{self._left_out} requests without a prompt or an answer were left out",
            )
        return Trace(
            name=self._path.stem,
            arrivals=tuple(arrivals),
            duration_s=self._asked.duration_s or max(arrivals[-1].t_s, 1e-6),
            labels=labels,
            left_out=self._left_out,
        )

    def _until(self) -> str:
        return "on" if self._asked.duration_s is None else f"to {self._asked.end_s:g} s"
