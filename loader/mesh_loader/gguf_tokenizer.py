"""Builds tokenizer.json from the vocabulary in a GGUF file's metadata.

Two kinds of tokenizer are known: byte-level BPE (`gpt2`), and SentencePiece BPE with byte fallback
(`llama`), whose merges are derived from the scores. The result gives the ids that the model's own
tokenizer gives. It is written as the JSON that the `tokenizers` library reads, which is many times
quicker than building the library's objects, and then loaded once as a check.
"""

import json
from typing import Any

from tokenizers import Tokenizer

from mesh.domain.errors import UnsupportedModel
from mesh_loader.gguf_file import GgufFile, corrupt

_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_TAIL = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_LLAMA3 = rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}{{1,3}}|{_TAIL}"
_QWEN2 = rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}|{_TAIL}"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

# Names that mean the same rules.
_ALIASES = {
    "llama-v3": "llama-bpe",
    "llama3": "llama-bpe",
    "falcon3": "llama-bpe",
    "smaug-bpe": "llama-bpe",
    "deepseek-r1-qwen": "qwen2",
    "megrez": "qwen2",
    "starcoder": "smollm",
    "refact": "smollm",
    "command-r": "smollm",
    "codeshell": "smollm",
    "exaone": "smollm",
    "minerva-7b": "smollm",
    "olmo": "gpt-2",
    "mpt": "gpt-2",
    "jais": "gpt-2",
    "phi-2": "gpt-2",
}
PRETOKENIZERS = ("default", "deepseek-coder", "gpt-2", "llama-bpe", "qwen2", "smollm", "tekken")
"""The supported rules; further names are aliases of these."""


def canonical(pre: str) -> str:
    """The name under which the rules of `pre` are known here; unknown names come back as given."""
    return _ALIASES.get(pre, pre)


