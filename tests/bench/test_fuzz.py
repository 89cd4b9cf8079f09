"""Drawn messages and bodies are of their type, damaged ones at times of none, and no method is left
out; model files are drawn of each kind; what an answer or an import must not do is found."""

import json
import os
import random
import signal
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import requests
from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.message import DecodeError
from google.protobuf.message_factory import GetMessageClass
from hypothesis import HealthCheck, Phase, find, given, seed, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from bench.drawn_json import Drawing
from bench.fuzz_http import cases as calls
from bench.fuzz_http import operations, wrong_in
from bench.fuzz_importing import IMPORTED, Case, Importer, cases, tried, whole_models
from bench.fuzz_protocols import Findings, methods, raw_messages, said
from mesh.domain.messages import NodeHello
from mesh.http.openapi import document
from mesh.v1 import inference_pb2, node_link_pb2
from mesh.wire.access import RPCS
from mesh.wire.codec import report_from_wire
from mesh_loader.store import ModelStore

INVOKE = inference_pb2.InvokeRequest.DESCRIPTOR
DOCUMENT: Any = json.loads(json.dumps(document()))


def test_every_method_that_there_are_roles_for_is_asked() -> None:
    asked = {f"/{m.containing_service.full_name}/{m.name}" for m in methods()}
    assert asked == set(RPCS)


@settings(max_examples=15, suppress_health_check=list(HealthCheck))
@given(data=st.data(), method=st.sampled_from(methods()))
def test_a_drawn_message_is_one_of_its_type(data: st.DataObject, method: MethodDescriptor) -> None:
    kind = method.input_type
    raw = data.draw(raw_messages(kind, ["chat"], False))
    GetMessageClass(kind).FromString(raw)


def test_names_that_exist_are_drawn() -> None:
    found = find(
        raw_messages(INVOKE, ["chat"], False),
        lambda raw: inference_pb2.InvokeRequest.FromString(raw).deployment == "chat",
    )
    assert b"chat" in found


@pytest.mark.parametrize("member", ["hello", "kv_arrived"])
def test_any_member_of_a_oneof_is_drawn(member: str) -> None:
    def has(raw: bytes) -> bool:
        return node_link_pb2.NodeReport.FromString(raw).WhichOneof("report") == member

    assert find(raw_messages(node_link_pb2.NodeReport.DESCRIPTOR, [], False), has)


def test_what_is_said_stays_but_for_a_few_fields() -> None:
    kind, message = node_link_pb2.NodeReport, said("Connect", "chat")
    assert isinstance(message, kind)

    def differs(raw: bytes) -> bool:
        (held,) = kind.FromString(raw).hello.requests
        return held.submitted.attempt != 1 and held.submitted.prompt_tokens == [1, 2, 3]

    found = kind.FromString(find(raw_messages(kind.DESCRIPTOR, ["chat"], False, message), differs))
    assert found.hello.node_id == "drawn"
    hello = report_from_wire(message)
    assert isinstance(hello, NodeHello)
    assert len(hello.requests) == 1, "those that cannot be read are left out"


def test_damaged_bytes_come_to_no_message_at_times() -> None:
    def broken(raw: bytes) -> bool:
        try:
            inference_pb2.InvokeRequest.FromString(raw)
        except DecodeError:
            return True
        return False

    raw = find(raw_messages(INVOKE, ["chat"], True), broken)
    with pytest.raises(DecodeError):
        inference_pb2.InvokeRequest.FromString(raw)


KINDS = (
    *("config.json", "generation_config.json", "tokenizer_config.json", "tokenizer", "template"),
    *("safetensors", "gguf", "damaged gguf", "damaged config.json", "pipe", "device"),
)


def test_model_files_of_each_kind_are_drawn(tmp_path: Path) -> None:
    drawn: dict[str, Case] = {}

    @seed(1)
    @settings(
        max_examples=400,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=cases())
    def draw(case: Case) -> None:
        drawn[case.what] = case

    draw()
    assert drawn.keys() >= set(KINDS)
    for what, case in drawn.items():
        assert case.write(tmp_path / what).parent.is_dir()


