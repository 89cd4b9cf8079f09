"""What starts took: a table a model with parts and floors, and the ratios that are asked for."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from bench.cold_start.starts import Engine, Part, Rates, Start, Tier
from bench.printing import last_line, rounded, show_table
from mesh.cli import output

HEADINGS = ("start", "TTFT s", "added s", "least", "most", "floor s", "× floor", *Part)
LEGEND = (
    "medians. added: TTFT over the engine's own warm one, least and most of all rounds; floor: the "
    "weights' bytes at the rate of memcpy, or of the disk where files are not in the page cache; "
    "then where the seconds of a TTFT went (of a peer: its load, and its first token from there)"
)
LIMITS = {
    "resident_added_ms": 30.0,
    "host_ratio_to_compile": 0.2,
    "host_floor_ratio": 5.0,
    "disk_ratio_to_compile": 0.3,
    "host_ratio_to_best_peer": 0.5,
}
"""The most that is well."""
OF_PEERS = ("host_ratio_to_best_peer",)
"""Not to be had where no peer is installed."""
_FROM_DISK = (Tier.STORED, Tier.COMPILED_STORED)


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """All starts of one model."""

    name: str
    weights_bytes: int
    rates: Rates
    starts: Sequence[Start]

    def of(self, engine: Engine, tier: Tier) -> list[Start]:
        return [s for s in self.starts if (s.engine, s.tier) == (engine, tier)]

    def ttft_s(self, engine: Engine, tier: Tier) -> float | None:
        found = [start.ttft_s for start in self.of(engine, tier)]
        return median(found) if found else None

    def added_s(self, engine: Engine, tier: Tier) -> float | None:
        """Over a warm one of the same engine."""
        cold_s, warm_s = self.ttft_s(engine, tier), self.ttft_s(engine, Tier.WARM)
        return None if cold_s is None or warm_s is None else cold_s - warm_s

    def floor_s(self, tier: Tier) -> float | None:
        """The floor of a start that brings weights into memory, or could."""
        if tier in (Tier.WARM, Tier.RESIDENT):
            return None
        rate = self.rates.disk if tier in _FROM_DISK else self.rates.memcpy
        return self.weights_bytes / rate

    def best_peer_s(self, tier: Tier) -> float | None:
        """The least that a peer adds."""
        added = [self.added_s(peer, tier) for peer in Engine if peer is not Engine.MESH]
        return min((each for each in added if each is not None), default=None)


def figures(measured: Measured) -> dict[str, float | None]:
    mesh = {tier: measured.added_s(Engine.MESH, tier) for tier in Tier}
    resident_s, compile_s = mesh[Tier.RESIDENT], mesh[Tier.COMPILED]
    peer_s = measured.best_peer_s(Tier.CACHED)
    found = {
        "resident_added_ms": None if resident_s is None else 1000.0 * resident_s,
        "host_ratio_to_compile": _ratio(mesh[Tier.HOST], compile_s),
        "host_floor_ratio": _ratio(mesh[Tier.HOST], measured.floor_s(Tier.HOST)),
        "host_ratio_to_best_peer": _ratio(mesh[Tier.HOST], peer_s),
        "cached_ratio_to_compile": _ratio(mesh[Tier.CACHED], compile_s),
        "cached_floor_ratio": _ratio(mesh[Tier.CACHED], measured.floor_s(Tier.CACHED)),
        "cached_ratio_to_best_peer": _ratio(mesh[Tier.CACHED], peer_s),
        "disk_ratio_to_compile": _ratio(mesh[Tier.STORED], mesh[Tier.COMPILED_STORED]),
        "disk_floor_ratio": _ratio(mesh[Tier.STORED], measured.floor_s(Tier.STORED)),
        "disk_ratio_to_best_peer": _ratio(mesh[Tier.STORED], measured.best_peer_s(Tier.STORED)),
    }
    return {name: rounded(value) for name, value in found.items()}


def targets(measured: Measured) -> dict[str, bool]:
    """Whether each is reached. What is not there for want of a peer is not missed."""
    found = figures(measured)
    return {
        name: name in OF_PEERS if (value := found[name]) is None else value <= most
        for name, most in LIMITS.items()
    }


def report(measured: Sequence[Measured], missing: Iterable[str], gpu: str | None) -> None:
    """`gpu`: why there are no figures of a GPU; None where none were asked for."""
    output.text(LEGEND)
    for each in measured:
        title = (
            f"\n{each.name}: {each.weights_bytes / 1e6:.0f} MB of weights; memcpy "
            f"{each.rates.memcpy / 1e9:.1f} GB/s, disk {each.rates.disk / 1e9:.1f} GB/s"
        )
        rows = [row(each, engine, tier) for engine in Engine for tier in Tier]
        show_table(HEADINGS, [found for found in rows if found], title=title)
    for name in missing:
        output.text(f"{name}: missing, not installed or --no-peers")
    if gpu is not None:
        output.text(f"gpu: missing, {gpu}")
    told: list[Mapping[str, object]] = [
        {
            "model": each.name,
            **figures(each),
            "memcpy_gb_per_s": rounded(each.rates.memcpy / 1e9),
            "disk_gb_per_s": rounded(each.rates.disk / 1e9),
            "ttft_s": {
                engine: {
                    tier: rounded(each.ttft_s(engine, tier))
                    for tier in Tier
                    if each.of(engine, tier)
                }
                for engine in Engine
            },
        }
        for each in measured
    ]
    shown = {**figures(measured[0]), "models": told, "missing": list(missing)}
    last_line(shown if gpu is None else {**shown, "gpu": "missing"})


def row(measured: Measured, engine: Engine, tier: Tier) -> tuple[str, ...] | None:
    starts, warm_s = measured.of(engine, tier), measured.ttft_s(engine, Tier.WARM)
    if not starts or warm_s is None:
        return None
    ttfts = [start.ttft_s for start in starts]
    added_s, floor_s = median(ttfts) - warm_s, measured.floor_s(tier)
    cold = tier is not Tier.WARM
    return (
        f"{engine}, {tier}",
        f"{median(ttfts):.3f}",
        *(f"{s:.3f}" if cold else "" for s in (added_s, min(ttfts) - warm_s, max(ttfts) - warm_s)),
        "" if floor_s is None else f"{floor_s:.3f}",
        "" if floor_s is None else f"{added_s / floor_s:.1f}",
        *(_seconds(starts, part) for part in Part),
    )


def _seconds(starts: Sequence[Start], part: Part) -> str:
    found = [start.parts_s[part] for start in starts if part in start.parts_s]
    return f"{median(found):.3f}" if found else ""


def _ratio(seconds: float | None, over_s: float | None) -> float | None:
    return None if seconds is None or not over_s else seconds / over_s
