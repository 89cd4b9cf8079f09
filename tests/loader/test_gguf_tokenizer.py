"""Tokenizers built from GGUF metadata give the ids that llama.cpp gives (see make_golden_ids)."""

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from mesh_loader.gguf_file import read_header
from mesh_loader.gguf_tokenizer import tokenizer_config, tokenizer_json
from tests.loader.tiny_gguf import TinyTokenizer, byte_tokenizer, write_tiny_gguf

GOLDEN: dict[str, Any] = json.loads(
    (Path(__file__).parent / "data" / "golden_ids.json").read_text(encoding="utf-8")
)
TEXTS: list[str] = GOLDEN["texts"]
PRE = sorted(set(GOLDEN["ids"]) - {"sentencepiece", "demo model"})


def built(tmp_path: Path, tokenizer: TinyTokenizer) -> Tokenizer:
    write_tiny_gguf(tmp_path / "m.gguf", tokenizer=tokenizer)
    return Tokenizer.from_str(tokenizer_json(read_header(tmp_path / "m.gguf")))


def ids_of(tokenizer: Tokenizer) -> list[list[int]]:
    return [tokenizer.encode(text, add_special_tokens=False).ids for text in TEXTS]


@pytest.mark.parametrize("pre", PRE)
def test_byte_level_tokenizers_cut_words_as_their_name_says(tmp_path: Path, pre: str) -> None:
    given = TinyTokenizer(**{**GOLDEN["byte_level"], "pre": pre})
    tokenizer = built(tmp_path, given)
    assert ids_of(tokenizer) == GOLDEN["ids"][pre]
    for text, ids in zip(TEXTS, GOLDEN["ids"][pre], strict=True):
        assert tokenizer.decode(ids, skip_special_tokens=False) == text


def test_the_rules_of_the_names_do_differ() -> None:
    """Or the test above would prove nothing about them."""
    distinct = {json.dumps(GOLDEN["ids"][pre]) for pre in PRE}
    assert len(distinct) == len(PRE)


def test_an_alias_means_the_same_rules(tmp_path: Path) -> None:
    given = TinyTokenizer(**{**GOLDEN["byte_level"], "pre": "deepseek-r1-qwen"})
    assert ids_of(built(tmp_path, given)) == GOLDEN["ids"]["qwen2"]


def test_without_a_name_the_default_rules_hold(tmp_path: Path) -> None:
    given = TinyTokenizer(**{**GOLDEN["byte_level"], "pre": None})
    assert ids_of(built(tmp_path, given)) == GOLDEN["ids"]["default"]


def test_qwen_composes_characters_first_as_its_own_tokenizer_does(tmp_path: Path) -> None:
    tokenizer = built(tmp_path, TinyTokenizer(**{**GOLDEN["byte_level"], "pre": "qwen2"}))
    assert tokenizer.encode("e\u0301").ids == tokenizer.encode("\u00e9").ids


def test_sentencepiece_merges_by_score_and_falls_back_to_bytes(tmp_path: Path) -> None:
    tokenizer = built(tmp_path, TinyTokenizer(**GOLDEN["sentencepiece"]))
    assert ids_of(tokenizer) == GOLDEN["ids"]["sentencepiece"]
    for text in TEXTS:
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        assert tokenizer.decode(ids, skip_special_tokens=False) == text


def test_sentencepiece_begins_a_prompt_with_bos_by_itself(tmp_path: Path) -> None:
    given = TinyTokenizer(**GOLDEN["sentencepiece"])
    tokenizer = built(tmp_path, given)
    plain = tokenizer.encode("Hello", add_special_tokens=False).ids
    assert tokenizer.encode("Hello").ids == [given.bos, *plain]
    assert tokenizer_config(read_header(tmp_path / "m.gguf"))["add_bos_token"] is True


def test_llama3_begins_a_prompt_with_bos_unless_the_file_says_otherwise(tmp_path: Path) -> None:
    tokenizer = built(tmp_path, byte_tokenizer("llama-bpe"))
    assert tokenizer.encode("he").ids == [257, 256]
    path = tmp_path / "without.gguf"
    write_tiny_gguf(
        path,
        tokenizer=byte_tokenizer("llama-bpe"),
        metadata={"tokenizer.ggml.add_bos_token": 0, "tokenizer.ggml.add_eos_token": 1},
    )
    assert Tokenizer.from_str(tokenizer_json(read_header(path))).encode("he").ids == [256, 258]


def test_special_tokens_and_templates_have_their_names(tmp_path: Path) -> None:
    """llama.cpp's keys, `seperator` spelled as there."""
    path = tmp_path / "m.gguf"
    ids = {"padding": 258, "unknown": 0, "seperator": 259, "cls": 257, "mask": 1}
    write_tiny_gguf(
        path,
        tokenizer=byte_tokenizer(),
        metadata={
            **{f"tokenizer.ggml.{name}_token_id": n for name, n in ids.items()},
            **{f"tokenizer.chat_template.{name}": name[0] for name in ("tool_use", "rag")},
        },
    )
    config = tokenizer_config(read_header(path))
    assert config | {"x": 1} == config | {
        "x": 1,
        "bos_token": "<s>",
        "eos_token": "</s>",
        "pad_token": "</s>",
        "sep_token": "<|im_end|>",
        "cls_token": "<s>",
        "chat_template": [{"name": "tool_use", "template": "t"}, {"name": "rag", "template": "r"}],
    }


def test_llama3_takes_a_whole_word_before_it_merges(tmp_path: Path) -> None:
    """A word in the vocabulary that no merge leads to is found by name, but only there."""
    whole = TinyTokenizer(
        model="gpt2", pre="llama-bpe", tokens=["a", "b", "c", "bc", "abc"], types=[1] * 5,
        merges=["b c"],
    )  # fmt: skip
    assert built(tmp_path, whole).encode("abc", add_special_tokens=False).ids == [4]
    merging = TinyTokenizer(**{**vars(whole), "pre": "qwen2"})
    assert built(tmp_path, merging).encode("abc").ids == [0, 3]


def test_the_demo_model_tokenizes_as_llama_cpp_does(smollm2_model_path: Path) -> None:
    tokenizer = Tokenizer.from_file(str(smollm2_model_path / "tokenizer.json"))
    assert ids_of(tokenizer) == GOLDEN["ids"]["demo model"]
    for text, ids in zip(TEXTS, GOLDEN["ids"]["demo model"], strict=True):
        assert tokenizer.decode(ids, skip_special_tokens=False) == text
