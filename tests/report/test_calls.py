"""The book of calls says of a run's requests what their callers saw, and how each came to it."""

import json
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mesh.domain.access import Caller, Role, TenantName
from mesh.domain.actions import SendCommand
from mesh.domain.events import (
    CancelRequested,
    InvokeRequested,
    NodeConnected,
    NodeDisconnected,
    NodeReported,
)
from mesh.domain.ids import DeploymentName, InstanceId, RequestId
from mesh.domain.messages import AbortRequest, RequestReturned, SubmitRequest, TokensReport
from mesh.domain.outcome import Outcome
from mesh.domain.request import RequestOrder
from mesh.domain.slo import Slo
from mesh.report.call_views import OPEN_SHOWN_MAX, chrome_trace, story, timeline
from mesh.report.calls import SPANS_MAX, TEXT_CHARS_MAX, WINDOW_S, CallBook, CallEnd, Load
from mesh.report.plain import plain_json
from mesh.runtime.turns import at_once, in_turns
from mesh.sim.checking import FaultyRun
from mesh.sim.cluster import VirtualCell
from mesh.sim.scenario import arrivals, faults, plan, read_scenario, trace_of
from mesh.sim.workload import Serverless
from tests.core.cells import hello, request
from tests.sim.scenarios import SMALL, scenario


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[CallBook, tuple[Outcome, ...], float]:
    """A run in which some requests are refused: its book, what its callers saw, and its end."""
    folder: Path = tmp_path_factory.mktemp("run")
    read = scenario(folder, SMALL.replace("requests_per_s = 2.0", "requests_per_s = 40.0"))
    read = replace(read, slo_mix="0.25:0.5,1.0:0.5")
    made = plan(read)
    specs = {one.spec.name: one.spec for one in made.start().deployments}
    book = CallBook(specs.get)
    cell = VirtualCell(made, recorders=(book,))
    return book, cell.run(arrivals(read)), cell.clock.now_s()


def test_the_ends_are_those_that_the_callers_saw(
    run: tuple[CallBook, tuple[Outcome, ...], float],
) -> None:
    book, outcomes, _ = run
    assert not book.open
    assert any(outcome.finished for outcome in outcomes)
    assert any(not outcome.admitted for outcome in outcomes)
    seen = [CallEnd.of(one) for one in sorted(outcomes, key=lambda one: one.ended_s)]
    for told, found in zip(sorted(book.ends, key=lambda one: one.at_s), seen, strict=True):
        assert (told.end, told.refused, told.output_tokens) == (
            found.end,
            found.refused,
            found.output_tokens,
        )
        assert (told.met, told.met_in_the_mean) == (found.met, found.met_in_the_mean)
        assert told.slo_class == found.slo_class != ""
        assert told.ttft_s == pytest.approx(found.ttft_s, abs=1e-3)
        assert told.tpot_s == pytest.approx(found.tpot_s, abs=1e-3)


def test_a_story_tells_every_decision_and_each_token_beside_its_deadline(
    run: tuple[CallBook, tuple[Outcome, ...], float],
) -> None:
    book, _, now_s = run
    call = next(c for c in book.stories if c.end == "stop" and c.output_tokens > 2)
    told: Any = at_once(story(call, now_s, 1_000.0 + now_s))
    texts = [step["text"] for step in told["steps"]]
    words = " | ".join(map(str, texts))
    for part in (
        "asked: ",
        "accepted: ",
        f"to {call.spans[-1].instance_id} on ",
        "ended by stop",
    ):
        assert part in words
    assert (call.spans[0].kind, call.spans[-1].kind) == ("wait", "decode")
    assert all(span.ended_s is not None for span in call.spans)
    tokens, due = told["tokens_after_s"], told["due_after_s"]
    assert isinstance(tokens, list)
    assert isinstance(due, list)
    assert len(tokens) == len(due) == call.output_tokens
    assert due == sorted(due)
    refused = next(c for c in book.stories if c.ended().refused)
    assert refused.steps[-1][1].startswith(f"refused ({refused.end}): ")


async def shown(
    book: CallBook, now_s: float, after: int = 0, sees: Callable[[str], bool] = lambda _: True
) -> Any:
    """The timeline, as who asks for it reads it."""
    told = await in_turns(timeline(book, now_s, now_s, after=after, sees=sees))
    return json.loads(plain_json(told))


