"""A server of the Inference service that answers by a script: no cell, no engine, no decisions."""

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import grpc

from mesh.domain.errors import MeshError, Unavailable
from mesh.v1 import inference_pb2 as pb
from mesh.wire.errors import status_of

THREADS = 64
"""Streams at once."""

Script = Callable[[pb.InvokeRequest], MeshError | bytes | None]
"""What a request is refused with, or gets in place of the end of its answer, if anything."""


class _Status(grpc.Status):
    def __init__(self, error: MeshError) -> None:
        made = status_of(error)
        self.code, self.details, self.trailing_metadata = made.code, made.details, made.metadata


class TokenServer:
    """Sends as many tokens as are asked for, `token_s` apart."""

    def __init__(self, script: Script, token_s: float) -> None:
        self.requests: list[pb.InvokeRequest] = []
        self._script = script
        self._token_s = token_s

    def invoke(self, request: pb.InvokeRequest, context: Any) -> Iterator[bytes]:
        self.requests.append(request)
        end = self._script(request)
        if isinstance(end, MeshError):
            context.abort_with_status(_Status(end))
        yield pb.InvokeResponse(accepted=pb.Accepted(request_id="r1")).SerializeToString()
        for number in range(request.max_tokens):
            time.sleep(self._token_s)
            tokens = pb.Tokens(first_index=number, token_ids=[7])
            yield pb.InvokeResponse(tokens=tokens).SerializeToString()
        finished = pb.Finished(reason="length", output_tokens=request.max_tokens, node="n1")
        well = pb.InvokeResponse(finished=finished).SerializeToString()
        yield end if isinstance(end, bytes) else well


@contextmanager
def token_server(
    script: Script = lambda request: None, *, token_s: float = 0.01
) -> Iterator[tuple[str, TokenServer]]:
    """Its address, and the requests that it has seen."""
    server = grpc.server(ThreadPoolExecutor(THREADS))
    made = TokenServer(script, token_s)
    invoke = grpc.unary_stream_rpc_method_handler(
        made.invoke, request_deserializer=pb.InvokeRequest.FromString
    )
    service = grpc.method_handlers_generic_handler("mesh.v1.Inference", {"Invoke": invoke})
    server.add_generic_rpc_handlers((service,))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield f"127.0.0.1:{port}", made
    finally:
        server.stop(None).wait()


def away(request: pb.InvokeRequest) -> MeshError:
    return Unavailable("away")
