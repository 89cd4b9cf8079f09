"""Byte sizes as people write them: `4GiB`, `512M`, `1073741824`, and back."""

import re
from decimal import Decimal

from mesh.domain.errors import InvalidInput

_POWERS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}
_PATTERN = re.compile(r"^\s*(\d+(?:\.\d+)?)\s*([kmgt]?)(i?)b?\s*$", re.IGNORECASE)


def parse_bytes(text: str) -> int:
    """Bytes of a size such as `4GiB` (1024-based with an i, 1000-based without).

    Raises InvalidInput when the text is no size.
    """
    match = _PATTERN.match(text)
    if match is None:
        raise InvalidInput(
            f"{text!r} is not a size in bytes", hint="write it like 4GiB, 512MiB or 1073741824"
        )
    number, prefix, binary = match.groups()
    return int(Decimal(number) * (1024 if binary else 1000) ** _POWERS[prefix.lower()])


def format_bytes(size_bytes: int) -> str:
    """A size for people, three digits or so: 1536 -> `1.5 KiB`."""
    size = float(size_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1024:
            return f"{size:.0f} {unit}" if unit == "B" or size >= 100 else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"
