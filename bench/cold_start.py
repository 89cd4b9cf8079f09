"""From a request to its first token, by where the model's weights are, beside other engines.

For each model, in turns and by the caller's clock: mesh with the model loaded but parked, with
another instance of it in memory, and from its files, in the page cache and out of it; the same with
a compile; OpenVINO GenAI's model cache and llama.cpp's mapped file, in processes of their own. What
a start adds to a warm first token is set beside its floor, the weights' bytes at the rate of memcpy
or of the disk. The last line is one JSON object, of the demo model, with `models` of all. Exit code
1 when a target was missed for the demo model.
"""

import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from statistics import median
from typing import Annotated, Literal

from bench.cold_start_cell import Engine, Part, Rates, Start, Tier, bring, forget, rates, starts
from bench.cold_start_peers import PACKAGES, installed, started, starter
from bench.cold_start_shapes import DEMO, Forms, made
from bench.demo_model import store_path
from bench.harness import Report, Table, rounded, show_status
from bench.peer import Peer
from mesh.domain.errors import Unavailable
from mesh_nodes.gpus import Gpus

HEADINGS = ("start", "TTFT s", "added s", "least", "most", "floor s", "× floor", *Part)
LEGEND = (
    "medians. added: TTFT over the engine's own warm one, least and most of all rounds; floor: the "
    "weights' bytes at the rate of memcpy, or of the disk where files are not in the page cache; "
    "then where the seconds of a TTFT went (of a peer: its load, and its first token from there)"
)
TARGETS = {
    "resident_added_ms": "<= 30",
    "host_ratio_to_compile": "<= 0.2",
    "host_floor_ratio": "<= 5",
    "disk_ratio_to_compile": "<= 0.3",
    "host_ratio_to_best_peer": "<= 0.5 if any",
}
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


Turn = Callable[[], None]


def measure(forms: Forms, rounds: int, *, peers: bool) -> Measured:
    """Raises MeshError when a cell or a peer ends."""
    found: list[Start] = []
    wanted = [engine for engine in PACKAGES if peers and installed(engine)]
    with ExitStack() as opened:
        show_status(f"{forms.name}: two cells and {len(wanted)} peers start")
        ours, journal = opened.enter_context(starts(forms, compiles=False))
        compiled, compiled_journal = opened.enter_context(starts(forms, compiles=True))
        ours.warm_up(blob=True)
        compiled.warm_up(blob=False)
        asked = [(e, opened.enter_context(Peer(e, starter, e, forms))) for e in wanted]
        for engine, peer in asked:
            peer.wait_ready()
            started(peer, engine, Tier.CACHED)  # GenAI makes its cache

        def peer_turn(engine: Engine, peer: Peer, tier: Tier) -> Turn:
            def turn() -> None:
                (forget if tier is Tier.STORED else bring)(forms.genai, forms.gguf)
                found.extend(started(peer, engine, tier))

            return turn

        turns: list[Turn] = [
            lambda: compiled.start(Tier.COMPILED_STORED),
            lambda: ours.start(Tier.STORED),
            *(peer_turn(engine, peer, Tier.STORED) for engine, peer in asked),
            lambda: compiled.start(Tier.COMPILED),
            lambda: ours.start(Tier.CACHED),
            *(peer_turn(engine, peer, Tier.CACHED) for engine, peer in asked),
        ]
        for number in range(rounds):
            for place, turn in enumerate(turns):
                show_status(
                    f"{forms.name}: round {number + 1} of {rounds}, {place + 1} of {len(turns)}"
                )
                turn()
        show_status(f"{forms.name}: what this machine can do")
        found += [*ours.read(journal), *compiled.read(compiled_journal)]
    return Measured(
        name=forms.name,
        weights_bytes=forms.weights_bytes,
        rates=rates(forms.prepared),
        starts=found,
    )


def no_gpu() -> str:
    """Why there are no figures of one."""
    try:
        Gpus().gpu(0)
    except Unavailable as error:
        return str(error)
    return "starts on a GPU are measured by `make bench-vllm-switch`"


def report(measured: Sequence[Measured], missing: Sequence[str], gpu: str | None) -> Report:
    """`gpu`: why there are no figures of a GPU; None where none were asked for."""
    tables = [
        Table(
            headings=HEADINGS,
            rows=[cells for pair in product(Engine, Tier) if (cells := row(each, *pair))],
            title=f"\n{each.name}: {each.weights_bytes / 1e6:.0f} MB of weights; memcpy "
            f"{each.rates.memcpy / 1e9:.1f} GB/s, disk {each.rates.disk / 1e9:.1f} GB/s",
        )
        for each in measured
    ]
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
    found = {**figures(measured[0]), "models": told, "missing": list(missing)}
    return Report(
        figures=found if gpu is None else {**found, "gpu": "missing"},
        shown=(
            LEGEND,
            *tables,
            *(f"{name}: missing, not installed or --no-peers" for name in missing),
            *(() if gpu is None else [f"gpu: missing, {gpu}"]),
        ),
        targets=TARGETS,
    )


def run(
    *,
    models: tuple[Literal["135M", "0.4B", "1B", "3B"], ...] = ("135M", "0.4B", "1B", "3B"),
    rounds: int = 5,
    quick: Annotated[bool, "the demo model, two rounds"] = False,
    peers: bool = True,
    gpu: Annotated[bool, "with a row for a GPU"] = False,
) -> Report:
    rounds = 2 if quick else rounds
    measured = []
    for name in [DEMO] if quick else dict.fromkeys(models):
        # The models take gigabytes: they are beside the store, and no longer than needed.
        kept = store_path().parent / "bench"
        kept.mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory(dir=kept, prefix="cold-start-") as folder:
            show_status(f"{name}: the model, for each engine")
            forms = made(name, Path(folder))
            measured.append(measure(forms, rounds, peers=peers))
    missing = [engine for engine in PACKAGES if not (peers and installed(engine))]
    return report(measured, missing, no_gpu() if gpu else None)
