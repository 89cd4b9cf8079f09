"""The controller core on engines that have not stated what a model takes: a load says it."""

from dataclasses import replace

from mesh.domain.actions import ControllerAction, RefuseRequest
from mesh.domain.ids import InstanceId
from mesh.domain.messages import (
    InstanceGone,
    InstanceLoaded,
    InstanceReport,
    LoadInstance,
    NodeHello,
    SubmitRequest,
    UnloadInstance,
)
from mesh.domain.model import Footprint
from mesh.domain.reasons import RefusalReason
from mesh.memory.demand import estimate_footprint
from tests.core.admission import instance
from tests.core.cells import (
    FOOTPRINT,
    MIB,
    MODEL,
    CellUnderTest,
    commands,
    deployment,
    hello,
    one_node,
    only,
    request,
)

ESTIMATE = estimate_footprint(MODEL)
LARGE = replace(ESTIMATE, weights_bytes=ESTIMATE.weights_bytes + 300 * MIB)
"""What the model really takes on `other`."""


def other(name: str = "n1", *, room: Footprint, memory_bytes: int = 0) -> NodeHello:
    """A node with another engine than the one that has stated a footprint, with room for one
    instance of a full context of this footprint.
    """
    least = room.instance_bytes(room.blocks_for(512))
    return replace(hello(name, memory_bytes=memory_bytes or least), engine="other")


def loaded(cell: CellUnderTest, link: int, load: LoadInstance) -> list[ControllerAction]:
    said = InstanceLoaded(
        instance_id=load.instance_id, footprint=LARGE, kv_blocks=load.kv_blocks, elapsed_s=0.5
    )
    return cell.report(link, said)


def test_an_instance_that_comes_out_larger_than_its_node_goes_and_its_request_is_refused() -> None:
    cell, link = one_node(deployment(), node=other(room=ESTIMATE))
    (load,) = commands(cell.invoke(), LoadInstance)
    after = loaded(cell, link, load)
    assert commands(after, SubmitRequest) == []
    assert only(commands(after, UnloadInstance), UnloadInstance).instance_id == load.instance_id
    gone = cell.report(link, InstanceGone(instance_id=load.instance_id))
    assert commands([*after, *gone], LoadInstance) == [], "it is known now that it does not fit"
    refused = only([*after, *gone], RefuseRequest)
    assert refused.reason is RefusalReason.MEMORY_FULL


def test_it_goes_to_another_node_that_has_room_for_it() -> None:
    cell = CellUnderTest(deployment())
    small, _ = cell.join(other("n1", room=ESTIMATE))
    large, _ = cell.join(other("n2", room=LARGE))
    (load,) = commands(cell.invoke(), LoadInstance)
    (again,) = commands(loaded(cell, small, load), LoadInstance)
    assert cell.core.cell.instances[again.instance_id].node.node_id == "n2"
    submitted = commands(loaded(cell, large, again), SubmitRequest)
    assert [order.instance_id for order in submitted] == [again.instance_id]


def test_so_does_one_that_was_loading_when_another_said_what_it_takes() -> None:
    """Both were promised what the estimate says."""
    cell = CellUnderTest(deployment(replicas_min=2))
    links = [cell.join(other(name, room=ESTIMATE))[0] for name in ("n1", "n2")]
    entries = list(cell.core.cell.instances.values())
    assert [entry.node.node_id for entry in entries] == ["n1", "n2"]
    for link, entry in zip(links, entries, strict=True):
        assert entry.to_load is not None
        (unload,) = commands(loaded(cell, link, entry.to_load), UnloadInstance)
        assert unload.instance_id == entry.instance_id
        assert entry.node.free_bytes >= 0


def test_with_room_for_what_it_came_to_it_stays_and_the_next_load_is_promised_as_much() -> None:
    cell, link = one_node(
        deployment(), node=other(room=LARGE, memory_bytes=LARGE.instance_bytes(40))
    )
    (load,) = commands(cell.invoke(), LoadInstance)
    assert len(commands(loaded(cell, link, load), SubmitRequest)) == 1
    cell.report(link, InstanceGone(instance_id=load.instance_id))
    (again,) = (i for i in cell.core.cell.instances.values() if i.instance_id != load.instance_id)
    assert again.promised_bytes == LARGE.instance_bytes(again.kv_blocks)


def test_what_the_importing_engine_stated_is_not_doubted() -> None:
    cell, link = one_node(
        deployment(), node=hello(memory_bytes=FOOTPRINT.instance_bytes(FOOTPRINT.blocks_for(512)))
    )
    (load,) = commands(cell.invoke(), LoadInstance)
    assert commands(loaded(cell, link, load), UnloadInstance) == []


def test_a_node_that_brings_an_instance_along_says_what_it_takes_there() -> None:
    cell = CellUnderTest(deployment())
    brought: InstanceReport = replace(instance("i1", "chat"), footprint=LARGE)
    cell.join(replace(other(room=LARGE, memory_bytes=4096 * MIB), instances=(brought,)))
    known = cell.core.deployment(deployment().spec.name)
    assert known is not None
    assert dict(known.footprints) == {"scripted": FOOTPRINT, "other": LARGE}
    assert cell.core.cell.instances[InstanceId("i1")].footprint == LARGE
    assert len(commands(cell.invoke(request("r2")), SubmitRequest)) == 1
