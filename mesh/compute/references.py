"""Measured profiles that mesh brings along, for devices on which nothing has been measured yet.

`mesh.compute.scaling` takes the one nearest to a node. Times are in milliseconds here, as their
sources give them; decode rows are batches, and a time that the source lacks is None and filled like
those of a survey. Prompts were measured whole, so that prefill has the column of no past alone.
"""

from collections.abc import Mapping

from mesh.compute.tables import Row, table
from mesh.domain.ids import ModelId
from mesh.domain.profile import Grid, Profile
from mesh.domain.reasons import DeviceKind


def _grid(columns: tuple[int, ...], rows_ms: Mapping[int, Row]) -> Grid:
    seconds = [[None if ms is None else ms / 1000 for ms in row] for row in rows_ms.values()]
    grid = table(tuple(rows_ms), columns, seconds)
    assert grid is not None, "a reference has times"
    return grid


def _reference(
    model_id: str,
    hardware: str,
    *,
    device: DeviceKind,
    cores: int,
    parameters: int,
    weights_bytes: int,
    kv_bytes_per_token: int,
    prefill_ms: Mapping[int, float],
    contexts: tuple[int, ...],
    decode_ms: Mapping[int, Row],
) -> Profile:
    return Profile(
        model_id=ModelId(model_id),
        device=device,
        fingerprint=f"reference/{hardware}",
        hardware=hardware,
        cores=cores,
        parameters=parameters,
        weights_bytes=weights_bytes,
        kv_bytes_per_token=kv_bytes_per_token,
        prefill=_grid((0,), {tokens: (ms,) for tokens, ms in prefill_ms.items()}),
        decode=_grid(contexts, decode_ms),
    )


_XEON = "32-core Xeon 6462C with AMX"
_A100 = "A100-80GB"
_TESTBED_CONTEXTS = (512, 1024, 2048, 3950)

REFERENCES: tuple[Profile, ...] = (
    # LLM-Mesh (SLINFER, arXiv 2507.00507) testbed measurements, 16-bit weights and KV: the next
    # four. A batch of 24, 48 or 96 that was measured at a single context is left out.
    _reference(
        "Llama-2-7B",
        _XEON,
        device=DeviceKind.CPU,
        cores=32,
        parameters=6_738_415_616,
        weights_bytes=13_476_831_232,
        kv_bytes_per_token=524_288,
        prefill_ms={1: 70, 128: 99, 256: 149, 512: 285, 1024: 567, 2048: 1178, 4096: 2748},
        contexts=_TESTBED_CONTEXTS,
        decode_ms={
            1: (70, 71, 74, 80),
            2: (72, 75, 81, 90),
            4: (77, 81, 92, 112),
            8: (84, 94, 116, 156),
            16: (97, 120, 163, 244),
            32: (131, 196, 286, 459),
            64: (193, 297, 479, None),
            128: (316, None, None, None),
        },
    ),
    _reference(
        "Llama-3.2-3B",
        _XEON,
        device=DeviceKind.CPU,
        cores=32,
        parameters=3_212_749_824,
        weights_bytes=6_425_499_648,
        kv_bytes_per_token=114_688,
        prefill_ms={1: 39, 128: 58, 256: 87, 512: 166, 1024: 339, 2048: 703, 4096: 1616},
        contexts=_TESTBED_CONTEXTS,
        decode_ms={
            1: (39, 39, 40, 41),
            2: (40, 40, 43, 45),
            4: (42, 44, 47, 51),
            8: (45, 48, 53, 62),
            16: (54, 58, 66, 85),
            32: (62, 74, 100, 144),
            64: (96, 119, 168, 257),
            128: (160, 210, 302, None),
            256: (300, 390, None, None),
        },
    ),
    _reference(
        "Llama-2-7B",
        _A100,
        device=DeviceKind.GPU,
        cores=0,
        parameters=6_738_415_616,
        weights_bytes=13_476_831_232,
        kv_bytes_per_token=524_288,
        prefill_ms={1: 20, 128: 24, 256: 30, 512: 50, 1024: 89, 2048: 169, 4096: 336},
        contexts=_TESTBED_CONTEXTS,
        decode_ms={
            1: (14, 14, 14, 15),
            2: (14, 14, 15, 16),
            4: (15, 15, 17, 19),
            8: (17, 18, 22, 28),
            16: (20, 22, 28, 38),
            32: (26, 30, 40, None),
            64: (39, 47, None, None),
            128: (59, None, None, None),
        },
    ),
    _reference(
        "Llama-3.2-3B",
        _A100,
        device=DeviceKind.GPU,
        cores=0,
        parameters=3_212_749_824,
        weights_bytes=6_425_499_648,
        kv_bytes_per_token=114_688,
        prefill_ms={1: 20, 128: 20, 256: 21, 512: 28, 1024: 45, 2048: 82, 4096: 163},
        contexts=_TESTBED_CONTEXTS,
        decode_ms={
            1: (12, 12, 12, 12),
            2: (12, 12, 12, 12),
            4: (13, 13, 13, 13),
            8: (13, 13, 13, 14),
            16: (15, 15, 16, 18),
            32: (19, 20, 22, 28),
            64: (31, 34, 34, 45),
            128: (42, 50, 59, None),
            256: (75, 99, None, None),
        },
    ),
    # Measured with OpenVINO 2026.4: 8-bit weights, 16-bit KV. `weights_bytes` is what mesh's engine
    # states, graph and activations included. A prefill of one token is a decode of one. The 512
    # tokens are one prompt that was measured whole: by 3.1 ms a token, as one of 2,048 took, where
    # 128 took 2.2; the context within a prompt is in them.
    _reference(
        "SmolLM2-135M",
        "2-core x86-64 with AVX2",
        device=DeviceKind.CPU,
        cores=2,
        parameters=134_515_008,
        weights_bytes=247_300_000,
        kv_bytes_per_token=23_040,
        prefill_ms={1: 11, 128: 277, 512: 1585},
        contexts=(128, 1024),
        decode_ms={1: (11, 14), 8: (31, 45), 16: (53, 92), 32: (91, 183)},
    ),
)
