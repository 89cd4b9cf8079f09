"""What the read verbs show of a cell and its memory: what stands in each column, units in headers.

Pure: views in, text out; `output` aligns and prints it. The structured forms (`-o json`) do not
come through here, they carry the views themselves.
"""

from collections.abc import Sequence
from datetime import UTC, datetime
from math import isfinite

from mesh.cli.output import Column, number, word
from mesh.domain.energy import EnergyView
from mesh.domain.lifecycle import DeploymentState, InstanceState
from mesh.domain.model import Footprint, ModelInfo
from mesh.domain.slo import Slo
from mesh.domain.views import (
    ClassView,
    DeploymentSnapshot,
    InstanceSnapshot,
    LoadTimesView,
    MemoryOperationView,
    NodeSnapshot,
    NodesWanted,
    OpenBatches,
    RequestSnapshot,
)
from mesh.report.memory_parts import free_bytes

DEPLOYMENTS: tuple[Column[DeploymentSnapshot], ...] = (
    word("NAME", lambda d: d.spec.name),
    word("STATE", lambda d: d.state),
    number("READY", lambda d: sum(i.state is InstanceState.READY for i in d.instances)),
    number("RUNNING", lambda d: d.running),
    number("QUEUED", lambda d: d.queued),
    number("SERVED", lambda d: d.served),
    number("REFUSED", lambda d: d.refused),
    number("TTFT_SLO_S", lambda d: seconds(d.spec.slo.ttft_s)),
    number("TPOT_SLO_S", lambda d: limit_of(d.spec.tpot_limit_s)),
    number("CONTEXT_TOKENS", lambda d: d.context_tokens_max or None),
    word("SOURCE", lambda d: d.spec.source),
)
CLASSES: tuple[Column[tuple[DeploymentSnapshot, Slo, ClassView]], ...] = (
    word("DEPLOYMENT", lambda c: c[0].spec.name),
    word("CLASS", lambda c: c[1].name),
    number("TTFT_SLO_S", lambda c: seconds(c[1].ttft_s)),
    number("TPOT_SLO_S", lambda c: None if c[1].best_effort else seconds(c[1].tpot_s)),
    number("PRICE", lambda c: f"{c[1].price:g}"),
    number("RUNNING", lambda c: c[2].running),
    number("QUEUED", lambda c: c[2].queued),
    number("SERVED", lambda c: c[2].served),
    number("MET", lambda c: f"{c[2].met / c[2].served:.0%}" if c[2].served else None),
    number("REFUSED", lambda c: c[2].refused),
)
"""The SLO classes of deployments; of best effort, the TTFT is how long a request waits at most."""
UNDER_WAY: Column[DeploymentSnapshot] = word("PHASE", lambda d: under_way(d))
"""The column of deployments that are being imported or loaded."""
_WHICH: tuple[Column[InstanceSnapshot], ...] = (
    word("INSTANCE", lambda i: i.instance_id),
    word("NODE", lambda i: i.node_id),
    word("STATE", lambda i: i.state),
    number("BATCH", lambda i: i.batch),
)
INSTANCES: tuple[Column[InstanceSnapshot], ...] = (
    *_WHICH,
    number("BATCH_MAX", lambda i: i.batch_max),
    number("LOAD_S", lambda i: f"{i.load_s:.2f}"),
    number("EXPECTED_S", lambda i: hundredths(i.load_expected_s or None)),
    word("FROM", lambda i: i.tier),
    word("ON_DEVICE", lambda i: on_device(i)),
    word("PHASE", lambda i: _phase(i)),
)
PACE: tuple[Column[InstanceSnapshot], ...] = (
    *_WHICH,
    number("HEADROOM_LEAST_S", lambda i: hundredths(i.headroom_least_s)),
    number("HEADROOM_P50_S", lambda i: hundredths(i.headroom_p50_s)),
    number("ITERATION_MS", lambda i: milliseconds(i.iteration_s) if i.iteration_s else None),
    number("CORRECTION", lambda i: f"{i.correction:.2f}"),
    # The structured forms say from what it was scaled, or as which model it was measured.
    word("PROFILE", lambda i: i.profile_source),
)
"""How instances keep up: headroom of their requests, predicted times, and how these are known."""
CORRECTIONS: tuple[Column[InstanceSnapshot], ...] = (
    word("INSTANCE", lambda i: i.instance_id),
    number("CORRECTION", lambda i: f"{i.correction:.2f}"),
    number("PLANNED", lambda i: f"{i.correction_planned:.2f}"),
    number("STALLS", lambda i: i.stalls.count),
    number("LONGEST_S", lambda i: hundredths(i.stalls.longest_s) if i.stalls.count else None),
    number("LAST_AGO_S", lambda i: f"{i.stalls.ago_s:.0f}" if i.stalls.count else None),
    number("OFF_P50", lambda i: f"{i.off_p50:.0%}" if i.off_p95 else None),
    number("OFF_P95", lambda i: f"{i.off_p95:.0%}" if i.off_p95 else None),
)
"""By what predictions are lengthened, what was left out of it, and how far they were off."""
NODES: tuple[Column[NodeSnapshot], ...] = (
    word("NODE", lambda n: n.node_id),
    word("STATE", lambda n: n.state),
    word("DEVICE", lambda n: n.device),
    number("CORES", lambda n: n.cores),
    number("INSTANCES", lambda n: len(n.instances)),
    number("ASLEEP", lambda n: len(n.asleep)),
    number("SILENT_S", lambda n: f"{n.silent_s:.1f}"),
    word("ENGINE", lambda n: n.engine),
    word("HARDWARE", lambda n: n.hardware),
)
REQUESTS: tuple[Column[RequestSnapshot], ...] = (
    word("REQUEST", lambda r: r.request_id),
    word("DEPLOYMENT", lambda r: r.deployment),
    word("PHASE", lambda r: r.phase),
    number("AGE_S", lambda r: hundredths(r.age_s)),
    number("PROMPT_TOKENS", lambda r: r.prompt_tokens),
    number("OUTPUT_TOKENS", lambda r: r.output_tokens),
    number("AT_MOST", lambda r: r.output_tokens_max),
)
LOAD_TIMES: tuple[Column[LoadTimesView], ...] = (
    word("LOADS_FROM", lambda t: t.tier),
    number("FIXED_S", lambda t: hundredths(t.fixed_s)),
    number("RATE_MIB_S", lambda t: mebibytes(t.bytes_per_s)),
    number("FACTOR", lambda t: f"{t.factor:.2f}"),
    number("LOADS", lambda t: t.loads),
)
"""What a node stated, and by what factor its last loads have differed from that."""
MODELS: tuple[Column[tuple[ModelInfo, Sequence[str]]], ...] = (
    word("MODEL", lambda m: m[0].model_id),
    word("ARCHITECTURE", lambda m: m[0].architecture),
    number("PARAMETERS_M", lambda m: f"{m[0].parameters / 1e6:.1f}"),
    number("CONTEXT_TOKENS", lambda m: m[0].context_tokens_max),
    number("DISK_MIB", lambda m: mebibytes(m[0].disk_bytes)),
    word("DEPLOYMENTS", lambda m: ",".join(m[1])),
    word("SOURCE", lambda m: m[0].source),
)
"""Each model with the names of the deployments that use it."""


