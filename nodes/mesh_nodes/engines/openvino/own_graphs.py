"""Gives instances that share a compiled model, and hinder each other by it, one of their own.

OpenVINO prepares the nodes of a compiled model anew whenever an iteration has another number of
tokens than the one before it. Where instances of one compiled model alternate, that is in most of
their iterations. A compiled model of its own costs an instance its weights once more, since what
the plugin has repacked belongs to one. So it is made from memory that is neither booked nor cached,
and is the first to go; and it is made while the node rests, since its import slows the iterations
beside it for as long as it takes. Before: `engine`, after each step, with each heartbeat, and when
memory is booked. After: `instance`, which moves between compiled models.
"""

import logging
import threading
from collections.abc import Callable, Mapping
from weakref import WeakKeyDictionary

from mesh.domain.errors import MeshError
from mesh.domain.ids import InstanceId
from mesh.domain.steps import StepResult
from mesh.memory.cache_budget import CacheBudget
from mesh_nodes.engines.openvino.batch import padded
from mesh_nodes.engines.openvino.compilation import CompiledGraph, Compiler, return_memory
from mesh_nodes.engines.openvino.instance import Instance

COPY_BYTES_MAX = 2**30
"""Larger models lose about 3 % of an iteration or less, and a copy of one takes seconds."""
SWITCHES = 1024
"""So many iterations of a compiled model lose 4 s (SmolLM2-135M, 30 layers: 4 ms each on two
threads), several times what an import takes. Only then is a copy made for a node that never rests.
"""

log = logging.getLogger(__name__)


class OwnGraphs:
    """`note` is for the compute thread, `forget` for that and the thread that swaps, the rest for
    any.
    """

    def __init__(
        self,
        compiler: Compiler,
        budget: CacheBudget,
        *,
        available_bytes: Callable[[], int],
        instances: Callable[[], list[Instance]],
    ) -> None:
        self._compiler = compiler
        self._budget = budget
        self._available_bytes = available_bytes
        self._instances = instances
        self._last: WeakKeyDictionary[CompiledGraph, tuple[InstanceId, int, int]]
        self._last = WeakKeyDictionary()
        """Which instance had the last iteration of a compiled model, of how many tokens, and how
        many iterations another instance's has made slower since a copy was last considered.
        """
        self._recent: dict[InstanceId, None] = {}
        """The instances that have computed; who computed last is last."""
        self._failed: set[InstanceId] = set()
        """The instances for which no copy could be made: it is not tried again."""
        self._moving, self._starting = threading.Lock(), threading.Lock()
        self._thread: threading.Thread | None = None
        self.making: Mapping[InstanceId, int] = {}
        """The bytes of the compiled model that is being made, and for which instance."""

    def note(self, instance: Instance, result: StepResult) -> None:
        """The instance has computed. Where it has long paid, a compiled model of its own is made
        for it beside its further iterations.
        """
        tokens, graph = padded(result.prefill_tokens + result.decode_batch), instance.graph
        if graph is None or not tokens:
            return
        instance_id = instance.instance_id
        self._recent.pop(instance_id, None)
        self._recent[instance_id] = None
        before, tokens_before, switches = self._last.get(graph, (instance_id, tokens, 0))
        switches += before != instance_id and tokens != tokens_before
        due = switches >= SWITCHES
        self._last[graph] = instance_id, tokens, 0 if due else switches
        if due and self._pays(instance):
            self._start(self._make, instance)

    def make_at_rest(self) -> None:
        """Make a compiled model of its own for who computed last of those that share one, if there
        is memory for it. Ask again with the next heartbeat at which the node rests.
        """
        for instance in reversed(self._least_recent_first()):
            if self._pays(instance):
                self._start(self._make, instance)
                return

    def give_back(self) -> None:
        """As long as more memory is booked than there is, instances share again, those first that
        have computed least recently. Waits for the copy that is being made.
        """
        if self._budget.spare_bytes >= 0:
            return
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()
        with self._moving:
            for instance in self._least_recent_first():
                if self._budget.spare_bytes >= 0:
                    break
                shared = self._compiler.shared(instance.order)
                if shared is not None and instance.graph not in (shared, None):
                    instance.move_to(shared)
                    return_memory()
                    log.info("%s shares its compiled model again", instance.instance_id)

    def give_back_beside(self) -> None:
        """The same in a thread of its own, for who cannot wait for an iteration. It does nothing
        while the thread has other work: ask again with the next heartbeat.
        """
        if self._budget.spare_bytes < 0:
            self._start(self.give_back)

    def forget(self, instance: Instance) -> None:
        """The instance's weights are about to go. If it was the last one of the compiled model that
        further instances would share, another's takes its place: the weights are booked as shared
        as long as there is any instance of them.
        """
        self._recent.pop(instance.instance_id, None)
        self._failed.discard(instance.instance_id)
        with self._moving:
            order, place = instance.order, self._compiler.place(instance.order)
            if instance.graph is None or self._compiler.shared(order) is not instance.graph:
                return
            others = [i for i in self._instances() if i is not instance]
            left = [i.graph for i in others if self._compiler.place(i.order) == place]
            graphs = [graph for graph in left if graph is not None]
            if graphs and instance.graph not in graphs:
                self._compiler.share(order, graphs[0])

    def close(self) -> None:
        """Waits for what is being made."""
        if self._thread is not None:
            self._thread.join()

    def _least_recent_first(self) -> list[Instance]:
        """All instances: first those that have not computed, last who computed last."""
        turns = {instance_id: turn for turn, instance_id in enumerate(list(self._recent))}
        return sorted(self._instances(), key=lambda i: turns.get(i.instance_id, -1))

    def _pays(self, instance: Instance) -> bool:
        """Whether it shares its compiled model, and there is memory for another."""
        graph = instance.graph
        if graph is None or graph.import_again is None or instance.instance_id in self._failed:
            return False
        if not any(instance.shares_with(o) for o in self._instances() if o is not instance):
            return False
        spare_bytes = min(self._budget.spare_bytes, self._available_bytes())
        return instance.footprint.shared_bytes <= min(spare_bytes, COPY_BYTES_MAX)

    def _make(self, instance: Instance) -> None:
        size_bytes = instance.footprint.shared_bytes
        self.making = {instance.instance_id: size_bytes}
        key = "own graph", instance.instance_id
        self._budget.begin_load(key, size_bytes)
        try:
            known = instance.graph
            again = known.import_again if known is not None else None
            graph = again() if again is not None else None
            if graph is None:
                return
            # Its weights are repacked by its first run, which no iteration is to wait for.
            instance.twin(graph).close()
            with self._moving:
                self._budget.end_load(key)
                self.making = {}
                if instance in self._instances() and self._pays(instance):
                    instance.move_to(graph)
                    log.info("%s has a compiled model of its own", instance.instance_id)
        except (MeshError, RuntimeError, OSError) as error:
            self._failed.add(instance.instance_id)
            log.warning("%s goes on sharing its compiled model: %s", instance.instance_id, error)
        finally:
            self._budget.end_load(key)
            self.making = {}

    def _start(self, work: Callable[..., None], *arguments: Instance) -> bool:
        """False while the thread has other work."""
        with self._starting:
            if self._thread is not None and self._thread.is_alive():
                return False
            thread = threading.Thread(
                target=work, args=arguments, name="mesh-own-graph", daemon=True
            )
            # Others join what they find, which must have been started.
            thread.start()
            self._thread = thread
            return True
