"""Reads a model's tokenizer and chat template from its folder in the store."""

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mesh.domain.errors import TornModel
from mesh.domain.text import SamplingDefaults, TextAssets

TOP_K_MAX = 2**32 - 1
"""What the message that carries it can hold."""


def read_assets(model_path: Path) -> TextAssets:
    """The text assets of a model in the store.

    Raises TornModel when tokenizer.json is missing, or one of the others is damaged.
    """
    try:
        tokenizer_json = (model_path / "tokenizer.json").read_bytes()
    except OSError as error:
        raise TornModel(f"{model_path.name} has no readable tokenizer.json") from error
    config = _read_config(model_path / "tokenizer_config.json")
    named = _templates(config.get("chat_template"))
    template_file = model_path / "chat_template.jinja"
    if template_file.is_file():
        named["default"] = _read_text(template_file)
    tokens = _special_tokens(config, _read_config(model_path / "special_tokens_map.json"))
    bos_token, eos_token = (_token(tokens.pop(name, None)) for name in ("bos_token", "eos_token"))
    return TextAssets(
        tokenizer_json=tokenizer_json,
        chat_template=named.get("default"),
        tool_template=named.get("tool_use"),
        bos_token=bos_token,
        eos_token=eos_token,
        special_tokens=json.dumps(tokens, ensure_ascii=False) if tokens else "",
        add_bos=bool(config.get("add_bos_token", False)),
        sampling=_sampling(_read_config(model_path / "generation_config.json")),
    )


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise TornModel(f"{path.parent.name}/{path.name} cannot be read: {error}") from error


def _read_config(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        config = json.loads(_read_text(path))
    except (ValueError, RecursionError) as error:
        raise TornModel(f"{path.parent.name}/{path.name} is no JSON") from error
    return config if isinstance(config, dict) else {}


def _templates(value: Any) -> dict[str, str]:
    """Chat templates by name, which configs write as one text, a list of named ones or a table."""
    if isinstance(value, list):
        value = {one.get("name"): one.get("template") for one in value if isinstance(one, dict)}
    if not isinstance(value, dict):
        value = {"default": value}
    return {str(name): text for name, text in value.items() if isinstance(text, str)}


def _special_tokens(config: Mapping[str, Any], mapped: Mapping[str, Any]) -> dict[str, Any]:
    """Special tokens by transformers' names, from the tokenizer's configuration and their map.

    As in transformers, the map goes first, unless the configuration lists its added tokens: then a
    map beside it is a left-over of earlier releases, and only fills in what the other leaves out.
    """
    sources = (mapped, config) if "added_tokens_decoder" in config else (config, mapped)
    tokens: dict[str, Any] = {}
    for source in sources:
        extra = source.get("extra_special_tokens")
        own = source.get("model_specific_special_tokens")
        for table in (source, extra, own):
            if not isinstance(table, Mapping):
                continue
            for name, value in table.items():
                if table is source and not name.endswith("_token"):
                    continue
                if value is None:
                    tokens.pop(name, None)
                elif (text := _token(value)) is not None:  # add_bos_token, say, is a flag
                    tokens[name] = text
        additional = source.get("additional_special_tokens")
        if not isinstance(additional, list):
            additional = extra
        if isinstance(additional, list):
            texts = [text for one in additional if (text := _token(one)) is not None]
            tokens["additional_special_tokens"] = texts
    return tokens


def _token(value: Any) -> str | None:
    """A special token, which configs write as text or as {"content": text}."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _sampling(config: Mapping[str, Any]) -> SamplingDefaults:
    """What is out of its range says nothing. `do_sample` is left unread, as vLLM leaves it: it is
    no recommendation, but the state of a switch.
    """
    top_k = _number(config, "top_k", TOP_K_MAX)
    return SamplingDefaults(
        temperature=_number(config, "temperature"),
        top_p=_number(config, "top_p", 1.0) or None,
        top_k=None if top_k is None else int(top_k),
        repetition_penalty=_number(config, "repetition_penalty") or None,
        min_p=_number(config, "min_p", 1.0),
    )


def _number(config: Mapping[str, Any], name: str, most: float = sys.float_info.max) -> float | None:
    value = config.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if 0 <= value <= most else None
