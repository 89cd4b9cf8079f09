"""Traces: what a real OTLP receiver gets of calls by both protocols; others pay nothing."""

import asyncio
import subprocess
import sys
import threading
import tracemalloc
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, asynccontextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from itertools import pairwise
from pathlib import Path
from typing import Any

import grpc
import pytest

pytest.importorskip("opentelemetry.sdk")

from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

from mesh.controller import main, tracing
from mesh.controller.trace_export import opened_tracer
from mesh.controller.tracing import Traces
from mesh.domain.actions import DeliverTokens
from mesh.domain.errors import InvalidInput, Refused
from mesh.domain.ids import NodeId, RequestId
from mesh.domain.invocation import TokenPrompt
from mesh.domain.messages import SubmitRequest
from mesh.domain.request import RequestTokens
from mesh.v1 import inference_pb2 as pb
from mesh.v1.inference_pb2_grpc import InferenceStub
from tests.controller.live import WAIT_S_MAX, asking
from tests.http.edge import Edge, edge

TRACE_ID, PARENT_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
TRACEPARENT = f"00-{TRACE_ID}-{PARENT_ID}-01"
UNSAMPLED = f"00-{TRACE_ID}-{PARENT_ID}-00"


class Receiver(trace_service_pb2_grpc.TraceServiceServicer):
    """Keeps every span that it is sent."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self.services: set[str] = set()

    def Export(self, request: Any, context: Any) -> Any:  # noqa: N802
        for resource in request.resource_spans:
            self.services |= {
                one.value.string_value
                for one in resource.resource.attributes
                if one.key == "service.name"
            }
            for scope in resource.scope_spans:
                self.spans += scope.spans
        return trace_service_pb2.ExportTraceServiceResponse()

    def named(self) -> dict[str, Span]:
        """The spans of one call, by name."""
        found = {span.name: span for span in self.spans}
        assert len(found) == len(self.spans), [span.name for span in self.spans]
        return found


def told(span: Any) -> dict[str, Any]:
    """Attributes of a span or an event."""
    return {
        one.key: [each.string_value for each in one.value.array_value.values]
        if one.value.HasField("array_value")
        else getattr(one.value, str(one.value.WhichOneof("value")))
        for one in span.attributes
    }


@pytest.fixture
def receiver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Receiver]:
    """To whom the variables point."""
    kept = Receiver()
    server = grpc.server(ThreadPoolExecutor(max_workers=2))
    service: Any = trace_service_pb2_grpc
    service.add_TraceServiceServicer_to_server(kept, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{port}")
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "service.name=cell-of-a-test")
    yield kept
    server.stop(None).wait()


@asynccontextmanager
async def traced(home: Path) -> AsyncIterator[Edge]:
    async with edge(home, traces=True) as http:
        yield http


async def by_grpc(http: Edge, tokens: int, **metadata: str) -> None:
    async with grpc.aio.insecure_channel(http.cell.address) as channel:
        asked = pb.InvokeRequest(
            deployment="chat", tokens=pb.TokenIds(ids=[97] * 3), max_tokens=tokens
        )
        invoke: Any = InferenceStub(channel).Invoke
        async for _ in invoke(asked, metadata=tuple(metadata.items()), timeout=WAIT_S_MAX):
            pass


async def by_http(http: Edge, tokens: int, **headers: str) -> None:
    body = {"model": "chat", "prompt": [97] * 3, "max_tokens": tokens, "temperature": 0.5}
    answer = await http.post("/v1/completions", body, headers=headers)
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize("protocol", [by_grpc, by_http])
async def test_a_call_is_one_trace(tmp_path: Path, receiver: Receiver, protocol: Any) -> None:
    """The clients', from its gateway to its last token, with the load that it waited for."""
    async with traced(tmp_path) as http:
        await http.cell.deployed()
        await protocol(http, 5, traceparent=TRACEPARENT)
    found = receiver.named()
    assert set(found) == {"gateway", "queue", "load", "prefill", "decode"}
    assert {span.trace_id.hex() for span in receiver.spans} == {TRACE_ID}
    gateway = found["gateway"]
    assert gateway.parent_span_id.hex() == PARENT_ID
    assert gateway.kind == Span.SPAN_KIND_SERVER
    for name in ("queue", "prefill", "decode"):
        assert found[name].parent_span_id == gateway.span_id, name
    assert found["load"].parent_span_id == found["queue"].span_id
    in_order = [found["queue"], found["prefill"], found["decode"]]
    assert gateway.start_time_unix_nano <= in_order[0].start_time_unix_nano
    for earlier, later in pairwise(in_order):
        assert earlier.end_time_unix_nano == later.start_time_unix_nano
    assert in_order[-1].end_time_unix_nano <= gateway.end_time_unix_nano
    said = told(gateway)
    assert said["gen_ai.request.model"] == "chat"
    assert said["gen_ai.operation.name"] == "text_completion"
    assert said["gen_ai.request.max_tokens"] == 5
    assert (said["gen_ai.usage.input_tokens"], said["gen_ai.usage.output_tokens"]) == (3, 5)
    assert said["gen_ai.response.finish_reasons"] == ["length"]
    assert said["gen_ai.response.id"] == "r1-1"
    assert (
        0
        < said["gen_ai.latency.time_in_queue"]
        <= said["gen_ai.latency.time_to_first_token"]
        <= said["gen_ai.latency.e2e"]
    )
    decode = told(found["decode"])
    assert (decode["mesh.iterations"], decode["mesh.tokens"]) == (5, 5)
    assert [event.name for event in found["decode"].events] == ["iteration"] * 5
    assert told(found["load"])["mesh.tier"] == "disk"
    assert receiver.services == {"cell-of-a-test"}


