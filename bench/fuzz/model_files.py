"""Model files as strangers write them: parts of a tiny model are drawn, and bytes of it damaged.

A case is the content of a folder, or of one GGUF file, with what is wrong in it as its name. Drawn
are values of configurations, tokenizers and headers, templates, metadata of GGUF files with their
types, bytes of any file, and what is no file at all. Before: `tests.support`, which makes the tiny
model. After: `importing`, which has mesh import the case.
"""

import json
import os
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from gguf.constants import GGUFValueType
from hypothesis import strategies as st

from bench.fuzz.messages import mutated
from mesh_loader.config_keys import CONFIG, GENERATION, ROPE, TOKENIZER_CONFIG
from mesh_loader.gguf_file import SCALARS
from tests.loader.tiny_gguf import write_tiny_gguf
from tests.support.tiny_model import write_tiny_llama

KEYS_MAX = 3
"""So many keys of a configuration are drawn; the others stay as they were."""
PATHS_MAX = 400
"""Places of a tokenizer.json where a value may be drawn; most are tokens of its vocabulary."""
HEADER_BYTES = 12_000
"""The bytes of a GGUF file that are damaged; behind them are weights."""
_GGUF = "m.gguf"
_WEIGHTS = "model.safetensors"
_TEXTS = (
    *("config.json", "generation_config.json", "tokenizer_config.json", "tokenizer.json"),
    "chat_template.jinja",
)

