"""The controller core on SLOs: who is admitted, who waits for headroom, who is refused and why."""

from dataclasses import replace

import pytest

from mesh.compute.times import Times
from mesh.core.controller.requests import outlook
from mesh.core.controller.requests.outlook import Cause, Outlook
from mesh.core.controller.state.context import EventContext
from mesh.core.controller.state.request import RequestEntry
from mesh.domain.actions import RefuseRequest, SetTimer, TellAccepted
from mesh.domain.events import PlaceRetryDue
from mesh.domain.ids import RequestId
from mesh.domain.messages import Heartbeat, LoadInstance, RequestReturned, SubmitRequest
from mesh.domain.node_rule import DEFAULT_RULE
from mesh.domain.profile import Grid
from mesh.domain.reasons import RefusalReason, Verdict
from mesh.domain.slo import ColdStart, Slo
from tests.core.admission import SLOW, BusyCell, instance, node, submitted
from tests.core.cells import (
    FOOTPRINT,
    MIB,
    CellUnderTest,
    commands,
    deployment,
    hello,
    of_kind,
    one_node,
    only,
    request,
)
from tests.support.profiles import profile

PROMPT_LATE = Slo(ttft_s=2.0, ttft_tokens_per_s=1e6, tpot_s=0.25)
"""The same TTFT for prompts of all lengths."""


def abc(**slos: Slo) -> BusyCell:
    """Some of the deployments with an SLO of their own."""
    return BusyCell(*(deployment(name, slo=slos.get(name, PROMPT_LATE)) for name in "abc"))


def refusal_of_a_waiting_request(cell: BusyCell, of: str, due_s: float) -> RefuseRequest:
    """It waits at first; it is refused before its first token is due."""
    while cell.now_s < due_s:
        cell.now_s += 0.05
        refused = of_kind(cell.retry(), RefuseRequest)
        if refused:
            assert refused[0].retry_after_s > 0
            return refused[0]
    raise AssertionError("it waits on when its first token is late already")


def test_a_request_that_makes_nobody_late_is_admitted_at_once() -> None:
    cell = abc()
    assert submitted(cell.ask("r1", "a", 256)) == [("r1", "a")]
    assert submitted(cell.ask("r2", "b", 100)) == [("r2", "b")]


def test_a_request_waits_and_is_admitted_when_time_has_come_free() -> None:
    """r1 is predicted to need 1.13 s, and with 195 tokens after it 2.004 s. It takes 1 s."""
    cell = abc()
    cell.ask("r1", "a", 256, max_tokens=200)
    assert isinstance(only(cell.ask("r2", "b", 195), SetTimer).timer, PlaceRetryDue)
    cell.now_s += 0.5
    assert submitted(cell.retry()) == []
    cell.now_s += 0.5
    assert submitted(cell.tokens(cell.link, "r1", [7])) == [], "a report tries nobody again"
    assert submitted(cell.retry()) == [("r2", "b")]


def test_a_request_whose_first_token_no_place_gives_in_time_is_refused_for_that() -> None:
    cell = abc()
    cell.ask("r1", "a", 256)
    assert submitted(cell.ask("r2", "b", 200)) == []
    refused = refusal_of_a_waiting_request(cell, "b", due_s=102.0)
    assert (refused.request_id, refused.reason) == ("r2", RefusalReason.FIRST_TOKEN_LATE)
    assert "2 s" in refused.message


def test_a_request_that_would_make_a_running_one_late_is_refused_for_that() -> None:
    """r1 has 44 tokens to go when its first chunk ends at 1.13 s, and is due at 1.6 s, as is r2,
    which needs 0.53 s. Were r2 to come 1.1 s later, it would delay the tokens after r1's first.
    """
    soon = Slo(ttft_s=1.6, ttft_tokens_per_s=1e6, tpot_s=0.25)
    cell = abc(a=soon, b=soon)
    cell.ask("r1", "a", 300)
    assert submitted(cell.ask("r2", "b", 120)) == []
    refused = refusal_of_a_waiting_request(cell, "b", due_s=101.6)
    assert refused.reason is RefusalReason.DELAYS_RUNNING


def test_a_request_is_refused_when_one_decode_of_every_instance_exceeds_the_tpot() -> None:
    """Three of 0.11 s, when each may have a token every 0.25 s."""
    cell = abc()
    assert submitted(cell.ask("r1", "a")) == [("r1", "a")]
    assert submitted(cell.ask("r2", "b")) == [("r2", "b")]
    refused = only(cell.ask("r3", "c"), RefuseRequest)
    assert refused.reason is RefusalReason.TPOT_EXCEEDED
    assert refused.retry_after_s > 10.0, "two answers of 128 tokens have to end first"
    assert "0.25 s" in refused.message


