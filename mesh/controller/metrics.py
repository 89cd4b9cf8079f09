"""The cell in numbers for Prometheus: counters and histograms of what was decided, gauges of how it
stands.

`Meter` is a recorder of the controller's host, so that the same decisions give the same numbers.
What vLLM has a name for bears that name. A scrape renders in a thread of its own, from a snapshot
that was taken between two events. Series of a deployment go with it, and a name that the cell does
not know gets none.
"""

import asyncio
import gc
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from mesh.controller.recent import Recent
from mesh.domain.actions import (
    DeliverTokens,
    RefuseRequest,
    RemoveDeployment,
    SendCommand,
    StoreDeployment,
    StoreRevisions,
    TellAccepted,
)
from mesh.domain.deployment import DeploymentSpec
from mesh.domain.events import CancelRequested, InvokeRequested, NodeReported
from mesh.domain.ids import DeploymentName, InstanceId, RequestId
from mesh.domain.messages import (
    ContinueRequest,
    InstanceGone,
    InstanceLoaded,
    KvResized,
    LoadFailed,
    LoadInstance,
    SubmitRequest,
)
from mesh.domain.reasons import FinishReason
from mesh.domain.revision import public_name
from mesh.domain.slo import Slo
from mesh.domain.views import CellSnapshot, DeploymentSnapshot, NodeSnapshot

_FIRST_TOKEN_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0)
_TOKEN_S = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5, 1.0)
_REQUEST_S = (0.1, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0)
_LOAD_S = (0.05, 0.1, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0)
_RESIZE_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25)
_MODEL = "model_name"
_CLASS = "slo_class"
"""The SLO class of a request; empty where its deployment has none, which Prometheus leaves out."""


@dataclass(slots=True, eq=False, kw_only=True)
class _Series:
    """The series of a deployment that every token or call moves. They are kept because looking them
    up each time would cost more.
    """

    model: str
    slo_class: str
    prompt_tokens: Counter
    output_tokens: Counter
    queried: Counter
    cached: Counter
    met: Counter
    first: Histogram
    between: Histogram
    mean: Histogram
    whole: Histogram
    queued: Histogram

    @property
    def labels(self) -> tuple[str, str]:
        return self.model, self.slo_class


@dataclass(slots=True, eq=False, kw_only=True)
class _Call:
    """A request that has not ended."""

    of: _Series
    prompt_tokens: int
    counted_tokens: int
    """Those of a prompt that another answer is not counted with."""
    shares: bool
    """It looks for its beginning in caches."""
    came_s: float
    slo: Slo | None = None
    """Once it has been submitted."""
    grace_s: float = 0.0
    first_s: float = 0.0
    last_s: float = 0.0
    tokens: int = 0
    copy_attempt: int = 0
    """The attempt that draws tokens elsewhere, to which it moves."""


