"""Log-probabilities of output tokens as clients of OpenAI's protocol are told them.

Two shapes: a list of objects for chats, parallel lists for completions. A token's bytes come from
the model's tokenizer, since a token may be part of a character. Before: `answers`, which has a
chunk's tokens.
"""

import codecs
from collections.abc import Callable

from pydantic import BaseModel

from mesh.domain.invocation import Tokens
from mesh.domain.request import TokenLogprobs

LOGPROB_MIN = -9999.0
"""As OpenAI says it: JSON has no infinity, which is that of a token that cannot come."""
TokenBytes = Callable[[int], bytes]


class TopLogprob(BaseModel):
    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(BaseModel):
    content: list[TokenLogprob]
    refusal: None = None


class CompletionLogprobs(BaseModel):
    """`text_offset`: characters of the answer before each token, or before the one that it is a
    part of. Such tokens are told by their bytes, as OpenAI does: as texts they are all alike.
    """

    tokens: list[str]
    token_logprobs: list[float | None]
    """`None` for the first token of a prompt, which follows nothing."""
    top_logprobs: list[dict[str, float] | None] | None
    text_offset: list[int]


def chat_logprobs(tokens: Tokens, bytes_of: TokenBytes) -> ChatLogprobs:
    content = []
    for token_id, told in zip(tokens.token_ids, tokens.logprobs, strict=True):
        top = [_top_logprob(bytes_of(one), logprob) for one, logprob in told.top]
        drawn = _top_logprob(bytes_of(token_id), told.logprob)
        content.append(TokenLogprob(**dict(drawn), top_logprobs=top))
    return ChatLogprobs(content=content)


class Characters:
    """Counts those of an answer, whose tokens may be parts of them."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._count = 0

    def before(self, token: bytes) -> int:
        """Before this further token; those that it completes are counted from then on."""
        before = self._count
        self._count += len(self._decoder.decode(token))
        return before


def completion_logprobs(
    tokens: Tokens, bytes_of: TokenBytes, characters: Characters, *, echo: bool = False
) -> CompletionLogprobs:
    """`characters`: those of the answer's earlier tokens are counted. `echo`: the prompt's tokens
    come before the answer's.
    """
    token_ids, logprobs = list(tokens.token_ids), list[TokenLogprobs | None](tokens.logprobs)
    if echo and tokens.prompt_token_ids:
        token_ids = [*tokens.prompt_token_ids, *token_ids]
        logprobs = [None, *tokens.prompt_logprobs, *logprobs]
    parts = [bytes_of(token_id) for token_id in token_ids]
    texts = [token_name(part) for part in parts]
    tops = [
        None
        if told is None
        else {token_name(bytes_of(one)): _finite(logprob) for one, logprob in told.top}
        | {text: _finite(told.logprob)}
        for text, told in zip(texts, logprobs, strict=True)
    ]
    return CompletionLogprobs(
        tokens=texts,
        token_logprobs=[None if told is None else _finite(told.logprob) for told in logprobs],
        top_logprobs=tops if any(told.top for told in logprobs if told is not None) else None,
        text_offset=[characters.before(part) for part in parts],
    )


class PromptLogprob(BaseModel):
    """What vLLM tells of a token in the place of one of a prompt's."""

    logprob: float
    rank: int | None
    """`None` for one that is none of the likeliest."""
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]
"""For each token of a prompt what could have been there, by token ids; `None` for the first."""


def prompt_logprobs(tokens: Tokens, bytes_of: TokenBytes) -> PromptLogprobs:
    told: PromptLogprobs = [None]
    for token_id, one in zip(tokens.prompt_token_ids[1:], tokens.prompt_logprobs, strict=True):
        found: list[tuple[int, float, int | None]] = [
            (token, logprob, rank) for rank, (token, logprob) in enumerate(one.top, 1)
        ]
        if token_id not in dict(one.top):
            found.insert(0, (token_id, one.logprob, None))
        told.append(
            {
                str(token): PromptLogprob(
                    logprob=_finite(logprob), rank=rank, decoded_token=_text(bytes_of(token))
                )
                for token, logprob, rank in found
            }
        )
    return told


def _top_logprob(token: bytes, logprob: float) -> TopLogprob:
    return TopLogprob(token=_text(token), logprob=_finite(logprob), bytes=list(token))


def token_name(token: bytes) -> str:
    """Its text; of one that is a part of a character, its bytes."""
    try:
        return token.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token)


def _text(token: bytes) -> str:
    return token.decode("utf-8", "replace")


def _finite(logprob: float) -> float:
    return max(logprob, LOGPROB_MIN)
