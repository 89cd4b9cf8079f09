"""A master and its workers: shares are parts of the whole, all start together, and what a worker
takes along is missed.
"""

import json
import time
from collections.abc import Callable, Sequence
from typing import Any

import gevent

from mesh.domain.reasons import FinishReason, RefusalReason
from mesh_load import master as masters
from mesh_load.master import Master, Word
from mesh_load.share import Share
from mesh_load.worker import Worker
from tests.load.speaking import ScriptedSender, share_of


class Fleet:
    """A master and workers that exchange packed messages, as locust's do."""

    def __init__(self, share: Share, names: Sequence[str]) -> None:
        self.senders = {name: ScriptedSender() for name in names}
        self.seen: list[str] = []
        self.workers = {name: self._worker(name) for name in names}
        self.starts: dict[str, float] = {}
        self.words: list[tuple[str, str]] = []
        self.mute: set[str] = set()
        """Who says nothing."""
        self.master = Master(share, self._send)
        self.alive = list(names)

    def _worker(self, name: str) -> Worker:
        return Worker(
            lambda address: self.senders[name],
            lambda result: self.seen.append(result.call.deployment),
        )

    def _send(self, word: str, data: dict[str, Any] | None, name: str) -> None:
        plain = json.loads(json.dumps(data))
        self.words.append((word, name))
        worker = self.workers[name]
        if word == Word.SHARE and worker.take(plain) and name not in self.mute:
            self.master.ready(name)
        elif word == Word.START:
            self.starts[name] = plain["start_unix_s"]
            worker.start(plain["start_unix_s"])
        elif word == Word.STOP:
            worker.stop()

    def poll(self) -> bool:
        """Take all reports, as locust does every few seconds; whether the run is over."""
        for name in self.alive:
            report = json.loads(json.dumps(self.workers[name].report()))
            self.master.take(name, report)
        return self.master.over(self.alive)

    def run(self) -> None:
        self.until(self.poll)

    def until(self, condition: Callable[[], object], bound_s: float = 20.0) -> None:
        until_s = time.monotonic() + bound_s
        while not condition():
            assert time.monotonic() < until_s, "not in time"
            gevent.sleep(0.01)


def test_workers_share_the_calls_and_start_at_one_moment() -> None:
    calls = tuple((0.01 * n, "quick", 1 + n % 3) for n in range(31))
    fleet = Fleet(share_of(*calls), ["a", "b", "c"])
    fleet.master.begin(["a", "b", "c"])
    fleet.run()
    assert len(set(fleet.starts.values())) == 1
    assert [len(sender.sent) for sender in fleet.senders.values()] == [11, 10, 10]
    sent = [call for sender in fleet.senders.values() for call in sender.sent]
    assert sorted(call.at_s for call in sent) == [at_s for at_s, _, _ in calls]
    assert sorted(fleet.master.results) == list(range(31))
    assert all(sender.closed.is_set() for sender in fleet.senders.values())


def test_results_arrive_as_they_were_judged() -> None:
    fleet = Fleet(share_of((0.0, "quick", 5), (0.0, "full", 5), (0.1, "gone", 5)), ["a"])
    fleet.master.begin(["a"])
    fleet.run()
    results = fleet.master.results
    ends = {number: result.outcome.end for number, result in results.items()}
    assert ends == {
        0: FinishReason.LENGTH,
        1: RefusalReason.MEMORY_FULL,
        2: FinishReason.FAILED,
    }
    assert results[0].outcome.met
    assert len(results[0].outcome.tokens_s) == 5
    assert results[2].failed == "unavailable"
    assert sorted(fleet.seen) == ["full", "gone", "quick"]


def test_a_share_crosses_in_pieces(monkeypatch: Any) -> None:
    monkeypatch.setattr("mesh_load.share.CALLS_PER_PIECE", 4)
    fleet = Fleet(share_of(*((0.0, "quick", 1) for _ in range(10))), ["a"])
    fleet.master.begin(["a"])
    fleet.run()
    assert [word for word, _ in fleet.words] == [Word.SHARE] * 3 + [Word.START]
    assert len(fleet.master.results) == 10


def test_the_calls_of_a_worker_that_goes_are_missed_and_the_run_ends() -> None:
    fleet = Fleet(share_of(*((0.02 * n, "quick", 1) for n in range(10))), ["a", "b"])
    fleet.master.begin(["a", "b"])
    fleet.alive.remove("b")
    fleet.run()
    assert sorted(fleet.master.results) == [0, 2, 4, 6, 8]


def test_a_worker_without_its_share_is_not_waited_for_for_ever(monkeypatch: Any) -> None:
    monkeypatch.setattr(masters, "READY_S_MAX", 0.2)
    fleet = Fleet(share_of(*((0.0, "quick", 1) for _ in range(4))), ["a", "b"])
    fleet.mute.add("b")
    fleet.master.begin(["a", "b"])
    fleet.until(lambda: fleet.poll() or fleet.starts)
    fleet.master.ready("b")
    fleet.run()
    assert list(fleet.starts) == ["a"]
    assert sorted(fleet.master.results) == [0, 2]


def test_stopped_before_all_are_ready_nothing_is_sent() -> None:
    fleet = Fleet(share_of((0.0, "quick", 1), (0.0, "quick", 1)), ["a", "b"])
    fleet.mute.add("b")
    fleet.master.begin(["a", "b"])
    fleet.master.stop()
    assert fleet.poll()
    fleet.master.ready("b")
    assert not fleet.starts


def test_stopped_the_master_still_hears_of_what_was_sent() -> None:
    fleet = Fleet(share_of((0.0, "quick", 1), (0.0, "slow", 1000), (90.0, "quick", 1)), ["a"])
    fleet.master.begin(["a"])
    sent = fleet.senders["a"].sent
    fleet.until(lambda: fleet.poll() or (0 in fleet.master.results and len(sent) == 2))
    fleet.master.stop()
    fleet.run()
    ends = [fleet.master.results[number].outcome.end for number in sorted(fleet.master.results)]
    assert ends == [FinishReason.LENGTH, FinishReason.CANCELLED]


def test_a_signal_that_reaches_the_workers_first_is_a_run_stopped_early() -> None:
    fleet = Fleet(share_of((0.0, "quick", 1), (0.0, "quick", 1), (90.0, "quick", 1)), ["a", "b"])
    fleet.master.begin(["a", "b"])
    fleet.until(lambda: fleet.poll() or len(fleet.master.results) == 2)
    before = fleet.master.interrupted
    for worker in fleet.workers.values():
        worker.stop()
    fleet.run()
    assert (before, fleet.master.interrupted) == (False, True)
    assert [part.stopped for part in fleet.master.parts.values()] == [True, False]


def test_a_second_run_forgets_the_first() -> None:
    fleet = Fleet(share_of((0.0, "quick", 1), (0.0, "full", 1)), ["a"])
    for _ in range(2):
        fleet.master.begin(["a"])
        assert not fleet.master.results
        fleet.run()
        assert sorted(fleet.master.results) == [0, 1]