class Meter:
    """`known`: whether the cell has a deployment. `recent` is told the same ends as are counted."""

    def __init__(self, known: Callable[[DeploymentName], bool]) -> None:
        self._known = known
        self.recent = Recent()
        self._calls: dict[RequestId, _Call] = {}
        self._loading: dict[InstanceId, str] = {}
        self._series: dict[tuple[str, str], _Series] = {}
        self.registry = CollectorRegistry()
        self._metrics: list[Counter | Histogram] = []
        self._prompt_tokens = self._counter("vllm:prompt_tokens", "Prompt tokens computed.", _CLASS)
        self._output_tokens = self._counter(
            "vllm:generation_tokens", "Output tokens delivered.", _CLASS
        )
        self._queried = self._counter(
            "vllm:prefix_cache_queries", "Prompt tokens looked for in prefix caches.", _CLASS
        )
        self._cached = self._counter(
            "vllm:prefix_cache_hits", "Prompt tokens found there, and not computed.", _CLASS
        )
        self._ended = self._counter(
            "vllm:request_success", "Requests that ended, by why.", _CLASS, "finished_reason"
        )
        self._met = self._counter(
            "mesh_requests_met_slo",
            "Ended with TTFT and mean TPOT in time, as was promised.",
            _CLASS,
        )
        self._refused = self._counter("mesh_requests_refused", "By reason.", _CLASS, "reason")
        self._late = self._counter(
            "mesh_requests_accepted_late",
            "Taken although a load makes their first token late.",
            _CLASS,
        )
        self._resubmitted = self._counter(
            "mesh_requests_resubmitted", "Sent to a node again: lost, evicted or preempted.", _CLASS
        )
        self._migrated = self._counter(
            "mesh_requests_migrated", "Handed over to another node while they ran.", _CLASS
        )
        self._first = self._histogram(
            "vllm:time_to_first_token_seconds",
            "From a call to its first token.",
            _FIRST_TOKEN_S,
            _CLASS,
        )
        self._between = self._histogram(
            "vllm:inter_token_latency_seconds", "From one token to the next.", _TOKEN_S, _CLASS
        )
        self._mean = self._histogram(
            "vllm:request_time_per_output_token_seconds",
            "In the mean of a request.",
            _TOKEN_S,
            _CLASS,
        )
        self._whole = self._histogram(
            "vllm:e2e_request_latency_seconds", "From a call to its last token.", _REQUEST_S, _CLASS
        )
        self._queued = self._histogram(
            "vllm:request_queue_time_seconds", "From a call to its place.", _FIRST_TOKEN_S, _CLASS
        )
        self._loads = self._histogram("mesh_load_seconds", "By tier.", _LOAD_S, "tier")
        self._failed_loads = self._counter("mesh_load_failures", "Loads that failed.")
        self._resizes = Histogram(
            "mesh_kv_resize_seconds",
            "KV caches resized.",
            buckets=_RESIZE_S,
            registry=self.registry,
        )

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        made = Counter(name, text, (_MODEL, *labels), registry=self.registry)
        self._metrics.append(made)
        return made

    def _histogram(self, name: str, text: str, buckets: Sequence[float], *labels: str) -> Histogram:
        made = Histogram(name, text, (_MODEL, *labels), buckets=buckets, registry=self.registry)
        self._metrics.append(made)
        return made

    def record(self, now_s: float, event: object, actions: Sequence[object]) -> None:
        match event:
            case InvokeRequested(request=request, slo=slo):
                label = self._label(request.deployment)
                self._calls[request.request_id] = _Call(
                    of=self._of(label, slo.name if slo is not None and label else ""),
                    prompt_tokens=len(request.prompt_tokens),
                    counted_tokens=request.counted_prompt_tokens,
                    shares=request.cache_salt is not None and request.first is None,
                    came_s=now_s,
                )
            case CancelRequested():
                for request_id in event.request_ids:
                    call = self._calls.pop(request_id, None)
                    if call is not None:
                        self._ended.labels(*call.of.labels, FinishReason.CANCELLED.value).inc()
            case NodeReported(report=report):
                self._reported(report)
        for action in actions:
            self._decided(now_s, action)

    def _of(self, model: str, slo_class: str) -> _Series:
        of = model, slo_class
        known = self._series.get(of)
        if known is None:
            known = self._series[of] = _Series(
                model=model,
                slo_class=slo_class,
                prompt_tokens=self._prompt_tokens.labels(*of),
                output_tokens=self._output_tokens.labels(*of),
                queried=self._queried.labels(*of),
                cached=self._cached.labels(*of),
                met=self._met.labels(*of),
                first=self._first.labels(*of),
                between=self._between.labels(*of),
                mean=self._mean.labels(*of),
                whole=self._whole.labels(*of),
                queued=self._queued.labels(*of),
            )
        return known

    def _label(self, name: DeploymentName) -> str:
        return name if self._known(name) else ""

    def _reported(self, report: object) -> None:
        match report:
            case InstanceLoaded():
                model = self._loading.pop(report.instance_id, "")
                self._loads.labels(model, report.tier.value).observe(report.elapsed_s)
            case LoadFailed():
                self._failed_loads.labels(self._loading.pop(report.instance_id, "")).inc()
            case InstanceGone():
                self._loading.pop(report.instance_id, None)
            case KvResized() if not report.error:
                self._resizes.observe(report.elapsed_s)

    def _decided(self, now_s: float, action: object) -> None:
        match action:
            case DeliverTokens():
                self._delivered(now_s, action)
            case SendCommand(command=SubmitRequest(order=order)):
                call = self._calls.get(order.request.request_id)
                if call is None or order.paused:
                    return
                if call.slo is None:
                    call.of.queued.observe(now_s - call.came_s)
                else:
                    self._resubmitted.labels(*call.of.labels).inc()
                call.slo = order.slo
            case SendCommand(command=ContinueRequest(paused=False) as command) if command.token_ids:
                call = self._calls.get(command.request_id)
                if call is not None:
                    call.copy_attempt = command.attempt
            case SendCommand(command=LoadInstance() as command):
                self._loading[command.instance_id] = self._label(public_name(command.deployment))
            case TellAccepted() if action.grace_s > 0:
                call = self._calls.get(action.request_id)
                if call is not None:
                    call.grace_s = action.grace_s
                    self._late.labels(*call.of.labels).inc()
            case RefuseRequest():
                call = self._calls.pop(action.request_id, None)
                if call is not None:
                    self._refused.labels(*call.of.labels, action.reason.value).inc()
                    self.recent.refused(now_s, call.of.model, action.reason)
            case RemoveDeployment():
                self._forget(action.name)
            case StoreDeployment(deployment=deployment) | StoreRevisions(deployment=deployment):
                self._forget_classes(deployment.spec)

    def _delivered(self, now_s: float, action: DeliverTokens) -> None:
        outputs = action.outputs
        call = self._calls.get(outputs.request_id)
        if call is None:
            return
        if outputs.attempt == call.copy_attempt:
            call.copy_attempt = 0
            self._migrated.labels(*call.of.labels).inc()
        count = len(outputs.token_ids)
        if count:
            call.of.output_tokens.inc(count)
            self.recent.tokens(count)
            if call.tokens:
                for _ in range(count):
                    call.of.between.observe((now_s - call.last_s) / count)
            else:
                call.first_s = now_s
                call.of.prompt_tokens.inc(call.counted_tokens)
                if call.shares:
                    call.of.queried.inc(call.prompt_tokens)
                    call.of.cached.inc(min(outputs.cached_tokens, call.prompt_tokens))
                call.of.first.observe(now_s - call.came_s)
            call.last_s = now_s
            call.tokens += count
        if outputs.finish is not None:
            del self._calls[outputs.request_id]
            self._finished(now_s, call, outputs.finish)

    def _finished(self, now_s: float, call: _Call, finish: FinishReason) -> None:
        self._ended.labels(*call.of.labels, finish.value).inc()
        if finish not in (FinishReason.STOP, FinishReason.LENGTH):
            return
        call.of.whole.observe(now_s - call.came_s)
        mean_s = (call.last_s - call.first_s) / max(call.tokens - 1, 1)
        if call.tokens > 1:
            call.of.mean.observe(mean_s)
        if call.slo is None:
            return
        ttft_s = call.first_s - call.came_s
        limit_s = call.slo.ttft_limit_s(call.prompt_tokens) + call.grace_s
        met = ttft_s <= limit_s and mean_s <= call.slo.tpot_s
        if met:
            call.of.met.inc()
        tpot_s = mean_s if call.tokens > 1 else None
        self.recent.finished(now_s, call.of.model, ttft_s=ttft_s, tpot_s=tpot_s, met=met)

    def _forget_classes(self, spec: DeploymentSpec) -> None:
        """Series of SLO classes that the deployment does not have any more go; what is under way in
        one is counted in none.
        """
        name, has = public_name(spec.name), {"", spec.slo.name, *(one.name for one in spec.classes)}
        gone = [of for of in self._series if of[0] == name and of[1] not in has]
        for of in gone:
            for metric in self._metrics:
                if _CLASS in metric._labelnames:
                    metric.remove_by_labels({_MODEL: name, _CLASS: of[1]})
            del self._series[of]
        for call in self._calls.values() if gone else ():
            if call.of.labels in gone:
                call.of = self._of(name, "")

    def _forget(self, name: DeploymentName) -> None:
        """What is under way for it is counted for no deployment from now on."""
        self.recent.forget(name)
        for metric in self._metrics:
            metric.remove_by_labels({_MODEL: name})
        gone = [of for of in self._series if of[0] == name]
        for of in gone:
            del self._series[of]
        for call in self._calls.values() if gone else ():
            if call.of.model == name:
                call.of = self._of("", "")
        for instance_id, model in self._loading.items():
            if model == name:
                self._loading[instance_id] = ""