async def test_a_timeline_goes_on_where_it_was_and_shows_a_tenant_its_own(
    run: tuple[CallBook, tuple[Outcome, ...], float],
) -> None:
    book, _, now_s = run
    whole = await shown(book, now_s)
    assert whole["ended"]
    again = await shown(book, now_s, whole["after"])
    assert again["ended"] == []
    assert again["after"] == whole["after"]
    anew = await shown(book, now_s, book.number + 1)
    assert anew["ended"] == whole["ended"], "the number is of another controller's book"
    other = await shown(book, now_s, sees=lambda tenant: tenant == "acme")
    assert (other["ended"], other["loads"], other["open_count"]) == ([], [], 0)


def in_perfetto(book: CallBook, now_s: float) -> set[str]:
    """The names of what a trace shows, held to the Trace Event Format as Perfetto reads it: a part
    that overlaps another of its thread, but is not within it, is dropped, and a thread is named by
    its number, whatever its process is.
    """
    events = json.loads(json.dumps(list(chrome_trace(book, now_s, lambda tenant: True))))
    named: dict[int, tuple[int, str]] = {}
    for event in events:
        if event["ph"] == "M":
            kind, pid, tid = event["name"], event["pid"], event["tid"]
            assert kind == ("process_name" if tid == pid else "thread_name")
            assert tid not in named, "no other has its number"
            named[tid] = pid, event["args"]["name"]
    assert all(pid in named and name for pid, name in named.values())
    ends_us, shown = defaultdict[int, list[int]](list), set()
    for event in sorted((e for e in events if e["ph"] != "M"), key=lambda one: one["ts"]):
        pid, tid, begun_us = event["pid"], event["tid"], event["ts"]
        assert named[tid][0] == pid != tid
        assert all(type(number) is int and number >= 0 for number in (pid, tid, begun_us))
        shown.add(event["name"])
        if event["ph"] == "i":
            assert event["s"] == "t"
            continue
        assert (event["ph"], type(event["dur"]), type(event["args"])) == ("X", int, dict)
        around_us, ended_us = ends_us[tid], begun_us + event["dur"]
        while around_us and around_us[-1] <= begun_us:
            around_us.pop()
        assert begun_us <= ended_us <= min(around_us, default=ended_us), event
        around_us.append(ended_us)
    return shown


def test_a_trace_is_what_perfetto_opens(run: tuple[CallBook, tuple[Outcome, ...], float]) -> None:
    book, _, now_s = run
    assert in_perfetto(book, now_s) >= {"wait", "prefill", "decode"}
    assert not in_perfetto(book, now_s + 2 * WINDOW_S), "it ended before the last minutes"


def test_what_a_lost_node_computed_and_loaded_there_ends_there() -> None:
    read = read_scenario(Path(__file__).parents[2] / "workloads/faults.toml")
    assert isinstance(read.workload, Serverless)
    read = replace(read, seed=4, workload=replace(read.workload, duration_s=60.0))
    made = plan(read)
    book = CallBook({one.spec.name: one.spec for one in made.start().deployments}.get)
    run = FaultyRun(made, faults(read, made), check=False, started=lambda start: [book])
    run.run(arrivals(read, trace_of(read)))
    lost = [load for load in book.loads if "was lost" in load.failed]
    assert lost
    assert all(load.ended_s is not None for load in lost)
    again = [c for c in book.stories if [s.kind for s in c.spans].count("decode") > 1]
    assert again, "one that is computed elsewhere decodes there, too"
    assert in_perfetto(book, book.ends[-1].at_s) >= {"decode", "late", "evicted", "load"}


def test_a_long_text_of_a_node_is_cut() -> None:
    book = CallBook(lambda _: None)
    book.record(0.0, InvokeRequested(request=request()), [])
    (call,) = book.open.values()
    back = RequestReturned(request_id=call.request_id, attempt=1, error="", message="x" * (1 << 20))
    book.record(1.0, NodeReported(link_id=1, report=back), [])
    assert len(call.steps[-1][1]) == TEXT_CHARS_MAX


