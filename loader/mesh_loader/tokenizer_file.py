"""The tokenizer.json of a folder that is imported: that it can be read, and that it is complete.

transformers reads a tokenizer from several files: tokens that were added to a model are named in
tokenizer_config.json or added_tokens.json, and templates may have a folder of their own. All else
in mesh, and llguidance, reads tokenizer.json and tokenizer_config.json alone, so the store's copies
of these two hold what the others say.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from mesh.domain.errors import MeshError, TornModel, UnsupportedModel
from mesh_loader.model_files import TEMPLATES
from mesh_loader.model_info import TEMPLATE_BYTES_MAX, TOKENIZER_BYTES_MAX, read_bounded, read_json
from mesh_loader.safetensors_file import write_json, write_synced

ADDED_TOKEN_ID_MAX = (1 << 31) - 1
_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")


def require_tokenizer(folder: Path) -> None:
    """Raises UnsupportedModel where there is none, TornModel where it cannot be loaded."""
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise UnsupportedModel(
            f"{folder.name} has no tokenizer.json",
            hint="write one: AutoTokenizer.from_pretrained(DIR).save_pretrained(DIR)",
        )
    try:
        Tokenizer.from_buffer(read_bounded(path, TOKENIZER_BYTES_MAX))
    except MeshError:
        raise
    except BaseException as error:  # the library raises bare Exception, and panics with even less
        if isinstance(error, KeyboardInterrupt | SystemExit):
            raise
        raise TornModel(
            f"{folder.name}/tokenizer.json is corrupt: {error}", hint="fetch the folder again"
        ) from error


def complete_tokenizer(path: Path, folder: Path) -> None:
    """Complete the copies in `folder` by what the model's files in `path` say elsewhere."""
    config = _optional(path / "tokenizer_config.json")
    templates = _named_templates(path)
    if templates:
        given = config.get("chat_template")
        kept = given if isinstance(given, list) else []
        table = [one for one in kept if isinstance(one, dict) and one.get("name") not in templates]
        named = [{"name": name, "template": text} for name, text in templates.items()]
        (folder / "tokenizer_config.json").unlink(missing_ok=True)  # it may be a link to theirs
        write_json(folder / "tokenizer_config.json", {**config, "chat_template": [*table, *named]})
    document = read_json(path / "tokenizer.json", TOKENIZER_BYTES_MAX)
    if not _completed(document, _declared(path, config)):
        return
    text = json.dumps(document, ensure_ascii=False)
    try:
        Tokenizer.from_str(text)
    except Exception as error:  # the library raises bare Exception
        raise TornModel(
            f"{path.name}: its added tokens do not go with tokenizer.json: {error}",
            hint="write both anew: AutoTokenizer.from_pretrained(DIR).save_pretrained(DIR)",
        ) from error
    (folder / "tokenizer.json").unlink(missing_ok=True)
    write_synced(folder / "tokenizer.json", text.encode())


def _optional(path: Path) -> dict[str, Any]:
    return read_json(path) if path.is_file() else {}


def _named_templates(path: Path) -> dict[str, str]:
    try:
        return {
            file.stem: read_bounded(file, TEMPLATE_BYTES_MAX).decode("utf-8")
            for file in sorted((path / TEMPLATES).glob("*.jinja"))
        }
    except UnicodeDecodeError as error:
        raise TornModel(f"{path.name}/{TEMPLATES} cannot be read: {error}") from error


def _declared(path: Path, config: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Added tokens with their ids, as tokenizer.json writes them; then special tokens without one,
    which transformers recognises whether or not they are among the added.
    """
    decoder = config.get("added_tokens_decoder")
    mapped = _optional(path / "special_tokens_map.json")
    special = set(_special_texts(config)) | set(_special_texts(mapped))
    if isinstance(decoder, dict):
        entries = [(key, one) for key, one in decoder.items() if isinstance(one, dict)]
    else:
        legacy = _optional(path / "added_tokens.json")
        entries = [
            (id_, {"content": text, "special": text in special}) for text, id_ in legacy.items()
        ]
    for key, one in entries:
        content = one.get("content")
        token_id = int(key) if str(key).isascii() and str(key).isdigit() else -1
        if isinstance(content, str) and content and 0 <= token_id <= ADDED_TOKEN_ID_MAX:
            yield {"id": token_id, "content": content} | {
                flag: bool(one.get(flag, False)) for flag in _FLAGS
            }
    for text in sorted(special):
        yield {"id": None, "content": text} | {flag: flag == "special" for flag in _FLAGS}


def _special_texts(config: Mapping[str, Any]) -> Iterator[str]:
    for name, value in config.items():
        if not name.endswith(("_token", "_special_tokens")):
            continue
        values = value.values() if name.endswith("s") and isinstance(value, dict) else [value]
        for one in value if isinstance(value, list) else values:
            text = one.get("content") if isinstance(one, dict) else one
            if isinstance(text, str) and text:
                yield text


def _completed(document: dict[str, Any], declared: Iterator[dict[str, Any]]) -> bool:
    """Add the declared tokens that tokenizer.json lacks; whether there were any. One without an id
    has the one that the vocabulary gives its text. An id that is another token's goes to the one
    that is declared: that is how a fine-tune renames a token that its base model reserved.
    """
    added = {int(one["id"]): one for one in document.get("added_tokens") or ()}
    there = {one["content"] for one in added.values()}
    vocabulary = document["model"]["vocab"]
    by_id = isinstance(vocabulary, list)  # Unigram's: text and score
    ids = {text: n for n, (text, _) in enumerate(vocabulary)} if by_id else vocabulary
    next_id = max([len(ids) - 1, *added]) + 1
    before = len(there)
    for token in declared:
        content = token["content"]
        token_id = ids.get(content, token["id"])
        if content in there or token_id is None:
            continue
        if content not in ids and by_id:
            if token_id < len(vocabulary):
                vocabulary[token_id] = [content, vocabulary[token_id][1]]
            elif token_id == next_id:
                next_id += 1
            elif token_id not in added:
                continue  # the library gives added tokens of such a vocabulary the next id alone
        elif content not in ids:
            if token_id in added:
                vocabulary.pop(added[token_id]["content"], None)
            vocabulary[content] = token_id
        there.add(content)
        added[token_id] = {**token, "id": token_id}
    document["added_tokens"] = [added[token_id] for token_id in sorted(added)]
    return len(there) > before
