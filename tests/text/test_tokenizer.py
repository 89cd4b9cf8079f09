"""Encoding prompts and conversations."""

import json
import sys
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, processors

from mesh.domain.errors import InvalidInput, TornModel
from mesh.domain.text import ChatMessage, TextAssets, ToolFormat
from mesh.text.thoughts import Thinking
from mesh.text.tokenizer import TextCodec
from mesh.text.tool_calls import turn_of_calls
from tests.text.conftest import tiny_assets

USER = ChatMessage(role="user", content="the cat")
WORDS = st.text(st.characters(codec="utf-8", exclude_characters="<|>"))


@pytest.fixture(scope="module")
def assets() -> TextAssets:
    return tiny_assets()


@given(WORDS)
def test_any_text_comes_back_from_its_tokens(codec: TextCodec, text: str) -> None:
    assert codec.decode(codec.encode(text)) == text


def test_a_prompt_begins_as_the_model_wants_it_and_once_only(assets: TextAssets) -> None:
    with_bos = TextCodec(assets).encode("cat")
    without = TextCodec(replace(assets, add_bos=False)).encode("cat")
    assert with_bos[1:] == without
    assert TextCodec(assets).encode("<s>cat") == with_bos


@given(WORDS)
def test_the_bytes_of_tokens_are_those_of_the_text(codec: TextCodec, text: str) -> None:
    assert b"".join(codec.token_bytes(one) for one in codec.encode_part(text)) == text.encode()


def test_special_tokens_have_their_names_and_unknown_ones_nothing(codec: TextCodec) -> None:
    (begins,) = codec.encode("")
    assert codec.token_bytes(begins) == b"<s>"
    assert codec.token_bytes(codec.vocabulary_tokens) == b""