def pretokenizer(pre: str) -> dict[str, Any] | None:
    """The `pre_tokenizer` entry of a tokenizer.json for a canonical name; None: unknown."""
    match pre:
        case "smollm":
            return _sequence({"type": "Digits", "individual_digits": True}, _byte_level(True))
        case "gpt-2":
            return _byte_level(True)
        case "llama-bpe":
            return _sequence(_split(_LLAMA3), _byte_level(False))
        case "qwen2":
            return _sequence(_split(_QWEN2), _byte_level(False))
        case "tekken":
            return _sequence(_split(_TEKKEN), _byte_level(False))
        case "deepseek-coder":
            patterns = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-퟿]+")
            digits = {"type": "Digits", "individual_digits": True}
            return _sequence(*(_split(p) for p in patterns), digits, _byte_level(False))
        case "default":
            # llama.cpp's rule for files without a name: older conversions of GPT-2-like models.
            return _sequence(
                _split(r"[\p{P}\$\+<=>\^~\|]+"),
                _split(r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"),
                _split(r"\p{N}+"),
                _split("[0-9][0-9][0-9]"),
                _byte_level(False),
            )
        case _:
            return None


def _sequence(*steps: dict[str, Any]) -> dict[str, Any]:
    return {"type": "Sequence", "pretokenizers": list(steps)}


def _split(pattern: str) -> dict[str, Any]:
    return {
        "type": "Split",
        "pattern": {"Regex": pattern},
        "behavior": "Isolated",
        "invert": False,
    }


def _byte_level(use_regex: bool) -> dict[str, Any]:
    return {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": False,
        "use_regex": use_regex,
    }


_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4
"""Token types of GGUF (llama.cpp's llama_token_type)."""
_SPACE = "\u2581"
_TEMPLATE = "tokenizer.chat_template."
"""The name of a further template follows this prefix; the default one is
`tokenizer.chat_template`.
"""


def check_tokenizer(file: GgufFile) -> None:
    """Raises UnsupportedModel for a tokenizer that mesh does not know."""
    name = file.path.name
    if not file.texts("tokenizer.ggml.tokens"):
        raise UnsupportedModel(f"{name} holds no tokenizer")
    kind = file.text("tokenizer.ggml.model")
    if kind not in ("gpt2", "llama"):
        raise UnsupportedModel(
            f"{name}: tokenizer {kind} is not supported",
            hint="mesh reads gpt2 (byte-level BPE) and llama (SentencePiece) tokenizers from GGUF",
        )
    pre = file.text("tokenizer.ggml.pre", "default")
    if kind == "gpt2" and pretokenizer(canonical(pre)) is None:
        raise UnsupportedModel(
            f"{name}: pre-tokenizer {pre} is not supported",
            hint=f"mesh knows {', '.join(PRETOKENIZERS)}",
        )


def tokenizer_json(file: GgufFile) -> str:
    """The text of a tokenizer.json, for a file that `check_tokenizer` has let pass.

    Raises TornModel where the metadata contradicts itself.
    """
    tokens = file.texts("tokenizer.ggml.tokens")
    if len(set(tokens)) != len(tokens):
        raise corrupt(file.path.name, "its vocabulary names a token twice")
    byte_level = file.text("tokenizer.ggml.model") == "gpt2"
    document = _byte_level_bpe(file, tokens) if byte_level else _sentencepiece_bpe(file, tokens)
    text = json.dumps(document, ensure_ascii=False)
    try:
        Tokenizer.from_str(text)
    except BaseException as error:  # the library raises bare Exception, and panics with even less
        if isinstance(error, KeyboardInterrupt | SystemExit):
            raise
        raise corrupt(file.path.name, f"its tokenizer cannot be built ({error})") from error
    return text


def tokenizer_config(file: GgufFile) -> dict[str, Any]:
    """The tokenizer_config.json: special tokens by text, which of them every prompt gets, and the
    chat templates that have names. The keys are llama.cpp's, with its spelling of `seperator`.
    """
    tokens = file.texts("tokenizer.ggml.tokens")
    config: dict[str, Any] = {
        "add_bos_token": adds_bos(file),
        "add_eos_token": file.flag("tokenizer.ggml.add_eos_token", False),
        "clean_up_tokenization_spaces": False,
    }
    for key, name in (
        ("bos_token", "bos"),
        ("eos_token", "eos"),
        ("unk_token", "unknown"),
        ("pad_token", "padding"),
        ("sep_token", "seperator"),
        ("cls_token", "cls"),
        ("mask_token", "mask"),
    ):
        token_id = _special_id(file, name, len(tokens))
        if token_id is not None:
            config[key] = tokens[token_id]
    templates = {
        key.removeprefix(_TEMPLATE): text
        for key, text in file.metadata.items()
        if key.startswith(_TEMPLATE) and isinstance(text, str)
    }
    if templates:
        config["chat_template"] = [
            {"name": name, "template": text} for name, text in templates.items()
        ]
    return config


def adds_bos(file: GgufFile) -> bool:
    """Whether a prompt begins with BOS where nothing is said: so do SentencePiece and Llama 3."""
    pre = canonical(file.text("tokenizer.ggml.pre", "default"))
    default = file.text("tokenizer.ggml.model") == "llama" or pre in ("llama-bpe", "tekken")
    return file.flag("tokenizer.ggml.add_bos_token", default)


def _special_id(file: GgufFile, name: str, tokens: int) -> int | None:
    key = f"tokenizer.ggml.{name}_token_id"
    if key not in file.metadata:
        return None
    token_id = file.integer(key)
    if not 0 <= token_id < tokens:
        raise corrupt(file.path.name, f"{key} is {token_id}, the vocabulary has {tokens} tokens")
    return token_id


def _byte_level_bpe(file: GgufFile, tokens: list[str]) -> dict[str, Any]:
    pre = canonical(file.text("tokenizer.ggml.pre", "default"))
    merges = [merge.split(" ", 1) for merge in file.texts("tokenizer.ggml.merges")]
    if any(len(merge) != 2 for merge in merges):
        raise corrupt(file.path.name, "a merge of its tokenizer is not two tokens")
    byte_level = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": False,
        "use_regex": False,
    }
    return {
        "version": "1.0",
        "added_tokens": _added_tokens(file, tokens),
        "normalizer": {"type": "NFC"} if pre == "qwen2" else None,
        "pre_tokenizer": pretokenizer(pre),
        "post_processor": _post_processor(file, tokens) or byte_level,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "vocab": {token: number for number, token in enumerate(tokens)},
            "merges": merges,
            # Llama 3 and Tekken look a whole word up before they merge it.
            "ignore_merges": pre in ("llama-bpe", "tekken"),
        },
    }


