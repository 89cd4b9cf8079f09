"""Calls by mesh's own gRPC API: one channel a worker, streams read token by token.

A process that waits by gevent has to call `wait_by_gevent` once, after it has forked. Before:
`replayer`. After: the cell's controller.
"""

from collections.abc import Iterator

import grpc.experimental.gevent

from mesh.domain.invocation import Invocation, InvocationEvent, TokenPrompt
from mesh.evaluation.load_client import Call
from mesh.wire.client import MeshClient


def wait_by_gevent() -> None:
    """Whoever waits for gRPC lets other greenlets run."""
    grpc.experimental.gevent.init_gevent()


class GrpcSender:
    """Dials `HOST:PORT` with its first call, and again by itself when the cell has gone away."""

    def __init__(self, address: str) -> None:
        self._client = MeshClient(address)

    def send(self, call: Call, timeout_s: float) -> Iterator[InvocationEvent]:
        return self._client.invoke(
            Invocation(
                deployment=call.deployment,
                prompt=TokenPrompt(token_ids=call.prompt_tokens),
                max_tokens=call.output_tokens,
                ignore_eos=call.forced,
                seed=1,
            ),
            timeout_s=timeout_s,
        )

    def close(self) -> None:
        self._client.close()
