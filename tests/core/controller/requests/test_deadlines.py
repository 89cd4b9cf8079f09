"""A refusal says what the place that is nearest to taking the request lacks."""

from dataclasses import replace
from math import inf

from mesh.domain.actions import RefuseRequest
from mesh.domain.limits import CellLimits
from mesh.domain.messages import LoadInstance, NodeHello, SubmitRequest
from mesh.domain.reasons import FinishReason, RefusalReason
from mesh.domain.slo import ColdStart, Slo
from mesh.domain.steps import LoadRate, LoadTier
from tests.core.admission import BusyCell, instance, node
from tests.core.cells import (
    MIB,
    CellUnderTest,
    commands,
    deployment,
    hello,
    of_kind,
    only,
    request,
)


def busy_cell(validations_max: int = 32) -> BusyCell:
    """For some tokens `a` and `b` leave their node no time for `c`; it has memory."""
    limits = CellLimits(validations_max=validations_max)
    cell = BusyCell(*(deployment(name) for name in "abc"), limits=limits)
    cell.ask("r1", "a", max_tokens=4)
    cell.ask("r2", "b", max_tokens=4)
    return cell


def refused_later(cell: CellUnderTest) -> list[RefuseRequest]:
    cell.now_s += 2.1
    return of_kind(cell.retry(), RefuseRequest)


def test_a_node_that_lacks_memory_alone_is_nearer_than_one_that_lacks_time() -> None:
    cell = busy_cell()
    cell.ask("r3", "c")
    assert [r.reason for r in refused_later(cell)] == [RefusalReason.TPOT_EXCEEDED]
    cell = busy_cell()
    cell.join(node("n2", memory_bytes=50 * MIB))
    cell.ask("r3", "c")
    (refused,) = refused_later(cell)
    assert refused.reason is RefusalReason.MEMORY_FULL
    assert "on a node" in refused.message


def test_an_instance_without_memory_for_one_more_says_so() -> None:
    """Two requests of 300 tokens need 20 blocks; the node has room for 16."""
    cell = CellUnderTest(deployment())
    link, _ = cell.join(hello(memory_bytes=116 * MIB))
    first = cell.invoke(request("r1", prompt=(1,) * 300, max_tokens=10))
    cell.loaded(link, only(commands(first, LoadInstance), LoadInstance).instance_id)
    cell.invoke(request("r2", prompt=(1,) * 300, max_tokens=10))
    (refused,) = refused_later(cell)
    assert refused.reason is RefusalReason.MEMORY_FULL
    assert "KV cache" in refused.message


def test_who_is_not_looked_into_any_more_is_refused_for_the_same_as_the_one_before() -> None:
    cell = busy_cell(validations_max=1)
    for name in ("r3", "r4"):
        cell.ask(name, "c")
    refused = refused_later(cell)
    assert [r.reason for r in refused] == [RefusalReason.TPOT_EXCEEDED] * 2


def test_who_is_not_looked_into_and_has_none_before_it_is_refused_for_what_its_last_try_found() -> (
    None
):
    limits = CellLimits(validations_max=1)
    cell = BusyCell(*(deployment(name) for name in "abcd"), limits=limits)
    for name, of, tokens in (("r1", "a", 4), ("r2", "b", 4), ("r3", "c", 256), ("r4", "d", 256)):
        cell.ask(name, of, max_tokens=tokens)
    refused = refused_later(cell)
    assert [r.reason for r in refused] == [RefusalReason.TPOT_EXCEEDED] * 2


def cell_where_the_weights_go(ttft_s: float) -> CellUnderTest:
    """A node from whose disk a load takes 1 s, and 0.25 s with weights that are there: those of
    `a`, which has to go for `b` as soon as it idles.
    """
    slo = Slo(ttft_s=ttft_s, cold_start=ColdStart.REFUSE)
    cell = CellUnderTest(*(deployment(name, slo=slo) for name in "ab"))
    idle = replace(instance("a1", "a"), kv_blocks=20)
    cell.join(loads_in(1.0, node("n1", idle, memory_bytes=160 * MIB)))
    return cell


def loads_in(disk_s: float, node: NodeHello) -> NodeHello:
    seconds = (LoadTier.DISK, disk_s), (LoadTier.HOST, 0.25)
    rates = tuple((tier, LoadRate(fixed_s=s, bytes_per_s=inf)) for tier, s in seconds)
    return replace(node, shares_weights=True, load_rates=rates)


def test_where_the_weights_go_for_a_load_it_lacks_time_and_who_lacks_memory_alone_is_nearer() -> (
    None
):
    cell = cell_where_the_weights_go(0.5)
    cell.join(loads_in(0.25, node("n2", memory_bytes=50 * MIB)))
    assert not of_kind(cell.invoke(request("r1", of="b")), RefuseRequest)
    assert [r.reason for r in refused_later(cell)] == [RefusalReason.MEMORY_FULL]


def test_who_has_waited_too_long_for_a_load_for_which_the_weights_go_is_late() -> None:
    """It would have been in time with them, and could not have them."""
    cell = cell_where_the_weights_go(1.2)
    assert commands(cell.invoke(request("r1", of="a")), SubmitRequest)
    assert not of_kind(cell.invoke(request("r2", of="b")), RefuseRequest)
    cell.now_s += 0.5
    ended = cell.tokens(1, "r1", (7,), finish=FinishReason.STOP)
    assert only(ended, RefuseRequest).reason is RefusalReason.FIRST_TOKEN_LATE
