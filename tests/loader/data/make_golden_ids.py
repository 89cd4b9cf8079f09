"""Makes golden_ids.json: texts, small vocabularies, and the ids that llama.cpp gives for them.

Run once, with the bench extra (xllamacpp) installed and the demo model's GGUF file as argument:
`python -m tests.loader.data.make_golden_ids MODEL.gguf`. llama.cpp is the reference because it is
what wrote the files, and it is no part of what is tested.
"""

import json
import sys
import tempfile
import urllib.request
from pathlib import Path

import xllamacpp
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from tests.loader.tiny_gguf import (
    BYTE,
    CONTROL,
    NORMAL,
    UNKNOWN,
    TinyTokenizer,
    byte_level_alphabet,
    random_tensors,
    write_tiny_gguf,
)

TARGET = Path(__file__).with_name("golden_ids.json")
MERGED_TOKENS = 500
PRE = ("smollm", "gpt-2", "llama-bpe", "qwen2", "tekken", "deepseek-coder", "default")

TEXTS = [
    "Hello, world! The quick brown fox jumps over the lazy dog.",
    "  leading, trailing and    inner   spaces  ",
    "tabs\tand\nnewlines\r\n\r\n  mixed \t \n",
    "\n\n\n\ny" + " " * 17 + "x",
    "1234567890 3.14159 1,000,000 0x1F 2024-11-21 10 20 300 4000 a1b2c3",
    "def f(x: int) -> int:\n    return x ** 2  # square\n\n\nclass A:\n\tpass\n",
    "for (int i = 0; i < n; ++i) { a[i] += b[i] * c[i]; }",
    *("I'm you're they've we'll he'd IT'S DON'T", "naïve café résumé Zürich Ærøskøbing œuvre"),
    *(
        "Привет, мир! Как дела?",
        "你好，世界！今天天气怎么样？",
        "こんにちは、世界。カタカナ 안녕하세요",
    ),
    *("مرحبا שלום नमस्ते สวัสดี", "😀😃 👨\u200d👩\u200d👧 🇩🇪 ❤\ufe0f"),
    "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n",
    "a<|im_end|>b <|endoftext|> c<|im_start|",
    "http://example.com/a?b=c&d=%20#frag !!!???...---___*** ((([[[{{{}}}]]]))) $100 €200",
    "a\u00a0b\u2003c\u200bd\ufeffe ½ ⅓ ² ① Ⅷ ٣",
    "\x01\x7f " + "ab" * 20,
    "CamelCase snake_case SCREAMING_CASE kebab-case",
    "𝕳𝖊𝖑 𐍈 𠜎",
]
"""All of it in Unicode's composed form: Qwen's own tokenizer composes, llama.cpp does not."""

SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


def byte_level_vocabulary() -> TinyTokenizer:
    """The 256 bytes and merges learnt from the texts."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = byte_level_alphabet()
    tokenizer.train_from_iterator(
        TEXTS * 4,
        trainers.BpeTrainer(
            vocab_size=256 + MERGED_TOKENS, initial_alphabet=alphabet, show_progress=False
        ),
    )
    merges = [tuple(m) for m in json.loads(tokenizer.to_str())["model"]["merges"]]
    tokens = [*alphabet, *dict.fromkeys(left + right for left, right in merges)]
    return TinyTokenizer(
        model="gpt2",
        tokens=[*tokens, *SPECIALS],
        types=[NORMAL] * len(tokens) + [CONTROL] * len(SPECIALS),
        merges=[f"{left} {right}" for left, right in merges],
        bos=len(tokens),
        eos=len(tokens) + 2,
    )


def sentencepiece_vocabulary() -> TinyTokenizer:
    """Special tokens, the byte fallback, merges learnt from the texts, and their characters."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.train_from_iterator(
        TEXTS[:12] * 4, trainers.BpeTrainer(vocab_size=MERGED_TOKENS, show_progress=False)
    )
    model = json.loads(tokenizer.to_str())["model"]
    merged = list(dict.fromkeys(left + right for left, right in model["merges"]))
    characters = sorted(token for token in model["vocab"] if len(token) == 1)
    heads = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    return TinyTokenizer(
        model="llama",
        tokens=[*heads, *merged, *characters],
        types=[UNKNOWN, CONTROL, CONTROL, *[BYTE] * 256]
        + [NORMAL] * (len(merged) + len(characters)),
        scores=[0.0] * len(heads) + [-float(n) for n in range(len(merged) + len(characters))],
        bos=1,
        eos=2,
        unknown=0,
    )


def reference_ids(path: Path) -> list[list[int]]:
    """What llama.cpp makes of the texts, special tokens parsed and none added."""
    params = xllamacpp.CommonParams()
    params.model.path = str(path)
    params.n_ctx, params.warmup = 64, False
    server = xllamacpp.Server(params)
    answers = []
    for text in TEXTS:
        body = json.dumps({"content": text, "add_special": False, "parse_special": True})
        request = urllib.request.Request(
            f"{server.listening_address}/tokenize",
            body.encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request) as answer:
            answers.append(json.load(answer)["tokens"])
    return answers


def main(model: Path) -> None:
    vocabularies = {pre: byte_level_vocabulary() for pre in PRE}
    vocabularies["sentencepiece"] = sentencepiece_vocabulary()
    ids = {"demo model": reference_ids(model)}
    with tempfile.TemporaryDirectory() as folder:
        for name, given in vocabularies.items():
            pre = name if given.model == "gpt2" else None
            tokenizer = TinyTokenizer(**{**vars(given), "pre": pre})
            path = Path(folder) / f"{name}.gguf"
            tensors = random_tensors("llama", len(tokenizer.tokens))
            write_tiny_gguf(path, tokenizer=tokenizer, tensors=tensors)
            ids[name] = reference_ids(path)
    bpe, pieces = vocabularies[PRE[0]], vocabularies["sentencepiece"]
    golden = {"texts": TEXTS, "byte_level": vars(bpe), "sentencepiece": vars(pieces), "ids": ids}
    TARGET.write_text(json.dumps(golden, ensure_ascii=True, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
