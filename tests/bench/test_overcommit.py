"""What the overcommit benchmark looks at: journals, and samples of a process."""

from dataclasses import replace

from bench.audit import Audit, Replay
from bench.overcommit_shapes import Resident
from mesh.domain.actions import ControllerAction, SendCommand
from mesh.domain.events import CancelRequested, ControllerEvent, KeepAliveExpired
from mesh.domain.ids import InstanceId, RequestId
from mesh.domain.messages import (
    AbortRequest,
    Heartbeat,
    InstanceLoaded,
    InstanceReport,
    KvResized,
    LoadInstance,
    ResizeKv,
    TokensReport,
    UnloadInstance,
)
from mesh.domain.reasons import FinishReason
from mesh.runtime.journal import Decision
from tests.core.cells import (
    FOOTPRINT,
    MIB,
    CellUnderTest,
    commands,
    deployment,
    hello,
    instance_report,
    request,
)


def test_samples_over_the_limit_are_counted_and_a_process_that_ends_is_none() -> None:
    resident = Resident(limit_bytes=900 * 1024)
    for rss in (800, 950, 901, 900):
        lines = {"VmHWM": 990, "VmRSS": rss, "RssAnon": 1, "RssFile": rss // 2}
        resident.note("".join(f"{word}:\t {size} kB\n" for word, size in lines.items()))
    resident.note("Name:\tx\nState:\tZ (zombie)\n")
    assert (resident.samples, resident.over) == (4, 2)
    assert (resident.rss_bytes_max, resident.file_bytes) == (950 * 1024, 475 * 1024)
    assert resident.high_water_bytes == 990 * 1024


class Recorded(CellUnderTest):
    """Keeps what its core decided."""

    def __init__(self) -> None:
        super().__init__(deployment())
        self.decisions: list[Decision] = []

    def tell(self, event: ControllerEvent) -> list[ControllerAction]:
        actions = super().tell(event)
        self.decisions.append(Decision(now_s=self.now_s, event=event, actions=tuple(actions)))
        return actions

    def audit(self) -> Audit:
        return Replay(CellUnderTest(deployment()).core).run(self.decisions)

    def resized(self, link: int, command: ResizeKv, error: str = "") -> None:
        said = KvResized(
            instance_id=command.instance_id,
            kv_blocks=command.kv_blocks,
            elapsed_s=0.002,
            error=error,
        )
        self.report(link, said)


def serving() -> tuple[Recorded, int, InstanceId]:
    """A cell whose instance is loaded and has one request."""
    cell = Recorded()
    link, _ = cell.join()
    load = commands(cell.invoke(), LoadInstance)[0]
    cell.loaded(link, load.instance_id)
    return cell, link, load.instance_id


def test_a_journal_tells_what_instances_did() -> None:
    """The instance is loaded, parked, resumed and unloaded; and the request ended once."""
    cell, link, instance_id = serving()
    cell.tokens(link, "r1", [7], finish=FinishReason.STOP)
    idle = KeepAliveExpired(instance_id=instance_id, idle_since_s=cell.now_s)
    cell.now_s += 1.0
    parked = commands(cell.tell(idle), ResizeKv)[0]
    cell.resized(link, parked)
    cell.resized(link, commands(cell.invoke(request("r2")), ResizeKv)[0])
    found = cell.audit()
    assert found.diverged_at is None
    wanted = {"loads": 1, "shrinks": 1, "parks": 1, "resumes": 1, "grows": 1}
    assert dict(found.counts) == wanted
    assert found.resize_s == [0.002, 0.002]
    assert found.over_capacity == 0
    assert 0.1 < found.tracked_share_max < 0.5
    assert not found.ended_once, "r2 is still there"
    cell.tokens(link, "r2", [7], finish=FinishReason.STOP)
    assert cell.audit().ended_once
    cell.tokens(link, "r2", [7], finish=FinishReason.STOP)
    assert cell.audit().ended_once, "what comes for an ended request is for nobody"


def test_a_client_that_leaves_is_told_nothing() -> None:
    cell, _, _ = serving()
    cell.tell(CancelRequested(request_id=RequestId("r1")))
    assert cell.audit().ended_once


def test_nor_are_those_that_leave_with_it() -> None:
    cell, _, _ = serving()
    cell.invoke(request("r2"))
    cell.tell(CancelRequested(request_id=RequestId("r1"), others=(RequestId("r2"),)))
    assert cell.audit().ended_once


def test_a_node_that_holds_more_than_it_has_is_seen() -> None:
    cell = Recorded()
    link, _ = cell.join(hello(memory_bytes=200 * MIB))
    load = commands(cell.invoke(), LoadInstance)[0]
    assert cell.audit().over_capacity == 0
    large = InstanceLoaded(
        instance_id=load.instance_id,
        footprint=replace(FOOTPRINT, weights_bytes=190 * MIB),
        kv_blocks=load.kv_blocks,
        elapsed_s=1.0,
    )
    cell.report(link, large)
    found = cell.audit()
    assert found.over_capacity == 1
    assert found.tracked_share_max > 1.0


def test_errors_of_nodes_are_counted_by_kind() -> None:
    cell, link, instance_id = serving()
    command = ResizeKv(instance_id=instance_id, kv_blocks=20)
    cell.resized(link, command, error="OutOfMemory")
    assert cell.audit().errors == {"resize OutOfMemory": 1}


def test_what_no_book_shows_is_told_apart_from_what_a_load_takes() -> None:
    cell = Recorded()
    link, _ = cell.join(replace(hello(), base_bytes=50 * MIB))
    load = commands(cell.invoke(), LoadInstance)[0]
    cell.report(link, Heartbeat(rss_bytes=90 * MIB))
    cell.loaded(link, load.instance_id)
    listed = (_listed(load),)
    cell.report(link, Heartbeat(rss_bytes=160 * MIB, engine_bytes=100 * MIB, instances=listed))
    found = cell.audit()
    assert found.unaccounted_amid_bytes == [40 * MIB]
    assert found.unaccounted_bytes == [10 * MIB]
    assert found.resident_max == 1
    assert found.booked_over_rss == 150 / 160


def _listed(load: LoadInstance) -> InstanceReport:
    """As its node reports it once it is loaded."""
    return instance_report(
        instance_id=load.instance_id,
        deployment=load.deployment,
        model_id=load.model.model_id,
        kv_blocks=load.kv_blocks,
        context_tokens_max=load.context_tokens_max,
        batch_max=load.batch_max,
        batch=1,
    )


def test_a_decision_that_comes_out_otherwise_is_named() -> None:
    cell, _, instance_id = serving()
    first = cell.decisions[0]
    other = SendCommand(link_id=1, command=UnloadInstance(instance_id=instance_id))
    cell.decisions[0] = replace(first, actions=(*first.actions, other))
    assert cell.audit().diverged_at == 1


def test_a_request_that_is_taken_back_for_want_of_blocks_is_an_eviction() -> None:
    """The node has 16 blocks: one request comes to need all of them, and there is another."""
    cell = Recorded()
    link, _ = cell.join(hello(memory_bytes=116 * MIB))
    load = commands(cell.invoke(request(prompt=[1] * 256, max_tokens=255)), LoadInstance)[0]
    cell.loaded(link, load.instance_id)
    cell.invoke(request("r2"))
    cell.tokens(link, "r1", [7] * 230)
    assert not cell.audit().counts["evictions"]
    starved = TokensReport(instance_id=load.instance_id, outputs=(), starved=(RequestId("r2"),))
    assert len(commands(cell.report(link, starved), AbortRequest)) == 1
    assert cell.audit().counts["evictions"] == 1
