"""Model files as strangers write them: parts of a tiny model are drawn, and bytes of it damaged.

A case is the content of a folder, or of one GGUF file, with what is wrong in it as its name. Drawn
are values of configurations, tokenizers and headers, templates, metadata of GGUF files with their
types, bytes of any file, and what is no file at all. Before: `tests.support`, which makes the tiny
model. After: `importing`, which has mesh import the case.
"""

import json
import os
import resource
import shutil
import signal
import struct
import tempfile
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures import TimeoutError as Late
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing, suppress
from dataclasses import dataclass
from itertools import count
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from gguf.constants import GGUFValueType
from hypothesis import given
from hypothesis import strategies as st

from bench.demo_model import store_path
from bench.fuzz_protocols import CALL_S_MAX, Findings, drawing, mutated
from mesh.domain.deployment import DeploymentSpec
from mesh.domain.errors import InvalidInput, MeshError, Refused, TornModel, UnsupportedModel
from mesh.domain.ids import DeploymentName, OperationId
from mesh.domain.invocation import Invocation, TextPrompt
from mesh.domain.messages import ImportDone
from mesh.domain.model import KvPrecision, WeightPrecision
from mesh.domain.reasons import RefusalReason
from mesh.domain.text import ChatMessage
from mesh.text.assets import read_assets
from mesh.text.tokenizer import TextCodec
from mesh.wire.client import MeshClient
from mesh.wire.codec import report_from_wire
from mesh.wire.unread import reports_written
from mesh_loader.config_keys import CONFIG, GENERATION, ROPE, TOKENIZER_CONFIG
from mesh_loader.gguf_file import SCALARS
from mesh_loader.store import ModelStore, StoredModel
from mesh_nodes.engines.openvino.architecture import read_architecture
from mesh_nodes.engines.openvino.footprint import estimate
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


CALLERS = (InvalidInput, TornModel, UnsupportedModel)
"""What an import may be refused with: the files are wrong, and no other try goes better."""
MEMORY_BYTES_MAX = 6 << 30
"""The address space of the process that imports; libraries map 2 GiB of it."""
CHARS_MAX = 4000
"""The longest message of an error that is kept."""
DEPLOYED_OF = 200
"""A cell deploys one of so many, and one of fewer of those that can be imported."""
IMPORTED_DEPLOYED_OF = 20


@dataclass(frozen=True, slots=True)
class Outcome:
    name: str
    wrong: str = ""


IMPORTED = Outcome("imported")


def fuzz_files(address: str, *, cases_max: int, seeded: int) -> Findings:
    findings = Findings()
    numbers, whole = count(), count()
    with tempfile.TemporaryDirectory() as scratch, closing(Importer()) as importer:

        @drawing(cases_max, seeded)
        @given(case=cases())
        def ask(case: Case) -> None:
            number = next(numbers)
            folder = Path(scratch) / f"{number}"
            source = f"file://{case.write(folder)}"
            outcome = importer.ask(case, source, str(Path(scratch) / "store"), findings)
            imported = outcome == IMPORTED and next(whole) % IMPORTED_DEPLOYED_OF == 0
            if imported or (outcome is not None and number % DEPLOYED_OF == 0):
                _deploy(address, DeploymentName(f"files-{number}"), source, case, findings)
            shutil.rmtree(folder, ignore_errors=True)

        ask()
        _forget(f"file://{scratch}/")
    return findings


class Importer:
    """The process that imports; another one after a case that has ended or held it."""

    def __init__(self) -> None:
        self._pool = self._begun()

    def ask(self, case: Case, source: str, store: str, findings: Findings) -> Outcome | None:
        """None where the process did not outlive it."""
        what = f"{case.what} {case.special} {_content(case)}"
        try:
            outcome = self._pool.submit(tried, source, store).result(CALL_S_MAX)
        except Late:
            findings.ended("hang")
            findings.hung(what)
        except BrokenProcessPool:
            findings.ended("process ended")
            findings.unexpected(f"the process ended for {what}")
        else:
            findings.ended(outcome.name)
            if outcome.wrong:
                findings.unexpected(f"{outcome.wrong} for {what}")
            return outcome
        self.close()
        self._pool = self._begun()
        return None

    def processes(self) -> list[int]:
        """Their ids; the pool itself does not say."""
        return list(self._pool._processes or ())

    def close(self) -> None:
        processes = self.processes()
        self._pool.shutdown(wait=False, cancel_futures=True)
        for process in processes:
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)

    def _begun(self) -> ProcessPoolExecutor:
        return ProcessPoolExecutor(1, mp_context=get_context("spawn"), initializer=_bound_memory)