def test_bytes_of_tokens_in_vocabularies_of_sentencepiece() -> None:
    tokens = ["<unk>", "<0xC3>", "\N{LOWER ONE EIGHTH BLOCK}cat", "é"]
    vocabulary = {token: n for n, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
    codec = TextCodec(TextAssets(tokenizer_json=tokenizer.to_str().encode()))
    told = [codec.token_bytes(token_id) for token_id in range(1, 4)]
    assert told == [b"\xc3", b" cat", "é".encode()]


def test_a_byte_level_token_of_other_characters_stands_for_itself() -> None:
    """One of them took the log-probabilities and grammars of the whole model."""
    tokens = ["\u0120cat", "a b", "\u732b"]
    tokenizer = Tokenizer(models.BPE(vocab={one: n for n, one in enumerate(tokens)}, merges=[]))
    tokenizer.decoder = decoders.ByteLevel()
    codec = TextCodec(TextAssets(tokenizer_json=tokenizer.to_str().encode()))
    for token_id, text in enumerate([" cat", "a b", "\u732b"]):
        assert codec.token_bytes(token_id) == text.encode() == codec.decode([token_id]).encode()


def test_a_part_of_a_prompt_has_no_beginning(assets: TextAssets) -> None:
    codec = TextCodec(replace(assets, add_bos=True))
    assert codec.encode_part("one two") == codec.encode("one two")[1:]


def test_a_gap_is_filled_by_the_tokens_that_a_model_has_for_it(assets: TextAssets) -> None:
    with pytest.raises(InvalidInput, match="no tokens for filling in") as none:
        TextCodec(assets).encode_fill("the ", " cat")
    assert none.value.field == "suffix"
    tokenizer = Tokenizer.from_str(assets.tokenizer_json.decode())
    marks = ["<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"]
    tokenizer.add_special_tokens(marks)
    codec = TextCodec(replace(assets, tokenizer_json=tokenizer.to_str().encode()))
    before, between, after = (tokenizer.token_to_id(mark) for mark in marks)
    given = (before, *codec.encode_part("one"), between, *codec.encode_part("two"), after)
    assert codec.encode_fill("one", "two") == (*codec.encode(""), *given)


def test_a_conversation_is_rendered_for_the_answer(codec: TextCodec) -> None:
    system = ChatMessage(role="system", content="be brief")
    assert codec.render_chat([system, USER]) == (
        "<s><|system|>be brief<|end|><|user|>the cat<|end|><|assistant|>"
    )
    assert codec.encode_chat([USER]).count(codec.encode("")[0]) == 1, "the beginning, once"


def test_a_template_is_given_names_of_speakers_and_what_else_it_knows(assets: TextAssets) -> None:
    template = "{% for m in messages %}{{ m.name }}:{{ m.content }}{% endfor %}{{ thinking }}"
    codec = TextCodec(replace(assets, chat_template=template))
    named = replace(USER, name="ann")
    assert codec.render_chat([named, USER]) == "ann:the cat:the cat"
    assert codec.render_chat([USER], '{"thinking": true}') == ":the catTrue"
    for kwargs, said in (("{", "no JSON"), ("[1]", "no JSON object"), ('{"tools": 1}', "tools")):
        with pytest.raises(InvalidInput, match=said) as caught:
            codec.render_chat([USER], kwargs)
        assert caught.value.field == "chat_template_kwargs"


def test_what_the_template_refuses_is_the_callers_mistake(codec: TextCodec) -> None:
    with pytest.raises(InvalidInput, match="role wizard"):
        codec.encode_chat([ChatMessage(role="wizard", content="x")])
    with pytest.raises(InvalidInput, match="at least one message"):
        codec.encode_chat([])


@pytest.mark.parametrize("named", [True, False])
def test_several_calls_of_a_turn_go_one_by_one_where_a_template_wants_that(
    assets: TextAssets, named: bool
) -> None:
    """As Llama 3's does, though the model may answer with several."""
    template = (
        "{% for m in messages %}{% if m.tool_calls %}{% if m.tool_calls | length != 1 %}"
        "{{ raise_exception('one call at once') }}{% endif %}"
        "{{ m.content }}{{ m.tool_calls[0].function.name }}"
        "{{ m.tool_calls[0].function.arguments | items | list }}"
        "{% else %}{{ m.role }}{{ m.content }}{% endif %};{% endfor %}"
    )
    codec = TextCodec(replace(assets, chat_template=template))
    calls = turn_of_calls([("1", "f", {}), ("2", "g", {"a": 1}), ("3", "h", '{"b": "K')])
    order = [("2", "G"), ("1", "F"), ("3", "H")] if named else [("", "F"), ("", "G"), ("", "H")]
    asked = [
        ChatMessage(role="user", content="hi"),
        ChatMessage(role="assistant", content="so", tool_calls=calls),
        *(ChatMessage(role="tool", content=text, tool_call_id=id_) for id_, text in order),
        ChatMessage(role="user", content="ho"),
    ]
    assert codec.render_chat(asked) == (
        "userhi;sof[];toolF;g[('a', 1)];toolG;h[('b', 'K')];toolH;userho;"
    )


def test_a_model_without_a_template_says_so(assets: TextAssets) -> None:
    with pytest.raises(InvalidInput, match="no chat template") as caught:
        TextCodec(replace(assets, chat_template=None)).encode_chat([USER])
    assert "--raw" in caught.value.hint


def test_a_template_cannot_reach_the_process(assets: TextAssets) -> None:
    evil = "{{ ''.__class__.__mro__[1].__subclasses__() }}"
    with pytest.raises(InvalidInput, match="fails on these messages"):
        TextCodec(replace(assets, chat_template=evil)).encode_chat([USER])


@pytest.mark.parametrize(
    ("template", "why"),
    [
        ("x\n{% if %}", "Expected an expression, got 'end of statement block' at line 2"),
        ("{% frobnicate %}", "unknown tag 'frobnicate'.* at line 1"),
        ("{{ [" + "(" * 5000, "recursion"),
        ("{% break %}", "'break' outside loop"),
    ],
)
def test_a_broken_template_refuses_chats_alone(assets: TextAssets, template: str, why: str) -> None:
    codec = TextCodec(replace(assets, chat_template=template))
    assert codec.encode("cat") == TextCodec(assets).encode("cat")
    for _ in range(2):
        with pytest.raises(InvalidInput, match=f"template cannot be compiled: .*{why}"):
            codec.encode_chat([USER])


def test_the_template_for_tools_is_taken_where_there_are_some(assets: TextAssets) -> None:
    both = replace(assets, chat_template="D", tool_template="T <tool_call> {{ tools }}")
    codec = TextCodec(both)
    assert codec.tool_format is ToolFormat.HERMES
    assert codec.render_chat([USER]) == "D"
    assert codec.render_chat([USER], tools="[1]") == "T <tool_call> [1]"
    with pytest.raises(InvalidInput, match="no chat template for chats without tools"):
        TextCodec(replace(both, chat_template=None)).render_chat([USER])


def test_templates_know_the_special_tokens_by_name(assets: TextAssets) -> None:
    tokens = {"pad_token": "<p>", "image_token": "<i>", "additional_special_tokens": ["<a>"]}
    template = "{{ pad_token }}{{ image_token }}{{ additional_special_tokens[0] }}{{ cls_token }}"
    given = replace(assets, chat_template=template, special_tokens=json.dumps(tokens))
    assert TextCodec(given).render_chat([USER]) == "<p><i><a>"
    assert TextCodec(given).render_chat([USER], '{"pad_token": "P"}') == "P<i><a>"


def test_a_broken_tokenizer_is_the_models_fault(assets: TextAssets) -> None:
    with pytest.raises(TornModel, match=r"tokenizer\.json"):
        TextCodec(replace(assets, tokenizer_json=b"{"))


def test_lone_surrogates_are_invalid_input(codec: TextCodec) -> None:
    with pytest.raises(InvalidInput, match="at character 1"):
        codec.encode("a\ud800")


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("{% generation %}{{ messages[0].content }}{% endgeneration %}!", "the cat!"),
        ("{{ {'b': '<é>', 'a': 1} | tojson }}", '{"b": "<é>", "a": 1}'),
        ("{{ [1] | tojson(indent=2) }}", "[\n  1\n]"),
        ("{% for m in messages %}{% if true %}{% break %}{% endif %}x{% endfor %}.", "."),
        ("{%- if strftime_now('%Y') | int > 2000 %}\n  now\n{%- endif %}", "  now"),
        ("{{ eos_token }}{{ tools }}{{ unknown }}", "<|end|>None"),
    ],
)
def test_what_templates_rely_on_is_there(assets: TextAssets, template: str, text: str) -> None:
    """As Hugging Face transformers renders them."""
    assert TextCodec(replace(assets, chat_template=template)).render_chat([USER]) == text


