"""A small model for tests, one of the size of the demo model, and the profile of the small one: two
sizes each way, times that are easy to reckon with.
"""

from dataclasses import replace

from mesh.domain.ids import ModelId
from mesh.domain.model import ModelFormat, ModelInfo
from mesh.domain.profile import Grid, Profile
from mesh.domain.reasons import DeviceKind

MODEL = ModelInfo(
    model_id=ModelId("sha256-0123456789abcdef"),
    source="file:///models/tiny",
    format=ModelFormat.SAFETENSORS,
    architecture="llama",
    context_tokens_max=512,
    vocabulary_tokens=128,
    layers=2,
    hidden_size=64,
    attention_heads=4,
    kv_heads=2,
    head_size=16,
    intermediate_size=128,
    parameters=100_000,
    disk_bytes=200_000,
    stop_token_ids=(2,),
)
SMOL = replace(
    MODEL,
    context_tokens_max=2048,
    vocabulary_tokens=49152,
    layers=30,
    hidden_size=576,
    attention_heads=9,
    kv_heads=3,
    head_size=64,
    parameters=134_515_008,
    disk_bytes=269_060_552,
)
FINGERPRINT = "test/2"
DECODE = Grid(rows=(1, 32), columns=(32, 512), seconds=((0.001, 0.002), (0.004, 0.008)))
PREFILL = Grid(rows=(1, 256), columns=(0, 256), seconds=((0.001, 0.0011), (0.02, 0.03)))


def profile(
    *,
    model_id: str = MODEL.model_id,
    fingerprint: str = FINGERPRINT,
    prefill: Grid = PREFILL,
    decode: Grid = DECODE,
    scaled_from: str = "",
    measured_s: float = 1.5,
) -> Profile:
    """The profile of MODEL on a node of two cores, where nothing else is
    given.
    """
    return Profile(
        model_id=ModelId(model_id),
        device=DeviceKind.CPU,
        fingerprint=fingerprint,
        hardware="test",
        cores=2,
        parameters=100_000,
        weights_bytes=100 << 20,
        kv_bytes_per_token=(1 << 20) // 32,
        prefill=prefill,
        decode=decode,
        scaled_from=scaled_from,
        measured_s=0.0 if scaled_from else measured_s,
    )


PROFILE = profile()