def _bound_memory() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES_MAX, MEMORY_BYTES_MAX))


def tried(source: str, store: str) -> Outcome:
    """What becomes of the import, and of what comes after it."""
    try:
        shutil.rmtree(store, ignore_errors=True)
        return _used(ModelStore(Path(store)).import_model(source))
    except MeshError as error:
        return Outcome(type(error).__name__, _improper(error))
    except BaseException as error:  # a panic of a Rust library is no Exception
        return Outcome("untyped", f"{type(error).__name__}: {str(error)[:CHARS_MAX]}")


def _used(stored: StoredModel) -> Outcome:
    read_architecture(stored.path)
    footprint = estimate(stored.info, weights=WeightPrecision.I8, kv=KvPrecision.F16)
    assets = read_assets(stored.path)
    done = ImportDone(
        operation_id=OperationId("o"), model=stored.info, footprint=footprint, text=assets
    )
    if [report_from_wire(message) for message in reports_written(done)] != [done]:
        return Outcome("imported", "what was imported does not fit its message")
    codec = TextCodec(assets)
    codec.decode(codec.encode("Hello, wörld 12"))
    if assets.chat_template:
        codec.encode_chat([ChatMessage(role="user", content="hi")])
    return IMPORTED


def _improper(error: MeshError) -> str:
    said = f"{type(error).__name__}: {error.message[:CHARS_MAX]}"
    if not isinstance(error, CALLERS):
        return f"no error of the caller's: {said}"
    if len(error.message) > CHARS_MAX or "\n" in error.message + error.hint:
        return f"no line for people: {said}"
    return f"it suggests another try: {error.hint}" if "try again" in error.hint else ""


def _deploy(
    address: str, name: DeploymentName, source: str, case: Case, findings: Findings
) -> None:
    """On the cell: every error is the caller's, by name, and the answers that come are whole."""
    asked = Invocation(deployment=name, prompt=TextPrompt(text="Hello"), max_tokens=2)
    with MeshClient(address) as client:
        try:
            client.deploy(DeploymentSpec(name=name, source=source))
        except MeshError as error:
            findings.ended(f"deploy: {type(error).__name__}")
            if wrong := _improper(error):
                findings.unexpected(f"deploy: {wrong} for {case.what} {_content(case)}")
            return
        ending = _ended(lambda: list(client.invoke(asked)))
        findings.ended(f"deployed: {ending.name}")
        if ending.wrong:
            findings.unexpected(f"invoke: {ending.wrong} for {case.what} {_content(case)}")
        client.delete(name)


def _ended(call: Callable[[], object]) -> Outcome:
    try:
        call()
    except Refused as error:
        # What a model's numbers come to, its engine may not have the memory for.
        wrong = "" if error.reason is RefusalReason.LOAD_FAILED else error.message
        return Outcome(f"refused, {error.reason}", wrong)
    except MeshError as error:
        return Outcome(type(error).__name__, _improper(error))
    return Outcome("answered")


def _forget(sources: str) -> None:
    """Takes what the cell has imported out of the usual store."""
    store = ModelStore(store_path())
    for stored in store.models():
        if stored.info.source.startswith(sources):
            store.remove(stored.info.model_id)


def _content(case: Case) -> str:
    """What is wrong, as far as a line can show it."""
    name = case.what.removeprefix("damaged ")
    content = case.files.get({"template": "chat_template.jinja"}.get(name, name), b"")
    return f"{content[:300]!r}"
