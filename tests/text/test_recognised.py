"""What is recognised as harmless is little; what only looks harmless is not."""

import json
from typing import Any

import pytest

from mesh.text.recognised import (
    TOKENIZER_BYTES_MAX,
    decoder_fault,
    is_harmless_template,
    is_harmless_tokenizer,
    is_quick_on_literals,
    is_quick_pattern,
)
from tests.text.conftest import TEMPLATE, tiny_assets

SMOLLM2 = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful AI assistant<|im_end|>\n' }}{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@pytest.mark.parametrize("template", [None, "", TEMPLATE, SMOLLM2, "{{ bos_token }}hello"])
def test_a_loop_over_the_messages_that_writes_their_words_is_harmless(template: str | None) -> None:
    assert is_harmless_template(template)


@pytest.mark.parametrize(
    "template",
    [
        "{% for i in range(99999) %}{% endfor %}",
        "{{ 'a' * 1500000000 }}",
        "{% if 'a' * 1500000000 %}{% endif %}",
        "{% for m in messages %}{% for n in messages %}{% endfor %}{% endfor %}",
        "{% for m in messages %}{{ messages }}{% endfor %}",
        "{% for m in messages %}{{ messages[0].content }}{% endfor %}",
        "{% for m in messages if m.content * 9 %}{% endfor %}",
        "{% for m in messages recursive %}{{ loop(messages) }}{% endfor %}",
        *("{% for m in tools %}{{ m }}{% endfor %}", "{% set x = 'a' %}"),
        "{% set x %}{{ x }}{{ x }}{% endset %}",
        *("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "{{ 'x'|center(1000000000) }}"),
        *("{{ 'x'|trim('y') ~ messages|tojson(indent=1000000000) }}", "{{ strftime_now('%Y') }}"),
        *("{{ '%1000000000d' % 1 }}", "{{ lipsum(1000000) }}"),
        *("{% if messages is divisibleby(3) %}{% endif %}", "{% include messages %}"),
        "{% for m in messages %}{{ m.content.__class__ }}{{ m['tools'] }}{% endfor %}",
        "x" * 5000,
        "{% if %}",
        "{{ " + "(" * 1500 + "1" + ")" * 1500 + " }}",
    ],
)
def test_a_template_that_does_anything_else_is_not(template: str) -> None:
    assert not is_harmless_template(template)


def _with(**parts: Any) -> bytes:
    return json.dumps({**json.loads(tiny_assets().tokenizer_json), **parts}).encode()


def test_a_small_byte_level_tokenizer_is_harmless() -> None:
    assert is_harmless_tokenizer(tiny_assets().tokenizer_json)
    spaces = {"type": "Replace", "pattern": {"String": " "}, "content": "_"}
    assert is_harmless_tokenizer(_with(normalizer={"type": "Sequence", "normalizers": [spaces]}))


@pytest.mark.parametrize(
    "parts",
    [
        {"pre_tokenizer": {"type": "Split", "pattern": {"Regex": "(a+)+$"}}},
        {"normalizer": {"type": "Replace", "pattern": {"Regex": "(a+)+$"}, "content": ""}},
        {"normalizer": {"type": "Replace", "pattern": {"String": "a"}, "content": "aaaaa"}},
        {"normalizer": {"type": "Replace", "pattern": {"String": ""}, "content": ""}},
        {"normalizer": {"type": "Prepend", "prepend": "a" * 100}},
        {"normalizer": {"type": "Sequence", "normalizers": [{"type": "Lowercase"}] * 9}},
        {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}},
        {"model": {"type": "WordPiece", "vocab": {}}},
        {"decoder": {"type": "Replace", "pattern": {"Regex": "(a+)+$"}, "content": ""}},
        {
            "post_processor": {
                "type": "TemplateProcessing",
                "single": [{"Sequence": {"id": "A", "type_id": 0}}] * 2,
                "special_tokens": {},
            }
        },
        {"padding": "x" * TOKENIZER_BYTES_MAX},
        {"added_tokens": [{"content": "<|" + "x" * 5000 + "|>"}]},
        {"pre_tokenizer": "ByteLevel"},
        {"normalizer": {"type": "Sequence", "normalizers": "x"}},
    ],
)
def test_a_tokenizer_with_any_other_part_is_not(parts: dict[str, Any]) -> None:
    assert not is_harmless_tokenizer(_with(**parts))
    assert not is_harmless_tokenizer(b"[" * 100_000)


