"""The scripted engine as the world's nodes have it.

It holds the node to what it may ask for: what a real engine would bear or refuse fails the test.
"""

from mesh.domain.errors import OutOfMemory
from mesh.domain.ids import InstanceId, RequestId
from mesh.domain.messages import InstanceLoaded, KvResized
from mesh.domain.model import Footprint
from mesh.domain.profile import IterationShape
from mesh.domain.steps import Decode, Prefill
from mesh.runtime.engine import EngineRequest, LoadOrder, Progress, StepResult
from tests.core.cells import FOOTPRINT
from tests.support.scripted_engine import Script, ScriptedEngine

MEASURED_S = 0.12
"""Every measured shape takes this long, and a little more: three times are enough, and two such
instances on a node are too many for a TPOT of 0.25 s.
"""


class StrictEngine(ScriptedEngine):
    def __init__(self, memory_bytes: int, footprint: Footprint = FOOTPRINT) -> None:
        script = Script(step_s=MEASURED_S)
        super().__init__(
            script, memory_bytes=memory_bytes, sleep=lambda seconds: None, footprint=footprint
        )
        self._stuck: set[InstanceId] = set()
        """Out of blocks for all of their requests, and nothing has changed since."""

    def heal(self) -> None:
        """No call fails any more."""
        self.script = Script(step_s=MEASURED_S)

    def load(self, order: LoadOrder, progress: Progress) -> InstanceLoaded:
        assert order.instance_id not in self._instances
        return super().load(order, progress)

    def unload(self, instance_id: InstanceId) -> None:
        self._stuck.discard(instance_id)
        super().unload(instance_id)

    def submit(self, instance_id: InstanceId, request: EngineRequest) -> int:
        instance = self._instance(instance_id)
        known = instance.sequences.get(request.request_id)
        if known is None or not known.paused:
            assert request.request_id not in self.request_ids(), "a request is on the node twice"
            assert len(instance.sequences) < instance.order.batch_max
        self._stuck.discard(instance_id)
        return super().submit(instance_id, request)

    def abort(self, instance_id: InstanceId, request_id: RequestId) -> None:
        self._stuck.discard(instance_id)
        super().abort(instance_id, request_id)

    def step(
        self, instance_id: InstanceId, prefill: Prefill, iterations: int = 1, decode: Decode = None
    ) -> StepResult:
        instance = self._instance(instance_id)
        assert instance.sequences, "a step of an instance without work"
        result = super().step(instance_id, prefill, iterations, decode)
        if not result.outputs and not result.prefill_tokens:
            self._stuck.add(instance_id)
        return result

    def measure(self, instance_id: InstanceId, shape: IterationShape) -> float:
        able = [
            i
            for i, of in self._instances.items()
            if any(s.left or not s.paused for s in of.sequences.values()) and i not in self._stuck
        ]
        assert not able, "a measurement goes before a request"
        return super().measure(instance_id, shape)

    def resize_kv(self, instance_id: InstanceId, kv_blocks: int) -> KvResized:
        self._stuck.discard(instance_id)
        return super().resize_kv(instance_id, kv_blocks)

    def _claim(self, more_bytes: int, instance_id: InstanceId) -> None:
        try:
            super()._claim(more_bytes, instance_id)
        except OutOfMemory as error:
            raise AssertionError("the controller promised a byte twice") from error