async def test_a_tenant_sees_its_own_loads_and_a_thousand_open_requests() -> None:
    book, name = CallBook(lambda _: None), DeploymentName("chat")
    for tenant in ("", "a", "b"):
        load = Load(
            instance_id=InstanceId(f"{tenant}-1"),
            deployment=name,
            tenant=tenant,
            node_id=None,
            begun_s=1.0,
        )
        book.loads.append(load)
    for n in range(OPEN_SHOWN_MAX + 1):
        asked = replace(request(), request_id=RequestId(f"r{n}"))
        book.record(0.0, InvokeRequested(request=asked), [])
    seen = {}
    for tenant in ("a", ""):
        sees = Caller(tenant=TenantName(tenant), role=Role.TENANT if tenant else Role.ADMIN).sees
        told = await shown(book, 2.0, sees=sees)
        traced: Any = list(chrome_trace(book, 2.0, sees))
        seen[tenant] = (
            [one["instance_id"] for one in told["loads"]],
            [one["args"] for one in traced if one["name"] == "load"],
            (told["open_count"], len(told["open"])),
        )
    assert seen["a"] == (["a-1"], [{}], (0, 0))
    assert seen[""] == (["-1", "a-1", "b-1"], [{}] * 3, (OPEN_SHOWN_MAX + 1, OPEN_SHOWN_MAX))


async def test_a_call_of_many_parts_has_its_own_end() -> None:
    book, abort = CallBook(lambda _: None), AbortRequest(request_id=request().request_id, attempt=1)
    book.record(0.0, InvokeRequested(request=request()), [])
    starved = TokensReport(
        instance_id=InstanceId("chat-1-2"), outputs=(), starved=(abort.request_id,)
    )
    for n in range(2 * SPANS_MAX):
        reported = NodeReported(link_id=1, report=starved)
        book.record(float(n), reported, [SendCommand(link_id=1, command=abort)])
    ended_s = 3.0 * SPANS_MAX
    book.record(ended_s, CancelRequested(request_id=abort.request_id), [])
    (drawn,) = (await shown(book, ended_s))["ended"]
    assert (len(drawn["spans"]), drawn["ended_unix_s"]) == (SPANS_MAX, ended_s)


def test_who_is_evicted_is_told_from_who_waits_for_its_first_place() -> None:
    book, asked, name = CallBook(lambda name: None), request(), InstanceId("chat-1-2")
    book.record(1.0, InvokeRequested(request=asked), [])
    abort = AbortRequest(request_id=asked.request_id, attempt=1)
    starved = TokensReport(instance_id=name, outputs=(), starved=(asked.request_id,))
    reported = NodeReported(link_id=1, report=starved)
    book.record(2.0, reported, [SendCommand(link_id=1, command=abort)])
    (call,) = book.open.values()
    assert [(span.kind, span.ended_s) for span in call.spans] == [("wait", 2.0), ("evicted", None)]


@pytest.mark.parametrize("lost", [False, True])
def test_a_move_that_is_given_up_ends_there(lost: bool) -> None:
    """Because the controller takes it back, or its node is lost; the request goes on."""
    book, asked, link_id, name = CallBook(lambda name: None), request(), 7, InstanceId("chat-1-2")
    book.record(0.0, NodeConnected(link_id=link_id, hello=hello("n2")), [])
    book.record(1.0, InvokeRequested(request=asked), [])
    order = RequestOrder(
        request=asked,
        attempt=2,
        paused=True,
        slo=Slo(),
        age_s=1.0,
        due_in_s=1.0,
        output_tokens=(5,),
    )
    ahead = SendCommand(link_id=link_id, command=SubmitRequest(instance_id=name, order=order))
    book.record(2.0, None, [ahead])
    (call,) = book.open.values()
    assert [(span.kind, span.ended_s) for span in call.spans] == [("wait", None), ("move", None)]
    if lost:
        book.record(3.0, NodeDisconnected(link_id=link_id, reason="gone"), [])
    else:
        for attempt in (1, 2):
            abort = AbortRequest(request_id=asked.request_id, attempt=attempt)
            book.record(1.0 + attempt, None, [SendCommand(link_id=link_id, command=abort)])
    assert [(span.kind, span.ended_s) for span in call.spans] == [("wait", None), ("move", 3.0)]
    assert call.steps[-1][1] == "its move to chat-1-2 was given up"
