"""Filling up what waits for a load, decided without any process: remotes are made up."""

from typing import cast

import pytest

from mesh.domain.errors import EngineError
from mesh.domain.ids import InstanceId
from mesh_nodes.engines.vllm import spare_processes
from mesh_nodes.engines.vllm.messages import Verb
from mesh_nodes.engines.vllm.spare_processes import SpareProcesses
from mesh_nodes.engines.vllm.spawner import Spawner

TRIES = 5


def test_a_process_that_ends_as_soon_as_it_is_ready_is_not_replaced_at_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Each one may end so: the next load is soon enough to try again."""
    made: list[object] = []
    ended: list[object] = []

    class ShortLived:
        def __init__(self, instance_id: InstanceId, spawner: Spawner, pool: int | None) -> None:
            made.append(self)
            self.pid = len(made)
            self.alive = len(made) == TRIES

        def call(self, verb: Verb) -> None:
            assert verb is Verb.PREPARE

        def why_gone(self) -> EngineError:
            return EngineError("it has ended (signal 9)")

        def end(self) -> None:
            ended.append(self)

    monkeypatch.setattr(spare_processes, "Remote", ShortLived)
    SpareProcesses(cast(Spawner, None), count_max=1)._fill()
    assert len(made) == 1
    assert ended == made
    assert "signal 9" in caplog.text
