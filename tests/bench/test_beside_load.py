"""Iterations and wakes beside loads: which are which, by a node's journal."""

import json

import pytest

from bench.beside_load import Iterations, Load, iterations_of, loads_of, report, wakes_of
from mesh.domain.actions import NodeAction
from mesh.domain.ids import DeploymentName, InstanceId
from mesh.domain.messages import InstanceLoaded, LoadInstance
from mesh.domain.model import Footprint
from mesh.domain.node_events import NodeEvent, StepFinished
from mesh.domain.steps import LoadTier
from mesh.runtime.journal import Decision
from tests.core.cells import load_instance, step_result

NEIGHBOUR, OTHER = InstanceId("neighbour"), InstanceId("other")


def decided(now_s: float, event: NodeEvent, *actions: NodeAction) -> Decision:
    return Decision(now_s=now_s, event=event, actions=actions)


def begins(instance_id: str) -> LoadInstance:
    return load_instance(
        instance_id=InstanceId(instance_id), deployment=DeploymentName(instance_id)
    )


def ended(instance_id: str, tier: LoadTier) -> InstanceLoaded:
    footprint = Footprint(weights_bytes=1, kv_block_bytes=1, block_tokens=32)
    return InstanceLoaded(
        instance_id=InstanceId(instance_id),
        footprint=footprint,
        kv_blocks=8,
        elapsed_s=9.0,
        tier=tier,
    )


def stepped(
    instance_id: InstanceId, elapsed_s: float, *, batch: int = 2, prefill: int = 0, times: int = 1
) -> StepFinished:
    result = step_result(
        prefill_tokens=prefill, decode_batch=batch, elapsed_s=elapsed_s, iterations=times
    )
    return StepFinished(instance_id=instance_id, result=result)


def a_load() -> Load:
    return Load(deployment=DeploymentName("a"), tier=LoadTier.PREPARED, begin_s=10.0, end_s=11.0)


def test_loads_last_from_their_order_to_their_end() -> None:
    decisions = [
        decided(1.0, stepped(OTHER, 0.1), begins("a"), begins("b")),
        decided(1.5, ended("b", LoadTier.HOST)),
        decided(2.0, ended("a", LoadTier.PREPARED)),
        decided(3.0, ended("of before", LoadTier.DISK)),
    ]
    found = [(load.deployment, load.tier, load.elapsed_s) for load in loads_of(decisions)]
    assert found == [("b", LoadTier.HOST, 0.5), ("a", LoadTier.PREPARED, 1.0)]


def test_decodes_of_a_full_batch_are_beside_a_load_alone_or_neither() -> None:
    decisions = [
        decided(10.0, stepped(NEIGHBOUR, 0.01)),  # ends as it begins
        decided(10.05, stepped(NEIGHBOUR, 0.1)),  # began before it
        decided(10.5, stepped(NEIGHBOUR, 0.08, times=4)),
        decided(10.6, stepped(NEIGHBOUR, 0.03, batch=1)),
        decided(10.7, stepped(NEIGHBOUR, 0.04, prefill=8)),
        decided(10.8, stepped(OTHER, 0.05)),
        decided(12.0, stepped(NEIGHBOUR, 0.06)),
    ]
    found = iterations_of(decisions, NEIGHBOUR, 2, [a_load()])
    assert found == Iterations(alone_s=[0.01, 0.06], beside_s=[0.02])


def test_the_ratios_are_told_and_judged(capsys: pytest.CaptureFixture[str]) -> None:
    name, host = DeploymentName("w"), LoadTier.HOST
    wakes = [
        Load(deployment=name, tier=host, begin_s=10.1, end_s=10.2),
        Load(deployment=name, tier=host, begin_s=20.0, end_s=20.05),
    ]
    alone_s, beside_s = wakes_of([a_load(), *wakes])
    assert (len(alone_s), len(beside_s)) == (1, 1)
    made = report([a_load(), *wakes], Iterations(alone_s=[0.02], beside_s=[0.028]))
    assert made.end() == 1
    told = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert told == {
        "neighbour_slowdown": 1.4,
        "wake_beside_load_ratio": 2.0,
        "surveyed": False,
    }
    assert made.missed() == ["wake_beside_load_ratio is 2.0, not <= 1.2"]


def test_what_was_not_measured_is_missed(capsys: pytest.CaptureFixture[str]) -> None:
    made = report([], Iterations())
    assert made.end() == 1
    assert len(made.missed()) == 2
    assert "null" in capsys.readouterr().out
