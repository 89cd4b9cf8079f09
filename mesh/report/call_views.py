"""The requests of a `CallBook` as plain values: those that are open, a timeline of the last
minutes, one story whole, and a trace for Chrome's and Perfetto's viewers. Pure.
"""

from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import TypeVar

from msgspec import Raw

from mesh.report.calls import WINDOW_S, Call, CallBook, Load
from mesh.report.plain import Plain, plain_json
from mesh.runtime.turns import Steps

OPEN_SHOWN_MAX = 1_000
"""The oldest are shown, and how many there are."""
ENDED_SHOWN_MAX = 400
"""The newest are shown."""
T = TypeVar("T")
Sees = Callable[[str], bool]
"""Whether whoever asks may see what is of this tenant."""


def timeline(
    book: CallBook, now_s: float, unix_s: float, *, after: int, sees: Sees
) -> Steps[dict[str, object]]:
    """`unix_s` is the wall clock at `now_s`; `after` the number of the last end that is known. The
    book is read at once; a step is a call or a load, of which its JSON is kept: to deallocate the
    values of 1,000 of them at once would keep the loop for milliseconds.
    """
    zero_s = unix_s - now_s
    if after > book.number:
        after = 0  # of another controller's book, which counted further
    mine = [call for call in book.open.values() if sees(call.tenant)]
    later = (c for c in reversed(book.stories) if c.number > after and sees(c.tenant))
    ended = list(islice((c for c in later if _recent(c.ended_s, now_s)), ENDED_SHOWN_MAX))
    loads = [one for one in book.loads if sees(one.tenant) and _recent(one.ended_s, now_s)]
    return {
        "time_unix_s": round(unix_s, 3),
        "window_s": WINDOW_S,
        "after": max((c.number for c in ended), default=after),
        "open_count": len(mine),
        "open": (yield from _each(mine[:OPEN_SHOWN_MAX], lambda c: _open(c, now_s, zero_s))),
        "ended": (yield from _each(ended[::-1], lambda c: _drawn(c, zero_s))),
        "loads": (yield from _each(loads, lambda load: _load(load, zero_s))),
    }


def _each(shown: Iterable[T], made: Callable[[T], Plain]) -> Steps[list[Raw]]:
    found = []
    for one in shown:
        found.append(Raw(plain_json(made(one))))
        yield
    return found


def story(call: Call, now_s: float, unix_s: float) -> Steps[dict[str, object]]:
    """One request, with each decision about it in words and its first TOKENS_MAX tokens beside
    their deadlines.
    """
    told = _open(call, now_s, unix_s - now_s)
    tokens_after_s = [round(after_s, 4) for after_s in call.tokens_after_s]
    yield
    first_s, tpot_s = call.due_s(0) - call.arrived_s, call.slo.tpot_s
    due_after_s = [round(first_s + n * tpot_s, 4) for n in range(len(tokens_after_s))]
    yield
    return {
        **told,
        "slo": {"ttft_s": call.slo.ttft_limit_s(call.prompt_tokens), "tpot_s": call.slo.tpot_s},
        **({"slo_class": call.slo.name} if call.slo.name else {}),
        "steps": [
            {"after_s": round(at_s - call.arrived_s, 3), "text": text} for at_s, text in call.steps
        ],
        "steps_left_out": call.steps_left_out,
        "tokens_after_s": tokens_after_s,
        "due_after_s": due_after_s,
    }


def chrome_trace(book: CallBook, now_s: float, sees: Sees) -> Iterator[Plain]:
    """Trace events: a process for the queue and for each node, a track for each request or
    instance; times in microseconds of the controller's clock. The book is read at once; the events
    may be made in a thread.
    """
    calls = [call for call in (*book.stories, *book.open.values()) if sees(call.tenant)]
    loads = [one for one in book.loads if sees(one.tenant) and _recent(one.ended_s, now_s)]
    recent = [call for call in calls if _recent(call.ended_s, now_s)]
    return _trace_events(recent, loads, now_s)


