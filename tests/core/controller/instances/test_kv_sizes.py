"""The controller core on how large KV caches are to be, at the edges: least, most, and for whom."""

from mesh.core.controller.state.instance import InstanceEntry
from mesh.domain.actions import ControllerAction
from mesh.domain.events import NodeDisconnected, RetryLoadDue
from mesh.domain.history import OutputHistory
from mesh.domain.ids import DeploymentName, RequestId
from mesh.domain.lifecycle import InstanceState
from mesh.domain.limits import CellLimits
from mesh.domain.messages import (
    AbortRequest,
    InstanceLoaded,
    LoadFailed,
    LoadInstance,
    ResizeKv,
    SubmitRequest,
    UnloadInstance,
)
from mesh.domain.model import Footprint
from tests.core.cells import MIB, commands, request
from tests.core.controller.instances.test_kv_cache import LIMITS, MemoryCell, only_one, with_one

A = DeploymentName("a")
LITTLE = Footprint(weights_bytes=4 * MIB, kv_block_bytes=MIB, block_tokens=32)
"""The footprint of a model so small that two have to go for a cache to grow."""


def short_answers(cell: MemoryCell) -> None:
    cell.core.cell.deployments[A].history = OutputHistory(mean_tokens=0.0, count=9)


def ask_three_that_wait(cell: MemoryCell) -> list[ControllerAction]:
    """Three requests that need 14 blocks each wait until the next load after a failed one."""
    load = only_one(cell.ask("a1", "a", 300), LoadInstance)
    cell.ask("a2", "a", 300)
    cell.ask("a3", "a", 300)
    cell.report(cell.link, LoadFailed(instance_id=load.instance_id, error="Torn", message="torn"))
    cell.now_s += LIMITS.load_retry_s
    return cell.tell(RetryLoadDue(name=A))


def test_the_next_token_of_a_request_has_to_be_written_somewhere() -> None:
    cell = MemoryCell("a", kv_blocks=100)
    short_answers(cell)
    load = only_one(cell.ask("a1", "a", 64), LoadInstance)
    assert load.kv_blocks == 4, "65 tokens are 3 blocks, and a quarter more"


def test_a_new_cache_is_for_no_more_requests_than_an_iteration_takes() -> None:
    limits = CellLimits(delivery_s_max=0.02, kv_tokens_least=64, batch_max=2)
    (load,) = commands(ask_three_that_wait(MemoryCell("a", kv_blocks=100, of=limits)), LoadInstance)
    assert load.kv_blocks == 35


def test_a_new_cache_need_not_hold_all_who_wait() -> None:
    (load,) = commands(ask_three_that_wait(MemoryCell("a", kv_blocks=20)), LoadInstance)
    assert load.kv_blocks == 20


def test_a_new_cache_holds_the_one_who_has_waited_longest_or_is_not_loaded() -> None:
    cell = MemoryCell("a", kv_blocks=13)
    assert commands(cell.ask("a1", "a", 300), LoadInstance) == []


def test_a_new_cache_has_the_least_and_the_watermark_even_for_a_short_request() -> None:
    cell = MemoryCell("a", kv_blocks=100)
    asked = cell.invoke(request("a1", of="a", max_tokens=1))
    assert only_one(asked, LoadInstance).kv_blocks == 3


def parked(cell: MemoryCell, name: str = "a") -> InstanceEntry:
    instance = cell.load(name)
    cell.idle(f"{name}1")
    cell.park(instance)
    cell.resized(instance, 1)
    return instance


def test_a_parked_cache_comes_back_with_the_least_even_for_a_short_request() -> None:
    cell = MemoryCell("a", kv_blocks=100)
    parked(cell)
    asked = cell.invoke(request("a2", of="a", max_tokens=1))
    assert only_one(asked, ResizeKv).kv_blocks == 3


def test_an_idle_instance_does_not_go_for_its_own_cache() -> None:
    cell = MemoryCell("a", "b", kv_blocks=9, weights=2)
    instance = parked(cell)
    cell.load("b")
    asked = cell.ask("a2", "a")
    assert not commands(asked, UnloadInstance)
    assert not commands(asked, SubmitRequest)
    assert instance.state is InstanceState.PARKED