def test_the_models_that_are_drawn_from_are_imported(tmp_path: Path) -> None:
    files, gguf = whole_models()
    for name, content in (("folder", files), ("file", {"m.gguf": gguf})):
        path = Case(what="whole", files=content).write(tmp_path / name)
        assert tried(f"file://{path}", str(tmp_path / "store")) == IMPORTED


@pytest.mark.parametrize("error", [KeyError("x"), BaseException("panic"), MemoryError()])
def test_an_error_that_nobody_has_typed_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    def fail(*arguments: object) -> None:
        raise error

    monkeypatch.setattr(ModelStore, "import_model", fail)
    outcome = tried("file:///x", str(tmp_path))
    assert outcome.name == "untyped"
    assert type(error).__name__ in outcome.wrong


def test_an_import_that_ends_its_process_is_found_and_the_next_has_another(tmp_path: Path) -> None:
    findings, store = Findings(), str(tmp_path / "store")
    files, _ = whole_models()
    case = Case(what="whole", files=files)
    source = f"file://{case.write(tmp_path / 'case')}"
    with closing(Importer()) as importer:
        assert importer.ask(case, source, store, findings) == IMPORTED
        (process,) = importer.processes()
        os.kill(process, signal.SIGKILL)
        assert importer.ask(case, source, store, findings) is None
        assert importer.ask(case, source, store, findings) == IMPORTED
    assert findings.outcomes == {"imported": 2, "process ended": 1}
    assert findings.undocumented == 1


def test_a_drawn_body_fits_its_schema_and_a_damaged_one_does_not_at_times() -> None:
    # An empty list is of each of the kinds of lists that a prompt may be.
    components = json.loads(json.dumps(DOCUMENT["components"]).replace('"oneOf"', '"anyOf"'))
    schemas = components["schemas"]
    drawing = Drawing(random.Random(1), schemas)
    broken = set[str]()
    for kind in schemas:
        ref = {"$ref": f"#/components/schemas/{kind}"}
        checks = Draft202012Validator({**ref, "components": components})
        for _ in range(10):
            body = drawing.fitting(ref)
            assert not list(checks.iter_errors(body)), body
            if not checks.is_valid(drawing.damaged(json.loads(json.dumps(body)))):
                broken.add(kind)
    assert len(broken) > len(schemas) / 2


def test_the_same_seed_draws_the_same_calls() -> None:
    def drawn(seeded: int) -> list[tuple[str, bytes | None]]:
        draw = random.Random(seeded)
        drawing = Drawing(draw, DOCUMENT["components"]["schemas"], ["chat"])
        return [
            (case.path, case.body)
            for operation in operations(DOCUMENT, ["chat"], ["embeds"])
            for case in calls(operation, draw, drawing, 5)
        ]

    assert drawn(1) == drawn(1) != drawn(2)


@pytest.mark.parametrize(
    ("status", "told", "found"),
    [
        (200, {"count": 1, "max_model_len": 2, "tokens": [3]}, ""),
        (200, {"count": "1"}, "not of type"),
        (418, {}, "no status of the schema"),
        (400, {"error": "wrong"}, "is not of type"),
        (500, {"error": {"message": "m", "type": "t", "param": None, "code": "c"}}, "c is no"),
    ],
)
def test_an_answer_that_nobody_documented_is_found(status: int, told: Any, found: str) -> None:
    (tokenize,) = (
        one for one in operations(DOCUMENT, ["chat"], ["embeds"]) if one.path == "/tokenize"
    )
    answer = requests.Response()
    answer.status_code, answer._content = status, json.dumps(told).encode()
    answer.headers["content-type"] = "application/json"
    wrong = " ".join(wrong_in(tokenize, answer))
    assert found in wrong
    assert bool(found) == bool(wrong)