def test_of_those_that_are_refused_together_the_shortest_tell_what_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The last four were not tried, since others wait before them: what one lacks that is longer
    than another of them is not looked for.
    """
    asked: list[int] = []

    def counted(ctx: EventContext, of: Outlook, request: RequestEntry) -> Cause:
        asked.append(request.tokens)
        return cause(ctx, of, request)

    cause = outlook._cause
    monkeypatch.setattr(outlook, "_cause", counted)
    cell = abc()
    cell.ask("r1", "a", 256)
    for number, prompt in enumerate((*[195] * 4, 210, 205, 220, 207)):
        assert submitted(cell.ask(f"r{2 + number}", "b", prompt)) == []
    cell.now_s += 0.5
    assert len(of_kind(cell.retry(), RefuseRequest)) == 7
    assert asked == [195, 210, 205]


def test_those_behind_one_that_there_was_no_time_for_are_refused_for_the_same_reason() -> None:
    """They were never tried: where there is no time for a further one, none is. Until then they
    wait, for the two that run have four tokens each to go.
    """
    cell = abc()
    cell.ask("r1", "a", max_tokens=4)
    cell.ask("r2", "b", max_tokens=4)
    assert of_kind(cell.ask("r3", "c"), RefuseRequest) == []
    assert of_kind(cell.ask("r4", "c"), RefuseRequest) == []
    cell.now_s += 2.1
    refused = of_kind(cell.retry(), RefuseRequest)
    assert [(r.request_id, r.reason) for r in refused] == [
        ("r3", RefusalReason.TPOT_EXCEEDED),
        ("r4", RefusalReason.TPOT_EXCEEDED),
    ]


def test_instances_with_a_batch_already_take_more_where_a_further_instance_would_not_fit() -> None:
    cell = abc()
    cell.ask("r1", "a")
    cell.ask("r2", "b")
    assert submitted(cell.ask("r3", "a")) == [("r3", "a")]


def test_a_prompt_that_no_node_could_compute_in_time_is_refused_at_once() -> None:
    """500 tokens take 2.2 s."""
    for cell in (abc(), CellUnderTest(deployment("a", slo=PROMPT_LATE), profiles=(SLOW,))):
        if not cell.core.cell.nodes:
            cell.join()
        asked = cell.invoke(request("r1", of="a", prompt=(1,) * 500))
        refused = only(asked, RefuseRequest)
        assert refused.reason is RefusalReason.FIRST_TOKEN_LATE
        assert "shorten the prompt" in refused.hint
        assert commands(asked, LoadInstance) == [], "nothing is loaded for it"


def test_a_hopeless_prompt_does_not_wait_for_a_load_either() -> None:
    cell = CellUnderTest(deployment("a", slo=PROMPT_LATE), profiles=(SLOW,))
    cell.join()
    assert len(commands(cell.invoke(request("r1", of="a")), LoadInstance)) == 1
    asked = cell.invoke(request("r2", of="a", prompt=(1,) * 500))
    assert only(asked, RefuseRequest).reason is RefusalReason.FIRST_TOKEN_LATE


def test_first_come_first_served_admits_whatever_there_is_room_for() -> None:
    cell = BusyCell(*(deployment(name, slo=PROMPT_LATE) for name in "abc"), rule="fcfs")
    for number, of in enumerate("abcabc"):
        assert submitted(cell.ask(f"r{number}", of, 500)) == [(f"r{number}", of)]


def test_a_model_without_a_measured_profile_gets_one_request_on_an_idle_node() -> None:
    """Its estimate may be wrong, and says that a token takes far too long."""
    impossible = Slo(ttft_s=1e-4, ttft_tokens_per_s=1e9, tpot_s=1e-5)
    cell = BusyCell(*(deployment(name, slo=impossible) for name in "ab"), profiles=())
    assert submitted(cell.ask("r1", "a")) == [("r1", "a")]
    assert submitted(cell.ask("r2", "a")) == []
    assert submitted(cell.ask("r3", "b")) == [], "the node is not idle any more"
    measured = BusyCell(deployment("a", slo=impossible), profiles=(profile(),))
    assert submitted(measured.ask("r1", "a")) == [], "a measured one is to be believed"


def test_when_the_first_candidate_cannot_the_next_one_is_tried() -> None:
    cell = CellUnderTest(deployment("a", slo=PROMPT_LATE), profiles=(SLOW,))
    for name in ("n1", "n2"):
        cell.join(node(name, instance(f"on-{name}", "a")))
    placed = [submitted(cell.invoke(request(f"r{n}", of="a", prompt=(1,) * 250))) for n in range(2)]
    assert placed == [[("r0", "on-n1")], [("r1", "on-n2")]], "the larger batch first, if it can"
    assert submitted(cell.invoke(request("r2", of="a"))) == [("r2", "on-n1")]


def cell_with_a_tight_neighbour() -> CellUnderTest:
    """A load takes 5 s. With its first token `b` has 0.55 s for the next, and 0.25 s for each after
    that, of which a decode takes 0.11 s.
    """
    tight = deployment("b", slo=Slo(ttft_s=0.3, tpot_s=0.25))
    cell = CellUnderTest(deployment("a", slo=PROMPT_LATE), tight, profiles=(SLOW,))
    cell.core.cell.expectations.learn_load(hello(), FOOTPRINT.weights_bytes, 5.0)
    return cell


@pytest.mark.parametrize(("slowdown", "chosen"), [(1.5, "n1"), (2.5, "n2")])
def test_an_instance_starts_where_its_load_makes_nobody_late(slowdown: float, chosen: str) -> None:
    """n1 is the fuller node and comes first, but computes for `b`."""
    cell = cell_with_a_tight_neighbour()
    link, _ = cell.join(node("n1", instance("b1", "b"), memory_bytes=1 << 30))
    cell.join(node("n2"))
    said = Heartbeat(rss_bytes=1, instances=(instance("b1", "b"),), load_slowdown=slowdown)
    cell.report(link, said)
    cell.invoke(request("r1", of="b"))
    cell.tokens(link, "r1", [7])
    (load,) = commands(cell.invoke(request("r2", of="a")), LoadInstance)
    assert cell.core.cell.instances[load.instance_id].node.node_id == chosen


def test_no_instance_starts_where_every_load_makes_somebody_late() -> None:
    cell = cell_with_a_tight_neighbour()
    link, _ = cell.join(node("n1", instance("b1", "b")))
    said = Heartbeat(rss_bytes=1, instances=(instance("b1", "b"),), load_slowdown=2.5)
    cell.report(link, said)
    cell.invoke(request("r1", of="b"))
    cell.tokens(link, "r1", [7])
    asked = cell.invoke(request("r2", of="a"))
    assert commands(asked, LoadInstance) == []
    refused = only(asked, RefuseRequest)
    assert (refused.request_id, refused.reason) == ("r2", RefusalReason.DELAYS_RUNNING)


@pytest.mark.parametrize(("cold_start", "loads"), [(ColdStart.LATE, 1), (ColdStart.REFUSE, 0)])
def test_only_who_may_be_late_starts_a_load_that_takes_too_long(
    cold_start: ColdStart, loads: int
) -> None:
    """A load takes 5 s, and the first token is due in 2."""
    cell = CellUnderTest(deployment("a", slo=replace(PROMPT_LATE, cold_start=cold_start)))
    cell.core.cell.expectations.learn_load(hello(), FOOTPRINT.weights_bytes, 5.0)
    cell.join()
    asked = cell.invoke(request("r1", of="a"))
    assert len(commands(asked, LoadInstance)) == loads
    assert len(of_kind(asked, RefuseRequest)) == 1 - loads


def returned(name: str) -> RequestReturned:
    return RequestReturned(
        request_id=RequestId(name), attempt=1, error="OutOfMemory", message="evicted"
    )


def test_a_request_that_was_admitted_before_is_placed_again_though_it_is_late() -> None:
    cell = abc()
    cell.ask("r1", "a", 256)
    cell.now_s += 5.0
    assert submitted(cell.report(cell.link, returned("r1"))) == [("r1", "a")]


def test_a_request_that_was_admitted_before_waits_on_when_it_is_late() -> None:
    cell = abc()
    cell.ask("r1", "a")
    cell.ask("r2", "b")
    cell.now_s += 5.0
    cell.tokens(cell.link, "r1", [7])
    cell.report(cell.link, returned("r2"))
    cell.now_s += 5.0
    # Two others are as many as the node can give their tokens in time.
    assert of_kind(cell.retry(), RefuseRequest) == []
    assert "r2" in cell.core.cell.requests


def test_what_a_report_says_is_left_of_a_prompt_counts() -> None:
    """None of r1's 256 tokens seem computed, until a report says that 10 are left."""
    cell = abc()
    cell.ask("r1", "a", 256)
    assert submitted(cell.ask("r2", "b", 200)) == []
    cell.iterated("a", r1=10)
    assert submitted(cell.retry()) == [("r2", "b")]


