"""Shares and results as locust's messages carry them: dictionaries of plain values, and back."""

from typing import Any

from cattrs import Converter

from mesh.domain.reasons import FinishReason, RefusalReason
from mesh.evaluation.replay.results import CallResult
from mesh_load.share import Share

_End = FinishReason | RefusalReason
_FINISHES = frozenset(FinishReason)


def _end(word: str, _: object) -> _End:
    return FinishReason(word) if word in _FINISHES else RefusalReason(word)


_CONVERTER = Converter()
_CONVERTER.register_structure_hook(_End, _end)


def plain_of(value: Share | CallResult) -> dict[str, Any]:
    plain: dict[str, Any] = _CONVERTER.unstructure(value)
    return plain


def share_of(plain: dict[str, Any]) -> Share:
    return _CONVERTER.structure(plain, Share)


def result_of(plain: dict[str, Any]) -> CallResult:
    return _CONVERTER.structure(plain, CallResult)