def class_rows(
    deployments: Sequence[DeploymentSnapshot],
) -> list[tuple[DeploymentSnapshot, Slo, ClassView]]:
    """What `CLASSES` shows."""
    return [
        (deployment, slo, view)
        for deployment in deployments
        for slo, view in zip(deployment.spec.classes, deployment.classes, strict=False)
    ]


def deployment_fields(deployment: DeploymentSnapshot) -> list[tuple[str, str]]:
    """One deployment in full but for its instances."""
    spec, model = deployment.spec, deployment.model
    ttft = f"max({seconds(spec.slo.ttft_s)}, prompt tokens / {spec.slo.ttft_tokens_per_s:g})"
    pairs = [
        ("name", str(spec.name)),
        ("state", str(deployment.state)),
        *([("failure", deployment.phase)] if deployment.state is DeploymentState.FAILED else []),
        *([("differs", deployment.differs)] if deployment.differs else []),
        ("source", spec.source),
        ("devices", ", ".join(spec.devices)),
        ("tensor_parallel", str(spec.tensor_parallel)),
        *([("cells", str(spec.cells))] if spec.cells > 1 else []),
        ("weights", spec.weights or "default"),
        ("precision", spec.precision or "each node's, see mesh describe NODE"),
        *([("task", spec.task)] if spec.task is not None else []),
        ("context_tokens_max", str(deployment.context_tokens_max or "")),
        ("ttft_slo_s", ttft),
        *[("tpot_slo_s", most) for most in [limit_of(spec.tpot_limit_s)] if most is not None],
        ("cold_start", str(spec.slo.cold_start)),
        *([("class_default", spec.class_default)] if spec.classes else []),
        ("replicas", f"{spec.scaling.replicas_min} to {spec.scaling.replicas_max}"),
        ("keep_alive_s", seconds(spec.scaling.keep_alive_s)),
        *([("planned", planned_words(deployment))] if spec.scaling.plan is not None else []),
        *(_text_fields(deployment) if spec.task is None else []),
        ("running", str(deployment.running)),
        ("queued", str(deployment.queued)),
        ("served", str(deployment.served)),
        ("refused", str(deployment.refused)),
        ("energy", energy_words(deployment.energy)),
    ]
    return pairs if model is None else pairs + model_fields(model)