def _sentencepiece_bpe(file: GgufFile, tokens: list[str]) -> dict[str, Any]:
    scores = file.numbers("tokenizer.ggml.scores")
    if len(scores) != len(tokens):
        raise corrupt(file.path.name, f"{len(scores)} scores for {len(tokens)} tokens")
    unknown = _special_id(file, "unknown", len(tokens))
    prefix = file.flag("tokenizer.ggml.add_space_prefix", True)
    normalizers: list[dict[str, Any]] = [
        {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}
    ]
    decoders: list[dict[str, Any]] = [
        {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if prefix:
        normalizers.insert(0, {"type": "Prepend", "prepend": _SPACE})
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    return {
        "version": "1.0",
        "added_tokens": _added_tokens(file, tokens),
        "normalizer": {"type": "Sequence", "normalizers": normalizers},
        "pre_tokenizer": None,
        "post_processor": _post_processor(file, tokens),
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": {
            "type": "BPE",
            "unk_token": None if unknown is None else tokens[unknown],
            "fuse_unk": True,
            "byte_fallback": True,
            "vocab": {token: number for number, token in enumerate(tokens)},
            "merges": _merges_of_scores(tokens, scores),
        },
    }


def _merges_of_scores(tokens: list[str], scores: list[float]) -> list[tuple[str, str]]:
    """The merges that SentencePiece's BPE makes, first those whose result scores highest.

    It merges the adjacent pair whose union is the best-scored piece; so every way to cut a piece
    into two pieces is a merge, at that piece's rank.
    """
    numbers = {token: number for number, token in enumerate(tokens)}
    ranked = []
    for number, token in enumerate(tokens):
        for cut in range(1, len(token)):
            left, right = numbers.get(token[:cut]), numbers.get(token[cut:])
            if left is not None and right is not None:
                ranked.append((-scores[number], number, left, right))
    ranked.sort()
    return [(tokens[left], tokens[right]) for _, _, left, right in ranked]


def _added_tokens(file: GgufFile, tokens: list[str]) -> list[dict[str, Any]]:
    """Control and user-defined tokens: found in the text as they stand, before anything else."""
    types = [int(kind) for kind in file.numbers("tokenizer.ggml.token_type")]
    if types and len(types) != len(tokens):
        raise corrupt(file.path.name, f"{len(types)} token types for {len(tokens)} tokens")
    return [
        {
            "id": number,
            "content": tokens[number],
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": kind != _USER_DEFINED,
        }
        for number, kind in enumerate(types)
        if kind in (_UNKNOWN, _CONTROL, _USER_DEFINED) and tokens[number]
    ]


def _post_processor(file: GgufFile, tokens: list[str]) -> dict[str, Any] | None:
    """Adds BOS and EOS around a text where the model wants them."""
    bos = _special_id(file, "bos", len(tokens)) if adds_bos(file) else None
    wants_eos = file.flag("tokenizer.ggml.add_eos_token", False)
    eos = _special_id(file, "eos", len(tokens)) if wants_eos else None
    if bos is None and eos is None:
        return None
    single: list[dict[str, Any]] = [{"Sequence": {"id": "A", "type_id": 0}}]
    pair: list[dict[str, Any]] = [*single, {"Sequence": {"id": "B", "type_id": 1}}]
    special: dict[str, Any] = {}
    for token_id, first in ((bos, True), (eos, False)):
        if token_id is not None:
            text = tokens[token_id]
            entry = {"SpecialToken": {"id": text, "type_id": 0}}
            single = [entry, *single] if first else [*single, entry]
            pair = [entry, *pair] if first else [*pair, entry]
            special[text] = {"id": text, "ids": [token_id], "tokens": [text]}
    return {"type": "TemplateProcessing", "single": single, "pair": pair, "special_tokens": special}
