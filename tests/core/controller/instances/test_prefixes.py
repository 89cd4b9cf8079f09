"""Where a request's beginning is computed already: counted on, preferred, and missed."""

from dataclasses import replace

from mesh.core.controller.instances.node_schedule import forecast_on
from mesh.core.controller.requests.search import preferred
from mesh.core.controller.state.expectations import Expectations
from mesh.core.controller.state.instance import InstanceEntry
from mesh.core.controller.state.request import RequestEntry
from mesh.domain.actions import ControllerAction, RefuseRequest, TellAccepted
from mesh.domain.events import InvokeRequested
from mesh.domain.ids import DeploymentName, InstanceId, RequestId
from mesh.domain.limits import CellLimits
from mesh.domain.messages import (
    AbortRequest,
    LoadInstance,
    PrefixesChanged,
    PrefixMissed,
    SubmitRequest,
    TokensReport,
)
from mesh.domain.reasons import RefusalReason
from mesh.domain.request import Request, RequestTokens
from mesh.domain.slo import ColdStart, Slo
from mesh.domain.steps import PrefixChange
from mesh.memory.block_keys import digests_of
from tests.core.admission import SLOW, instance, node
from tests.core.cells import FOOTPRINT, CellUnderTest, commands, deployment, one_node, only, request
from tests.core.controller.state.entries import Entries, submit

SIZE = FOOTPRINT.block_tokens
PROMPT = tuple(range(10 * SIZE))


def digests() -> tuple[int, ...]:
    ((_, found),) = digests_of(PROMPT, [SIZE], "")
    return found


def salted(known: Entries, name: str = "r1", salt: str | None = "") -> RequestEntry:
    entry = known.a_request(name, tokens=len(PROMPT))
    entry.original = replace(entry.original, digests=digests_of(PROMPT, [SIZE], salt))
    return entry


def knows(instance: InstanceEntry, count: int) -> None:
    instance.note_prefixes(PrefixChange(came=digests()[:count]))


def test_the_longest_beginning_counts_and_one_token_is_left() -> None:
    known = Entries()
    asked = salted(known)
    assert known.instance.cached_tokens(asked) == 0
    knows(known.instance, 4)
    assert known.instance.cached_tokens(asked) == 4 * SIZE
    known.instance.note_prefixes(PrefixChange(went=digests()[1:2]))
    assert known.instance.cached_tokens(asked) == SIZE, "what comes after a gap is of no use"
    knows(known.instance, 10)
    assert known.instance.cached_tokens(asked) == 9 * SIZE


def test_other_salts_and_none_find_nothing() -> None:
    known = Entries()
    knows(known.instance, 10)
    assert known.instance.cached_tokens(salted(known, "r2", "other")) == 0
    assert known.instance.cached_tokens(salted(known, "r3", None)) == 0


def test_validation_takes_the_prefill_that_is_left() -> None:
    known = Entries()
    asked = salted(known)
    asked.due_s = 5.0

    def first_token_s() -> float:
        limits = CellLimits()
        return forecast_on(known.instance, asked, now_s=0.0, limits=limits, late=True).first_token_s

    submit(known.instance, known.a_request("other"), now_s=0.0)
    whole_s = first_token_s()
    knows(known.instance, 9)
    assert first_token_s() < whole_s


def test_a_place_with_more_of_it_is_preferred_unless_it_is_the_busier_by_more() -> None:
    known = Entries()
    other = known.an_instance("a2", known.a_node("n2", 2))
    asked, both = salted(known), [known.instance, other]
    assert preferred(both, asked, 0.0) is None
    knows(other, 2)
    assert preferred(both, asked, 0.0) is other
    submit(other, known.a_request("long", tokens=500))
    assert preferred(both, asked, 0.0) is None, "500 tokens before it, for 2 blocks less"
    knows(known.instance, 1)
    assert preferred(both, asked, 0.0) is None, "the policy's first is the best"


def test_who_has_nothing_in_any_cache_is_left_to_the_policy() -> None:
    known = Entries()
    other = known.an_instance("a2", known.a_node("n2", 2))
    knows(known.instance, 5)
    knows(other, 5)
    submit(known.instance, known.a_request("long", tokens=500))
    assert preferred([known.instance, other], known.a_request("new"), 0.0) is None


def asking() -> Request:
    return replace(request("again", prompt=PROMPT), digests=digests_of(PROMPT, [SIZE], ""))


