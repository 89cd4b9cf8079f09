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
    template_file = model_path / "chat_template.jinja"
    template = _template(config.get("chat_template"))
    if template_file.is_file():
        template = _read_text(template_file)
    return TextAssets(
        tokenizer_json=tokenizer_json,
        chat_template=template,
        bos_token=_token(config.get("bos_token")),
        eos_token=_token(config.get("eos_token")),
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


def _template(value: Any) -> str | None:
    """A chat template, which configs write as text or as a list of named ones, one the default."""
    if isinstance(value, list):
        named = {item.get("name"): item.get("template") for item in value if isinstance(item, dict)}
        value = named.get("default")
    return value if isinstance(value, str) else None


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
