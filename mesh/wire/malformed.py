"""What is wrong with a message that cannot be meant, said as InvalidInput.

The codecs use these checks on everything that comes off the wire. Bytes that are no message at all
become a `Malformed` in place of one, so that the call's handler can answer for them. A word that
only a later version knows is wrong where something is done about it, and else shown as it is.
"""

from collections.abc import Callable
from enum import StrEnum
from typing import Protocol, TypeVar

from google.protobuf.message import DecodeError, Message

from mesh.domain.errors import InvalidInput
from mesh.domain.ranges import NAME_CHARS_MAX, Range

E = TypeVar("E", bound=StrEnum)
M = TypeVar("M", bound=Message)
N = TypeVar("N", int, float)

UNKNOWN_MARK = "?"
"""After a word that this version does not know."""


class Malformed:
    """Stands for bytes that could not be parsed."""

    def __init__(self, message: str) -> None:
        self.message = message


def lenient(parse: Callable[[bytes], M]) -> Callable[[bytes], M | Malformed]:
    """A deserialiser that gives a Malformed where `parse` would raise."""

    def parsed(raw: bytes) -> M | Malformed:
        try:
            return parse(raw)
        except DecodeError as error:
            return Malformed(f"no valid message: {error}")

    return parsed


def known(kind: type[E], text: str) -> E | None:
    """The enum's member; None for a word of another version's."""
    try:
        return kind(text)
    except ValueError:
        return None


def member(kind: type[E], text: str, message: Message, field: str) -> E:
    """The enum's member. Raises InvalidInput for a text that is none."""
    found = known(kind, text)
    if found is None:
        allowed = ", ".join(kind)
        raise InvalidInput(
            f"{_name(message)}.{field} is {text!r}; it must be one of {allowed}",
            hint="both ends of the wire should run the same version of mesh",
        )
    return found


def shown(kind: type[E], text: str, message: Message, field: str) -> E:
    """The enum's member; for a word of another version's one that is equal to none, whose value is
    the word and whose text has UNKNOWN_MARK after it. Raises InvalidInput for a text that is none.
    """
    found = known(kind, text)
    if found is None:
        found = str.__new__(kind, identifier(text, message, field) + UNKNOWN_MARK)
        found._name_ = found._value_ = text
    return found


class Words(Protocol):
    """How a codec reads words: as `member` where something is done about them, else as `shown`."""

    def __call__(self, kind: type[E], text: str, message: Message, field: str) -> E: ...


def require(message: Message, *fields: str) -> None:
    """Raise InvalidInput when one of these message fields is missing."""
    for field in fields:
        if not message.HasField(field):
            raise InvalidInput(f"{_name(message)} lacks {field}")


def within(numbers: Range, value: N, message: Message, field: str) -> N:
    """The value. Raises InvalidInput when it is outside the range."""
    if value not in numbers:
        raise InvalidInput(f"{_name(message)}.{field} is {value:g}; it must be {numbers}")
    return value


def identifier(text: str, message: Message, field: str) -> str:
    """An id that is neither empty nor absurdly long. Raises InvalidInput otherwise."""
    if not text:
        raise InvalidInput(f"{_name(message)} lacks {field}")
    if len(text) > NAME_CHARS_MAX:
        raise InvalidInput(
            f"{_name(message)}.{field} has {len(text)} characters; "
            f"at most {NAME_CHARS_MAX} are allowed"
        )
    return text


def nothing_known(message: Message) -> InvalidInput:
    """The error for a oneof with no member that this version knows."""
    return InvalidInput(
        f"{_name(message)} holds nothing that this version knows",
        hint="both ends of the wire should run the same version of mesh",
    )


def _name(message: Message) -> str:
    return message.DESCRIPTOR.name
