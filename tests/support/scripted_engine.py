"""An engine without a model, whose books and manners are an engine's.

It keeps to the whole contract of `mesh.runtime.engine` (the contract suite says so), so that the
core, the wire and the node can be tested without weights. A `Script` makes it slow or lets it fail.
Its tokens are those of `mesh.sim.sequences.answer_of`.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from mesh.domain.errors import EngineError, OutOfMemory, TornModel
from mesh.domain.ids import InstanceId
from mesh.domain.messages import InstanceLoaded, KvResized, LoadInstance
from mesh.domain.model import Footprint, ModelInfo
from mesh.domain.profile import IterationShape
from mesh.domain.steps import Decode, Prefill
from mesh.runtime.engine import EngineCapabilities, LoadOrder, Progress, StepResult
from mesh.runtime.node_actions import Brought
from mesh.sim.virtual_engine import VirtualEngine

BLOCK_TOKENS = 32
KV_BLOCK_BYTES = 64 * 1024
WEIGHTS_BYTES = 4 * 1024 * 1024
FOOTPRINT = Footprint(
    weights_bytes=WEIGHTS_BYTES, kv_block_bytes=KV_BLOCK_BYTES, block_tokens=BLOCK_TOKENS
)
MEASURED_TOKEN_S = 1e-6
"""By which a token of a measured shape lengthens the script's step, and 1024 tokens of its past."""


@dataclass(slots=True)
class Script:
    """How the engine misbehaves from now on; a test may change it at any time.

    Counts are of calls still to fail, one less after each.
    """

    load_s: float = 0.0
    step_s: float = 0.0
    resize_s: float = 0.0
    fail_loads: int = 0
    out_of_memory_loads: int = 0
    fail_steps: int = 0
    fail_measures: int = 0
    fail_resizes: int = 0
    measures_at_once: bool = False
    """What it says that a shape takes is not what measuring it takes."""

    def fails(self, calls: str) -> bool:
        """Whether a call of this kind is to fail; it counts as one."""
        left: int = getattr(self, calls)
        setattr(self, calls, max(left - 1, 0))
        return left > 0


def measured_s(shape: IterationShape, step_s: float) -> float:
    """What measuring this shape finds: every size counts."""
    prefill = shape.prefill_tokens * (1 + shape.prefill_past_tokens / 1024)
    decode = shape.decode_batch * (1 + shape.decode_context_tokens / 1024)
    return step_s + MEASURED_TOKEN_S * (prefill + decode)


class ScriptedEngine(VirtualEngine):
    """See `mesh.runtime.engine.Engine`. `script` may be changed between any two calls."""

    def __init__(
        self,
        script: Script | None = None,
        *,
        memory_bytes: int | None = None,
        sleep: Callable[[float], None] = time.sleep,
        footprint: Footprint = FOOTPRINT,
    ) -> None:
        """`memory_bytes` bounds what all instances take together; None: nothing does."""
        super().__init__(memory_bytes)
        self.script = script or Script()
        self._sleep = sleep
        self._footprint = footprint

    @property
    def capabilities(self) -> EngineCapabilities:
        return EngineCapabilities(
            name="scripted",
            version="1",
            resize_kv=True,
            computes_ahead=True,
            kv_format="counted",
            caches_prefixes=True,
        )

    def footprint(self, model: ModelInfo) -> Footprint:
        return self._footprint

    def load(self, order: LoadOrder, progress: Progress) -> InstanceLoaded:
        progress("pretend", 0.0)
        self._sleep(self.script.load_s)
        if self.script.fails("fail_loads"):
            raise EngineError(f"instance {order.instance_id} fails to load: the script wants it so")
        if self.script.fails("out_of_memory_loads"):
            raise OutOfMemory(f"instance {order.instance_id} finds no memory, says the script")
        if not order.model_path.is_dir():
            raise TornModel(f"{order.model_path.name} is no folder of a model")
        tier = self.tier_of(order)
        prefixes = self._enter(order, self._footprint)
        progress("loaded", 1.0)
        return InstanceLoaded(
            instance_id=order.instance_id,
            footprint=self._footprint,
            kv_blocks=order.kv_blocks,
            elapsed_s=self.script.load_s,
            tier=tier,
            prefixes=prefixes,
        )

    def step(
        self, instance_id: InstanceId, prefill: Prefill, iterations: int = 1, decode: Decode = None
    ) -> StepResult:
        instance = self._instance(instance_id)
        if self.script.fails("fail_steps"):
            raise EngineError(f"instance {instance_id} fails in a step: the script wants it so")

        def seconds(prefill: int, past: int, batch: int, context: int, count: int) -> float:
            took_s = self.script.step_s * count
            self._sleep(took_s)
            return took_s

        return instance.step(prefill, iterations, seconds, decode)

    def measure(self, instance_id: InstanceId, shape: IterationShape) -> float:
        self._measurable(instance_id, shape)
        elapsed_s = measured_s(shape, self.script.step_s)
        if not self.script.measures_at_once:
            self._sleep(elapsed_s)
        if self.script.fails("fail_measures"):
            raise EngineError(f"instance {instance_id} is not measured: the script wants it so")
        return elapsed_s

    def resize_kv(self, instance_id: InstanceId, kv_blocks: int) -> KvResized:
        self._sleep(self.script.resize_s)
        if self.script.fails("fail_resizes"):
            raise OutOfMemory(f"instance {instance_id} is not resized: the script wants it so")
        self._resize(instance_id, kv_blocks)
        blocks = self._instances[instance_id].pool.blocks
        elapsed_s = self.script.resize_s
        return KvResized(instance_id=instance_id, kv_blocks=blocks, elapsed_s=elapsed_s)


class ModelsAtHand:
    """For a node whose models are all there, in one folder."""

    model_path = Path()
    import_s = 0.0

    def at_hand(self, action: LoadInstance) -> LoadOrder | None:
        return action.order(self.model_path, self.import_s)

    def bring(self, action: LoadInstance, progress: Progress, then: Brought) -> None:
        raise AssertionError("all models are at hand")
