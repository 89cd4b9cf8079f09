"""What the read verbs show of a cell: views as rows of text, units in the headers.

Pure: views in, text out; `output` aligns and prints it. The structured forms (`-o json`) do not
come through here, they carry the views themselves.
"""

from collections.abc import Sequence

from mesh.cli.output import Column
from mesh.domain.lifecycle import InstanceState
from mesh.domain.model import ModelInfo
from mesh.domain.views import DeploymentSnapshot, InstanceSnapshot, NodeSnapshot

Row = tuple[str, ...]

DEPLOYMENTS = (
    Column("NAME"),
    Column("STATE"),
    Column("READY", right=True),
    Column("RUNNING", right=True),
    Column("QUEUED", right=True),
    Column("SERVED", right=True),
    Column("REFUSED", right=True),
    Column("TTFT_SLO_S", right=True),
    Column("TPOT_SLO_S", right=True),
    Column("CONTEXT_TOKENS", right=True),
    Column("SOURCE"),
)
INSTANCES = (
    Column("INSTANCE"),
    Column("NODE"),
    Column("STATE"),
    Column("BATCH", right=True),
    Column("BATCH_MAX", right=True),
    Column("LOAD_S", right=True),
    Column("FROM"),
    Column("PHASE"),
)
PACE = (
    Column("INSTANCE"),
    Column("NODE"),
    Column("STATE"),
    Column("BATCH", right=True),
    Column("HEADROOM_LEAST_S", right=True),
    Column("HEADROOM_P50_S", right=True),
    Column("ITERATION_MS", right=True),
    Column("CORRECTION", right=True),
    Column("PROFILE"),
)
"""How instances keep up: headroom of their requests, predicted times and how right those are."""
NODES = (
    Column("NODE"),
    Column("STATE"),
    Column("DEVICE"),
    Column("CORES", right=True),
    Column("INSTANCES", right=True),
    Column("ASLEEP", right=True),
    Column("SILENT_S", right=True),
    Column("ENGINE"),
    Column("HARDWARE"),
)
MODELS = (
    Column("MODEL"),
    Column("ARCHITECTURE"),
    Column("PARAMETERS_M", right=True),
    Column("CONTEXT_TOKENS", right=True),
    Column("DISK_MIB", right=True),
    Column("DEPLOYMENTS"),
    Column("SOURCE"),
)


def deployment_rows(deployments: Sequence[DeploymentSnapshot]) -> list[Row]:
    return [
        (
            deployment.spec.name,
            deployment.state,
            str(_ready(deployment.instances)),
            str(deployment.running),
            str(deployment.queued),
            str(deployment.served),
            str(deployment.refused),
            seconds(deployment.spec.slo.ttft_s),
            seconds(deployment.spec.slo.tpot_s),
            str(deployment.context_tokens_max or ""),
            deployment.spec.source,
        )
        for deployment in deployments
    ]


def instance_rows(instances: Sequence[InstanceSnapshot]) -> list[Row]:
    return [
        (
            instance.instance_id,
            instance.node_id,
            instance.state,
            str(instance.batch),
            str(instance.batch_max),
            f"{instance.load_s:.2f}",
            instance.tier or "",
            _phase(instance),
        )
        for instance in instances
    ]


def pace_rows(instances: Sequence[InstanceSnapshot]) -> list[Row]:
    return [
        (
            instance.instance_id,
            instance.node_id,
            instance.state,
            str(instance.batch),
            _headroom(instance.headroom_least_s),
            _headroom(instance.headroom_p50_s),
            milliseconds(instance.iteration_s) if instance.iteration_s else "",
            f"{instance.correction:.2f}",
            _profile(instance),
        )
        for instance in instances
    ]


def node_rows(nodes: Sequence[NodeSnapshot]) -> list[Row]:
    return [
        (
            node.node_id,
            node.state,
            node.device,
            str(node.cores),
            str(len(node.instances)),
            str(len(node.asleep)),
            f"{node.silent_s:.1f}",
            node.engine,
            node.hardware,
        )
        for node in nodes
    ]


def model_rows(models: Sequence[tuple[ModelInfo, Sequence[str]]]) -> list[Row]:
    """Each model with the names of the deployments that use it."""
    return [
        (
            model.model_id,
            model.architecture,
            f"{model.parameters / 1e6:.1f}",
            str(model.context_tokens_max),
            mebibytes(model.disk_bytes),
            ",".join(deployments),
            model.source,
        )
        for model, deployments in models
    ]


def deployment_fields(deployment: DeploymentSnapshot) -> list[tuple[str, str]]:
    """One deployment in full but for its instances."""
    spec, model = deployment.spec, deployment.model
    ttft = f"max({seconds(spec.slo.ttft_s)}, prompt tokens / {spec.slo.ttft_tokens_per_s:g})"
    pairs = [
        ("name", str(spec.name)),
        ("state", str(deployment.state)),
        ("source", spec.source),
        ("devices", ", ".join(spec.devices)),
        ("tensor_parallel", str(spec.tensor_parallel)),
        ("context_tokens_max", str(deployment.context_tokens_max or "")),
        ("ttft_slo_s", ttft),
        ("tpot_slo_s", seconds(spec.slo.tpot_s)),
        ("replicas", f"{spec.scaling.replicas_min} to {spec.scaling.replicas_max}"),
        ("keep_alive_s", seconds(spec.scaling.keep_alive_s)),
        ("running", str(deployment.running)),
        ("queued", str(deployment.queued)),
        ("served", str(deployment.served)),
        ("refused", str(deployment.refused)),
    ]
    return pairs if model is None else pairs + model_fields(model)


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


def seconds(span_s: float) -> str:
    return f"{span_s:g}"


def milliseconds(span_s: float) -> str:
    return f"{span_s * 1e3:.2f}"


def mebibytes(size_bytes: int) -> str:
    return f"{size_bytes / 2**20:.1f}"


def _ready(instances: Sequence[InstanceSnapshot]) -> int:
    return sum(instance.state is InstanceState.READY for instance in instances)


def _phase(instance: InstanceSnapshot) -> str:
    if instance.state is not InstanceState.LOADING or not instance.phase:
        return ""
    return f"{instance.phase} {instance.share:.0%}"


def _headroom(span_s: float | None) -> str:
    """Empty for an instance without requests."""
    return "" if span_s is None else f"{span_s:.2f}"


def _profile(instance: InstanceSnapshot) -> str:
    """`measured` or `scaled`; the structured forms say from what."""
    return instance.profile if instance.profile in ("", "measured") else "scaled"