def test_a_template_cannot_change_what_it_is_given(assets: TextAssets) -> None:
    with pytest.raises(InvalidInput, match="fails on these messages"):
        TextCodec(replace(assets, chat_template="{{ messages.append(1) }}")).render_chat([USER])


def test_how_answers_begin_is_kept_of_short_template_kwargs_alone(assets: TextAssets) -> None:
    """Callers say what these hold, megabytes if they like."""
    template = "{{ '<think>' if thinking else '</think>' }}"
    codec = TextCodec(replace(assets, chat_template=template))
    short, long = '{"thinking": true}', f'{{"thinking": true, "more": "{"x" * 5000}"}}'
    before = sys.getrefcount(short), sys.getrefcount(long)
    assert codec.thinking(short) == codec.thinking(long) == Thinking(amid=True)
    assert codec.thinking("") is None
    assert sys.getrefcount(short) > before[0]
    assert sys.getrefcount(long) == before[1]


def test_a_query_that_contains_the_separator_is_refused(assets: TextAssets) -> None:
    tokenizer = Tokenizer.from_str(assets.tokenizer_json.decode())
    end = tokenizer.token_to_id("<|end|>")
    tokenizer.post_processor = processors.TemplateProcessing(
        single="$A <|end|>", pair="$A <|end|> $B:1 <|end|>:1", special_tokens=[("<|end|>", end)]
    )
    codec = TextCodec(replace(assets, tokenizer_json=tokenizer.to_str().encode(), add_bos=False))
    query, document = codec.encode_part("the cat"), codec.encode_part("<|end|>the mat")
    assert codec.encode_pair("the cat", "<|end|>the mat") == (*query, end, *document, end)
    with pytest.raises(InvalidInput, match="the query contains") as refused:
        codec.encode_pair("the <|end|> cat", "the mat")
    assert refused.value.field == "query"
