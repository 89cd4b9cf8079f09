"""What a replay asks of a protocol, and what it notes of an answer.

The replay itself knows no protocol: a `Sender` speaks one, and `ask` notes when every token of an
answer comes. Before: `replayer`. After: `mesh.evaluation.load_client`, which judges the answers
of every client alike.
"""

import time
from collections.abc import Iterator
from typing import Protocol

import gevent

from mesh.domain.errors import MeshError, Refused
from mesh.domain.invocation import InvocationEvent
from mesh.evaluation.load_client import STOPPED, Answer, Call, answer_of
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