def little(cell: MemoryCell, name: str) -> InstanceEntry:
    """Idle, of 3 blocks and 4 MiB of weights."""
    load = only_one(cell.ask(f"{name}1", name), LoadInstance)
    cell.report(
        cell.link,
        InstanceLoaded(instance_id=load.instance_id, footprint=LITTLE, kv_blocks=7, elapsed_s=0.1),
    )
    cell.idle(f"{name}1")
    return cell.core.cell.instances[load.instance_id]


def crowded(free_blocks: int) -> tuple[MemoryCell, list[str]]:
    """`a` has five blocks of seven in use; two little ones of 7 MiB are idle."""
    cell = MemoryCell("b", "c", "a", kv_blocks=100, weights=3)
    idle = [little(cell, "b"), little(cell, "c")]
    cell.now_s += 0.1
    cell.load("a")
    cell.station.capacity_bytes = cell.station.promised_bytes + free_blocks * MIB
    return cell, [instance.instance_id for instance in idle]


def test_idle_instances_go_as_far_as_free_memory_does_not_do() -> None:
    """Ten blocks more are wanted, of which two are free and two are spare: six are missing."""
    cell, idle = crowded(free_blocks=4)
    asked = cell.ask("a2", "a", 200)
    assert [u.instance_id for u in commands(asked, UnloadInstance)] == idle[:1]


def test_as_many_idle_instances_go_as_it_takes() -> None:
    cell, idle = crowded(free_blocks=0)
    asked = cell.ask("a2", "a", 200)
    assert [u.instance_id for u in commands(asked, UnloadInstance)] == idle
    assert commands(asked, SubmitRequest)


def test_a_request_needs_no_more_than_it_may_ever_have() -> None:
    cell = MemoryCell("a", kv_blocks=100)
    short_answers(cell)
    cell.load("a")
    cell.invoke(request("a2", of="a", max_tokens=29))
    cell.invoke(request("a3", of="a", prompt=[1] * 479, max_tokens=500))
    cell.tokens(cell.link, "a2", range(29))
    cell.tokens(cell.link, "a3", range(33))
    held = cell.core.cell.requests
    assert [held[RequestId(name)].required_blocks for name in ("a2", "a3")] == [1, 16]


def test_what_a_request_needs_beyond_expectation_is_counted_once() -> None:
    cell = MemoryCell("a", kv_blocks=100)
    short_answers(cell)
    instance = cell.load("a")
    for n in range(4):
        cell.tokens(cell.link, "a1", range(32), first=32 * n)
    assert instance.required_blocks == 5


def test_who_starves_gets_more_blocks_and_nobody_goes_where_there_is_room() -> None:
    cell, instance = with_one(100)
    cell.ask("a2", "a")
    cell.resized(instance, 7, error="OutOfMemory")
    cell.now_s += LIMITS.grow_retry_s
    starved = cell.starved(instance, "a2")
    assert only_one(starved, ResizeKv).kv_blocks == 13
    assert commands(starved, AbortRequest) == []


def test_the_end_of_a_request_makes_no_cache_grow() -> None:
    """It is the starving that do, when it is time."""
    cell, instance = with_one(100)
    cell.ask("a2", "a")
    cell.ask("a3", "a")
    cell.resized(instance, 13)
    cell.resized(instance, 7, error="OutOfMemory")
    assert (instance.required_blocks, instance.promised_blocks) == (15, 7)
    assert commands(cell.finish("a3"), ResizeKv) == []


def test_what_a_shrink_gives_back_is_given_away_at_once() -> None:
    cell = MemoryCell("a", "b", kv_blocks=23, weights=2)
    cell.load("a", prompt=400)
    cell.invoke(request("a2", of="a", max_tokens=100))
    cell.ask("b1", "b")
    assert len(cell.core.cell.instances) == 1
    cell.finish("a1")
    (load,) = cell.station.waiting()
    assert cell.core.cell.instances[load.instance_id].deployment == "b"


def test_a_lost_node_is_told_nothing_of_what_its_end_would_have_made_room_for() -> None:
    cell = MemoryCell("a", "b", kv_blocks=20)
    cell.load("a")
    cell.idle("a1")
    cell.ask("b1", "b")
    lost = cell.tell(NodeDisconnected(link_id=cell.link, reason="reset"))
    assert commands(lost, LoadInstance) == []
