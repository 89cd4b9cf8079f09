"""Keeps answers to their grammars: which tokens may come next, by llguidance.

All that is known of a request follows from its tokens, so that it goes on alike wherever it moves.
A model's vocabulary is built when the first grammar asks for it, and matchers are, on a thread of
their own beside the request's prefill; only a first token waits for them. Before: `sampling`, with
a row of logits. After: the same row, what must not come at minus infinity.
"""

import logging
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache, lru_cache
from pathlib import Path

import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper
from tokenizers import Tokenizer

from mesh.domain.grammar import Grammar
from mesh.domain.steps import EngineRequest
from mesh.domain.text import TextAssets
from mesh.text.grammars import compiled
from mesh.text.recognised import LITERAL_CHARS_MAX, is_quick_on_literals
from mesh.text.tokenizer import TextCodec

VOCABULARIES_MAX = 8
"""This many vocabularies are kept; each takes tens of MB."""
_MARK = "\x02"
"""A character that is a token of its own in every vocabulary that has bytes."""

_LONGEST_BYTES_MAX = 64
"""Longer tokens are not tried where a literal is taken apart in Python."""
BUILD_S_MAX = 10.0
"""For a matcher, on whose thread others may be built before it."""
CPU_S_MAX, CPU_S_MAX_PER_TOKEN = 0.25, 0.02
"""What one request may take of the compute thread's time, in all and for each token: other requests
wait meanwhile.
"""

log = logging.getLogger(__name__)


@cache
def _builder() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(1, thread_name_prefix="grammars")


class _Literals:
    """The tokens of text that a grammar forces, as llguidance's `TokenizerWrapper` asks for them.

    llguidance's own reading of tokenizer.json takes the name of a special token for that token,
    wherever it stands: `"a<|im_end|>b"` would end an answer amid a string.
    """

    def __init__(self, tokenizer_json: bytes, vocabulary_tokens: int) -> None:
        codec = TextCodec(TextAssets(tokenizer_json=tokenizer_json))
        self._tokenizer = Tokenizer.from_buffer(tokenizer_json)
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._tokenizer.encode_special_tokens = True
        self._is_quick = is_quick_on_literals(tokenizer_json)
        self.tokens = [codec.token_bytes(token_id) for token_id in range(vocabulary_tokens)]
        self.special_token_ids = sorted(codec.special_ids & set(range(vocabulary_tokens)))
        self.eos_token_id = 0
        self.bos_token_id = None
        ordinary = (n for n in range(vocabulary_tokens) if n not in codec.special_ids)
        self._ids = {self.tokens[n]: n for n in ordinary if self.tokens[n]}
        self._bytes_max = min(max(map(len, self._ids), default=1), _LONGEST_BYTES_MAX)

    def __call__(self, text: str) -> list[int]:
        if type(text) is not str:
            raise TypeError("text, no bytes")  # by which llguidance learns what it may give
        wanted = text.encode()
        # Some tokenizers begin every text with a space, which is then that of the mark.
        for mark in ("", _MARK) if self._is_quick and len(text) <= LITERAL_CHARS_MAX else ():
            ids = self._tokenizer.encode(mark + text, add_special_tokens=False).ids
            said = [self.tokens[n] if n < len(self.tokens) else b"" for n in ids]
            marks = next((n for n in range(len(ids)) if said[n].endswith(_MARK.encode())), -1) + 1
            if b"".join(said[marks:]) == wanted:
                return ids[marks:]
        return self._longest(wanted)

    def _longest(self, wanted: bytes) -> list[int]:
        """The longest token each time, up to where none fits."""
        ids, at = list[int](), 0
        while at < len(wanted):
            ends = range(min(len(wanted), at + self._bytes_max), at, -1)
            end = next((end for end in ends if wanted[at:end] in self._ids), None)
            if end is None:
                break
            ids.append(self._ids[wanted[at:end]])
            at = end
        return ids


@lru_cache(maxsize=VOCABULARIES_MAX)
def _vocabulary(
    tokenizer_json: Path, vocabulary_tokens: int, stop_ids: tuple[int, ...]
) -> LLTokenizer:
    """Takes 0.25 s for each 16,000 tokens. Tokens that the model has no row of logits
    for, as those of images in a text model, can never come and are left out.
    """
    ends = [one for one in stop_ids if one < vocabulary_tokens] or None
    wrapped = TokenizerWrapper(_Literals(tokenizer_json.read_bytes(), vocabulary_tokens))
    return LLTokenizer(wrapped, n_vocab=vocabulary_tokens, eos_token=ends)


def _matcher(
    grammar: Grammar, tokenizer_json: Path, vocabulary_tokens: int, stop_ids: tuple[int, ...]
) -> LLMatcher:
    vocabulary = _vocabulary(tokenizer_json, vocabulary_tokens, stop_ids)
    return LLMatcher(vocabulary, compiled(grammar), log_level=0)


class Constraint:
    """Keeps one request to its grammar. `add` is told the request's tokens in their order."""

    def __init__(self, matcher: "Future[LLMatcher]", stop_ids: Sequence[int]) -> None:
        self._building = matcher
        self._stop_ids = np.array(stop_ids, np.int64)
        self._cpu_s, self._cpu_s_max = 0.0, CPU_S_MAX
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
        begun_s = time.thread_time()
        try:
            matcher = self._building.result(BUILD_S_MAX)
            if self._cpu_s > self._cpu_s_max:
                raise TimeoutError(f"it has taken more than {self._cpu_s_max:.2f} s of computing")
            told, self._waiting = self._waiting, []
            if (not told or matcher.consume_tokens(told)) and not matcher.is_error():
                bits = np.frombuffer(matcher.compute_bitmask(), np.uint8)
                if not matcher.is_error():
                    return bits
            said = matcher.get_error()
        except BaseException as error:  # a library's panic is no Exception
            said = f"{type(error).__name__}: {error}"
        finally:
            self._cpu_s += time.thread_time() - begun_s
            self._cpu_s_max += CPU_S_MAX_PER_TOKEN
        self.failed = True
        log.error("an answer cannot be kept to its grammar any more: %s", said)
        return None


def constraint_of(
    request: EngineRequest, model_path: Path, vocabulary_tokens: int
) -> Constraint | None:
    """The constraint of a request, or `None` when it has no grammar."""
    grammar = request.sampling.grammar
    if grammar is None:
        return None
    matcher = _builder().submit(
        _matcher, grammar, model_path / "tokenizer.json", vocabulary_tokens, request.stop_token_ids
    )
    constraint = Constraint(matcher, request.stop_token_ids)
    constraint.add(request.output_tokens)
    return constraint
