"""An engine without a model: what calls cost comes from tables, memory is really counted.

It implements `mesh.runtime.engine.Engine` and is held to the contract suite like every other. A
call returns at once and has told `spend` how long it took; the virtual lanes let its outcome wait
for as long. Before: `NodePerformer`. After: `virtual_engine`, which keeps its books.
"""

import math
import random
from collections.abc import Callable, Mapping

from mesh.compute.load_times import beside_s
from mesh.compute.times import Times
from mesh.domain.errors import UnsupportedModel
from mesh.domain.ids import InstanceId, ModelId, RequestId
from mesh.domain.messages import InstanceLoaded, KvResized
from mesh.domain.model import Footprint, ModelInfo
from mesh.domain.profile import IterationShape
from mesh.domain.steps import Decode, LoadTier, Prefill
from mesh.domain.values import dataclass
from mesh.runtime.engine import EngineCapabilities, LoadOrder, Progress, StepResult
from mesh.sim.costs import ModelCosts, NodeCosts
from mesh.sim.virtual_engine import NO_LENGTHS, VirtualEngine

NAME = "cost-model"
SHARE_MIN = 0.5
"""No jitter makes an iteration shorter than this share of its mean time."""
LOAD_END_SHARE = 0.001
"""A load that would be longer by less than this share of itself may end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Load:
    began_s: float
    alone_s: float
    """What it takes beside nothing."""
    computed_s: float
    """On the node, until it began."""


class CostEngine(VirtualEngine):
    """`memory_bytes` bounds what all instances take together. `spend` is told the seconds of each
    call while it is made. `now_s` says when it is made, for the pace and for loads beside steps.
    `drawn` is what jitter is drawn from; by default it begins with the jitter's own seed.
    """

    capabilities = EngineCapabilities(
        name=NAME,
        version="1",
        resize_kv=True,
        computes_ahead=True,
        kv_format="counted",
        caches_prefixes=True,
        swaps=True,
        swaps_parts=True,
    )

    def __init__(
        self,
        *,
        models: Mapping[ModelId, ModelCosts],
        costs: NodeCosts,
        memory_bytes: int,
        spend: Callable[[float], None],
        now_s: Callable[[], float] = lambda: 0.0,
        lengths: Mapping[RequestId, int] = NO_LENGTHS,
        drawn: random.Random | None = None,
    ) -> None:
        super().__init__(memory_bytes, lengths)
        self._models = models
        self._costs = costs
        self._spend = spend
        self._now_s = now_s
        self._drawn = drawn or random.Random(costs.jitter.seed)
        self._load: _Load | None = None
        """From disk, under way: a node's follow each other."""
        self._loading_until_s = 0.0
        """When the latest load ends, as far as is known."""
        self._computed_s = 0.0
        """By all iterations, once they have ended."""
        self._computing_until_s = -math.inf
        """When the latest iteration ends: how long it takes is known when it begins."""
        self.working_until_s = -math.inf
        """When the latest of all loads and steps ends."""
        self._times = {m: Times(known.profile, costs.factor) for m, known in models.items()}
        self._even = not costs.overhead_s and costs.jitter.is_none()
        """Nothing of a turn is beside the engine's part."""
        self.loads = 0
        self.loaded_bytes = 0
        """The bytes of weights that these loads read."""
        self.prefilled_tokens = 0
        self.decoded_tokens = 0
        """The tokens decoded in all steps so far; a prompt's first token is not decoded."""

    def footprint(self, model: ModelInfo) -> Footprint:
        """Raises UnsupportedModel when nothing is known of what the model costs."""
        if model.model_id not in self._models:
            raise UnsupportedModel(
                f"this node has no profile of {model.source}",
                hint="give the scenario one for the node's hardware",
            )
        return self._models[model.model_id].footprint

    def load(self, order: LoadOrder, progress: Progress) -> InstanceLoaded:
        """The folder is never looked at: there is none."""
        footprint = self.footprint(order.model).at_context(order.context_tokens_max)
        known = self._models[order.model.model_id]
        tier = self.tier_of(order)
        later = tier is LoadTier.HOST or order.swapped
        read_bytes = 0 if later else known.profile.weights_bytes
        seconds = self._load_alone_s(read_bytes)
        progress("load", 0.0)
        if tier is not LoadTier.HOST:
            now_s = self._now_s()
            computed_s = self._computed_until(now_s)
            self._load = _Load(began_s=now_s, alone_s=seconds, computed_s=computed_s)
        self._spend(seconds)
        self._loads_for(seconds)
        prefixes = self._enter(order, footprint)
        self.loads += 1
        self.loaded_bytes += read_bytes
        progress("loaded", 1.0)
        return InstanceLoaded(
            instance_id=order.instance_id,
            footprint=footprint,
            kv_blocks=order.kv_blocks,
            elapsed_s=seconds,
            tier=tier,
            prefixes=prefixes,
        )

    def more_load_s(self) -> float:
        """How much longer the load takes that is about to end, for what was computed beside it."""
        load, now_s = self._load, self._now_s()
        if load is None:
            return 0.0
        computed_s = self._computed_until(now_s) - load.computed_s
        seconds = beside_s(load.alone_s, self._costs.load_stretch - 1.0, computed_s)
        more_s = load.began_s + seconds - now_s
        if more_s <= load.alone_s * LOAD_END_SHARE:
            self._load = None
            return 0.0
        self._loads_for(more_s)
        return more_s

    def close(self) -> None:
        super().close()
        self._load = None

    def unload(self, instance_id: InstanceId) -> None:
        if instance_id in self._instances:
            self._spend(self._costs.unload_s)
        super().unload(instance_id)

    def swap(self, instance_id: InstanceId, share: float) -> None:
        """The weights come at the rate of a load."""
        seconds = self._swap_s(instance_id, share)
        super().swap(instance_id, share)
        self._spend(seconds)
        self._loads_for(seconds)

    def step(
        self, instance_id: InstanceId, prefill: Prefill, iterations: int = 1, decode: Decode = None
    ) -> StepResult:
        instance = self._computing(instance_id)
        times, slower = self._times[instance.order.model.model_id], self._slower()
        took_s = self._lost_s()

        def seconds(prefill: int, past: int, batch: int, context: int, count: int) -> float:
            nonlocal took_s
            self.prefilled_tokens += prefill
            self.decoded_tokens += batch * count
            factor = slower * self._costs.prefill_factor if prefill else slower
            engine_s = 0.0
            for longer in range(count):
                one_s = times.seconds(prefill, past, batch, context + longer) * factor
                engine_s += one_s
                took_s += one_s if self._even else self._turn_s(one_s, slower, prefill=prefill > 0)
            return engine_s

        result = instance.step(prefill, iterations, seconds, decode)
        self._spend(took_s)
        self._computes_for(took_s)
        self._works(took_s)
        return result

    def measure(self, instance_id: InstanceId, shape: IterationShape) -> float:
        instance = self._measurable(instance_id, shape)
        slower = self._slower()
        seconds = self._times[instance.order.model.model_id].iteration_s(shape)
        seconds *= slower * self._costs.prefill_factor if shape.prefill_tokens else slower
        took_s = self._lost_s() + self._turn_s(seconds, slower, prefill=shape.prefill_tokens > 0)
        self._spend(took_s + self._costs.priming_s)
        self._computes_for(took_s + self._costs.priming_s)
        return seconds

    def resize_kv(self, instance_id: InstanceId, kv_blocks: int) -> KvResized:
        seconds = self._costs.resize_time_s(*self._resize(instance_id, kv_blocks))
        self._spend(seconds)
        blocks = self._instances[instance_id].pool.blocks
        return KvResized(instance_id=instance_id, kv_blocks=blocks, elapsed_s=seconds)

    def _slower(self) -> float:
        """How much longer iterations that begin now take."""
        now_s = self._now_s()
        beside_load = self._costs.load_slowdown if now_s < self._loading_until_s else 1.0
        return self._costs.pace.at(now_s) * beside_load

    def _turn_s(self, engine_s: float, slower: float, *, prefill: bool) -> float:
        """From one turn to the next, when so much of it is the engine's part."""
        costs = self._costs
        drawn_s = costs.jitter.drawn_s(engine_s, self._drawn, prefill=prefill)
        return max(engine_s + costs.overhead_s * slower + drawn_s, engine_s * SHARE_MIN)

    def _lost_s(self) -> float:
        """The time that a call which computes loses before it begins to."""
        return 0.0

    def _load_alone_s(self, weights_bytes: int) -> float:
        return self._costs.load_time_s(weights_bytes)

    def _swap_s(self, instance_id: InstanceId, share: float) -> float:
        instance = self._instance(instance_id)
        weights_bytes = self._models[instance.order.model.model_id].profile.weights_bytes
        footprint = instance.footprint
        here_bytes = instance.pool.weights_bytes - footprint.stays_bytes
        there = here_bytes / max(footprint.weights_bytes, 1)
        return self._costs.swap_time_s(weights_bytes, share - there)

    def _loads_for(self, seconds: float) -> None:
        self._loading_until_s = max(self._loading_until_s, self._now_s() + seconds)
        self._works(seconds)

    def _computes_for(self, seconds: float) -> None:
        self._computed_s += seconds
        self._computing_until_s = self._now_s() + seconds

    def _computed_until(self, now_s: float) -> float:
        return self._computed_s - max(self._computing_until_s - now_s, 0.0)

    def _works(self, seconds: float) -> None:
        self.working_until_s = max(self.working_until_s, self._now_s() + seconds)

    def count_on(self, before: "CostEngine") -> None:
        """Go on from the counts of an engine that has ended on the same node."""
        self.loads, self.loaded_bytes = before.loads, before.loaded_bytes
        self.prefilled_tokens = before.prefilled_tokens
        self.decoded_tokens = before.decoded_tokens