class KnowingCell(CellUnderTest):
    """A node comes with an instance, and says which of the prompt's blocks it has."""

    def __init__(self, known: int) -> None:
        super().__init__(deployment("chat", slo=Slo(ttft_s=5.0)), profiles=(SLOW,))
        self.held = replace(instance("chat", "chat"), prefixes=digests()[:known])
        self.link, _ = self.join(node("n1", self.held))

    def ask(self) -> list[ControllerAction]:
        return self.invoke(
            replace(request("again", prompt=PROMPT), digests=digests_of(PROMPT, [SIZE], ""))
        )

    def miss(self, attempt: int, tokens: int) -> list[ControllerAction]:
        missed = PrefixMissed(request_id=RequestId("again"), attempt=attempt, cached_tokens=tokens)
        return self.report(self.link, missed)


def test_a_node_is_told_what_was_counted_on_and_a_client_too() -> None:
    cell = KnowingCell(5)
    asked = cell.ask()
    assert only(asked, TellAccepted).cached_tokens == 5 * SIZE
    (sent,) = commands(asked, SubmitRequest)
    assert sent.order.cached_tokens == 5 * SIZE
    assert cell.core.cell.requests[RequestId("again")].prefill_left == 5 * SIZE


def test_a_deployment_counts_what_its_cache_had_of_prompts_once_for_each_first_token() -> None:
    cell = KnowingCell(5)
    (sent,) = commands(cell.ask(), SubmitRequest)
    for first, cached in ((0, 5 * SIZE), (1, 0)):
        outputs = RequestTokens(
            request_id=RequestId("again"),
            attempt=sent.order.attempt,
            first_index=first,
            token_ids=(7,),
            cached_tokens=cached,
        )
        instance_id = sent.instance_id
        cell.report(cell.link, TokensReport(instance_id=instance_id, outputs=(outputs,)))
    (seen,) = cell.core.snapshot(cell.now_s).deployments
    prompt = len(cell.core.cell.requests[RequestId("again")].original.prompt_tokens)
    assert (seen.prompt_tokens, seen.cached_tokens) == (prompt, 5 * SIZE)


def test_with_its_beginning_a_prompt_is_taken_that_would_be_late_without() -> None:
    hopeless = KnowingCell(0)
    first = asking()
    late = Slo(ttft_s=0.004 * 7 * SIZE, ttft_tokens_per_s=1e9)
    refused = hopeless.tell(InvokeRequested(request=first, slo=late))
    assert only(refused, RefuseRequest).reason is RefusalReason.FIRST_TOKEN_LATE
    taken = KnowingCell(6).tell(InvokeRequested(request=first, slo=late))
    assert commands(taken, SubmitRequest)


def test_a_start_is_priced_with_what_an_unloaded_instance_left() -> None:
    load_s = Expectations().load_s(node("n1"), FOOTPRINT.weights_bytes)
    ttft_s = load_s + 0.004 * 7 * SIZE
    first = asking()
    late = Slo(ttft_s=ttft_s, ttft_tokens_per_s=1e9, cold_start=ColdStart.REFUSE)
    for known in (0, 6):
        cell, link = one_node(
            deployment("chat", slo=Slo(ttft_s=5.0)), profiles=(SLOW,), node=node("n1")
        )
        left = PrefixesChanged(
            instance_id=InstanceId("before"),
            change=PrefixChange(came=digests()[:known]),
            left_to=DeploymentName("chat"),
        )
        cell.report(link, left)
        told = cell.tell(InvokeRequested(request=first, slo=late))
        if not known:
            assert only(told, RefuseRequest).reason is RefusalReason.FIRST_TOKEN_LATE
    (load,) = commands(told, LoadInstance)
    loading = cell.core.cell.instances[load.instance_id]
    assert loading.cached_tokens(cell.core.cell.requests[first.request_id]) == 6 * SIZE
    cell.loaded(link, load.instance_id)
    assert not loading.prefixes, "its engine has found none of them"


def test_who_misses_is_not_sent_again_for_what_it_missed_though_nobody_told_that_it_went() -> None:
    cell = KnowingCell(5)
    cell.ask()
    (sent,) = commands(cell.miss(1, SIZE), SubmitRequest)
    assert sent.order.cached_tokens == SIZE
    (sent,) = commands(cell.miss(2, 0), SubmitRequest)
    assert sent.order.cached_tokens == 0


def test_who_misses_what_it_was_promised_for_is_placed_anew() -> None:
    cell = KnowingCell(5)
    cell.ask()
    gone = PrefixChange(went=digests()[1:5])
    cell.report(cell.link, PrefixesChanged(instance_id=InstanceId("chat"), change=gone))
    again = cell.miss(1, SIZE)
    assert commands(again, AbortRequest)
    (sent,) = commands(again, SubmitRequest)
    assert (sent.order.attempt, sent.order.cached_tokens) == (2, SIZE)
    assert not commands(cell.miss(1, 0), SubmitRequest), "what an earlier attempt met is over"
    entry = cell.core.cell.requests[RequestId("again")]
    assert (entry.evictions, entry.failures) == (1, 1)
