"""Calls every method of every service of mesh's with drawn messages and damaged bytes.

Before: a running cell. After: `Findings`. A call may end well or with a status that mesh gave, one
of `mesh.wire.statuses`; a fault of ours (`UNKNOWN`, `INTERNAL`) and what gRPC says by itself are
undocumented.
"""

from collections.abc import Iterable, Sequence
from itertools import islice
from typing import cast

import grpc
from google.protobuf.descriptor import MethodDescriptor
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from bench.fuzz.findings import CALL_S_MAX, Findings
from bench.fuzz.messages import raw_messages
from mesh.v1 import control_pb2, inference_pb2, node_link_pb2, open_inference_pb2
from mesh.wire.codec_infer import INPUTS
from mesh.wire.errors import EndedCall, is_told

ANSWERS_MAX = 4096
"""Messages read of one stream."""
_ENDLESS = frozenset({"Watch", "Connect"})
"""They go on until their caller leaves."""
_LISTENED_S = 0.2
_NAMED = frozenset({"Invoke", "GetDeployment", "GetProfiles", "GetTokenizer", "GetUsage", "Load"})
_NAMED |= {"ModelReady", "ModelMetadata"}
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


def fuzz_grpc(address: str, names: Sequence[str], *, cases: int, seeded: int) -> Findings:
    findings = Findings()
    drawn = st.sampled_from(methods()).flatmap(
        lambda method: st.booleans().flatmap(
            lambda damaged: st.tuples(
                st.just(method),
                raw_messages(method.input_type, _names_in(method, names), damaged),
            )
        )
    )
    with grpc.insecure_channel(address) as channel:

        @seed(seeded)
        @settings(
            max_examples=cases,
            database=None,
            deadline=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        @given(case=drawn)
        def ask(case: tuple[MethodDescriptor, bytes]) -> None:
            _ask(channel, *case, findings)

        ask()
    return findings


def _names_in(method: MethodDescriptor, names: Sequence[str]) -> Sequence[str]:
    if method.name in _TENSORS:
        return (*names, *_WORDS)
    return names if method.name in _NAMED else ()


def _ask(channel: grpc.Channel, method: MethodDescriptor, raw: bytes, findings: Findings) -> None:
    endless = method.name in _ENDLESS
    path = f"/{method.containing_service.full_name}/{method.name}"
    timeout_s = _LISTENED_S if endless else CALL_S_MAX
    try:
        # Without a serialiser gRPC takes bytes as they are.
        answers: Iterable[object]
        if method.client_streaming:
            answers = channel.stream_stream(path, None, None)(iter([raw]), timeout=timeout_s)
        elif method.server_streaming:
            answers = channel.unary_stream(path, None, None)(raw, timeout=timeout_s)
        else:
            answers = [channel.unary_unary(path, None, None)(raw, timeout=timeout_s)]
        for _ in islice(answers, ANSWERS_MAX):
            pass
    except grpc.RpcError as error:
        code = error.code()
        findings.ended(code.name)
        what = f"{path} {code.name} {error.details()} for {raw.hex()}"
        if code is grpc.StatusCode.DEADLINE_EXCEEDED and not is_told(cast(EndedCall, error)):
            if not endless:
                findings.hung(what)
        elif code in _FAULTS or not is_told(cast(EndedCall, error)):
            findings.unexpected(what)
    else:
        findings.ended("OK")
