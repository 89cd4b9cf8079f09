"""An answer that outlives its controller: what a client does where its stream breaks.

The call has a key. Where its controller goes away, or leads no more, it is asked for again, with
what has come of it: at each of the addresses in turn, until one goes on with it. What its reader
gets is one answer, each token once. Before: `client`, which makes the calls.
"""

import time
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import replace
from typing import cast
from uuid import uuid4

import grpc

from mesh.domain.errors import DeadlineExceeded, MeshError, Refused, StandsBy, Unavailable
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
from mesh.wire.errors import EndedCall, is_told

RESUME_S_MAX = 15.0
"""From the break of a stream until it goes on: a lease, a few dials, and a node's way back."""
PAUSE_S = 0.1
"""Between two rounds of all addresses."""
_UNCONNECTED = "failed to connect"
"""In gRPC's words where nobody took a call."""


class ResumedAnswer:
    """One answer. `ask` makes a call at an address, of which there are `addresses` in all."""

    def __init__(
        self,
        invocation: Invocation,
        ask: Callable[[str, Invocation, float | None], Generator[InvocationEvent, None, None]],
        addresses: Sequence[str],
        timeout_s: float | None,
    ) -> None:
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
        self._stream = self._call()

    def events(self) -> Generator[InvocationEvent, None, None]:
        """Raises what ends it otherwise than by its Finished."""
        while True:
            try:
                for event in self._stream:
                    yield from self._told(event)
                return
            except (Unavailable, Refused) as error:
                self._look(error)
            finally:
                self._stream.close()
            self._stream = self._call()

    def _call(self) -> Generator[InvocationEvent, None, None]:
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
        now_s, lost = time.monotonic(), _is_lost(error)
        if not (lost or _is_elsewhere(error)):
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
        if self._tried % len(self._addresses) == 0:
            time.sleep(PAUSE_S)


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
