"""Whether a controller that runs still answers: `mesh up` says so when it does not.

A process can live while its event loop stands still, which no exit code tells. It is asked for its
health again and again, without waiting for the answer, so that whoever looks is not held up.
"""

import contextlib
from collections.abc import Callable

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from mesh.wire.channel import dial_blocking

ASK_EVERY_S = 1.0
STILL_S_MAX = 10.0
"""Without an answer for so long, a controller is said to stand still."""


class Pulse:
    """Watches one process that has begun to serve at an address. `tell` is given a line for
    people.
    """

    def __init__(self, address: str, now_s: float, tell: Callable[[str], None]) -> None:
        self._channel = dial_blocking(address)
        self._check = health_pb2_grpc.HealthStub(self._channel).Check
        self._tell = tell
        self._asked_s = now_s
        self._silent_since_s: float | None = None
        """When it was first asked without an answer so far; silence between looks is nobody's."""
        self._answer: grpc.Future[health_pb2.HealthCheckResponse] | None = None
        self._is_told = False

    def look(self, now_s: float) -> None:
        """Take an answer that has come, and ask again when that is due; never waits."""
        if self._answer is not None and self._answer.done():
            with contextlib.suppress(grpc.RpcError, grpc.FutureCancelledError):
                self._answer.result()
                self._note_answer(now_s)
            self._answer = None
        if self._answer is None and now_s >= self._asked_s + ASK_EVERY_S:
            self._asked_s = now_s
            if self._silent_since_s is None:
                self._silent_since_s = now_s
            self._answer = self._check.future(health_pb2.HealthCheckRequest())
        silent_s = 0.0 if self._silent_since_s is None else now_s - self._silent_since_s
        if not self._is_told and silent_s >= STILL_S_MAX:
            self._is_told = True
            self._tell(
                f"the controller has not answered for {silent_s:.0f} s: its "
                "process runs, and its event loop stands still; no call is served meanwhile"
            )

    def close(self) -> None:
        self._channel.close()

    def _note_answer(self, now_s: float) -> None:
        if self._is_told and self._silent_since_s is not None:
            self._tell(f"the controller answers again, after {now_s - self._silent_since_s:.0f} s")
        self._is_told, self._silent_since_s = False, None