def _trace_events(calls: Iterable[Call], loads: Iterable[Load], now_s: float) -> Iterator[Plain]:
    tracks = _Tracks()
    for call in calls:
        for span in call.spans:
            place = tracks.of(str(span.node_id or "queue"), str(call.request_id))
            told: dict[str, Plain] = {"deployment": str(call.deployment), "end": call.end}
            told["instance"] = None if span.instance_id is None else str(span.instance_id)
            yield _complete(span.kind, span.begun_s, span.ended_s or now_s, place, told)
        for at_s in call.late_s:
            place = tracks.of("late tokens", str(call.request_id))
            yield {"name": "late", "ph": "i", "ts": _us(at_s), "s": "t", **place}
    for load in loads:
        place = tracks.of(str(load.node_id), str(load.instance_id))
        name = f"load from {load.tier}" if load.tier else "load"
        yield _complete(name, load.begun_s, load.ended_s or now_s, place, {})
    yield from tracks.names()


class _Tracks:
    """Numbers processes and threads in the order in which they are named: each has a number that no
    other has, since Perfetto names the threads of one number alike.
    """

    def __init__(self) -> None:
        self._ids: dict[tuple[str, str], int] = {}
        """A process has the thread of no name."""

    def of(self, process: str, thread: str) -> dict[str, Plain]:
        ids = self._ids
        pid = ids.setdefault((process, ""), len(ids) + 1)
        return {"pid": pid, "tid": ids.setdefault((process, thread), len(ids) + 1)}

    def names(self) -> Iterator[Plain]:
        for (process, thread), tid in self._ids.items():
            kind, name = ("thread_name", thread) if thread else ("process_name", process)
            place: dict[str, Plain] = {"pid": self._ids[process, ""], "tid": tid}
            yield {"name": kind, "ph": "M", **place, "args": {"name": name}}


def _complete(
    name: str, begun_s: float, ended_s: float, place: dict[str, Plain], told: dict[str, Plain]
) -> dict[str, Plain]:
    times: dict[str, Plain] = {"ts": _us(begun_s), "dur": max(_us(ended_s) - _us(begun_s), 0)}
    return {"name": name, "cat": "request", "ph": "X", **times, **place, "args": told}


def _us(at_s: float) -> int:
    return round(at_s * 1e6)


def _recent(ended_s: float | None, now_s: float) -> bool:
    return ended_s is None or ended_s >= now_s - WINDOW_S


def _open(call: Call, now_s: float, zero_s: float) -> dict[str, Plain]:
    place = call.place
    until_s = now_s if call.ended_s is None else call.ended_s
    running = call.ended_s is None
    return {
        **_drawn(call, zero_s),
        "tenant": call.tenant,
        "phase": call.end or (call.spans[-1].kind if call.spans else ""),
        "node_id": None if place is None else str(place.node_id),
        "instance_id": None if place is None else str(place.instance_id),
        "age_s": round(until_s - call.arrived_s, 3),
        "prompt_tokens": call.prompt_tokens,
        "output_tokens": call.output_tokens,
        "output_tokens_max": call.output_tokens_max,
        "headroom_s": round(call.due_s(call.output_tokens) - now_s, 3) if running else None,
        "grace_s": call.grace_s,
        "late_tokens": call.late_tokens,
    }


def _drawn(call: Call, zero_s: float) -> dict[str, Plain]:
    return {
        "request_id": str(call.request_id),
        "deployment": str(call.deployment),
        "end": call.end,
        "ended_unix_s": _at(call.ended_s, zero_s),
        "spans": [
            {
                "kind": span.kind,
                "begun_unix_s": round(span.begun_s + zero_s, 3),
                "ended_unix_s": _at(span.ended_s, zero_s),
                "node_id": None if span.node_id is None else str(span.node_id),
                "instance_id": None if span.instance_id is None else str(span.instance_id),
            }
            for span in call.spans
        ],
        "late_unix_s": _all_at(call.late_s, zero_s),
        "late_tokens": call.late_tokens,
    }


def _load(load: Load, zero_s: float) -> dict[str, Plain]:
    return {
        "instance_id": str(load.instance_id),
        "deployment": str(load.deployment),
        "node_id": None if load.node_id is None else str(load.node_id),
        "begun_unix_s": round(load.begun_s + zero_s, 3),
        "ended_unix_s": _at(load.ended_s, zero_s),
        "tier": load.tier,
        "failed": load.failed,
    }


def _at(at_s: float | None, zero_s: float) -> float | None:
    return None if at_s is None else round(at_s + zero_s, 3)


def _all_at(times_s: Iterable[float], zero_s: float) -> list[Plain]:
    return [round(at_s + zero_s, 3) for at_s in times_s]
