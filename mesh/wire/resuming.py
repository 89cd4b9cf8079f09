"""An answer that outlives its controller: what a client does where its stream breaks.

The call has a key. Where its controller goes away, or leads no more, it is asked for again, with
what has come of it: at each of the addresses in turn, until one goes on with it. What its reader
gets is one answer, each token once. Before: `client`, which makes the calls.
"""

import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Protocol, cast
from uuid import uuid4

import grpc

from mesh.domain.errors import (
    Cancelled,
    DeadlineExceeded,
    MeshError,
    Refused,
    StandsBy,
    Unavailable,
)
from mesh.domain.invocation import (
    Accepted,
    Finished,
    Invocation,
    InvocationEvent,
    Resume,
    Tokens,
    Waiting,
)
from mesh.domain.reasons import RefusalReason
from mesh.wire.channel import dial_blocking
from mesh.wire.errors import EndedCall, is_told

RESUME_S_MAX = 15.0
"""From the break of a stream until it goes on: a lease, a few dials, and a node's way back."""
NODES_S_MAX = 5.0
"""Until a leader that has just begun has nodes."""
LOOK_S = 0.25
LOOK_S_MAX = 0.5
"""For the answer of a controller that is asked whether it leads."""
PAUSE_S = 0.1
"""Between two rounds of all addresses."""
_UNCONNECTED = "failed to connect"
"""In gRPC's words where nobody took a call."""


class Call(Protocol):
    """A call at one address."""

    def cancel(self) -> object: ...


Asked = tuple[Call, Generator[InvocationEvent, None, None]]


class ResumedAnswer:
    """One answer. `ask` makes a call at an address, of which there are `addresses` in all; what
    `watched` yields lasts as long as somebody reads.
    """

    def __init__(
        self,
        invocation: Invocation,
        ask: Callable[[str, Invocation, float | None], Asked],
        addresses: Sequence[str],
        timeout_s: float | None,
        watched: "Callable[[ResumedAnswer], AbstractContextManager[None]]",
    ) -> None:
        self._watched = watched
        self._leaves_for: int | None = None
        """The address of a controller that has begun to lead meanwhile."""
        self._asked = invocation if invocation.key else replace(invocation, key=uuid4().hex)
        self._ask = ask
        self._addresses = addresses
        self._timeout_s = timeout_s
        self._began_s = time.monotonic()
        self._times_s: tuple[float, float] | None = None
        """When its first token came, and its last."""
        self._token_ids: list[int] = []
        self._accepted = self._resumed = False
        self._lost_s: float | None = None
        """When its stream broke; None while it has one that goes on."""
        self._error: MeshError | None = None
        """What broke it."""
        self._at = self._tried = 0
        self._call, self._stream = self._made()

    def events(self) -> Generator[InvocationEvent, None, None]:
        """Raises what ends it otherwise than by its Finished."""
        with self._watched(self):
            while True:
                try:
                    for event in self._stream:
                        yield from self._told(event)
                    return
                except (Unavailable, Refused, Cancelled) as error:
                    self._look(error)
                finally:
                    self._stream.close()
                self._call, self._stream = self._made()

    def leave_for(self, at: int) -> None:
        """The controller at that address leads now: one that hangs does not say that it does no
        more. For any thread.
        """
        if at != self._at:
            self._leaves_for = at
            self._call.cancel()

    def _made(self) -> Asked:
        asked, left_s = self._asked, self._timeout_s
        if self._resumed:
            age_s = time.monotonic() - self._began_s
            tokens = tuple(self._token_ids)
            resume = Resume(next_index=len(tokens), output_tokens=tokens, age_s=age_s)
            asked = replace(asked, resume=resume)
        if self._timeout_s is not None and self._tried:
            left_s = self._timeout_s - (time.monotonic() - self._began_s)
            if left_s <= 0.0:
                raise DeadlineExceeded(
                    f"not done within {self._timeout_s:g} s, the time limit of the call",
                    hint="allow more time, or ask for fewer tokens",
                )
        return self._ask(self._addresses[self._at], asked, left_s)

    def _told(self, event: InvocationEvent) -> Iterator[InvocationEvent]:
        self._lost_s, self._error, self._tried = None, None, 0
        match event:
            case Accepted():
                if self._accepted:
                    return
                self._accepted = True
            case Tokens(token_ids=token_ids):
                if self._resumed and not token_ids:
                    return
                now_s = time.monotonic()
                self._times_s = (now_s if self._times_s is None else self._times_s[0]), now_s
                self._token_ids += token_ids
            case Finished() if self._resumed:
                first_s, last_s = self._times_s or (self._began_s, self._began_s)
                gaps = max(event.output_tokens - 1, 1)
                ttft_s, tpot_s = first_s - self._began_s, (last_s - first_s) / gaps
                event = replace(event, ttft_s=ttft_s, tpot_s=tpot_s)
            case Finished() | Waiting():
                pass
        yield event

    def _look(self, error: MeshError) -> None:
        """Choose the address of the next try, and wait a moment after each round of them. Raises
        the error where there is to be no other try.
        """
        now_s, left = time.monotonic(), self._leaves_for is not None
        lost = left or _is_lost(error)
        comes = _is_elsewhere(error) or (
            # The nodes of a leader that has begun just now are on their way to it.
            isinstance(error, Refused)
            and error.reason is RefusalReason.NO_NODE
            and len(self._addresses) > 1
            and now_s - self._began_s < NODES_S_MAX
        )
        if not (lost or comes):
            raise error
        if lost and self._error is None:
            self._lost_s, self._error, self._resumed = now_s, error, True
        if self._error is None and len(self._addresses) == 1:
            raise error
        since_s = self._began_s if self._lost_s is None else self._lost_s
        if now_s - since_s > RESUME_S_MAX:
            raise self._error or error
        self._tried += 1
        self._at = (self._at + 1) % len(self._addresses)
        if self._leaves_for is not None:
            self._at, self._leaves_for = self._leaves_for, None
            return
        if self._tried % len(self._addresses) == 0:
            time.sleep(PAUSE_S)