def test_the_decoders_of_known_families_are_served() -> None:
    spaces = {"type": "Replace", "pattern": {"String": "\u2581"}, "content": " "}
    strip = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
    llama = [spaces, {"type": "ByteFallback"}, {"type": "Fuse"}, strip]
    assert decoder_fault({"type": "Sequence", "decoders": llama}) == ""
    assert decoder_fault({"type": "ByteLevel"}) == decoder_fault(None) == ""
    tenfold = {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 10}
    fault = decoder_fault({"type": "Sequence", "decoders": [tenfold, tenfold]})
    assert "100 times longer, and 16 times is the limit" in fault
    doubled = {"type": "BPEDecoder", "suffix": ""}
    assert "replaces nothing" in decoder_fault({"type": "Sequence", "decoders": [doubled] * 8})
    assert decoder_fault({"type": "BPEDecoder", "suffix": "</w>"}) == ""


CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
ENDS = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


@pytest.mark.parametrize(
    "pattern",
    [
        CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}" + ENDS,  # cl100k, Llama 3, GLM
        CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}" + ENDS,  # Qwen
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{M}]*[\p{Ll}\p{Lm}\p{M}]+" + CONTRACTIONS + "?" + ENDS,
        r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+""",
        *(
            " ?[^(\\s|[.,!?…。，、।۔،])]+",
            "[0-9][0-9][0-9]",
            "[一-龥぀-ゟ゠-ヿ]+",
            " {2,}",
            "\\d{3}",
        ),
    ],
)
def test_patterns_of_known_families_are_quick(pattern: str) -> None:
    assert is_quick_pattern(pattern)


@pytest.mark.parametrize(
    "pattern",
    [
        *(
            "(a+)+$",
            "(a|aa)+$",
            "(?:a|a)*b",
            "(a*)*",
            "a*a*a*b",
            "(x+x+)y",
            r"(a)\1*",
            r"(?<n>a)\k<n>",
        ),
        *("(a?){20}a{20}", "a?" * 20 + "a" * 20, "(?>a+)", "(?<=a+)b", "a{2,}{2,}", "(?~ab)", "[a"),
        *("a{1000}", "(a{2,}b?)", "((a))*", "a**", r"\R+", r"\X+"),
    ],
)
def test_patterns_that_backtrack_without_end_are_not(pattern: str) -> None:
    assert not is_quick_pattern(pattern)


@pytest.mark.parametrize(
    ("parts", "quick"),
    [
        ({}, True),
        ({"normalizer": {"type": "Prepend", "prepend": "_"}}, True),
        ({"normalizer": {"type": "Prepend", "prepend": "_" * 100}}, False),
        ({"normalizer": {"type": "Replace", "pattern": {"Regex": "(a+)+$"}, "content": ""}}, False),
        ({"pre_tokenizer": {"type": "Split", "pattern": {"Regex": r"\s+"}}}, True),
        (
            {
                "pre_tokenizer": {
                    "type": "Sequence",
                    "pretokenizers": [{"type": "Split", "pattern": {"Regex": "(a|aa)+$"}}],
                }
            },
            False,
        ),
        (
            {
                "normalizer": {
                    "type": "Sequence",
                    "normalizers": [
                        {"type": "Replace", "pattern": {"String": "q"}, "content": "qq"}
                    ]
                    * 40,
                }
            },
            False,
        ),
    ],
)
def test_which_tokenizers_a_node_asks_amid_its_iterations(
    parts: dict[str, Any], quick: bool
) -> None:
    assert is_quick_on_literals(_with(**parts)) is quick
