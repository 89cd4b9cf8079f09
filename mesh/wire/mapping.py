"""Domain values to protobuf messages and back, by one mapping that is derived from both.

A dataclass and a message belong together field by field, by the fields' names. The dataclass's type
hints say what a value is, the message's descriptor how it is carried, and `Rule` says what neither
can. What a hint may be:

- str, bytes, int, float, bool: carried as it is.
- an id of `mesh.domain.ids`, or `Name`: a string, neither empty nor too long where something is
  done about it.
- StrEnum: a string, read as `Words` says.
- Annotated with a Range: the number, which must lie in the range.
- a dataclass: a message; where the message has no such field, the fields of that dataclass stand
  among its own.
- tuple[X, ...]: a repeated field, a map if X is a pair, or a message that holds nothing but a
  repeated field, which tells an empty tuple from None.
- X or None: a field with presence; where the field has none, its zero stands for None.

A field that is absent, or whose zero cannot be meant, has the dataclass's default.
"""

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import MISSING
from enum import StrEnum
from types import NoneType, UnionType
from typing import Annotated, Any, NewType, TypeVar, Union, get_args, get_origin, get_type_hints

from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from mesh.domain.ids import DeploymentName
from mesh.domain.ranges import NotEmpty, Range
from mesh.domain.values import dataclass
from mesh.wire.malformed import E, Words, identifier, known, member, nothing_known, require, within

M = TypeVar("M", bound=Message)
V = TypeVar("V")

Descriptor = Any
"""The stubs of protobuf know two of them, one for each implementation."""
FieldDescriptor = Any
Encode = Callable[[Any], Any]
Decode = Callable[[Any, Message, Words], Any]
"""From what the message's field holds, the message and how words are read."""
_NAMES_CHECKED_ELSEWHERE: frozenset[Any] = frozenset({DeploymentName})
"""`mesh.domain.checks` says what is wrong with a name that a user has chosen."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """What neither the type hints of a dataclass nor the message's descriptor say."""

    names: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Fields that have another name in the message."""
    required: frozenset[str] = frozenset()
    """Fields that must be present although the dataclass has a default."""
    tolerant: frozenset[str] = frozenset()
    """Fields in which a word of a later version is no fault: an element with one is left out, and a
    single one has the default.
    """
    check: Callable[[Any], None] | None = None
    """Raises InvalidInput where the fields do not fit together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ByHand:
    """A type with a codec of its own, in place of a mapping. `decode` is given the message and the
    name of the field that holds it, "" where none does.
    """

    encode: Encode
    decode: Callable[[Any, str], Any]


class Mappings:
    """All mappings by one set of rules, each made when it is first needed."""

    def __init__(self, rules: Mapping[type, Rule | ByHand]) -> None:
        self._rules = rules
        self._made: dict[tuple[type, str], _Codec] = {}
        self._members: dict[type, tuple[str, _Codec]] = {}
        self._oneofs: dict[type, str] = {}
        self._read: dict[tuple[type, str | None], _Codec] = {}
        """What reads the members of each kind of message, by their names in it."""

    def to_wire(self, value: Any, kind: type[M]) -> M:
        """The value as a message of this kind. Raises ValueError or TypeError for a value that the
        message cannot hold: a number out of range, text with a lone surrogate.
        """
        message: M = self.between(type(value), kind.DESCRIPTOR).encode(value)
        return message

    def from_wire(self, message: Message, kind: type[V], words: Words = member) -> V:
        """The value of this kind in the message. Raises InvalidInput for a malformed one."""
        value: V = self.between(kind, message.DESCRIPTOR).decode(message, message, words)
        return value

    def member_to_wire(self, value: Any, kind: type[M]) -> M:
        """A message of this kind, of whose oneof the member is the value: its message has the name
        of the value's class. Errors: see `to_wire`.
        """
        found = self._members.get(type(value))
        if found is None:
            descriptor: Descriptor = kind.DESCRIPTOR
            name = type(value).__name__
            (field,) = (f for f in descriptor.oneofs[0].fields if f.message_type.name == name)
            found = field.name, self.between(type(value), field.message_type)
            self._members[type(value)] = found
        in_message, codec = found
        return kind(**{in_message: codec.encode(value)})

    def member_from_wire(self, message: Message, kinds: Any, words: Words = member) -> Any:
        """The value in the message's oneof, of one of the classes in the union `kinds`. Raises
        InvalidInput for a malformed one, or none that this version knows.
        """
        of = type(message)
        oneof = self._oneofs.get(of)
        if oneof is None:
            descriptor: Descriptor = of.DESCRIPTOR
            oneof = self._oneofs[of] = descriptor.oneofs[0].name
        name = message.WhichOneof(oneof)
        codec = self._read.get((of, name))
        if codec is None:
            found: Descriptor = (getattr(message, name) if name else message).DESCRIPTOR
            kind = {kind.__name__: kind for kind in get_args(kinds)}.get(found.name)
            if kind is None:
                raise nothing_known(message)
            codec = self._read[of, name] = self.between(kind, found)
        part = getattr(message, name)
        return codec.decode(part, part, words)

    def between(self, kind: type, descriptor: Descriptor, field: str = "") -> "_Codec":
        """The codec between a class and a message, which the field of another may hold."""
        rule = self._rules.get(kind, _PLAIN)
        if isinstance(rule, ByHand):
            decode = rule.decode
            return _Codec(encode=rule.encode, decode=lambda raw, message, words: decode(raw, field))
        key = kind, descriptor.full_name
        if key not in self._made:
            self._made[key] = _Mapping(self, kind, descriptor, rule).codec
        return self._made[key]


