"""Gives instances that share a compiled model, and hinder each other by it, one of their own.

OpenVINO prepares the nodes of a compiled model anew whenever an iteration has another number of
tokens than the one before it. Where instances of one compiled model alternate, that is in most of
their iterations. A compiled model of its own costs an instance its weights once more, since what
the plugin has repacked belongs to one. So it is made from memory that is neither booked nor cached,
and is the first to go. Before: `engine`, after each step and when memory is booked. After:
`instance`, which moves between compiled models.
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
SWITCHES = 256
"""So many iterations lose 1 s (SmolLM2-135M, 30 layers: 4 ms each on two threads), about as much as
the import of a copy takes. Only then is it made.
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
        self._last: WeakKeyDictionary[CompiledGraph, tuple[InstanceId, int]] = WeakKeyDictionary()
        """Which instance had the last iteration of a compiled model, and of how many tokens."""
        self._switches: dict[InstanceId, int] = {}
        """The iterations of each instance that another's made slower; who computed last is last.
        """
        self._moving, self._starting = threading.Lock(), threading.Lock()
        self._thread: threading.Thread | None = None
        self.making: Mapping[InstanceId, int] = {}
        """The bytes of the compiled model that is being made, and for which instance."""

    def note(self, instance: Instance, result: StepResult) -> None:
        """The instance has computed. Where it pays, a compiled model of its own is made for it
        beside its further iterations.
        """
        tokens, graph = padded(result.prefill_tokens + result.decode_batch), instance.graph
        if graph is None or not tokens:
            return
        instance_id = instance.instance_id
        before, tokens_before = self._last.get(graph, (instance_id, tokens))
        self._last[graph] = instance_id, tokens
        switches = self._switches.pop(instance_id, 0)
        switches += before != instance_id and tokens != tokens_before
        self._switches[instance_id] = switches
        if switches >= SWITCHES and self._pays(instance) and self._start(self._make, instance):
            # Those that share with it will do so with one less.
            self._switches = dict.fromkeys(self._switches, 0)

    def give_back(self) -> None:
        """As long as more memory is booked than there is, instances share again, those first that
        have computed least recently. Waits for the copy that is being made.
        """
        if self._budget.spare_bytes >= 0:
            return
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()
        with self._moving:
            recent = {instance_id: turn for turn, instance_id in enumerate(list(self._switches))}
            loaded = self._instances()
            for instance in sorted(loaded, key=lambda i: recent.get(i.instance_id, -1)):
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
        self._switches.pop(instance.instance_id, None)
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

    def _pays(self, instance: Instance) -> bool:
        """Whether it shares its compiled model, and there is memory for another."""
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
