"""What a replay asks of a protocol, what it notes of an answer, and calls by mesh's own protocol.

The replay itself knows no protocol: a `Sender` speaks one, and `ask` notes when every token of an
answer comes. Before: `replayer`. After: `mesh.evaluation.load_client`, which judges the answers
of every client alike. A process that waits by gevent has to call `wait_by_gevent` once, after it
has forked.
"""

import time
from collections.abc import Iterator
from typing import Protocol

import gevent
import grpc.experimental.gevent

from mesh.domain.errors import MeshError, Refused
from mesh.domain.invocation import Invocation, InvocationEvent, TokenPrompt
from mesh.evaluation.load_client import STOPPED, Answer, Call, answer_of
from mesh.wire.client import MeshClient
from mesh.wire.errors import status_of


class Sender(Protocol):
    """A worker's way to a cell. It may block a greenlet, never the process."""

    def send(self, call: Call, timeout_s: float) -> Iterator[InvocationEvent]:
        """The answer's events as they come. Closing the iterator leaves the call.

        Raises Refused with the reason, DeadlineExceeded after `timeout_s`, another MeshError when
        the call fails.
        """
        ...

    def close(self) -> None: ...


def ask(sender: Sender, call: Call, *, due_s: float, timeout_s: float) -> Answer:
    """Send a call that was due at a moment of the machine's monotonic clock, and wait for its end.

    A greenlet that is killed meanwhile leaves the call, and still returns what came.
    """
    events: list[tuple[float, InvocationEvent]] = []
    note = events.append
    refused = failed = ""
    retry_after_s = 0.0
    sent_s = time.monotonic()
    try:
        for event in sender.send(call, timeout_s):
            note((time.monotonic(), event))
    except Refused as error:
        refused, retry_after_s = str(error.reason), error.retry_after_s
    except MeshError as error:
        failed = status_of(error).code.name.lower()
    except gevent.GreenletExit:
        failed = STOPPED
    return answer_of(
        events,
        sent_s=sent_s,
        ended_s=time.monotonic(),
        lag_s=sent_s - due_s,
        refused=refused,
        retry_after_s=retry_after_s,
        failed=failed,
    )


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