def test_a_node_that_reports_to_be_quicker_than_its_profile_takes_more() -> None:
    cell = abc()
    cell.ask("r1", "a")
    cell.ask("r2", "b")
    assert submitted(cell.ask("r3", "c")) == []
    for name in "abc":
        cell.iterated(name, correction=0.5)
    assert submitted(cell.ask("r4", "c")) == [("r4", "c")]


def test_a_node_that_reports_to_be_slower_than_its_profile_takes_less() -> None:
    cell = abc()
    cell.iterated("a", correction=3.0)
    assert submitted(cell.ask("r1", "a")) == [], "a token would take 0.33 s"
    assert submitted(cell.ask("r2", "b")) == [("r2", "b")], "another model may be well"


def test_by_what_to_plan_is_known_from_the_hello_on() -> None:
    cell = CellUnderTest(deployment("a"), profiles=(SLOW,))
    cell.join(node("n1", replace(instance("a", "a"), correction_planned=3.0)))
    assert submitted(cell.invoke(request("r1", of="a"))) == [], "a token would take 0.33 s"


def test_a_correction_is_forgotten_where_nothing_computes() -> None:
    cell = abc()
    cell.iterated("a", correction=3.0)
    cell.now_s += 60.0
    assert submitted(cell.ask("r1", "a")) == [("r1", "a")]