_PLAIN = Rule()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Codec:
    encode: Encode
    decode: Decode


_AS_IT_IS = _Codec(encode=lambda value: value, decode=lambda raw, message, words: raw)


class _Mapping:
    """Between the fields of one dataclass and those of the same names of one message."""

    def __init__(self, mappings: Mappings, kind: type, descriptor: Descriptor, rule: Rule) -> None:
        self._kind = kind
        self._message = GetMessageClass(descriptor)
        self._check = rule.check
        self._encoders: list[tuple[str, str, bool, Encode | None]] = []
        """The field, its name in the message, whether it has presence there, and what encodes it
        where it is not as it is.
        """
        self._readers: list[tuple[str, str, Decode | None]] = []
        """The field, and what reads it from the message: to MISSING for the default."""
        self._flat: list[tuple[str, _Mapping]] = []
        """Dataclasses whose fields stand among the others of the message."""
        self._required: list[str] = []
        hints = get_type_hints(kind, include_extras=True)
        for one in dataclasses.fields(kind):
            name = rule.names.get(one.name, one.name)
            hint = hints[one.name]
            if name not in descriptor.fields_by_name:
                self._flat.append((one.name, _Mapping(mappings, hint, descriptor, _PLAIN)))
                continue
            field = descriptor.fields_by_name[name]
            default = one.default is not MISSING or one.default_factory is not MISSING
            optional, hint = _without_none(hint)
            needed = one.name in rule.required or not (default or optional)
            if needed and field.message_type is not None and not field.is_repeated:
                self._required.append(name)
            found = _codec(mappings, field, hint, tolerant=one.name in rule.tolerant)
            read = _reader(field, found, hint, optional=optional, default=default)
            if read is not None and one.name in rule.tolerant:
                read = _tolerant(read)
            encode = None if found is _AS_IT_IS else found.encode
            self._encoders.append((one.name, name, field.has_presence, encode))
            self._readers.append((one.name, name, read))
        self.codec = _Codec(encode=self._encode, decode=self._decode)

    def _encode(self, value: Any) -> Any:
        return self._message(**self._parts(value))

    def _parts(self, value: Any) -> dict[str, Any]:
        parts: dict[str, Any] = {}
        for name, in_message, has_presence, encode in self._encoders:
            part = getattr(value, name)
            if part or (has_presence and part is not None):
                parts[in_message] = part if encode is None else encode(part)
        for name, mapping in self._flat:
            parts |= mapping._parts(getattr(value, name))
        return parts

    def _decode(self, raw: Any, message: Message, words: Words) -> Any:
        require(raw, *self._required)
        parts = {}
        for name, in_message, read in self._readers:
            part = getattr(raw, in_message) if read is None else read(raw, raw, words)
            if part is not MISSING:
                parts[name] = part
        for name, mapping in self._flat:
            parts[name] = mapping._decode(raw, message, words)
        value = self._kind(**parts)
        if self._check is not None:
            self._check(value)
        return value


def _without_none(hint: Any) -> tuple[bool, Any]:
    """Whether the hint allows None, and the hint without it."""
    if get_origin(hint) not in (Union, UnionType):
        return False, hint
    (rest,) = [one for one in get_args(hint) if one is not NoneType]
    return True, rest


def _reader(
    field: FieldDescriptor, codec: _Codec, hint: Any, *, optional: bool, default: bool
) -> Decode | None:
    """Reads the field of a message, absent ones as the module says; None: it is as it is."""
    name, decode = field.name, codec.decode
    absent = None if optional else MISSING
    if field.has_presence:

        def if_present(raw: Any, message: Message, words: Words) -> Any:
            if not message.HasField(name):
                return absent
            return decode(getattr(message, name), message, words)

        return if_present
    zero_is_none = optional or (default and not _may_be_zero(hint))
    if codec is _AS_IT_IS and not zero_is_none:
        return None

    def as_found(raw: Any, message: Message, words: Words) -> Any:
        found = getattr(message, name)
        if zero_is_none and not found:
            return absent
        return decode(found, message, words)

    return as_found


