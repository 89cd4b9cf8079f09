"""An answer that outlives its controller: what a client does where its stream breaks.

The call has a key. Where its controller goes away, or leads no more, it is asked for again, with
what has come of it: at each of the addresses in turn, until one goes on with it. What its reader
gets is one answer, each token once. Before: `client`, which makes the calls.
"""

import threading
import time
from collections.abc import Callable, Collection, Generator, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol, cast
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
from mesh.domain.limits import AWAY_S_MAX, BREAKS_MAX, NODES_S_MAX, RESUME_S_MAX
from mesh.domain.reasons import RefusalReason
from mesh.domain.values import replace
from mesh.runtime.link_life import LOOK_S
from mesh.wire.channel import dial_blocking
from mesh.wire.errors import EndedCall, is_told
from mesh.wire.leader import UNCONNECTED, WAITS, Look, begin_look, looked

PAUSE_S = 0.1
"""Between two rounds of all addresses."""


class Call(Protocol):
    """A call at one address."""

    def cancel(self) -> object: ...


CallMade = tuple[Call, Generator[InvocationEvent, None, None]]


class ResumedAnswer:
    """One answer. `ask` makes a call at an address, of which there are `addresses` in all; `watch`
    knows the one to begin at.
    """

    def __init__(
        self,
        invocation: Invocation,
        ask: Callable[[str, Invocation, float | None], CallMade],
        addresses: Sequence[str],
        timeout_s: float | None,
        watch: "LeaderWatch",
    ) -> None:
        self._watch = watch
        self._lock = threading.Lock()
        """It guards where the answer is: the watch has a thread of its own."""
        self._leaves_for: int | None = None
        """The address of a controller that has begun to lead meanwhile."""
        self._asked = invocation if invocation.key else replace(invocation, key=uuid4().hex)
        self._ask = ask
        self._addresses = addresses
        self._timeout_s = timeout_s
        self._began_s = time.monotonic()
        self._times_s: tuple[float, float] | None = None
        """When its first token came, and its last."""
        given = invocation.resume
        self._token_ids = [] if given is None else list(given.output_tokens)
        self._accepted = self._resumed = False
        self._lost_s: float | None = None
        """When its stream broke; None while it has one that goes on."""
        self._error: MeshError | None = None
        """What broke it."""
        self._at, self._tried = watch.at, 0
        self._breaks = 0
        """Since its last token."""
        self._heard = False
        """Whether the stream that it has now has told anything."""
        self._chars = self._chars_again = 0
        """The characters of its text so far, and those that a controller has yet to say again."""
        self._call, self._stream = self._made()

    def events(self) -> Generator[InvocationEvent, None, None]:
        """Raises what ends it otherwise than by its Finished."""
        with self._watch.watched(self):
            while True:
                try:
                    for event in self._stream:
                        yield from self._told(event)
                    return
                except (Unavailable, Refused, Cancelled) as error:
                    self._choose(error)
                finally:
                    self._stream.close()
                call, stream = self._made()
                with self._lock:
                    self._call, self._stream, self._leaves_for = call, stream, None

    def leave_for(self, at: int, hung: Collection[int]) -> None:
        """The controller at that address leads now, and those at `hung` do not say that they do no
        more. For any thread.
        """
        with self._lock:
            if self._at in hung:
                self._leaves_for = at
                self._call.cancel()

    def _made(self) -> CallMade:
        self._heard = False
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
        self._lost_s, self._error, self._tried, self._heard = None, None, 0, True
        self._watch.at = self._at
        match event:
            case Accepted():
                if self._accepted:
                    return
                self._accepted = True
            case Tokens():
                event = self._new(event)
                if self._resumed and not (event.token_ids or event.text):
                    return
                now_s = time.monotonic()
                self._times_s = (now_s if self._times_s is None else self._times_s[0]), now_s
                self._token_ids += event.token_ids
                self._chars += len(event.text)
                self._breaks = 0
            case Finished() if self._resumed:
                first_s, last_s = self._times_s or (self._began_s, self._began_s)
                gaps = max(event.output_tokens - 1, 1)
                ttft_s, tpot_s = first_s - self._began_s, (last_s - first_s) / gaps
                event = replace(event, ttft_s=ttft_s, tpot_s=tpot_s)
            case Finished() | Waiting():
                pass
        yield event

    def _new(self, event: Tokens) -> Tokens:
        """What of it the reader lacks: a controller of before `resume` begins anew. Raises
        Unavailable where it does not go on from what the reader has.
        """
        had, first, count = self._token_ids, event.first_index, len(event.token_ids)
        if first > len(had) or had[first : first + count] != [*event.token_ids[: len(had) - first]]:
            raise Unavailable(
                f"the controller at {self._addresses[self._at]} does not go on with the answer: it "
                f"told other tokens from {first} on, and its reader has {len(had)}",
                hint="bring all controllers of the cell to one version, and ask again",
            )
        if first == len(had) and not self._chars_again:
            return event
        if not first:
            self._chars_again = self._chars
        known, chars = len(had) - first, self._chars_again
        self._chars_again = max(chars - len(event.text), 0)
        return replace(
            event,
            first_index=max(first, len(had)),
            token_ids=event.token_ids[known:],
            logprobs=event.logprobs[known:],
            text=event.text[chars:],
        )

    def _choose(self, error: MeshError) -> None:
        """Choose the address of the next try, and wait a moment after each round of them. Raises
        the error where there is to be no other try.
        """
        now_s = time.monotonic()
        with self._lock:
            leaves_for, self._leaves_for = self._leaves_for, None
        if not isinstance(error, Cancelled):
            leaves_for = None  # it has ended by itself
        since_s = self._began_s if self._lost_s is None else self._lost_s
        refused = error if isinstance(error, Refused) else None
        lost = leaves_for is not None or _had_it(error)
        if lost and self._error is None:
            self._lost_s = since_s = now_s
            self._error = error
            # One that was refused unheard is no other controller's.
            self._resumed = self._resumed or self._heard or refused is None
        waits = self._error is not None or len(self._addresses) > 1
        # The nodes of a leader that has begun just now are on their way to it.
        comes = refused is not None and refused.reason is RefusalReason.NO_NODE
        again = lost or _is_untaken(error) or (comes and now_s - since_s < NODES_S_MAX)
        if self._resumed and refused is not None and refused.reason is RefusalReason.TENANT_LIMIT:
            # Calls that come again together may be more than a second's.
            again, waits = True, True
            since_s = self._lost_s = now_s if self._lost_s is None else self._lost_s
            self._error = self._error or error
        if not (again and waits):
            raise error
        self._breaks += lost and self._heard
        limit_s = AWAY_S_MAX if self._error is None else RESUME_S_MAX
        if now_s - since_s > limit_s or self._breaks > BREAKS_MAX:
            raise self._error or error
        self._tried += 1
        if refused is not None and not comes and not lost:
            time.sleep(min(refused.retry_after_s, 1.0))
        with self._lock:
            self._at = (self._at + 1) % len(self._addresses) if leaves_for is None else leaves_for
        if leaves_for is None and self._tried % len(self._addresses) == 0:
            time.sleep(PAUSE_S)


