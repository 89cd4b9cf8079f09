"""The queues: who is placed when room appears, and what a waiting queue may unload for it."""

from mesh.domain.events import CancelRequested, LoadExpired, NodeDisconnected
from mesh.domain.ids import InstanceId, RequestId
from mesh.domain.limits import CellLimits
from mesh.domain.messages import InstanceGone, LoadInstance, SubmitRequest, UnloadInstance
from mesh.domain.reasons import FinishReason
from mesh.domain.slo import Slo
from tests.core.cells import MIB, CellUnderTest, commands, deployment, hello, request


def run_one(cell: CellUnderTest, name: str, of: str, link: int) -> InstanceId:
    """An instance of `of` is loaded and has answered one request."""
    load = commands(cell.invoke(request(name, of=of)), LoadInstance)[0]
    cell.loaded(link, load.instance_id)
    cell.tokens(link, name, [7], finish=FinishReason.STOP)
    return load.instance_id


def test_when_a_waiting_head_leaves_those_behind_it_may_fit() -> None:
    """r2 needs all 16 blocks that the node has room for, and r1 holds one of them; r3 needs one."""
    cell = CellUnderTest(deployment(slo=Slo(ttft_s=60.0)))
    link, _ = cell.join(hello(memory_bytes=116 * MIB))
    load = commands(cell.invoke(request("r1", max_tokens=8)), LoadInstance)[0]
    cell.loaded(link, load.instance_id)
    assert commands(cell.invoke(request("r2", prompt=[1] * 500)), SubmitRequest) == []
    assert commands(cell.invoke(request("r3", max_tokens=8)), SubmitRequest) == []
    left = commands(cell.tell(CancelRequested(request_id=RequestId("r2"))), SubmitRequest)
    assert [s.order.request.request_id for s in left] == ["r3"]


def test_a_burst_that_waits_for_room_unloads_no_more_than_it_needs() -> None:
    cell = CellUnderTest(*(deployment(name, keep_alive_s=600) for name in "abc"))
    for name in "ab":
        link, _ = cell.join(hello(f"n-{name}", run_id=name, memory_bytes=150 * MIB))
        run_one(cell, f"r-{name}", name, link)
    unloads = [
        u for n in range(5) for u in commands(cell.invoke(request(f"c{n}", of="c")), UnloadInstance)
    ]
    assert len(unloads) == 1


def test_a_load_given_up_is_not_waited_for_while_an_idle_instance_can_go() -> None:
    """Nobody knows when a node lets go of a load that takes too long."""
    cell = CellUnderTest(*(deployment(name, keep_alive_s=600) for name in "abc"))
    cell.join(hello("n1", run_id="1", memory_bytes=150 * MIB))
    cell.invoke(request("r-a", of="a"))
    cell.tell(CancelRequested(request_id=RequestId("r-a")))
    other, _ = cell.join(hello("n2", run_id="2", memory_bytes=150 * MIB))
    idle = run_one(cell, "r-b", "b", other)
    (loading,) = [i for i in cell.core.cell.instances if i != idle]
    cell.tell(LoadExpired(instance_id=loading))
    asked = cell.invoke(request("r-c", of="c"))
    assert [u.instance_id for u in commands(asked, UnloadInstance)] == [idle]


def test_an_instance_just_loaded_serves_its_queue_before_an_older_request_takes_its_memory() -> (
    None
):
    """`b`'s request is older, but went to a node that is lost when `a` has begun to load."""
    cell = CellUnderTest(deployment("a"), deployment("b"))
    first, _ = cell.join(hello("n1", run_id="1", memory_bytes=150 * MIB))
    cell.invoke(request("r-b", of="b"))
    second, _ = cell.join(hello("n2", run_id="2", memory_bytes=150 * MIB))
    cell.now_s += 1.0
    load = commands(cell.invoke(request("r-a", of="a")), LoadInstance)[0]
    cell.tell(NodeDisconnected(link_id=first, reason="reset"))
    loaded = cell.loaded(second, load.instance_id)
    assert [s.order.request.request_id for s in commands(loaded, SubmitRequest)] == ["r-a"]
    assert commands(loaded, UnloadInstance) == []


def test_requests_that_lost_their_node_wait_in_the_order_in_which_they_came() -> None:
    cell = CellUnderTest(deployment(), limits=CellLimits(batch_max=1))
    links = []
    for n in (1, 2):
        link, _ = cell.join(hello(f"n{n}", run_id=str(n)))
        load = commands(cell.invoke(request(f"r{n}")), LoadInstance)[0]
        cell.loaded(link, load.instance_id)
        links.append(link)
        cell.now_s += 1.0
    cell.invoke(request("r3"))
    for link in links:
        cell.tell(NodeDisconnected(link_id=link, reason="reset"))
    (entry,) = cell.core.cell.deployments.values()
    assert [held.original.request_id for held in entry.queue] == ["r1", "r2", "r3"]


def test_memory_that_an_idle_instance_leaves_goes_to_who_waits() -> None:
    cell = CellUnderTest(deployment("a", keep_alive_s=600), deployment("b"))
    link, _ = cell.join(hello(memory_bytes=150 * MIB))
    idle = run_one(cell, "r-a", "a", link)
    cell.invoke(request("r-b", of="b"))
    gone = cell.report(link, InstanceGone(instance_id=idle))
    assert [load.deployment for load in commands(gone, LoadInstance)] == ["b"]
