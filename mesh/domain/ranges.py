"""Ranges of numbers and names, declared once, on the field that carries them.

`from_wire` in `mesh.wire.mapping` holds what comes off the wire to them. A number of a peer whose
version does not know its field arrives as 0: where 0 is out of the range and the field has a
default, it means the default.
"""

from math import inf, isfinite
from typing import Annotated

from mesh.domain.values import dataclass

NAME_CHARS_MAX = 255
"""Ids on the wire are no longer than this; mesh itself makes much shorter ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Range:
    """Numbers from `least` to `most`, without `least` where they are `above` it; never NaN, and
    with `finite` not infinite either.
    """

    least: float
    most: float = inf
    above: bool = False
    finite: bool = True

    def __contains__(self, value: float) -> bool:
        enough = value > self.least if self.above else value >= self.least
        return enough and value <= self.most and (isfinite(value) or not self.finite)

    def __str__(self) -> str:
        if self.least == -inf:
            return "a number"
        if self.most < inf:
            return f"between {self.least:g} and {self.most:g}"
        if self.above:
            return f"above {self.least:g}" + " and finite" * self.finite
        return f"{self.least:g} or more" + ", and finite" * (self.finite and self.least < 1)


Count = Annotated[int, Range(least=1)]
"""A number that others divide by or index with."""
Seconds = Annotated[float, Range(least=0.0)]
"""How long something took."""
Joules = Annotated[float, Range(least=0.0)]
"""The energy that something took."""
Share = Annotated[float, Range(least=0.0)]
"""The share by which something is off."""
Part = Annotated[float, Range(least=0.0, most=1.0)]
"""The part of a whole."""
Factor = Annotated[float, Range(least=0.0, above=True)]
"""What a time or a rate is multiplied by."""
Rate = Annotated[float, Range(least=0.0, above=True, finite=False)]
"""Something a second; an infinite one takes no time."""
Instant = Annotated[float, Range(least=-inf, finite=False)]
"""Seconds from now, in either direction, or never."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NotEmpty:
    """Marks text that is neither empty nor longer than NAME_CHARS_MAX."""


Name = Annotated[str, NotEmpty()]
