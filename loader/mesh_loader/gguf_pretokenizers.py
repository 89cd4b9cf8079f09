"""How byte-level BPE tokenizers cut a text into words before they merge, by GGUF's name for it.

GGUF keeps only a name (`tokenizer.ggml.pre`); the rules behind the names are those of the models'
own tokenizer.json files, which llama.cpp (src/llama-vocab.cpp) mirrors. gguf_tokenizer puts the
result into a tokenizer.json.
"""

from typing import Any

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
