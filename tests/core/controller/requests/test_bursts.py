"""How many of a burst one resident instance takes: validation and memory say so, or its engine."""

from dataclasses import replace

import pytest

from mesh.compute.times import Times
from mesh.domain.ids import RequestId
from mesh.domain.messages import SubmitRequest
from mesh.domain.node_rule import DEFAULT_RULE
from mesh.domain.profile import Grid
from mesh.domain.reasons import Verdict
from mesh.domain.slo import Slo
from tests.core.admission import instance, node
from tests.core.cells import MIB, CellUnderTest, commands, deployment, request
from tests.support.profiles import profile

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
