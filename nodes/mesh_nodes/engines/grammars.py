"""Keeps answers to their grammars: which tokens may come next, by llguidance.

All that is known of a request follows from its tokens, so that it goes on alike wherever it moves.
A model's vocabulary is built when the first grammar asks for it, and matchers are, on a thread of
their own beside the request's prefill; only a first token waits for them. Before: `sampling`, with
a row of logits. After: the same row, what must not come at minus infinity.
"""

import json
import logging
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher, LLTokenizer

from mesh.domain.grammar import Grammar
from mesh.domain.steps import EngineRequest
from mesh.text.grammars import compiled

VOCABULARIES_MAX = 8
"""Of tens of MB each."""

log = logging.getLogger(__name__)


@cache
def _builder() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(1, thread_name_prefix="grammars")


@lru_cache(maxsize=VOCABULARIES_MAX)
def _vocabulary(
    tokenizer_json: Path, vocabulary_tokens: int, stop_ids: tuple[int, ...]
) -> LLTokenizer:
    """Takes a tenth of a second for each 16,000 tokens. Tokens that the model has no row of logits
    for, as those of images in a text model, can never come and are left out.
    """
    ends = [one for one in stop_ids if one < vocabulary_tokens] or None
    text = tokenizer_json.read_text(encoding="utf-8")
    try:
        return LLTokenizer(text, n_vocab=vocabulary_tokens, eos_token=ends)
    except ValueError:
        document = json.loads(text)
        _leave_out(document, vocabulary_tokens)
        return LLTokenizer(json.dumps(document), n_vocab=vocabulary_tokens, eos_token=ends)


def _leave_out(document: dict[str, Any], vocabulary_tokens: int) -> None:
    """All tokens of a tokenizer.json from this id on."""
    model, added = document["model"], document["added_tokens"]
    document["added_tokens"] = [one for one in added if one["id"] < vocabulary_tokens]
    if isinstance(model["vocab"], list):
        model["vocab"] = model["vocab"][:vocabulary_tokens]
        return
    gone = {text for text, token_id in model["vocab"].items() if token_id >= vocabulary_tokens}
    model["vocab"] = {text: one for text, one in model["vocab"].items() if text not in gone}
    pairs = [one if isinstance(one, list) else one.split(" ") for one in model.get("merges", ())]
    model["merges"] = [pair for pair in pairs if not {*pair, "".join(pair)} & gone]


def _matcher(
    grammar: Grammar, tokenizer_json: Path, vocabulary_tokens: int, stop_ids: tuple[int, ...]
) -> LLMatcher:
    vocabulary = _vocabulary(tokenizer_json, vocabulary_tokens, stop_ids)
    return LLMatcher(vocabulary, compiled(grammar), log_level=0)


class Constraint:
    """Of one request. `add` is told its tokens in their order."""

    def __init__(self, matcher: "Future[LLMatcher]", stop_ids: Sequence[int]) -> None:
        self._building = matcher
        self._stop_ids = np.array(stop_ids, np.int64)
        self._waiting: list[int] = []
        """Tokens that the matcher was not told yet."""
        self.failed = False
        """Nothing can follow: the grammar went beyond a bound, or tokens of elsewhere break it."""

    def add(self, tokens: Sequence[int]) -> None:
        self._waiting += tokens

    def restrict(self, row: npt.NDArray[np.float32]) -> None:
        """Leave of a row of logits [vocabulary] what may come next; where nothing may, the end."""
        bits = self._allowed()
        if bits is None:
            forbidden = np.ones(row.size, np.bool_)
            forbidden[self._stop_ids[self._stop_ids < row.size]] = False
        else:
            forbidden = np.unpackbits(~bits, count=row.size, bitorder="little").view(np.bool_)
        np.copyto(row, -np.inf, where=forbidden)

    def _allowed(self) -> npt.NDArray[np.uint8] | None:
        """A bit a token, the least first."""
        try:
            matcher = self._building.result()
            told, self._waiting = self._waiting, []
            if (not told or matcher.consume_tokens(told)) and not matcher.is_error():
                bits = np.frombuffer(matcher.compute_bitmask(), np.uint8)
                if not matcher.is_error():
                    return bits
            said = matcher.get_error()
        except Exception as error:
            said = f"{type(error).__name__}: {error}"
        self.failed = True
        log.error("an answer cannot be kept to its grammar any more: %s", said)
        return None


def constraint_of(
    request: EngineRequest, model_path: Path, vocabulary_tokens: int
) -> Constraint | None:
    """None: it may say what it likes."""
    grammar = request.sampling.grammar
    if grammar is None:
        return None
    matcher = _builder().submit(
        _matcher, grammar, model_path / "tokenizer.json", vocabulary_tokens, request.stop_token_ids
    )
    constraint = Constraint(matcher, request.stop_token_ids)
    constraint.add(request.output_tokens)
    return constraint
