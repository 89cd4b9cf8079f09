"""What the cell on paper consists of: models, their profiles, and how busy its nodes are.

Iteration times are those of a small model on a CPU node: decodes of 10 to 40 ms, a millisecond for
a prompt token. A calm node needs about a quarter of its time for the tokens that it owes.
"""

from dataclasses import dataclass, replace

from mesh.compute.shapes import Axes, survey_axes
from mesh.domain.deployment import Deployment, DeploymentSpec, Scaling
from mesh.domain.ids import DeploymentName, ModelId
from mesh.domain.limits import PREFILL_TOKENS_MAX
from mesh.domain.model import Footprint, ModelFormat, ModelInfo
from mesh.domain.profile import Grid, Profile
from mesh.domain.reasons import DeviceKind
from mesh.domain.slo import ColdStart, Slo

DEPLOYMENTS = 4
"""Each has an instance on every node."""
BATCH = 8
BATCH_MAX = 32
"""Requests that run on each instance."""
SLO = Slo(ttft_s=2.0, ttft_tokens_per_s=512.0, tpot_s=0.25)
CONTEXT_TOKENS = 2048
KV_BLOCKS = 512
FOOTPRINT = Footprint(weights_bytes=1 << 30, kv_block_bytes=1 << 20, block_tokens=32)
ENGINE = "paper"
HARDWARE = "32 cores, on paper"
FINGERPRINT = "paper/32"
MODEL_ID = ModelId("sha256-00000000000admit")


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """How busy a node is: by how much its iterations take longer than the profile says, how much
    headroom its running requests have, and how many requests have come that it has not begun with.
    """

    correction: float
    headroom_s: tuple[float, float]
    waiting: int = 0


CALM = Load(correction=1.0, headroom_s=(0.5, 4.0))
BUSY = (
    Load(correction=2.0, headroom_s=(1.5, 4.0), waiting=2),
    Load(correction=3.6, headroom_s=(0.02, 0.4)),
    Load(correction=5.0, headroom_s=(0.02, 0.4)),
)
"""They cannot take one more, for reasons that take differently long to find out: prompts wait that
would be late then; there is too little time beside the decodes for any prompt; there is none.
"""
WAITING_PROMPT_TOKENS = 550
WAITING_SLO = replace(SLO, ttft_s=20.0, cold_start=ColdStart.REFUSE)
"""The SLO of deployments that wait for a load: one would be in time, if there were memory for it.
No request is taken late: that is tried for a moment after a request has come, and here no moment
passes.
"""
WAITING_FOOTPRINT = replace(FOOTPRINT, weights_bytes=4 << 30)
"""More than the others leave of a node, whatever they give back."""


def deployment(number: int, nodes: int) -> Deployment:
    """One that may have an instance on each of so many nodes; from `DEPLOYMENTS` on, one that has
    none.
    """
    waits = number >= DEPLOYMENTS
    spec = DeploymentSpec(
        name=DeploymentName(f"model-{number}"),
        source="file:///models/paper",
        slo=WAITING_SLO if waits else SLO,
        scaling=Scaling(replicas_max=nodes, keep_alive_s=600.0),
        devices=(DeviceKind.CPU,),
    )
    return Deployment(
        spec=spec,
        model=_model(),
        context_tokens_max=CONTEXT_TOKENS,
        footprints=((ENGINE, WAITING_FOOTPRINT if waits else FOOTPRINT),),
    )


def profile() -> Profile:
    """A profile of the size that a survey gives."""
    axes = survey_axes(
        context_tokens_max=CONTEXT_TOKENS,
        batch_max=BATCH_MAX,
        kv_tokens=KV_BLOCKS * FOOTPRINT.block_tokens,
        prefill_tokens_max=PREFILL_TOKENS_MAX,
    )
    return Profile(
        model_id=MODEL_ID,
        device=DeviceKind.CPU,
        fingerprint=FINGERPRINT,
        hardware=HARDWARE,
        cores=32,
        parameters=1_000_000_000,
        weights_bytes=FOOTPRINT.weights_bytes,
        kv_bytes_per_token=FOOTPRINT.kv_block_bytes // FOOTPRINT.block_tokens,
        prefill=_prefill(axes),
        decode=_decode(axes),
        measured_s=60.0,
    )


def _prefill(axes: Axes) -> Grid:
    rows, columns = axes.prefill_rows, axes.prefill_columns
    seconds = tuple(tuple(0.01 + 0.001 * n * (1 + past / 8192) for past in columns) for n in rows)
    return Grid(rows=rows, columns=columns, seconds=seconds)


def _decode(axes: Axes) -> Grid:
    rows, columns = axes.decode_rows, axes.decode_columns
    seconds = tuple(tuple(0.01 + n * (0.0004 + c * 0.25e-6) for c in columns) for n in rows)
    return Grid(rows=rows, columns=columns, seconds=seconds)


def _model() -> ModelInfo:
    return ModelInfo(
        model_id=MODEL_ID,
        source="file:///models/paper",
        format=ModelFormat.SAFETENSORS,
        architecture="llama",
        context_tokens_max=CONTEXT_TOKENS,
        vocabulary_tokens=32_000,
        layers=16,
        hidden_size=2048,
        attention_heads=32,
        kv_heads=8,
        head_size=64,
        parameters=1_000_000_000,
        disk_bytes=1 << 30,
        stop_token_ids=(2,),
    )