def _text_fields(deployment: DeploymentSnapshot) -> list[tuple[str, str]]:
    """What matters where the answers are texts."""
    spec = deployment.spec
    special_tokens = "read in content" if spec.special_tokens_in_content else "not in content"
    return [
        ("prefix_cache", _prefix_cache(deployment)),
        ("tool_format", spec.tool_format or "by the chat template"),
        ("special_tokens", special_tokens),
    ]


def _prefix_cache(deployment: DeploymentSnapshot) -> str:
    if not deployment.spec.prefix_cache:
        return "off"
    cached, prompts = deployment.cached_tokens, deployment.prompt_tokens
    return f"on, had {cached / prompts:.0%} of {prompts} prompt tokens" if prompts else "on"


def model_fields(model: ModelInfo) -> list[tuple[str, str]]:
    return [
        ("model_id", str(model.model_id)),
        ("architecture", model.architecture),
        ("format", str(model.format)),
        ("parameters_m", f"{model.parameters / 1e6:.1f}"),
        ("layers", str(model.layers)),
        ("hidden_size", str(model.hidden_size)),
        ("attention_heads", str(model.attention_heads)),
        ("kv_heads", str(model.kv_heads)),
        ("head_size", str(model.head_size)),
        ("vocabulary_tokens", str(model.vocabulary_tokens)),
        ("kv_kib_per_token", f"{model.kv_bytes_per_token() / 1024:.1f}"),
        ("disk_mib", mebibytes(model.disk_bytes)),
    ]


def energy_words(energy: EnergyView) -> str:
    """Joules, what they came to for a request and for a token, and where they are from."""
    if energy.idle_j is None and energy.busy_j is None:
        return f"not known{f': {energy.reason}' if energy.reason else ''}"
    said = [f"{energy.busy_j or 0.0:.1f} J computing"]
    if energy.j_per_request is not None:
        said.append(f"{energy.j_per_request:.3g} J a request")
    if energy.j_per_output_token is not None:
        said.append(f"{energy.j_per_output_token:.3g} J an output token")
    if energy.idle_j is not None:
        said.append(f"{energy.idle_j:.1f} J idle")
    return f"{', '.join(said)} (by {', '.join(energy.sources)})"


def limit_of(most: float | None) -> str | None:
    return None if most is None else f"{most:g}"


def seconds(span_s: float) -> str:
    return f"{span_s:g}"


def utc_minute(unix_s: float) -> str:
    return datetime.fromtimestamp(unix_s, UTC).strftime("%Y-%m-%dT%H:%MZ")


def hundredths(span_s: float | None) -> str | None:
    return None if span_s is None else f"{span_s:.2f}"


def milliseconds(span_s: float) -> str:
    return f"{span_s * 1e3:.2f}"


def mebibytes(size_bytes: float) -> str:
    return f"{size_bytes / 2**20:.1f}"


