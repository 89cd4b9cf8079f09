"""What `mesh profile` shows of a profile: where it holds, and its two tables in milliseconds.

Pure: profiles in, text out; `output` aligns and prints it, `profile_plot` draws the same grids.
"""

from collections.abc import Sequence

from mesh.cli.output import Column, number
from mesh.cli.tables import milliseconds
from mesh.domain.profile import Grid, OperatorTimes, Profile
from mesh.domain.reasons import ProfileSource
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
    match profile.origin:
        case ProfileSource.ESTIMATE:
            return f"scaled from {profile.scaled_from}"
        case ProfileSource.OPERATORS:
            return f"scaled from {profile.scaled_from}, operator by operator"
        case ProfileSource.ITERATIONS:
            how = "an estimate, corrected by the iterations of requests"
        case ProfileSource.PRIMING:
            how = f"{points(profile)} points after a load, in {profile.measured_s:.1f} s"
        case ProfileSource.REST:
            how = f"{points(profile)} points while the node rested, in {profile.measured_s:.1f} s"
        case ProfileSource.SURVEY:
            how = f"{points(profile)} points in {profile.measured_s:.1f} s"
    measured_as = f" as {profile.measured_as}, of the same shape" if profile.measured_as else ""
    return f"measured{measured_as}: {how}"


def points(profile: Profile) -> int:
    grids = (profile.prefill, profile.decode)
    return sum(len(grid.rows) * len(grid.columns) for grid in grids)


Times = tuple[int, tuple[float, ...]]
"""A size, and its iteration times in seconds."""


def prefill(grid: Grid) -> tuple[list[Column[Times]], list[Times]]:
    """A row a size; its times in milliseconds."""
    return _table("PROMPT_TOKENS", "PAST", grid)


def decode(grid: Grid) -> tuple[list[Column[Times]], list[Times]]:
    return _table("BATCH", "CONTEXT", grid)


def _table(rows: str, name: str, grid: Grid) -> tuple[list[Column[Times]], list[Times]]:
    """A grid of one column holds for every size along it, so its header names none."""
    sizes = grid.columns if len(grid.columns) > 1 else ("ANY",)

    def column(n: int, size: object) -> Column[Times]:
        return number(f"{name}_{size}", lambda times: milliseconds(times[1][n]))

    columns = [number(rows, lambda times: times[0]), *(column(n, s) for n, s in enumerate(sizes))]
    return columns, list(zip(grid.rows, grid.seconds, strict=True))


def operators(profile: Profile) -> list[tuple[str, list[str], list[tuple[str, ...]]]]:
    """Title, headings and rows: milliseconds of each operator in prompts without a past, of sizes
    that double, and in decodes at the least context and the largest; the same with some cores.
    """
    tables = _of_operators(profile.operators, "by operator")
    for of in profile.by_cores:
        cores = "1 core" if of.cores == 1 else f"{of.cores} cores"
        tables += _of_operators(of.operators, f"by operator, {cores}")
    return tables


def _of_operators(
    counted: Sequence[OperatorTimes], by: str
) -> list[tuple[str, list[str], list[tuple[str, ...]]]]:
    if not counted:
        return []
    prefill, decode = counted[0].prefill, counted[0].decode
    tokens = [(n, 0) for n in prefill.rows if n.bit_count() == 1]
    ends = sorted({decode.columns[0], decode.columns[-1]})
    batches = [(n, context) for context in ends for n in decode.rows]
    return [
        (
            f"prefill_ms {by}",
            ["OPERATOR", *(f"TOKENS_{n}" for n, _ in tokens)],
            [(o.name, *(milliseconds(o.prefill.at(*at)) for at in tokens)) for o in counted],
        ),
        (
            f"decode_ms {by}",
            ["OPERATOR", *(f"BATCH_{n}_AT_{context}" for n, context in batches)],
            [(o.name, *(milliseconds(o.decode.at(*at)) for at in batches)) for o in counted],
        ),
    ]