_INTEGERS = st.integers(-2, 9) | st.integers(-(2**70), 2**70)
_ODD = st.sampled_from(
    [2**31 - 1, 2**31, 2**32, 2**53 + 1, 2**63, 10**18, 10**400, "false", "8", "", "\ud800"]
)
_TEXT = st.text(max_size=20)
_SCALARS = st.none() | st.booleans() | _INTEGERS | st.floats() | _ODD | _TEXT
VALUES: st.SearchStrategy[Any] = st.recursive(
    _SCALARS,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.sampled_from([*CONFIG, *ROPE]) | _TEXT, inner, max_size=4)
    ),
    max_leaves=6,
)
_TEMPLATE_PARTS = (
    *("{% for m in messages %}", "{% endfor %}", "{{ m.content }}", "{{ messages[0]['content'] }}"),
    *("{{ bos_token }}", "{% if tools %}", "{% else %}", "{% endif %}", "{{ 1 / 0 }}", "{%", "}}"),
    *(
        "{{ ''.__class__.__mro__ }}",
        "{{ raise_exception('no') }}",
        "{{ x.y.z }}",
        "{{ 'a' * 999 }}",
    ),
    *("{{ messages | tojson(indent=2) }}", "{% include 'x' %}", "{% set x = messages %}"),
    *("{% macro a() %}{{ a() }}{% endmacro %}{{ a() }}", "{{ strftime_now('%d') }}", "{{ range }}"),
    *("{% generation %}", "{% endgeneration %}", "{{ messages[7].content }}", "\n", "<|im_end|>"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """`files` by their names in the folder; one GGUF file alone is the model itself."""

    what: str
    files: dict[str, bytes]
    special: str = ""
    """A file in whose place there is something else."""

    def write(self, folder: Path) -> Path:
        """What is to be imported."""
        folder.mkdir()
        for name, content in self.files.items():
            (folder / name).write_bytes(content)
        if self.special:
            path = folder / self.special
            path.unlink()
            match self.what:
                case "pipe":
                    os.mkfifo(path)
                case "folder":
                    path.mkdir()
                case "device":
                    path.symlink_to("/dev/zero")
                case _:
                    path.symlink_to("gone")
        return folder / _GGUF if _GGUF in self.files else folder


def whole_models() -> tuple[dict[str, bytes], bytes]:
    """The files of a tiny Hugging Face folder, and a tiny GGUF file."""
    with TemporaryDirectory() as scratch:
        folder = write_tiny_llama(Path(scratch) / "tiny")
        (folder / "generation_config.json").write_text('{"eos_token_id": 1, "temperature": 0.7}')
        config = json.loads((folder / "tokenizer_config.json").read_text())
        (folder / "chat_template.jinja").write_text(config.pop("chat_template"))
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
        write_tiny_gguf(Path(scratch) / _GGUF)
        files = {path.name: path.read_bytes() for path in folder.iterdir()}
        return files, (Path(scratch) / _GGUF).read_bytes()


def cases() -> st.SearchStrategy[Case]:
    """Cases of each kind; kinds of which chance draws fewer wrong values come more often."""
    files, gguf = whole_models()
    kinds = [
        *(_configured(files, name, keys) for name, keys in _KEYS.items()),
        *(_tokenizer(files), _template(files), _tensors(files)) * 2,
        *(_metadata(gguf), _damaged_gguf(gguf)) * 3,
        st.sampled_from((*_TEXTS, _WEIGHTS)).flatmap(lambda name: _damaged(files, name)),
        _special(files),
    ]
    return st.one_of(*kinds)


_KEYS: dict[str, tuple[str, ...]] = {
    "config.json": (*CONFIG, "quantization_config", "text_config", "use_bidirectional_attention"),
    "generation_config.json": tuple(GENERATION),
    "tokenizer_config.json": tuple(TOKENIZER_CONFIG),
}


def _configured(
    files: dict[str, bytes], name: str, keys: tuple[str, ...]
) -> st.SearchStrategy[Case]:
    scaling = st.dictionaries(st.sampled_from(list(ROPE)), VALUES, max_size=4)
    layered = st.dictionaries(st.sampled_from(["full_attention", "sliding_attention"]), scaling)
    before = json.loads(files[name])

    def case(drawn: dict[str, Any], gone: set[str], rope: dict[str, Any] | None) -> Case:
        changed = {**before, **drawn}
        if rope is not None and name == "config.json":
            changed["rope_scaling"] = rope
        left = {key: value for key, value in changed.items() if key not in gone}
        return Case(what=name, files={**files, name: _json(left)})

    drawn = st.dictionaries(st.sampled_from(keys), VALUES, max_size=KEYS_MAX)
    gone = st.sets(st.sampled_from(sorted(before)), max_size=1)
    return st.builds(case, drawn, gone, st.none() | scaling | layered)


def _tokenizer(files: dict[str, bytes]) -> st.SearchStrategy[Case]:
    document = files["tokenizer.json"]
    paths = _paths(json.loads(document), ())[:PATHS_MAX]

    def case(changes: dict[tuple[Any, ...], Any]) -> Case:
        whole = json.loads(document)
        for path, value in changes.items():
            inner = whole
            try:
                for step in path[:-1]:
                    inner = inner[step]
                inner[path[-1]] = value
            except (KeyError, IndexError, TypeError):
                continue  # an earlier change took what was there
        return Case(what="tokenizer", files={**files, "tokenizer.json": _json(whole)})

    places = st.sampled_from(paths[:40]) | st.sampled_from(paths)
    return st.builds(case, st.dictionaries(places, VALUES, min_size=1, max_size=2))


def _paths(value: Any, before: tuple[Any, ...]) -> list[tuple[Any, ...]]:
    """The paths of all values inside, the outer ones first."""
    inside = value.items() if isinstance(value, dict) else enumerate(value)
    steps = [((*before, step), inner) for step, inner in inside]
    deeper = [
        path for at, inner in steps if isinstance(inner, dict | list) for path in _paths(inner, at)
    ]
    return sorted([*(at for at, _ in steps), *deeper], key=len)


def _template(files: dict[str, bytes]) -> st.SearchStrategy[Case]:
    parts = st.lists(st.sampled_from(_TEMPLATE_PARTS) | _TEXT, max_size=8)

    def case(drawn: list[str]) -> Case:
        template = "".join(drawn).encode("utf-8", "replace")
        return Case(what="template", files={**files, "chat_template.jinja": template})

    return st.builds(case, parts)


def _tensors(files: dict[str, bytes]) -> st.SearchStrategy[Case]:
    raw = files[_WEIGHTS]
    (length,) = struct.unpack("<Q", raw[:8])
    before, data = json.loads(raw[8 : 8 + length]), raw[8 + length :]
    members = st.dictionaries(
        st.sampled_from(["dtype", "shape", "data_offsets"]), VALUES, min_size=1, max_size=2
    )

    def case(
        name: str, change: dict[str, Any] | None, other: Any, cut: int, claim: int | None
    ) -> Case:
        entry = {**before[name], **change} if change is not None else other
        header = _json({**before, name: entry})
        claimed = struct.pack("<Q", len(header) if claim is None else claim)
        weights = claimed + header + data[: len(data) - cut]
        return Case(what="safetensors", files={**files, _WEIGHTS: weights})

    names = st.sampled_from(sorted(before))
    cut = st.just(0) | st.integers(0, 64)
    claims = st.none() | st.integers(0, 2**64 - 1)
    return st.builds(case, names, st.none() | members, VALUES, cut, claims)


def _metadata(gguf: bytes) -> st.SearchStrategy[Case]:
    """Entries with keys that are known and any value of any type; of two with one name both."""
    tensors, count = struct.unpack("<QQ", gguf[8:24])
    entries, at = [], 24
    for _ in range(count):
        key, end = _gguf_entry(gguf, at)
        entries.append((key, gguf[at:end]))
        at = end
    end = at
    for _ in range(tensors):
        end = _gguf_text(gguf, end)[1]
        (dimensions,) = struct.unpack_from("<I", gguf, end)
        end += 4 + 8 * dimensions + 12
    infos, data = gguf[at:end], gguf[-(-end // 32) * 32 :]
    names = st.sampled_from([key for key, _ in entries]) | st.sampled_from(
        [b"general.alignment", b"split.count", b"llama.expert_count", b"llama.rope.scaling.type"]
    )

    def case(drawn: dict[bytes, bytes], twice: bool) -> Case:
        kept = [raw for key, raw in entries if twice or key not in drawn]
        added = [_text(key) + value for key, value in drawn.items()]
        head = b"".join([*kept, *added, infos])
        head = gguf[:16] + struct.pack("<Q", len(kept) + len(added)) + head
        padding = b"\0" * (-len(head) % 32)
        return Case(what="gguf", files={_GGUF: head + padding + data})

    typed = st.dictionaries(names, _gguf_values(), min_size=1, max_size=KEYS_MAX)
    return st.builds(case, typed, st.integers(0, 9).map(lambda n: n == 0))


def _gguf_entry(raw: bytes, at: int) -> tuple[bytes, int]:
    key, at = _gguf_text(raw, at)
    (kind,) = struct.unpack_from("<I", raw, at)
    at += 4
    if kind in SCALARS:
        return key, at + SCALARS[kind].size
    if kind == GGUFValueType.STRING:
        return key, _gguf_text(raw, at)[1]
    inner, length = struct.unpack_from("<IQ", raw, at)
    at += 12
    for _ in range(length):
        at = at + SCALARS[inner].size if inner in SCALARS else _gguf_text(raw, at)[1]
    return key, at


def _gguf_text(raw: bytes, at: int) -> tuple[bytes, int]:
    (length,) = struct.unpack_from("<Q", raw, at)
    return raw[at + 8 : at + 8 + length], at + 8 + length


def _text(raw: bytes) -> bytes:
    return struct.pack("<Q", len(raw)) + raw


def _gguf_values() -> st.SearchStrategy[bytes]:
    """A type and bytes of it; at times of a length, or a type, that is not so."""
    scalars = st.sampled_from(sorted(SCALARS)).flatmap(
        lambda kind: st.binary(min_size=SCALARS[kind].size, max_size=SCALARS[kind].size).map(
            lambda raw: (kind, raw)
        )
    )
    small = st.sampled_from([GGUFValueType.UINT32, GGUFValueType.UINT64]).flatmap(
        lambda kind: st.sampled_from([0, 1, 2, 3, 64, 2**20, 2**31, 2**32 - 1]).map(
            lambda n: (int(kind), SCALARS[kind].pack(n))
        )
    )
    texts = (
        st.text(max_size=20).map(lambda text: text.encode("utf-8", "replace"))
        | st.binary(max_size=9)
    ).map(lambda raw: (int(GGUFValueType.STRING), _text(raw)))
    single = scalars | small | texts

    def listed(items: list[tuple[int, bytes]], claim: int | None) -> tuple[int, bytes]:
        kind = items[0][0] if items else int(GGUFValueType.UINT8)
        length = len(items) if claim is None else claim
        return int(GGUFValueType.ARRAY), struct.pack("<IQ", kind, length) + b"".join(
            raw for _, raw in items
        )

    lists = st.builds(listed, st.lists(single, max_size=4), st.none() | st.integers(0, 2**64 - 1))
    return (single | lists).map(lambda one: struct.pack("<I", one[0]) + one[1])


def _damaged(files: dict[str, bytes], name: str) -> st.SearchStrategy[Case]:
    @st.composite
    def case(draw: Callable[[Any], Any]) -> Case:
        head, rest = files[name][:HEADER_BYTES], files[name][HEADER_BYTES:]
        content = bytes(mutated(draw, bytearray(head))) + rest
        return Case(what=f"damaged {name}", files={**files, name: content})

    return case()


def _damaged_gguf(gguf: bytes) -> st.SearchStrategy[Case]:
    @st.composite
    def case(draw: Callable[[Any], Any]) -> Case:
        content = bytes(mutated(draw, bytearray(gguf[:HEADER_BYTES]))) + gguf[HEADER_BYTES:]
        return Case(what="damaged gguf", files={_GGUF: content})

    return case()


def _special(files: dict[str, bytes]) -> st.SearchStrategy[Case]:
    return st.builds(
        lambda what, name: Case(what=what, files=files, special=name),
        st.sampled_from(["pipe", "folder", "device", "dangling link"]),
        st.sampled_from(sorted(files)),
    )


def _json(value: object) -> bytes:
    return json.dumps(value).encode()
