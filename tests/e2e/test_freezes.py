"""A node's process that stands still for a second: soon after, calls are admitted as before."""

import time
from pathlib import Path

from mesh.domain.ids import DeploymentName
from mesh.domain.slo import Slo
from mesh.domain.views import InstanceSnapshot
from tests.e2e.live_cell import LiveCell

STEP_S = 0.1
SLO = Slo(ttft_s=2.0, ttft_tokens_per_s=1e6, tpot_s=0.2)
"""A node that is planned with as 1.8 times as slow as it is takes nothing."""
FREEZE_S, BACK_S = 1.0, 3.0


def test_a_node_that_stood_still_for_a_second_admits_as_before_three_seconds_later(
    cell: LiveCell, tiny_model: Path
) -> None:
    node = cell.start("n1", "--step-s", str(STEP_S), "--measure-at-once")
    cell.deploy("chat", tiny_model, replicas_min=1, slo=SLO)
    cell.wait_for("the instance", lambda: cell.instance_count("chat") == 1)
    cell.client.profile(DeploymentName("chat"))
    load = cell.invoke("chat", "goes on meanwhile", max_tokens=120)
    cell.wait_tokens(load, 20)

    node.freeze()
    time.sleep(FREEZE_S)
    node.thaw()
    time.sleep(BACK_S)
    for _ in range(4):
        assert cell.invoke("chat", "afterwards", max_tokens=3).finished().output_tokens == 3
    assert not load.ended.is_set(), "there was work all the time"

    def stalled() -> InstanceSnapshot | None:
        found = cell.deployment("chat")
        return next((i for i in found.instances if i.stalls.count), None) if found else None

    instance = cell.wait_for("the stall to be told", stalled)
    assert instance.stalls.longest_s > FREEZE_S * 0.8
    assert instance.stalls.ago_s < 60
    assert instance.correction_planned < 1.8
