"""What the codecs of memory refuse: resizes to nothing, times that are none, books that are off."""

from math import inf, nan

import pytest

from mesh.domain.errors import InvalidInput
from mesh.domain.messages import Heartbeat, NodeHello
from mesh.domain.views import MemoryOperationView
from mesh.v1 import control_pb2
from mesh.v1 import node_link_pb2 as pb
from mesh.wire.codec import command_from_wire, report_from_wire, view_from_wire


@pytest.mark.parametrize(
    ("resize", "said"),
    [
        (pb.ResizeKv(instance_id="i1"), "ResizeKv.kv_blocks is 0; it must be 1 or more"),
        (pb.ResizeKv(kv_blocks=1), "ResizeKv lacks instance_id"),
    ],
)
def test_a_resize_names_an_instance_and_leaves_it_a_block(resize: pb.ResizeKv, said: str) -> None:
    with pytest.raises(InvalidInput, match=said):
        command_from_wire(pb.NodeCommand(resize_kv=resize))


@pytest.mark.parametrize("elapsed_s", [-1.0, nan, inf])
def test_a_resize_took_a_time(elapsed_s: float) -> None:
    resized = pb.KvResized(instance_id="i1", kv_blocks=4, elapsed_s=elapsed_s)
    with pytest.raises(InvalidInput, match=r"KvResized\.elapsed_s is .* 0 or more, and finite"):
        report_from_wire(pb.NodeReport(kv_resized=resized))


def test_a_resize_of_no_instance_is_invalid() -> None:
    with pytest.raises(InvalidInput, match="KvResized lacks instance_id"):
        report_from_wire(pb.NodeReport(kv_resized=pb.KvResized(kv_blocks=4)))


@pytest.mark.parametrize(
    ("starved", "said"), [("", "TokensReport lacks starved"), ("x" * 256, "has 256 characters")]
)
def test_a_starved_request_has_an_id(starved: str, said: str) -> None:
    tokens = pb.TokensReport(instance_id="i1", starved=["r1", starved])
    with pytest.raises(InvalidInput, match=said):
        report_from_wire(pb.NodeReport(tokens=tokens))


def test_a_node_that_takes_more_than_its_limit_by_itself_is_turned_away() -> None:
    hello = pb.NodeHello(node_id="n", run_id="r", device="cpu", memory_bytes=100, base_bytes=100)
    taken = report_from_wire(pb.NodeReport(hello=hello))
    assert isinstance(taken, NodeHello)
    assert taken.base_bytes == 100
    hello.base_bytes = 101
    with pytest.raises(InvalidInput, match="base_bytes is 101, above memory_bytes") as caught:
        report_from_wire(pb.NodeReport(hello=hello))
    assert "--memory" in caught.value.hint


@pytest.mark.parametrize(
    ("fixed_s", "bytes_per_s"), [(-1.0, 1e9), (nan, 1e9), (inf, 1e9), (0.0, nan)]
)
def test_a_node_says_how_long_its_loads_take(fixed_s: float, bytes_per_s: float) -> None:
    rate = pb.LoadRate(fixed_s=fixed_s, bytes_per_s=bytes_per_s)
    hello = pb.NodeHello(node_id="n", run_id="r", device="cpu", memory_bytes=100)
    hello.load_rates["disk"].CopyFrom(rate)
    with pytest.raises(InvalidInput, match=r"LoadRate\.(fixed_s|bytes_per_s) is"):
        report_from_wire(pb.NodeReport(hello=hello))


def test_a_node_that_tells_no_books_has_empty_ones() -> None:
    """It runs an earlier version."""
    beat = report_from_wire(pb.NodeReport(heartbeat=pb.Heartbeat(rss_bytes=7)))
    assert beat == Heartbeat(rss_bytes=7, engine_bytes=0)


def test_a_memory_operation_is_needed_at_some_time() -> None:
    """Or never, when nobody waits for it."""
    message = control_pb2.MemoryOperation(kind="resize", instance_id="i1", needed_in_s=inf)
    assert view_from_wire(message, MemoryOperationView).needed_in_s == inf
    message.needed_in_s = nan
    with pytest.raises(InvalidInput, match="needed_in_s is nan"):
        view_from_wire(message, MemoryOperationView)
