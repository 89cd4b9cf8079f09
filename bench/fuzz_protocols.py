"""What fuzzing found: how many cases were asked, and which answers nobody documented."""

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, cast

import grpc
from google.protobuf.descriptor import Descriptor, FieldDescriptor, MethodDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from mesh.v1 import control_pb2, inference_pb2, model_pb2, node_link_pb2, open_inference_pb2
from mesh.wire.codec_infer import INPUTS
from mesh.wire.errors import EndedCall, is_told

SHOWN_MAX = 20
SHOWN_CHARS_MAX = 400
CALL_S_MAX = 30.0
"""A call that has not ended by then hangs. The deployment's context ends an answer long before."""


@dataclass(slots=True, kw_only=True)
class Findings:
    """What fuzzing found about one protocol, or about files. `outcomes`: calls by how they
    ended.
    """

    cases: int = 0
    hangs: int = 0
    undocumented: int = 0
    shown: list[str] = dataclasses.field(default_factory=list)
    outcomes: dict[str, int] = dataclasses.field(default_factory=dict)

    def ended(self, outcome: str) -> None:
        self.cases += 1
        self.outcomes[outcome] = self.outcomes.get(outcome, 0) + 1

    def hung(self, what: str) -> None:
        self.hangs += 1
        self._show(f"hang: {what}")

    def unexpected(self, what: str) -> None:
        self.undocumented += 1
        self._show(f"undocumented: {what}")

    def _show(self, line: str) -> None:
        if len(self.shown) < SHOWN_MAX:
            self.shown.append(line[:SHOWN_CHARS_MAX])