class LeaderWatch:
    """Asks the controllers of a cell which of them leads, while an answer is read: it has one that
    hangs left for one that has begun to lead. A thread of its own, as long as there is any.
    """

    def __init__(self, addresses: Sequence[str]) -> None:
        self._addresses = addresses
        self._open: dict[int, ResumedAnswer] = {}
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    @contextmanager
    def watched(self, answer: ResumedAnswer) -> Iterator[None]:
        """While somebody reads the answer; with one address there is nothing to choose."""
        if len(self._addresses) == 1:
            yield
            return
        with self._lock:
            self._open[id(answer)] = answer
            if self._thread is None:
                self._thread = threading.Thread(target=self._look, daemon=True)
                self._thread.start()
        try:
            yield
        finally:
            with self._lock:
                del self._open[id(answer)]

    def _look(self) -> None:
        channels = [dial_blocking(address) for address in self._addresses]
        led: set[int] | None = None
        try:
            while self._is_wanted():
                lead = {n for n, channel in enumerate(channels) if leads(channel)}
                begun = lead - led if led is not None else set()
                led = lead
                with self._lock:
                    answers = list(self._open.values()) if begun else []
                for answer in answers:
                    answer.leave_for(max(begun))
                time.sleep(LOOK_S)
        finally:
            for channel in channels:
                channel.close()

    def _is_wanted(self) -> bool:
        with self._lock:
            if not self._open:
                self._thread = None
            return bool(self._open)


def leads(channel: grpc.Channel) -> bool:
    """Whether the controller there leads its cell."""
    from grpc_health.v1 import health_pb2, health_pb2_grpc  # few clients have to choose

    check = health_pb2_grpc.HealthStub(channel).Check
    asked = health_pb2.HealthCheckRequest(service="mesh.v1.NodeLink")
    try:
        told = check(asked, timeout=LOOK_S_MAX)
    except grpc.RpcError:
        return False
    return bool(told.status == health_pb2.HealthCheckResponse.SERVING)


def _is_lost(error: MeshError) -> bool:
    """Whether a controller had the call, and has it no more."""
    if isinstance(error, Refused):
        return error.reason is RefusalReason.SHUTTING_DOWN
    return _broke(error) and not _is_elsewhere(error)


def _is_elsewhere(error: MeshError) -> bool:
    """Whether no controller that leads took the call."""
    if isinstance(error, StandsBy):
        return True
    details = cast(EndedCall, error.__cause__).details() if _broke(error) else None
    return _UNCONNECTED in (details or "")


def _broke(error: MeshError) -> bool:
    """Whether the network ended the call, and not the other end."""
    cause = error.__cause__
    broke = isinstance(error, Unavailable) and isinstance(cause, grpc.RpcError)
    return broke and not is_told(cast(EndedCall, cause))
