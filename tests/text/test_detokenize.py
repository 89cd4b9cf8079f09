"""Streaming detokenisation: whole characters, nothing lost, resumable anywhere."""

from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers

from mesh.domain.text import TextAssets
from mesh.text.detokenize import REPLACEMENT, Detokenizer
from mesh.text.tokenizer import TextCodec

TEXTS = st.text(st.characters(codec="utf-8", exclude_characters=REPLACEMENT + "<|>"))
PROMPT = (40, 50, 60)


def pieces(codec: TextCodec, tokens: tuple[int, ...]) -> list[str]:
    detokenizer = Detokenizer(codec, prompt=PROMPT)
    return [*(detokenizer.push(token) for token in tokens), detokenizer.flush()]


@given(TEXTS)
def test_pieces_are_whole_characters_and_add_up_to_the_text(codec: TextCodec, text: str) -> None:
    tokens = codec.encode(text)[1:]
    given_out = pieces(codec, tokens)
    assert all(REPLACEMENT not in piece for piece in given_out)
    assert "".join(given_out) == text


@given(TEXTS, st.data())
def test_a_restart_goes_on_the_same(codec: TextCodec, text: str, data: st.DataObject) -> None:
    """Also in the middle of a character, where a request may move to another node."""
    tokens = codec.encode(text)[1:]
    cut = data.draw(st.integers(0, len(tokens)))
    resumed = Detokenizer(codec, prompt=PROMPT, output=tokens[:cut])
    rest = [*(resumed.push(token) for token in tokens[cut:]), resumed.flush()]
    assert rest == pieces(codec, tokens)[cut:]


def test_a_character_is_given_out_when_its_last_byte_comes(codec: TextCodec) -> None:
    tokens = codec.encode("é🙂")[1:]
    given_out = pieces(codec, tokens)
    assert [piece for piece in given_out if piece] == ["é", "🙂"]
    assert len(tokens) > 2, "the tokenizer does split them"


def test_an_incomplete_character_at_the_end_is_not_given_out(codec: TextCodec) -> None:
    tokens = codec.encode("a🙂")[1:-1]
    assert "".join(pieces(codec, tokens)) == "a"


def test_bytes_that_are_no_character_do_not_hold_the_text_back_for_ever(codec: TextCodec) -> None:
    broken = codec.encode("🙂")[1:2] * 40
    detokenizer = Detokenizer(codec)
    assert "".join(detokenizer.push(token) for token in broken).startswith(REPLACEMENT)


def test_special_tokens_are_not_text(codec: TextCodec) -> None:
    detokenizer = Detokenizer(codec, prompt=PROMPT)
    tokens = (*codec.encode("cat")[1:], 4, *codec.encode("mat")[1:])
    assert "".join(map(detokenizer.push, tokens)) + detokenizer.flush() == "catmat"


@given(st.lists(st.integers(5, 319), max_size=24))
def test_any_tokens_at_all_add_up_to_their_text(codec: TextCodec, tokens: list[int]) -> None:
    """Also those whose bytes are no UTF-8, as a model at a high temperature writes them."""
    text = "".join(pieces(codec, tuple(tokens)))
    assert text.rstrip(REPLACEMENT) == codec.decode(tokens).rstrip(REPLACEMENT)


def sentencepiece_codec() -> TextCodec:
    """As Llama 2's: words begin with ▁, rare characters are bytes, a text loses its first space."""
    vocabulary = {"<s>": 0, "</s>": 1} | {f"<0x{byte:02X}>": 2 + byte for byte in range(256)}
    for word in ("▁", "a", "b", "▁a", "▁ab", "é"):
        vocabulary[word] = len(vocabulary)
    merges = [("▁", "a"), ("▁a", "b")]
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.add_special_tokens(["<s>", "</s>"])
    return TextCodec(TextAssets(tokenizer_json=tokenizer.to_str().encode()))


SENTENCEPIECE = sentencepiece_codec()


@given(st.text("ab é🙂中", max_size=20))
def test_spaces_and_bytes_of_sentencepiece_come_out_in_place(text: str) -> None:
    tokens = SENTENCEPIECE.encode(text)
    detokenizer = Detokenizer(SENTENCEPIECE, prompt=SENTENCEPIECE.encode("ab"))
    out = [*map(detokenizer.push, tokens), detokenizer.flush()]
    assert "".join(out) == (" " + text if text else "")
    assert REPLACEMENT not in "".join(out)


def test_a_special_token_takes_no_space_from_what_follows() -> None:
    ab = SENTENCEPIECE.encode("ab")
    detokenizer = Detokenizer(SENTENCEPIECE, prompt=ab)
    assert "".join(map(detokenizer.push, (*ab, 1, *ab))) == " ab ab"
