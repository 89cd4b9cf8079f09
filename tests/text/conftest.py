"""A small byte-level tokenizer, trained here, whose tokens often end inside a character."""

from functools import cache

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from mesh.domain.text import TextAssets
from mesh.text.tokenizer import TextCodec

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if m.role not in ('system', 'user', 'assistant') %}{{ raise_exception('role ' + m.role) }}"
    "{% endif %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@cache
def tiny_assets() -> TextAssets:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<s>", "<|user|>", "<|assistant|>", "<|system|>", "<|end|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["the cat sat on the mat, and stopped there"] * 3, trainer)
    return TextAssets(
        tokenizer_json=tokenizer.to_str().encode(),
        chat_template=TEMPLATE,
        bos_token="<s>",
        eos_token="<|end|>",
        add_bos=True,
    )


@pytest.fixture(scope="session")
def codec() -> TextCodec:
    return TextCodec(tiny_assets())
