"""A small profile for tests: two sizes each way, times that are easy to reckon with."""

from mesh.domain.ids import ModelId
from mesh.domain.profile import Grid, Profile
from mesh.domain.reasons import DeviceKind

FINGERPRINT = "test/2"
DECODE = Grid(rows=(1, 32), columns=(32, 512), seconds=((0.001, 0.002), (0.004, 0.008)))
PREFILL = Grid(rows=(1, 256), columns=(0, 256), seconds=((0.001, 0.0011), (0.02, 0.03)))


def profile(
    *,
    model_id: str = "sha256-0123456789abcdef",
    fingerprint: str = FINGERPRINT,
    prefill: Grid = PREFILL,
    decode: Grid = DECODE,
    scaled_from: str = "",
    measured_s: float = 1.5,
) -> Profile:
    """The profile of tests.core.cells' model on a node of two cores, where nothing else is
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
