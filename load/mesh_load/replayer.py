"""Sends a worker's calls at their times, each from a greenlet of its own: open loop.

A worker that cannot keep up sends its calls late, each answer says by how much, and no call waits
for another's answer. It owns the greenlets. Before: `worker`, which has the calls. After: `sender`.
"""

import gc
import time
from collections.abc import Callable, Iterable

import gevent
from gevent.event import Event
from gevent.pool import Group

from mesh.evaluation.load_client import CALL_S_MAX, NOT_SENT, OPEN_MAX, STOPPED, Answer, Call
from mesh_load.sender import Sender, ask
from mesh_workloads import replay_plan as planned

OnAnswer = Callable[[planned.Call, Call, Answer], None]
"""The replayer calls it with each call, as planned and as sent, when the call has ended."""


class Replayer:
    """Sends the calls of one run. `run` may be called once, `stop` from any greenlet."""

    def __init__(
        self,
        sender: Sender,
        calls: Iterable[tuple[planned.Call, Call]],
        on_answer: OnAnswer,
        *,
        call_s_max: float = CALL_S_MAX,
        open_max: int = OPEN_MAX,
    ) -> None:
        """`calls`, as planned and as they are sent, in the order of their times; each is drawn when
        the one before it has gone.
        """
        self._sender = sender
        self._calls = calls
        self._on_answer = on_answer
        self._call_s_max = call_s_max
        self._open_max = open_max
        self._open: Group = Group()
        self._unbegun: dict[int, tuple[planned.Call, Call, float]] = {}
        """By number, with when they were due: their greenlets have not run yet."""
        self._stopped = Event()

    def run(self, start_s: float) -> None:
        """Until all have ended. `start_s`: the moment from which their times count."""
        gc.collect()
        gc.freeze()
        for plan, call in self._calls:
            due_s = start_s + call.at_s
            if self._stopped.wait(max(0.0, due_s - time.monotonic())):
                break
            if len(self._open) < self._open_max:
                self._unbegun[plan.number] = (plan, call, due_s)
                self._open.add(gevent.spawn(self._ask, plan, call, due_s))
            else:
                self._on_answer(plan, call, _nothing(due_s, NOT_SENT))
        self._open.join()
        for plan, call, due_s in self._unbegun.values():  # a greenlet killed so early never runs
            self._on_answer(plan, call, _nothing(due_s, STOPPED))

    def stop(self) -> None:
        """Send nothing more, and leave the calls that are open; `run` returns soon."""
        self._stopped.set()
        self._open.kill(block=False)

    def _ask(self, plan: planned.Call, call: Call, due_s: float) -> None:
        del self._unbegun[plan.number]
        answer = ask(self._sender, call, due_s=due_s, timeout_s=self._call_s_max)
        self._on_answer(plan, call, answer)


def _nothing(due_s: float, why: str) -> Answer:
    now_s = time.monotonic()
    return Answer(ended_s=0.0, tokens_s=(), sent_s=now_s, lag_s=now_s - due_s, failed=why)
