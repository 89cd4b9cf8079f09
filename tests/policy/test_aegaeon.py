"""What `aegaeon` decides in a small cell: who computes a prompt, and where its decodes go."""

from dataclasses import replace

from mesh.domain.actions import ControllerAction
from mesh.domain.events import LeaseCheckDue
from mesh.domain.ids import InstanceId, RequestId
from mesh.domain.messages import (
    AbortRequest,
    ComputedAhead,
    ContinueRequest,
    KvArrived,
    LoadInstance,
    NodeHello,
    SubmitRequest,
)
from mesh.domain.reasons import DeviceKind
from tests.core.admission import instance, node, submitted
from tests.core.cells import MIB, CellUnderTest, commands, only, request
from tests.policy.test_mesh import anywhere


def gpu(name: str, *there: str, **said: str) -> NodeHello:
    """A node that moves KV blocks, with an instance `NAME-OF` of each deployment that is there."""
    made = node(name, *(instance(f"{name}-{of}", of) for of in there))
    return replace(
        made, device=DeviceKind.GPU, kv_address=said.get("kv_address", name), kv_format="f"
    )


class Divided(CellUnderTest):
    """Six nodes, of which `n1` and `n2` compute prompts (6 of 16 in the paper)."""

    def __init__(self, *first: NodeHello) -> None:
        super().__init__(*(anywhere(name) for name in "abc"), rule="aegaeon")
        others = [gpu(f"n{n}") for n in range(len(first) + 1, 7)]
        self.links = {hello.node_id: self.join(hello)[0] for hello in (*first, *others)}

    def ask(self, name: str, of: str) -> list[ControllerAction]:
        return self.invoke(request(name, of=of, prompt=(1,) * 100, max_tokens=100))


def test_a_prompt_joins_the_group_of_its_model_until_that_is_full() -> None:
    cell = Divided(gpu("n1", "a"), gpu("n2", "a"))
    for n in range(1, 9):
        assert submitted(cell.ask(f"r{n}", of="a")) == [(f"r{n}", "n1-a")]
    assert submitted(cell.ask("r9", of="a")) == [("r9", "n2-a")]


def test_a_new_group_goes_to_the_node_with_the_least_to_compute() -> None:
    cell = Divided(gpu("n1", "a"), gpu("n2"))
    cell.ask("r1", of="a")
    load = only(commands(cell.ask("r2", of="b"), LoadInstance), LoadInstance)
    assert cell.core.cell.instances[load.instance_id].node.node_id == "n2"


def test_with_its_first_token_a_request_goes_to_the_node_of_the_fewest_batches() -> None:
    cell = Divided(gpu("n1", "a"), gpu("n2"), gpu("n3", "b"))
    cell.ask("r1", of="a")
    load = only(commands(cell.tell(LeaseCheckDue()), LoadInstance), LoadInstance)
    there = cell.core.cell.instances[load.instance_id]
    assert (there.node.node_id, there.label) == ("n4", "decode")
    assert not commands(
        cell.loaded(cell.links[there.node.node_id], load.instance_id), SubmitRequest
    )
    cell.tokens(cell.links[there.node.node_id], "r1", (7,))
    copy = only(commands(cell.tell(LeaseCheckDue()), SubmitRequest), SubmitRequest)
    assert (copy.instance_id, copy.order.paused) == (load.instance_id, True)
    assert copy.order.kv is not None
    # It goes on as soon as what did not come is computed, whatever its source has drawn meanwhile.
    link, moved = cell.links[there.node.node_id], (RequestId("r1"), copy.order.attempt)
    came = KvArrived(request_id=moved[0], attempt=moved[1], tokens=32, moved_bytes=1, elapsed_s=0.1)
    assert not commands(cell.report(link, came), ContinueRequest)
    ahead = ComputedAhead(request_id=moved[0], attempt=moved[1])
    actions = cell.report(link, ahead)
    assert not only(commands(actions, ContinueRequest), ContinueRequest).paused
    assert only(commands(actions, AbortRequest), AbortRequest).attempt == 1
    assert cell.core.cell.requests[RequestId("r1")].instance is there


def test_nodes_that_move_no_kv_blocks_compute_both() -> None:
    cell = CellUnderTest(anywhere("a"), rule="aegaeon")
    for name in ("n1", "n2"):
        cell.join(gpu(name, "a", kv_address=""))
    assert submitted(cell.invoke(request("r1", of="a"))) == [("r1", "n1-a")]
    cell.tokens(1, "r1", (7,))
    assert not commands(cell.tell(LeaseCheckDue()), SubmitRequest)
    assert InstanceId("n1-a") in cell.core.cell.instances


def test_another_batch_begins_where_the_first_has_no_room_for_a_request() -> None:
    full = gpu("n3", "a")
    small = replace(full.instances[0], kv_blocks=1)
    full = replace(full, instances=(small,), memory_bytes=101 * MIB)
    cell = Divided(gpu("n1", "a"), gpu("n2"), full)
    cell.ask("r1", of="a")
    cell.tokens(1, "r1", (7,))
    load = only(commands(cell.tell(LeaseCheckDue()), LoadInstance), LoadInstance)
    assert cell.core.cell.instances[load.instance_id].node.node_id == "n4"
