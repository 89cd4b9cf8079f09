"""Counts what the operators of an iteration take, by OpenVINO's performance counters.

Counters belong to a compiled model, and what they tell of a node is a mean over all of its
iterations. So a copy of the model is compiled with them, in which nothing but what is counted is
computed, in the instance's KV cache; it is kept from one iteration to the next, and goes soon after
the last. Its memory is what is neither booked nor cached. Before: `engine`; after: `instance`.
"""

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping

import openvino as ov

from mesh.domain.ids import InstanceId
from mesh.domain.operators import Role
from mesh.domain.profile import CountedIteration, IterationShape
from mesh.domain.values import dataclass
from mesh.memory.cache_budget import CacheBudget
from mesh_nodes.engines.openvino.compilation import Compiler, engine_errors, return_memory
from mesh_nodes.engines.openvino.graph import role_of
from mesh_nodes.engines.openvino.instance import Bound, Instance
from mesh_nodes.engines.refusals import lacks_memory

UNUSED_S = 5.0
"""A copy goes when it has not counted for so long."""
_KEY = "counted"
"""The copy's, in the budget."""
_CUT_S = 0.5e-6
"""A counter cuts each time to whole microseconds, and their mean once more: so much is lost, in the
mean, by either.
"""


@dataclass(slots=True)
class _Copy:
    instance: Instance
    cores: int | None
    bound: Bound
    roles: Mapping[str, Role]
    totals: Mapping[str, float]
    """Seconds of all iterations so far, by role."""
    iterations: int = 1
    counted_s: float = 0.0
    """When it counted last."""

    def read(self) -> Mapping[str, float]:
        """The seconds of the iteration that has just ended, by role."""
        self.iterations += 1
        before, self.totals = self.totals, _totals(self.bound, self.roles, self.iterations)
        return {role: total - before.get(role, 0.0) for role, total in self.totals.items()}


class OperatorCounters:
    """`count` is for the compute thread, the rest for any."""

    def __init__(
        self, compiler: Compiler, budget: CacheBudget, *, available_bytes: Callable[[], int]
    ) -> None:
        self._compiler = compiler
        self._budget = budget
        self._available_bytes = available_bytes
        self._lock = threading.Lock()
        self._copy: _Copy | None = None
        self.taken: Mapping[InstanceId, int] = {}
        """The bytes of the copy, and of which instance it is."""

    def count(
        self, instance: Instance, shape: IterationShape, cores: int | None = None
    ) -> CountedIteration:
        """See the engine port."""
        with self._lock:
            copy = self._copy
            if copy is None or (copy.instance, copy.cores) != (instance, cores):
                self._drop()
                copy = self._copy = self._made(instance, cores)
            try:
                elapsed_s = instance.measure(shape, copy.bound)
            except BaseException:
                # How many iterations its counters tell of is not known any more.
                self._drop()
                raise
            seconds, copy.counted_s = copy.read(), time.monotonic()
            return CountedIteration(elapsed_s=elapsed_s, operators=tuple(seconds.items()))

    def drop(self) -> None:
        """Its memory, or its instance, is wanted. Waits for the iteration under way."""
        with self._lock:
            self._drop()

    def drop_unused(self) -> None:
        """The same where it has not counted for a while, and does not now; ask again with each
        heartbeat.
        """
        if self._lock.acquire(blocking=False):
            try:
                copy = self._copy
                if copy is not None and time.monotonic() - copy.counted_s >= UNUSED_S:
                    self._drop()
            finally:
                self._lock.release()

    def _made(self, instance: Instance, cores: int | None) -> _Copy:
        instance_id, size_bytes = instance.instance_id, instance.footprint.shared_bytes
        free_bytes = min(self._budget.spare_bytes, self._available_bytes())
        if size_bytes > free_bytes:
            raise lacks_memory(instance_id, size_bytes, free_bytes)
        self._budget.begin_load(_KEY, size_bytes)
        self.taken = {instance_id: size_bytes}
        try:
            graph = self._compiler.counted(instance.order, cores)
            with engine_errors(f"a copy of {instance_id} cannot be brought up"):
                bound = instance.bound_beside(graph)
            roles = roles_of(graph.model)
            return _Copy(instance, cores, bound, roles, _totals(bound, roles, 1))
        except BaseException:
            self._drop()
            raise

    def _drop(self) -> None:
        if self.taken:
            self._copy, self.taken = None, {}
            self._budget.end_load(_KEY)
            return_memory()


def roles_of(model: ov.CompiledModel) -> Mapping[str, Role]:
    """The roles of the nodes of a graph that was built `by_role`, by their names. One that the
    plugin has fused keeps the name of one of those that it was made of, or has a new one.
    """
    roles: dict[str, Role] = {}
    for node in model.get_runtime_model().get_ops():
        name, made_of = node.get_friendly_name(), node.get_rt_info()["originalLayersNames"]
        found = map(role_of, [name, *made_of.astype(str).split(",")])
        if (role := next(filter(None, found), None)) is not None:
            roles[name] = role
    return roles


def _totals(bound: Bound, roles: Mapping[str, Role], iterations: int) -> Mapping[str, float]:
    """Seconds of so many iterations by role, of nodes that took any."""
    totals = defaultdict[str, float](float)
    for node in bound.request.profiling_info:
        mean_s, role = node.real_time.total_seconds(), roles.get(node.node_name)
        if role is not None and mean_s > 0.0:
            totals[role] += (mean_s + 2 * _CUT_S) * iterations
    return totals