async def test_iterations_are_told_up_to_a_bound(
    tmp_path: Path, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tracing, "ITERATION_EVENTS_MAX", 3)
    async with traced(tmp_path) as http:
        await http.cell.deployed()
        await by_grpc(http, 9)
    decode = receiver.named()["decode"]
    assert len(decode.events) == 3
    assert told(decode)["mesh.iterations"] == 9


async def test_nothing_that_a_client_has_said_is_in_a_trace(
    tmp_path: Path, receiver: Receiver
) -> None:
    async with traced(tmp_path) as http:
        await http.cell.deployed()
        secret = {"Authorization": "Bearer mesh_secret", "baggage": "user=secret"}
        body = {"model": "chat", "prompt": "secret", "stop": "secret", "max_tokens": 2}
        assert (await http.post("/v1/completions", body, headers=secret)).status_code == 200
    assert receiver.spans
    assert all(b"secret" not in span.SerializeToString() for span in receiver.spans)


async def test_refusals_failures_and_leaving_are_told(tmp_path: Path, receiver: Receiver) -> None:
    async with traced(tmp_path) as http:
        node = await http.cell.deployed()
        long = replace(asking(), prompt=TokenPrompt(token_ids=(97,) * 5000))
        with pytest.raises(Refused):
            await http.cell.answer(long)
        assert (await http.post("/v1/completions", {"model": "x", "prompt": "x"})).ok is False
        node.held = True
        await http.cell.accepted(asking())
        await http.cell.idle()
    ends = [(told(span).get("error.type"), span.status.code) for span in gateways(receiver)]
    assert ends == [
        ("prompt_too_long", Status.STATUS_CODE_ERROR),
        ("cancelled", Status.STATUS_CODE_UNSET),
    ]
    cut_short = [span.name for span in receiver.spans if told(span).get("mesh.cancelled")]
    assert cut_short in (["queue"], ["prefill"]), "whether its load had ended by then"
    assert not any(span.end_time_unix_nano == 0 for span in receiver.spans)


def gateways(receiver: Receiver) -> list[Span]:
    found = [span for span in receiver.spans if span.name == "gateway"]
    return sorted(found, key=lambda span: span.start_time_unix_nano)


async def test_a_request_that_moves_stays_one_trace(tmp_path: Path, receiver: Receiver) -> None:
    async with traced(tmp_path) as http:
        first = await http.cell.deployed(held=True)
        asked = asyncio.create_task(by_grpc(http, 4))
        order = (await first.told(SubmitRequest)).order
        await first.answer(order, 0, 2, last=False)
        await http.cell.node(node_id=NodeId("n2"), run_id="run-2")
        http.cell.nodes.remove(first)
        await first.leave()
        async with asyncio.timeout(WAIT_S_MAX):
            await asked
    names = [span.name for span in receiver.spans]
    assert names.count("gateway") == 1
    assert (names.count("prefill"), names.count("decode")) == (2, 2)
    assert len({span.trace_id for span in receiver.spans}) == 1
    (gateway,) = gateways(receiver)
    assert "resubmitted" in [event.name for event in gateway.events]
    attempts = {told(span)["mesh.attempt"] for span in receiver.spans if span.name == "prefill"}
    assert attempts == {1, 2}