def drawing(cases: int, seeded: int) -> Callable[[Callable[[], None]], Callable[[], None]]:
    """A function that hypothesis calls with so many cases, the same for the same seed."""
    generating = settings(
        max_examples=cases,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    return lambda ask: seed(seeded)(generating(ask))


DEPTH_MAX = 4
REPEATED_MAX = 3
CHARS_MAX = 40
MUTATIONS_MAX = 4
OTHERS_MAX = 2
"""So many fields of a message are drawn that would be answered."""
KEYS = 1000
"""Calls that go on with others have so many: of two calls with one key the second is refused."""

_INTEGERS = {
    FieldDescriptor.CPPTYPE_INT32: st.integers(-(2**31), 2**31 - 1),
    FieldDescriptor.CPPTYPE_INT64: st.integers(-(2**63), 2**63 - 1),
    FieldDescriptor.CPPTYPE_UINT32: st.integers(0, 2**32 - 1),
    FieldDescriptor.CPPTYPE_UINT64: st.integers(0, 2**64 - 1),
    FieldDescriptor.CPPTYPE_ENUM: st.integers(-1, 40),
}
_SMALL = st.integers(0, 8)
"""Beside numbers of any size, ones that may be meant."""


@st.composite
def raw_messages(
    draw: Callable[[Any], Any],
    descriptor: Descriptor,
    names: Sequence[str],
    damaged: bool,
    said: Message | None = None,
) -> bytes:
    """A message as it goes over the wire; with `damaged`, bytes that were one. `names` appear in
    its strings. With `said`, which would be answered, a few of its fields are drawn.
    """
    message = GetMessageClass(descriptor)()
    if said is not None:
        message.MergeFrom(said)
    _fill(draw, message, names, 0, said is not None)
    raw = message.SerializeToString()
    return bytes(mutated(draw, bytearray(raw))) if damaged else raw


def _drawn(draw: Callable[[Any], Any], message: Message, said: bool) -> Sequence[Any]:
    """The fields to fill: half of them, or, where it `said` something, half of what it holds and a
    few others. The members of a oneof are as likely as each other.
    """
    kind = message.DESCRIPTOR
    fields: list[Any] = list(kind.fields)
    if not said:
        one_of = [draw(st.sampled_from(list(one.fields))) for one in kind.oneofs]
        fields = [f for f in fields if f.containing_oneof is None or f in one_of]
        return [field for field in fields if draw(st.booleans())]
    held = [f for f, _ in message.ListFields() if f.message_type is not None]
    taken = [message.WhichOneof(one.name) for one in kind.oneofs]
    free = [
        f
        for f in fields
        if f.containing_oneof is None or taken[f.containing_oneof.index] in (None, f.name)
    ]
    others = draw(st.lists(st.sampled_from(free), max_size=OTHERS_MAX, unique=True))
    return [*(field for field in held if draw(st.booleans())), *others]


def _fill(
    draw: Callable[[Any], Any], message: Message, names: Sequence[str], depth: int, said: bool
) -> None:
    for field in _drawn(draw, message, said):
        kind, held = field.message_type, getattr(message, field.name)
        count = draw(st.integers(1, REPEATED_MAX)) if field.is_repeated else 1
        if kind is None and field.is_repeated:
            held.extend(draw(_scalars(field, names)) for _ in range(count))
        elif kind is None:
            setattr(message, field.name, draw(_scalars(field, names)))
        elif depth == DEPTH_MAX or kind.GetOptions().map_entry:
            continue
        elif field.is_repeated:
            there = bool(held)
            for one in held if there else [held.add() for _ in range(count)]:
                _fill(draw, one, names, depth + 1, there)
        else:
            there = message.HasField(field.name)
            held.SetInParent()
            _fill(draw, held, names, depth + 1, there)


def _scalars(field: Any, names: Sequence[str]) -> st.SearchStrategy[Any]:
    if field.cpp_type in _INTEGERS:
        return _SMALL | _INTEGERS[field.cpp_type]
    match field.cpp_type:
        case FieldDescriptor.CPPTYPE_BOOL:
            return st.booleans()
        case FieldDescriptor.CPPTYPE_FLOAT:
            return st.floats(width=32)
        case FieldDescriptor.CPPTYPE_DOUBLE:
            return st.floats() | st.floats(0.0, 10.0)
    if field.type == FieldDescriptor.TYPE_BYTES:
        return st.binary(max_size=CHARS_MAX)
    text = st.text(st.characters(codec="utf-8"), max_size=CHARS_MAX)
    return st.sampled_from(list(names)) | text if names else text


def mutated(draw: Callable[[Any], Any], raw: bytearray) -> bytearray:
    for _ in range(draw(st.integers(1, MUTATIONS_MAX))):
        at = draw(st.integers(0, len(raw)))
        match draw(st.sampled_from(["insert", "change", "cut"])):
            case "change" if at < len(raw):
                raw[at] = draw(st.integers(0, 255))
            case "cut":
                del raw[at : at + draw(st.integers(1, 8))]
            case _:
                raw[at:at] = draw(st.binary(min_size=1, max_size=8))
    return raw


SENT_MAX = 4
"""Messages of one call that takes a stream of them."""
ANSWERS_MAX = 4096
"""Messages read of one stream."""
_ENDLESS = frozenset({"Watch", "Connect"})
"""They go on until their caller leaves."""
_LISTENED_S = 0.2
_NAMED = frozenset({"Invoke", "GetDeployment", "GetProfiles", "GetTokenizer", "GetUsage", "Load"})
_NAMED |= {"InvokeMany", "ModelReady", "ModelMetadata"}
"""What may be asked of the deployment that the others are not to take away."""
_TENSORS = frozenset({"ModelInfer", "ModelStreamInfer"})
"""The same, whose strings are names of tensors and datatypes, too."""
_WORDS = (*INPUTS, "BYTES", "BOOL", "INT32", "FP32")
_FAULTS = frozenset({grpc.StatusCode.UNKNOWN, grpc.StatusCode.INTERNAL})


def methods() -> list[MethodDescriptor]:
    return [
        method
        for file in (control_pb2, inference_pb2, node_link_pb2, open_inference_pb2)
        for service in file.DESCRIPTOR.services_by_name.values()
        for method in service.methods
    ]


def said(method: str, deployment: str, key: str = "") -> Message | None:
    """A message that may be answered, of methods of which whole drawn ones hardly ever are."""
    invoke = inference_pb2.InvokeRequest(
        deployment=deployment,
        prompt="go on",
        max_tokens=4,
        key=key,
        resume=inference_pb2.Resume(next_index=2, output_tokens=[1, 2], age_s=1.0),
    )
    submitted = node_link_pb2.SubmitRequest(
        instance_id="i-1",
        request_id="r-1",
        deployment=deployment,
        attempt=1,
        prompt_tokens=[1, 2, 3],
        sampling=model_pb2.SamplingParams(max_tokens=8),
        slo=model_pb2.Slo(ttft_s=1.0, ttft_tokens_per_s=1e3, tpot_s=1.0),
        keyed=True,
    )
    outputs = model_pb2.RequestTokens(request_id="r-1", attempt=1, token_ids=[1], text="a")
    instance = node_link_pb2.InstanceReport(
        instance_id="i-1",
        deployment=deployment,
        model_id="m",
        footprint=model_pb2.Footprint(weights_bytes=1, kv_block_bytes=1, block_tokens=16),
        kv_blocks=4,
        context_tokens_max=64,
        batch_max=4,
    )
    hello = node_link_pb2.NodeHello(
        node_id="drawn",
        run_id="drawn",
        device="cpu",
        memory_bytes=1 << 30,
        instances=[instance],
        requests=[node_link_pb2.HeldRequest(submitted=submitted, outputs=[outputs])],
    )
    known: dict[str, Message] = {
        "Invoke": invoke,
        "InvokeMany": inference_pb2.CallOrder(call=1, invoke=invoke),
        "Connect": node_link_pb2.NodeReport(hello=hello),
    }
    return known.get(method)


def fuzz_grpc(
    address: str,
    names: Sequence[str],
    *,
    cases: int,
    seeded: int,
    asked: Sequence[MethodDescriptor],
) -> Findings:
    findings = Findings()
    drawn = st.sampled_from(asked).flatmap(
        lambda method: st.tuples(st.just(method), _sent(method, names))
    )
    with grpc.insecure_channel(address) as channel:

        @drawing(cases, seeded)
        @given(case=drawn)
        def ask(case: tuple[MethodDescriptor, list[bytes]]) -> None:
            _ask(channel, *case, findings)

        ask()
    return findings


def _names_in(method: MethodDescriptor, names: Sequence[str]) -> Sequence[str]:
    if method.name in _TENSORS:
        return (*names, *_WORDS)
    return names if method.name in _NAMED else ()


def _sent(method: MethodDescriptor, names: Sequence[str]) -> st.SearchStrategy[list[bytes]]:
    """The messages of one call."""
    kind, known = method.input_type, _names_in(method, names)
    keyed = st.integers(1, KEYS).map(lambda n: said(method.name, names[0], f"key-{n}"))
    base = st.none() | keyed
    message = st.tuples(st.booleans(), base).flatmap(
        lambda drawn: raw_messages(kind, known, *drawn)
    )
    return st.lists(message, min_size=1, max_size=SENT_MAX if method.client_streaming else 1)


def _ask(
    channel: grpc.Channel, method: MethodDescriptor, sent: list[bytes], findings: Findings
) -> None:
    endless = method.name in _ENDLESS
    path = f"/{method.containing_service.full_name}/{method.name}"
    timeout_s = _LISTENED_S if endless else CALL_S_MAX
    try:
        # Without a serialiser gRPC takes bytes as they are.
        answers: Iterable[object]
        if method.client_streaming:
            answers = channel.stream_stream(path, None, None)(iter(sent), timeout=timeout_s)
        elif method.server_streaming:
            answers = channel.unary_stream(path, None, None)(sent[0], timeout=timeout_s)
        else:
            answers = [channel.unary_unary(path, None, None)(sent[0], timeout=timeout_s)]
        for _ in islice(answers, ANSWERS_MAX):
            pass
    except grpc.RpcError as error:
        code = error.code()
        findings.ended(code.name)
        what = f"{path} {code.name} {error.details()} for {b' '.join(sent).hex()}"
        if code is grpc.StatusCode.DEADLINE_EXCEEDED and not is_told(cast(EndedCall, error)):
            if not endless:
                findings.hung(what)
        elif code in _FAULTS or not is_told(cast(EndedCall, error)):
            findings.unexpected(what)
    else:
        findings.ended("OK")
