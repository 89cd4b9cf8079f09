"""Where two lists of actions differ, in words: which field, what was recorded, what is decided."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass

DIFFERENCES_MAX = 20
SHOWN_MAX = 6
"""At most so many items of a tuple or a mapping are shown."""
TEXT_MAX = 200
"""At most so many characters of one value are shown."""
NOTHING = "nothing"


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """`where` is a path such as `SendCommand[1].command.kv_blocks`: the second action's."""

    where: str
    recorded: str
    decided: str


def differences(
    recorded: tuple[object, ...], decided: tuple[object, ...]
) -> tuple[Difference, ...]:
    """The first `DIFFERENCES_MAX`, in the order of the actions; none when they are equal."""
    found: list[Difference] = []
    for number in range(max(len(recorded), len(decided))):
        one = recorded[number] if number < len(recorded) else None
        other = decided[number] if number < len(decided) else None
        named = other if one is None else one
        found += _between(f"{type(named).__name__}[{number}]", one, other)
        if len(found) >= DIFFERENCES_MAX:
            break
    return tuple(found[:DIFFERENCES_MAX])


def _between(where: str, one: object, other: object) -> Iterator[Difference]:
    if one == other:
        return
    if is_dataclass(one) and not isinstance(one, type) and type(one) is type(other):
        for field in fields(one):
            left, right = getattr(one, field.name), getattr(other, field.name)
            yield from _between(f"{where}.{field.name}", left, right)
    elif isinstance(one, tuple) and isinstance(other, tuple) and len(one) == len(other):
        for number, (left, right) in enumerate(zip(one, other, strict=True)):
            yield from _between(f"{where}[{number}]", left, right)
    else:
        yield Difference(where=where, recorded=shown(one), decided=shown(other))


def shown(value: object) -> str:
    """A value in a line, with the ends of what is long left out."""
    text = _shown(value)
    return text if len(text) <= TEXT_MAX else text[: TEXT_MAX - 1] + "…"


def _shown(value: object) -> str:
    if value is None:
        return NOTHING
    if is_dataclass(value) and not isinstance(value, type):
        pairs = (f"{f.name}={_shown(getattr(value, f.name))}" for f in fields(value))
        return f"{type(value).__name__}({', '.join(pairs)})"
    if isinstance(value, tuple):
        more = f", … {len(value)} in all" if len(value) > SHOWN_MAX else ""
        return f"({', '.join(_shown(item) for item in value[:SHOWN_MAX])}{more})"
    if isinstance(value, Mapping):
        first = list(value.items())[:SHOWN_MAX]
        more = f", … {len(value)} in all" if len(value) > SHOWN_MAX else ""
        return "{" + ", ".join(f"{key}: {_shown(item)}" for key, item in first) + more + "}"
    return repr(value) if type(value) is str else str(value)