def _may_be_zero(hint: Any) -> bool:
    if isinstance(hint, type) and issubclass(hint, StrEnum):
        return False
    return all(0.0 in one for one in _marks(hint) if isinstance(one, Range))


def _marks(hint: Any) -> tuple[Any, ...]:
    return get_args(hint)[1:] if get_origin(hint) is Annotated else ()


class _UnknownWord(Exception):
    """A word of a later version was read. It is raised where that is no fault."""


def _known_word(kind: type[E], text: str, message: Message, field: str) -> E:
    found = known(kind, text)
    if found is None:
        raise _UnknownWord
    return found


def _tolerant(read: Decode) -> Decode:
    def read_or_default(raw: Any, message: Message, words: Words) -> Any:
        try:
            return read(raw, message, _known_word if words is member else words)
        except _UnknownWord:
            return MISSING

    return read_or_default


def _codec(mappings: Mappings, field: FieldDescriptor, hint: Any, *, tolerant: bool) -> _Codec:
    """What the field holds as a whole."""
    if get_origin(hint) is not tuple:
        return _element(mappings, field, hint)
    kind, *_ = get_args(hint)
    inner = field.message_type
    if not field.is_repeated:  # a message that tells an empty tuple from none
        (held,) = inner.fields
        codec = _elements(_element(mappings, held, kind), tolerant=tolerant)
        wrap = GetMessageClass(inner)
        return _Codec(
            encode=lambda values: wrap(**{held.name: codec.encode(values)}),
            decode=lambda raw, message, words: codec.decode(getattr(raw, held.name), raw, words),
        )
    if inner is not None and inner.GetOptions().map_entry:
        key, value = (
            _element(mappings, inner.fields_by_name[name], part)
            for name, part in zip(("key", "value"), get_args(kind), strict=True)
        )
        pairs = _elements(
            _Codec(
                encode=lambda pair: (key.encode(pair[0]), value.encode(pair[1])),
                decode=lambda raw, message, words: (
                    key.decode(raw[0], message, words),
                    value.decode(raw[1], message, words),
                ),
            ),
            tolerant=tolerant,
        )
        return _Codec(
            encode=lambda values: dict(pairs.encode(values)),
            # By their keys: protobuf keeps a map's pairs in no order.
            decode=lambda raw, message, words: pairs.decode(sorted(raw.items()), message, words),
        )
    return _elements(_element(mappings, field, kind), tolerant=tolerant)


def _elements(codec: _Codec, *, tolerant: bool) -> _Codec:
    """A tuple of what the codec is for."""
    if codec is _AS_IT_IS:
        # A slice is made at once, where `tuple` asks for each element by its index.
        return _Codec(
            encode=lambda values: values,
            decode=lambda raw, message, words: tuple(raw[:]) if raw else (),
        )
    encode, decode = codec.encode, _tolerant(codec.decode) if tolerant else codec.decode

    def decoded(raw: Any, message: Message, words: Words) -> tuple[Any, ...]:
        if not raw:
            return ()
        found = [decode(one, message, words) for one in raw]
        return tuple([one for one in found if one is not MISSING])

    return _Codec(encode=lambda values: [encode(value) for value in values], decode=decoded)


def _element(mappings: Mappings, field: FieldDescriptor, hint: Any) -> _Codec:
    """A single value."""
    name = field.name
    if isinstance(hint, NewType):
        if hint in _NAMES_CHECKED_ELSEWHERE:
            return _AS_IT_IS
        return _named(name)
    if get_origin(hint) is Annotated:
        (mark,) = _marks(hint)
        return _named(name) if isinstance(mark, NotEmpty) else _within(mark, name)
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        return mappings.between(hint, field.message_type, name)
    if issubclass(hint, StrEnum):
        return _Codec(
            encode=lambda word: word.value,
            decode=lambda raw, message, words: words(hint, raw, message, name),
        )
    return _AS_IT_IS


def _within(numbers: Range, field: str) -> _Codec:
    return _Codec(
        encode=lambda value: value,
        decode=lambda raw, message, words: within(numbers, raw, message, field),
    )


def _named(field: str) -> _Codec:
    """Ids are checked where something is done about them: people are shown what there is."""

    def checked(raw: str, message: Message, words: Words) -> str:
        return identifier(raw, message, field) if words is member else raw

    return _Codec(encode=lambda value: value, decode=checked)
