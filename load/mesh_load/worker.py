"""A worker's part of a run: it takes its share, replays it from the moment told, and reports.

It speaks with the master by locust's messages and reports, of which it knows no more than that they
are dictionaries. Before: `master`. After: `replayer`.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import gevent

from mesh.evaluation import load_client
from mesh.evaluation.load_client import Answer
from mesh.evaluation.replay.results import CallResult
from mesh.evaluation.replay.running import result_of
from mesh_load.replayer import Replayer
from mesh_load.sender import Sender
from mesh_load.share import Share, plain_of, share_of
from mesh_workloads.replay_plan import Call

STOP_S_MAX = 5.0
"""For the calls that are left when a run is stopped."""
RESULTS_PER_REPORT = 10_000


class Worker:
    """Owns the greenlet that replays, and the results that were not reported yet."""

    def __init__(
        self, sender_of: Callable[[Share], Sender], on_result: Callable[[CallResult], None]
    ) -> None:
        """`sender_of` makes one for a share's address and protocol."""
        self._sender_of = sender_of
        self._on_result = on_result
        self._share: Share | None = None
        self._replayer: Replayer | None = None
        self._replaying: gevent.Greenlet[..., None] | None = None
        self._start_s = 0.0
        self._results: deque[CallResult] = deque()
        self._ended = False
        self._stopped = False

    def take(self, message: dict[str, Any]) -> bool:
        """A piece of the share; whether it is complete now."""
        piece = share_of(message)
        begun = self._share is not None and not self._share.complete
        self._share = self._share.joined(piece) if self._share and begun else piece
        return self._share.complete

    def start(self, start_unix_s: float) -> None:
        """Replay the share; the moment is one of the system's clocks, on which workers agree."""
        assert self._share is not None, "started without a share"
        self._start_s = time.monotonic() + start_unix_s - time.time()
        self._results.clear()
        self._ended = self._stopped = False
        sender = self._sender_of(self._share)
        self._replayer = Replayer(sender, self._share.to_send(), self._heard)
        self._replaying = gevent.spawn(self._replay, self._replayer, sender)

    def _replay(self, replayer: Replayer, sender: Sender) -> None:
        try:
            replayer.run(self._start_s)
        finally:
            sender.close()
            self._ended = True

    def _heard(self, planned: Call, call: load_client.Call, answer: Answer) -> None:
        result = result_of(planned, call, answer, self._start_s)
        self._results.append(result)
        self._on_result(result)

    def join(self) -> None:
        """Wait until what was started has ended."""
        if self._replaying is not None:
            self._replaying.join()

    def stop(self) -> None:
        """Leave the open calls and wait for them, for a bounded time."""
        if self._replayer is not None and self._replaying is not None:
            self._stopped = self._stopped or not self._ended
            self._replayer.stop()
            self._replaying.join(timeout=STOP_S_MAX)

    def report(self) -> dict[str, Any]:
        """What has come since the last one."""
        some = min(len(self._results), RESULTS_PER_REPORT)
        results = [plain_of(self._results.popleft()) for _ in range(some)]
        ended = self._ended and not self._results
        return {"results": results, "ended": ended, "stopped": self._stopped}

    def rest(self) -> Iterator[dict[str, Any]]:
        """Reports until all that came is told; one at least."""
        yield self.report()
        while self._results:
            yield self.report()
