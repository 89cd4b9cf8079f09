"""An engine without a model: what calls cost comes from tables, memory is really counted.

It implements `mesh.runtime.engine.Engine` and is held to the contract suite like every other. A
call returns at once and has told `spend` how long it took; the virtual lanes let its outcome wait
for as long. Before: `NodePerformer`. After: `sequences`, which computes what an iteration yields.
"""

import math
import random
from collections.abc import Callable, Mapping
from operator import attrgetter
from pathlib import Path

from mesh.compute.times import Times
from mesh.domain.errors import EngineError, OutOfMemory, UnsupportedModel
from mesh.domain.ids import InstanceId, ModelId, RequestId
from mesh.domain.model import Footprint, ModelInfo
from mesh.domain.profile import IterationShape
from mesh.runtime.engine import (
    Ended,
    EngineCapabilities,
    EngineRequest,
    InstanceMemory,
    LoadedInstance,
    LoadOrder,
    Progress,
    ResizedKv,
    StepResult,
)
from mesh.runtime.measurable import check_measurable
from mesh.sim.costs import ModelCosts, NodeCosts
from mesh.sim.sequences import Instance

NAME = "cost-model"
SHARE_MIN = 0.5
"""Of what an iteration takes on the average: no jitter makes it shorter."""
_SEQUENCES = attrgetter("sequences")


