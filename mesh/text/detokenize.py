"""Streaming detokenisation that never splits a character.

A token may end in the middle of a UTF-8 sequence, and what a token reads like may depend on the one
before it. So a short window of tokens is decoded twice, with and without the new ones, and the
difference is the new text; a window that ends in an incomplete character waits for the next token.
"""

from collections.abc import Sequence

from mesh.text.tokenizer import TextCodec

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
CONTEXT_TOKENS = 6
"""Prompt tokens before the output, so that its first token reads as it does in place."""
HELD_TOKENS_MAX = 16
"""No character is longer in tokens: whatever is held for longer is no beginning of one."""


class Detokenizer:
    """The output text of one request, piece by piece.

    Built with the tokens so far, it goes on exactly as the one that produced them would have.
    """

    def __init__(
        self, codec: TextCodec, *, prompt: Sequence[int] = (), output: Sequence[int] = ()
    ) -> None:
        self._codec = codec
        self._window = list(prompt[-CONTEXT_TOKENS:])
        self._read = len(self._window)
        """Tokens of the window whose text has been given out."""
        given = codec.decode(self._window) if self._window else ""
        self._given = given.rstrip(REPLACEMENT)
        """The window's text so far; a prompt may end in the middle of a character."""
        for token_id in output:
            self.push(token_id)

    def push(self, token_id: int) -> str:
        """The whole characters that this token completes; empty while one is incomplete."""
        if token_id in self._codec.special_ids:
            # No text, and no place in the window: what follows one that held nothing else would
            # be decoded as the beginning of a text, which some tokenizers strip of its space.
            return ""
        self._window.append(token_id)
        text = self._codec.decode(self._window)
        held = len(self._window) - self._read
        if text.endswith(REPLACEMENT) and held <= HELD_TOKENS_MAX:
            return ""
        piece = text[len(self._given) :]
        self._window = self._window[self._read :]
        self._read = len(self._window)
        self._given = self._codec.decode(self._window)
        return piece

    def flush(self) -> str:
        """What is held back when the output ends, without the incomplete character at its end."""
        text = self._codec.decode(self._window)
        piece = text[len(self._given) :].rstrip(REPLACEMENT)
        self._given += piece
        return piece
