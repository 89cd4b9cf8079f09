"""What `mesh profile` shows of a profile: where it holds, and its two tables in milliseconds.

Pure: profiles in, text out; `output` aligns and prints it, `profile_plot` draws the same grids.
"""

from collections.abc import Sequence

from mesh.cli.output import Column
from mesh.cli.tables import Row, milliseconds
from mesh.domain.profile import Grid, Profile
from mesh.domain.views import ProfileView

PREFILL = "prefill_ms"
DECODE = "decode_ms"


def profile_fields(view: ProfileView) -> list[tuple[str, str]]:
    """What was measured, and where it holds."""
    profile = view.profile
    return [
        ("hardware", profile.hardware),
        ("device", str(profile.device)),
        ("cores", str(profile.cores)),
        ("fingerprint", profile.fingerprint),
        ("nodes", ", ".join(view.nodes)),
        ("model_id", str(profile.model_id)),
        ("times", origin(profile)),
    ]


def origin(profile: Profile) -> str:
    """Where the times come from, in words."""
    if profile.measured:
        return f"measured: {points(profile)} points in {profile.measured_s:.1f} s"
    return f"scaled from {profile.scaled_from}"


def points(profile: Profile) -> int:
    grids = (profile.prefill, profile.decode)
    return sum(len(grid.rows) * len(grid.columns) for grid in grids)


def prefill_columns(grid: Grid) -> list[Column]:
    return _columns("PROMPT_TOKENS", "PAST", grid.columns)


def decode_columns(grid: Grid) -> list[Column]:
    return _columns("BATCH", "CONTEXT", grid.columns)


def grid_rows(grid: Grid) -> list[Row]:
    """A row a size; its times in milliseconds."""
    return [
        (str(size), *(milliseconds(span_s) for span_s in spans_s))
        for size, spans_s in zip(grid.rows, grid.seconds, strict=True)
    ]


def _columns(rows: str, name: str, sizes: Sequence[int]) -> list[Column]:
    """A grid of one column holds for every size along it, so its header names none."""
    words = [f"{name}_{size}" for size in sizes] if len(sizes) > 1 else [f"{name}_ANY"]
    return [Column(rows, right=True), *(Column(word, right=True) for word in words)]