def test_who_was_promised_a_load_is_served_though_it_takes_longer() -> None:
    """Two prompts of 1.13 s together are in time after a load of 0.7 s, and it takes 3."""
    cell, link = one_node(deployment("a", slo=PROMPT_LATE), profiles=(SLOW,))
    lengths = {"r0": 128, "r1": 128, "r2": 20}
    prompts = {r: request(r, of="a", prompt=(1,) * tokens) for r, tokens in lengths.items()}
    asked = cell.invoke(prompts["r0"])
    (load,) = commands(asked, LoadInstance)
    assert only(asked, TellAccepted).grace_s == 0.0
    assert only(cell.invoke(prompts["r1"]), TellAccepted).grace_s == 0.0
    assert only(cell.invoke(prompts["r2"]), TellAccepted).grace_s > 0.0, "it has to wait for both"
    cell.now_s += 3.0
    served = submitted(cell.loaded(link, load.instance_id))
    assert [name for name, _ in served][:2] == ["r0", "r1"]


GROWING = profile(
    prefill=Grid(rows=(1, 256), columns=(4096,), seconds=((0.001,), (0.002,))),
    decode=Grid(rows=(1, 256), columns=(4096,), seconds=((0.01,), (0.2,))),
)
SLO = Slo(ttft_s=4.0, tpot_s=0.15)
IN_TIME = max(
    n
    for n in range(1, 257)
    if Times(GROWING, DEFAULT_RULE.overestimate).decode_s(n, 64) <= SLO.tpot_s
)
"""The largest batch whose decodes keep the pace."""


def taken(calls: int, *, batch_max: int = 256, memory_bytes: int = 4 << 30) -> tuple[int, set[str]]:
    """How many of so many calls at once are on the instance, and what the others are told."""
    loaded = replace(instance("i", "chat"), batch_max=batch_max, kv_blocks=16)
    cell = CellUnderTest(deployment(slo=SLO, replicas_max=1), profiles=[GROWING])
    cell.join(replace(node("n1", loaded, memory_bytes=memory_bytes), batch_max=batch_max))
    sent = [cell.invoke(request(f"r{n}")) for n in range(calls)]
    waiting = [cell.core.cell.requests.get(RequestId(f"r{n}")) for n in range(calls)]
    submitted = sum(len(commands(actions, SubmitRequest)) for actions in sent)
    told = {str(held.refusals.verdict) for held in waiting if held and not held.instance}
    return submitted, told


def test_64_calls_at_once_are_taken_where_all_of_them_would_be_in_time() -> None:
    assert 64 < IN_TIME < 256
    assert taken(64) == (64, set())


def test_of_256_as_many_are_taken_as_decode_within_their_tpot() -> None:
    """A few fewer, since deadlines leave something for the way of the tokens."""
    found, told = taken(256)
    assert 0.9 * IN_TIME <= found <= IN_TIME
    assert told == {Verdict.TPOT_EXCEEDED.value}


def test_where_memory_is_short_it_decides() -> None:
    found, _ = taken(64, memory_bytes=140 * MIB)
    assert 16 <= found <= 40


@pytest.mark.parametrize("batch_max", [8, 32])
def test_no_more_are_taken_than_the_engine_can_carry(batch_max: int) -> None:
    assert taken(64, batch_max=batch_max)[0] == batch_max