class LeaderWatch:
    """Asks the controllers of a cell which of them leads, while an answer is read: it has one that
    hangs left for one that has begun to lead. A thread of its own, as long as there is any.
    """

    def __init__(self, addresses: Sequence[str]) -> None:
        self._addresses = addresses
        self.at = 0
        """The address that served last: calls begin there."""
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
        channels: list[grpc.Channel] = []
        looks: dict[int, Any] = {}
        due_s, missed = [0.0] * len(self._addresses), [0] * len(self._addresses)
        lead: set[int] = set()
        answered = threading.Event()
        try:
            channels += [dial_blocking(address) for address in self._addresses]
            while self._is_wanted():
                now_s = time.monotonic()
                # Whoever hangs holds up no other: it is asked again once its look is over.
                for n, at in enumerate(channels):
                    if n not in looks and now_s >= due_s[n]:
                        due_s[n], looks[n] = now_s + LOOK_S, begin_look(at, WAITS)
                        looks[n].add_done_callback(lambda _: answered.set())
                answered.wait(min((at_s - now_s for at_s in due_s if at_s > now_s), default=LOOK_S))
                answered.clear()
                # One look may have failed; one that was deposed may say that it leads, still; and
                # one that says that it does not lets its answers end.
                for n in [n for n in looks if looks[n].done()]:
                    said = looked(looks.pop(n))
                    (lead.add if said is Look.LEADS else lead.discard)(n)
                    missed[n] = 0 if said in (Look.LEADS, Look.FOLLOWS) else missed[n] + 1
                hung = {n for n, looks_missed in enumerate(missed) if looks_missed > 1}
                with self._lock:
                    open_ = list(self._open.values()) if lead and hung else []
                for answer in open_:
                    answer.leave_for(max(lead), hung)
        finally:
            with self._lock:
                if self._thread is threading.current_thread():
                    self._thread = None
            for channel in channels:
                channel.close()

    def _is_wanted(self) -> bool:
        with self._lock:
            if not self._open:
                self._thread = None
            return bool(self._open)


def _had_it(error: MeshError) -> bool:
    """Whether a controller had the call, and has it no more."""
    if isinstance(error, Refused):
        return error.reason is RefusalReason.SHUTTING_DOWN
    return _broke(error) and not _is_untaken(error)


def _is_untaken(error: MeshError) -> bool:
    """Whether no controller that leads took the call."""
    if isinstance(error, StandsBy):
        return True
    details = cast(EndedCall, error.__cause__).details() if _broke(error) else None
    return UNCONNECTED in (details or "")


def _broke(error: MeshError) -> bool:
    """Whether the network ended the call, and not the other end."""
    cause = error.__cause__
    broke = isinstance(error, Unavailable) and isinstance(cause, grpc.RpcError)
    return broke and not is_told(cast(EndedCall, cause))