class CellMetrics:
    """Renders a meter together with a snapshot of the cell."""

    def __init__(self, meter: Meter, snapshot: Callable[[], CellSnapshot]) -> None:
        self._meter = meter
        self._snapshot = snapshot
        self._under_way: asyncio.Task[bytes] | None = None

    async def exposition(self) -> bytes:
        """In Prometheus' text format. Those who ask while it is being rendered get the same."""
        if self._under_way is None or self._under_way.done():
            self._under_way = asyncio.create_task(self._render())
        return await asyncio.shield(self._under_way)

    async def _render(self) -> bytes:
        gauges = CollectorRegistry()
        gauges.register(_Gauges(self._snapshot()))
        return await asyncio.to_thread(_text, self._meter.registry, gauges)


def _text(*registries: CollectorRegistry) -> bytes:
    """A family at a time, and without garbage collection meanwhile: megabytes that are joined in
    one call, and a heap that is searched for the sake of a hundred thousand young objects, would
    keep the event loop's thread waiting.
    """
    gc.disable()
    try:
        families = (family for registry in registries for family in registry.collect())
        return b"".join(generate_latest(_Family(family)) for family in families)
    finally:
        gc.enable()


@dataclass(frozen=True, slots=True)
class _Family(Collector):
    """What `generate_latest` takes for a registry."""

    family: Metric

    def collect(self) -> Iterable[Metric]:
        return (self.family,)