def wanted_words(kinds: Sequence[NodesWanted]) -> str:
    """How many nodes of each kind are wanted, and why."""
    return "; ".join(
        f"{one.device} {one.wanted} (from {one.least} to {one.most}), {one.ready} ready"
        + (f", the others lack for {one.lacking_s:.0f} s" if one.lacking_s else "")
        + (f"; {one.why}" if one.why else "")
        for one in kinds
    )


def batches_words(of_tenants: Sequence[OpenBatches]) -> str:
    """How many batches have not ended, and how far they are."""
    return "; ".join(
        (f"{one.tenant}: " if one.tenant else "")
        + f"{one.batches}, {one.done} of {one.lines} lines done"
        for one in of_tenants
    )


def planned_words(deployment: DeploymentSnapshot) -> str:
    """How many instances its plan wants loaded, and why."""
    planned = deployment.planned
    return "not yet" if planned is None else f"{planned.wanted} ({planned.why})"


def under_way(deployment: DeploymentSnapshot) -> str:
    """What its import is at, or the first of its loads, or why it has failed, or at a front where
    its cells differ; empty where there is none of that.
    """
    if deployment.state is DeploymentState.FAILED:
        return deployment.phase
    if deployment.phase:
        return _progress_text(deployment.phase, deployment.share)
    return next(filter(None, map(_phase, deployment.instances)), deployment.differs)


def _phase(instance: InstanceSnapshot) -> str:
    if instance.state is not InstanceState.LOADING or not instance.phase:
        return ""
    return _progress_text(instance.phase, instance.share)


def on_device(instance: InstanceSnapshot) -> str:
    """The share of its weights that is on the device, and where its swap under way leads."""
    if instance.resident_share is None:
        return ""
    here = f"{instance.resident_share:.0%}"
    return here if instance.swaps_to is None else f"{here[:-1]}→{instance.swaps_to:.0%}"


def _progress_text(phase: str, share: float) -> str:
    return f"{phase} {share:.0%}"


NODE_MEMORY: tuple[Column[NodeSnapshot], ...] = (
    word("NODE", lambda n: n.node_id),
    number("LIMIT_MIB", lambda n: mebibytes(n.memory_bytes)),
    number("BASE_MIB", lambda n: mebibytes(n.base_bytes)),
    number("PROMISED_MIB", lambda n: mebibytes(n.promised_bytes)),
    number("TRACKED_MIB", lambda n: mebibytes(n.tracked_bytes)),
    number("FREE_MIB", lambda n: mebibytes(free_bytes(n))),
    number("RSS_MIB", lambda n: mebibytes(n.rss_bytes)),
    number("UNACCOUNTED_MIB", lambda n: mebibytes(n.unaccounted_bytes)),
    number("WAITING", lambda n: sum(not operation.running for operation in n.operations)),
)
KV_CACHES: tuple[Column[InstanceSnapshot], ...] = (
    word("INSTANCE", lambda i: i.instance_id),
    number("USED", lambda i: i.kv_blocks_used),
    number("CACHED", lambda i: i.kv_blocks_cached),
    number("KV_BLOCKS", lambda i: i.kv_blocks),
    number("WEIGHTS_MIB", lambda i: mebibytes(i.weights_bytes)),
    number("KV_USED_MIB", lambda i: mebibytes(i.kv_used_bytes)),
    number("KV_HELD_MIB", lambda i: mebibytes(i.kv_bytes)),
    number("REQUIRED_MIB", lambda i: mebibytes(i.kv_required_bytes)),
)
FOOTPRINTS: tuple[Column[tuple[str, Footprint]], ...] = (
    word("SHAPE", lambda f: f[0]),
    number("INSTANCE_MIB", lambda f: mebibytes(f[1].weights_bytes)),
    number("SHARED_MIB", lambda f: mebibytes(f[1].shared_bytes)),
    number("KV_BLOCK_KIB", lambda f: f[1].kv_block_bytes // 1024),
)
OPERATIONS: tuple[Column[MemoryOperationView], ...] = (
    word("OPERATION", lambda o: o.kind),
    word("INSTANCE", lambda o: o.instance_id),
    number("SIZE_MIB", lambda o: mebibytes(o.size_bytes)),
    word("STATE", lambda o: "running" if o.running else "waiting"),
    number("NEEDED_IN_S", lambda o: f"{o.needed_in_s:.2f}" if isfinite(o.needed_in_s) else None),
)