class CostEngine:
    """`memory_bytes` bounds what all instances take together. `spend` is told the seconds of each
    call while it is made. `now_s` says when it is made, for the pace and for loads beside steps.
    """

    capabilities = EngineCapabilities(name=NAME, version="1", resize_kv=True)

    def __init__(
        self,
        *,
        models: Mapping[ModelId, ModelCosts],
        costs: NodeCosts,
        memory_bytes: int,
        spend: Callable[[float], None],
        now_s: Callable[[], float] = lambda: 0.0,
    ) -> None:
        self._models = models
        self._costs = costs
        self._memory_bytes = memory_bytes
        self._spend = spend
        self._now_s = now_s
        self._random = random.Random(costs.jitter.seed)
        self._loading_until_s = 0.0
        """When the latest load ends."""
        self._stepping_until_s = -math.inf
        """When the latest step ends: what it yields is known when it begins."""
        self.working_until_s = -math.inf
        """When the latest of all loads and steps ends."""
        self._times = {m: Times(known.profile, costs.factor) for m, known in models.items()}
        self._instances: dict[InstanceId, Instance] = {}
        self._ended: Ended = lambda instance_id, error: None
        self.loads = 0
        self.prefilled_tokens = 0
        self.decoded_tokens = 0
        """Of all steps so far; a prompt's first token is not decoded."""

    def watch(self, ended: Ended) -> None:
        self._ended = ended

    def footprint(self, model: ModelInfo) -> Footprint:
        """Raises UnsupportedModel when nothing is known of what the model costs."""
        if model.model_id not in self._models:
            raise UnsupportedModel(
                f"this node has no profile of {model.source}",
                hint="give the scenario one for the node's hardware",
            )
        return self._models[model.model_id].footprint

    def prepare(self, model: ModelInfo, model_path: Path, progress: Progress) -> None:
        progress("nothing to prepare", 1.0)

    def load(self, order: LoadOrder, progress: Progress) -> LoadedInstance:
        """The folder is never looked at: there is none."""
        footprint = self.footprint(order.model)
        if order.instance_id in self._instances:
            raise EngineError(f"instance {order.instance_id} is already loaded")
        seconds = self._costs.load_time_s(footprint.weights_bytes)
        if self.has_requests() or self._now_s() < self._stepping_until_s:
            seconds *= self._costs.load_stretch
        progress("load", 0.0)
        self._loading_until_s = self._now_s() + seconds
        self._spend(seconds)
        self._works(seconds)
        self._claim(footprint.instance_bytes(order.kv_blocks), order.instance_id)
        self._instances[order.instance_id] = Instance(order, footprint, order.kv_blocks)
        self.loads += 1
        progress("loaded", 1.0)
        return LoadedInstance(footprint=footprint, kv_blocks=order.kv_blocks, elapsed_s=seconds)

    def unload(self, instance_id: InstanceId) -> None:
        if self._instances.pop(instance_id, None) is not None:
            self._spend(self._costs.unload_s)

    def lose(self, instance_id: InstanceId) -> None:
        """The instance ends by itself, as an engine process that is killed, and its memory is free
        at once.
        """
        del self._instances[instance_id]
        self._ended(instance_id, EngineError(f"instance {instance_id} has ended: it was killed"))

    def submit(self, instance_id: InstanceId, request: EngineRequest) -> None:
        instance = self._instance(instance_id)
        given = len(request.prompt_tokens) + len(request.output_tokens)
        if request.request_id in instance.sequences:
            raise EngineError(f"request {request.request_id} is already there")
        if not request.prompt_tokens:
            raise EngineError(f"request {request.request_id} has no prompt tokens")
        if given >= instance.order.context_tokens_max:
            raise EngineError(
                f"request {request.request_id}: {given} tokens leave no room in "
                f"{instance.order.context_tokens_max} of context"
            )
        if len(request.output_tokens) >= request.sampling.max_tokens:
            raise EngineError(f"request {request.request_id} has all of its tokens already")
        instance.add(request)

    def abort(self, instance_id: InstanceId, request_id: RequestId) -> None:
        instance = self._instances.get(instance_id)
        if instance is not None:
            instance.drop(request_id)

    def step(
        self, instance_id: InstanceId, prefill_tokens_max: int, iterations: int = 1
    ) -> StepResult:
        instance = self._instance(instance_id)
        times, slower = self._times[instance.order.model.model_id], self._slower()
        prompts_slower = slower * self._costs.prefill_factor
        took_s = 0.0

        def seconds(prefill: int, past: int, batch: int, context: int, count: int) -> float:
            nonlocal took_s
            self.prefilled_tokens += prefill
            self.decoded_tokens += batch * count
            engine_s = 0.0
            for longer in range(count):
                one_s = times.seconds(prefill, past, batch, context + longer)
                one_s *= prompts_slower if prefill else slower
                engine_s += one_s
                took_s += self._turn_s(one_s, slower, prefill=prefill > 0)
            return engine_s

        result = instance.step(prefill_tokens_max, iterations, seconds)
        self._spend(took_s)
        self._stepping_until_s = self._now_s() + took_s
        self._works(took_s)
        return result

    def measure(self, instance_id: InstanceId, shape: IterationShape) -> float:
        instance = self._instance(instance_id)
        check_measurable(
            instance_id,
            shape,
            context_tokens_max=instance.order.context_tokens_max,
            batch_max=instance.order.batch_max,
            block_tokens=instance.footprint.block_tokens,
            blocks_free=instance.kv_blocks - instance.blocks_used,
        )
        slower = self._slower()
        seconds = self._times[instance.order.model.model_id].iteration_s(shape)
        seconds *= slower * self._costs.prefill_factor if shape.prefill_tokens else slower
        took_s = self._turn_s(seconds, slower, prefill=shape.prefill_tokens > 0)
        self._spend(took_s + self._costs.priming_s)
        return seconds

    def resize_kv(self, instance_id: InstanceId, kv_blocks: int) -> ResizedKv:
        instance = self._instance(instance_id)
        blocks = max(kv_blocks, instance.blocks_used, 1)
        old_bytes, new_bytes = (
            size * instance.footprint.kv_block_bytes for size in (instance.kv_blocks, blocks)
        )
        seconds = self._costs.resize_time_s(old_bytes, new_bytes)
        self._spend(seconds)
        self._claim(new_bytes - old_bytes, instance_id)
        instance.kv_blocks = blocks
        return ResizedKv(kv_blocks=blocks, elapsed_s=seconds)

    def memory(self) -> tuple[InstanceMemory, ...]:
        return tuple(instance.memory() for _, instance in sorted(self._instances.items()))

    def close(self) -> None:
        self._instances.clear()

    def has_requests(self) -> bool:
        return any(map(_SEQUENCES, self._instances.values()))

    def requests(self) -> int:
        """Submitted and not ended."""
        return sum(len(instance.sequences) for instance in self._instances.values())

    def _slower(self) -> float:
        """How much longer iterations that begin now take."""
        now_s = self._now_s()
        beside_load = self._costs.load_slowdown if now_s < self._loading_until_s else 1.0
        return self._costs.pace.at(now_s) * beside_load

    def _turn_s(self, engine_s: float, slower: float, *, prefill: bool) -> float:
        """From one turn to the next, when so much of it is the engine's part."""
        costs = self._costs
        jitter = costs.jitter.prefill_s if prefill else costs.jitter.decode_s
        drawn_s = self._random.choice(jitter) if jitter else 0.0
        return max(engine_s + costs.overhead_s * slower + drawn_s, engine_s * SHARE_MIN)

    def _works(self, seconds: float) -> None:
        self.working_until_s = max(self.working_until_s, self._now_s() + seconds)

    def _instance(self, instance_id: InstanceId) -> Instance:
        if instance_id not in self._instances:
            raise EngineError(f"instance {instance_id} is not loaded")
        return self._instances[instance_id]

    def count_on(self, before: "CostEngine") -> None:
        """Go on from the counts of an engine that has ended on the same node."""
        self.loads = before.loads
        self.prefilled_tokens = before.prefilled_tokens
        self.decoded_tokens = before.decoded_tokens

    def request_ids(self) -> list[RequestId]:
        """Of all requests that are in it."""
        return [r for instance in self._instances.values() for r in instance.sequences]

    def held_bytes(self) -> int:
        """What all instances take together."""
        return sum(m.weights_bytes + m.kv_held_bytes for m in self.memory())

    def _claim(self, more_bytes: int, instance_id: InstanceId) -> None:
        held_bytes = self.held_bytes()
        if more_bytes > 0 and held_bytes + more_bytes > self._memory_bytes:
            raise OutOfMemory(
                f"instance {instance_id} wants {more_bytes} bytes more, "
                f"{self._memory_bytes - held_bytes} of {self._memory_bytes} are free"
            )