class _Gauges(Collector):
    """How a cell stands."""

    def __init__(self, snapshot: CellSnapshot) -> None:
        self._snapshot = snapshot

    def collect(self) -> Iterable[Metric]:
        yield from _of_deployments(self._snapshot.deployments)
        yield from _of_nodes(self._snapshot.nodes)
        wanted = _gauge("mesh_nodes_wanted", "By kind, where whoever starts them is told.", "kind")
        lacking = _gauge(
            "mesh_nodes_lacking_seconds", "Since fewer nodes are ready than are wanted.", "kind"
        )
        for one in self._snapshot.wanted:
            wanted.add_metric([one.device.value], one.wanted)
            lacking.add_metric([one.device.value], one.lacking_s)
        yield from (wanted, lacking)
        prefetches = CounterMetricFamily(
            "mesh_prefetches",
            "Models brought nearer before a call, by outcome.",
            labels=["outcome"],
        )
        seen = self._snapshot.prefetches
        for outcome, count in (("used", seen.used), ("wasted", seen.wasted)):
            prefetches.add_metric([outcome], count)
        yield prefetches
        needed = "Loads that callers needed, or would have needed without a prefetch."
        yield CounterMetricFamily("mesh_loads_needed", needed, value=seen.loads)
        felt = "Loads that callers waited for, at least in part."
        yield CounterMetricFamily("mesh_loads_felt", felt, value=seen.felt)


def _of_deployments(deployments: Sequence[DeploymentSnapshot]) -> Iterable[Metric]:
    running = _gauge("vllm:num_requests_running", "Requests with a place.", _MODEL)
    waiting = _gauge("vllm:num_requests_waiting", "Requests in the queue.", _MODEL)
    usage = _gauge("vllm:kv_cache_usage_perc", "KV blocks in use; 1 is all.", _MODEL)
    headroom = _gauge(
        "mesh_headroom_least_seconds", "Of the request that is the most urgent.", _MODEL
    )
    energy = CounterMetricFamily(
        "mesh_energy_joules", "While nodes computed for it.", labels=[_MODEL]
    )
    for one in deployments:
        name = [one.spec.name]
        running.add_metric(name, one.running)
        waiting.add_metric(name, one.queued)
        blocks = sum(instance.kv_blocks for instance in one.instances)
        used = sum(instance.kv_blocks_used for instance in one.instances)
        usage.add_metric(name, used / blocks if blocks else 0.0)
        least = [i.headroom_least_s for i in one.instances if i.headroom_least_s is not None]
        if least:
            headroom.add_metric(name, min(least))
        if one.energy.busy_j is not None:
            energy.add_metric(name, one.energy.busy_j)
    return running, waiting, usage, headroom, energy


def _of_nodes(nodes: Sequence[NodeSnapshot]) -> Iterable[Metric]:
    state = _gauge("mesh_node", "1: a node of the cell, by its state.", "node", "device", "state")
    memory = _gauge("mesh_node_memory_bytes", "The node's books.", "node", "of")
    instances = _gauge("mesh_instances", "By state.", "node", "state")
    operations = _gauge(
        "mesh_memory_operations", "Promised by the reservation station.", "node", "kind", "state"
    )
    correction = _gauge(
        "mesh_correction", "Measured over predicted iteration time, the most of it.", "node"
    )
    slowdown = _gauge(
        "mesh_load_slowdown", "By which a load lengthens the iterations beside it.", "node"
    )
    energy = CounterMetricFamily(
        "mesh_node_energy_joules",
        "Taken since the node joined, by what it did and where it is known from.",
        labels=["node", "state", "source"],
    )
    for node in nodes:
        state.add_metric([node.node_id, node.device.value, node.state.value], 1)
        for of, size_bytes in (
            ("limit", node.memory_bytes),
            ("base", node.base_bytes),
            ("promised", node.promised_bytes),
            ("tracked", node.tracked_bytes),
            ("rss", node.rss_bytes),
            ("unaccounted", node.unaccounted_bytes),
        ):
            memory.add_metric([node.node_id, of], size_bytes)
        _count(instances, node.node_id, [(one.state.value,) for one in node.instances])
        _count(
            operations,
            node.node_id,
            [(one.kind, "running" if one.running else "waiting") for one in node.operations],
        )
        if node.instances:
            correction.add_metric([node.node_id], max(one.correction for one in node.instances))
        slowdown.add_metric([node.node_id], node.load_slowdown)
        for does, joules in (("idle", node.energy.idle_j), ("computing", node.energy.busy_j)):
            if joules is not None:
                energy.add_metric([node.node_id, does, ",".join(node.energy.sources)], joules)
    return state, memory, instances, operations, correction, slowdown, energy


def _count(gauge: GaugeMetricFamily, node: str, labels: Sequence[tuple[str, ...]]) -> None:
    for each in sorted(set(labels)):
        gauge.add_metric([node, *each], labels.count(each))


def _gauge(name: str, text: str, *labels: str) -> GaugeMetricFamily:
    return GaugeMetricFamily(name, text, labels=labels)