async def test_what_is_not_sampled_is_forgotten_at_once(tmp_path: Path, receiver: Receiver) -> None:
    async with traced(tmp_path) as http:
        await http.cell.deployed()
        await by_grpc(http, 3, traceparent=UNSAMPLED)
        await by_http(http, 3, traceparent=UNSAMPLED)
    assert receiver.spans == []


def test_tokens_of_untraced_requests_take_no_memory(receiver: Receiver) -> None:
    with ExitStack() as opened:
        traces = Traces(opened_tracer({}, opened), lambda: 0.0)
        outputs = RequestTokens(
            request_id=RequestId("r1-1"), attempt=1, first_index=0, token_ids=(1,)
        )
        actions = (DeliverTokens(outputs=outputs),)
        traces.record(0.0, None, actions)
        tracemalloc.start()
        try:
            before = tracemalloc.get_traced_memory()[0]
            for _ in range(1000):
                traces.record(0.0, None, actions)
            kept = tracemalloc.get_traced_memory()[0] - before
        finally:
            tracemalloc.stop()
    assert kept < 1000


UNTRACED = """
import asyncio, sys, tempfile, pathlib
from tests.controller.live import asking
from tests.http.edge import edge

async def run():
    with tempfile.TemporaryDirectory() as home:
        async with edge(pathlib.Path(home)) as http:
            await http.cell.deployed()
            body = {"model": "chat", "prompt": "x", "max_tokens": 2}
            answer = await http.post("/v1/completions", body, headers={"traceparent": "%s"})
            assert answer.ok, answer.text
            assert await http.cell.answer()

asyncio.run(run())
print(sorted(name for name in sys.modules if name.startswith("opentelemetry")))
"""


def test_without_a_place_for_traces_nothing_of_opentelemetry_is_imported() -> None:
    """So nothing of it is called either: `tracing` imports it."""
    done = subprocess.run(
        [sys.executable, "-c", UNTRACED % TRACEPARENT],
        capture_output=True,
        text=True,
        timeout=60.0,
        check=False,
    )
    assert done.stdout.splitlines()[-1:] == ["[]"], done.stderr


@pytest.mark.parametrize(
    ("environ", "wanted"),
    [
        ({}, False),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://x:4317"}, True),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://x:4317"}, True),
        ({"OTEL_TRACES_EXPORTER": "console"}, True),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://x", "OTEL_TRACES_EXPORTER": "none"}, False),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://x", "OTEL_SDK_DISABLED": "TRUE"}, False),
    ],
)
def test_traces_are_wanted_by_a_variable(environ: dict[str, str], wanted: bool) -> None:
    assert main.wants_traces(environ) is wanted


@pytest.mark.parametrize(
    "environ",
    [{"OTEL_TRACES_EXPORTER": "zipkin"}, {"OTEL_EXPORTER_OTLP_PROTOCOL": "http/json"}],
)
def test_a_variable_that_cannot_be_meant_is_said(environ: dict[str, str]) -> None:
    with ExitStack() as opened, pytest.raises(InvalidInput, match=next(iter(environ.values()))):
        opened_tracer(environ, opened)


def test_spans_go_by_http_where_a_variable_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    came: list[tuple[str, bytes]] = []

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            came.append((self.path, self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            """Nowhere."""

    with HTTPServer(("127.0.0.1", 0), Collector) as server:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
        serving = threading.Thread(target=server.serve_forever, args=(0.02,))
        serving.start()
        with ExitStack() as opened:
            environ = {"OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf"}
            opened_tracer(environ, opened).start_span("of a test").end()
        server.shutdown()
        serving.join()
    ((path, body),) = came
    assert path == "/v1/traces"
    assert b"of a test" in body


async def test_a_collector_that_does_not_answer_holds_nobody_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "2")
    async with asyncio.timeout(30.0):
        async with traced(tmp_path) as http:
            await http.cell.deployed()
            await by_grpc(http, 3)
    # Who goes on trying draws random numbers, which Hypothesis holds against the tests after this.
    for thread in threading.enumerate():
        if thread.name == "traces":
            thread.join(WAIT_S_MAX)
