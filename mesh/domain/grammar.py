"""What an answer has to look like: a value that travels with a request's sampling parameters."""

from enum import StrEnum

from mesh.domain.values import dataclass


class GrammarKind(StrEnum):
    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    LARK = "lark"
    """Lark's notation, as llguidance understands it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Grammar:
    """Every answer is one of its words, or the beginning of one where `max_tokens` cut it off."""

    kind: GrammarKind
    text: str
