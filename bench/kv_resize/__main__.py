"""Resizes the demo model's KV cache with 0.1 to 4 GB live in it, the elastic way and by a copy.

What is timed is the engine's `resize_kv`, which the node's iterations wait for; when the memory has
left the process is watched besides. Then what an elastic cache costs while it is not resized:
decode beside a fixed cache, on pages that earlier requests have left and (`_growing_`) while pages
come, the footprint of an idle instance, and decode while another instance's pages go back. The last
line is one JSON object; `elastic_ms_max` is the worst of all elastic
resizes, of any size, the first included, `cached_ms_max` of those that give cached blocks back,
`speedup_1gb` the lesser of grow and shrink by medians.
"""

import argparse
import os
import random
from dataclasses import dataclass
from statistics import mean, median

from bench.kv_resize.footprint import Footprint, measure_footprint
from bench.kv_resize.live import DemoGraph, LiveInstance
from bench.kv_resize.resizing import (
    CACHED,
    EMPTY,
    GROW,
    OPERATIONS,
    SHRINK,
    SPARE_SHARE,
    Resize,
    resizes,
)
from bench.kv_resize.serving import (
    BATCH,
    BLOCKS,
    DecodedRound,
    Served,
    decode_rounds,
    draw_prompts,
    steps_during,
)
from bench.printing import errors_told, last_line, show_table
from mesh.cli import output
from mesh_nodes.engines.openvino.instance import Instance
from mesh_nodes.engines.openvino.kv_cache import KvResize

SIZES_GB = (0.1, 0.25, 0.5, 1.0, 2.0, 4.0)
RETURN_GB_MIN = 0.1
"""What goes back of less than this drowns in what else the process does."""
ROUNDS = 3
DECODE_ROUNDS = 8
DECODE_STEPS = 96
BESIDE_BATCH = 8
BESIDE_ROUNDS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    resizes: list[Resize]
    decoded: list[DecodedRound]
    footprint: Footprint
    quiet_step_s: float
    returning_step_s: float
    """Mean step of a batch, alone and while pages go back."""

    def of(self, how: KvResize, operation: str, live_gb: float) -> list[Resize]:
        return [
            r for r in self.resizes if (r.how, r.operation, r.live_gb) == (how, operation, live_gb)
        ]

    def stall_ms(self, how: KvResize, operation: str, live_gb: float) -> float:
        return 1e3 * median(r.stall_s for r in self.of(how, operation, live_gb))


def measure(
    sizes_gb: tuple[float, ...], rounds: int, decode_rounds_: int, threads: int, seed: int
) -> Measured:
    draw = random.Random(seed)
    output.message("footprint of an idle instance")
    footprint = measure_footprint(threads, draw)
    found: list[Resize] = []
    blocks_max = round(max(sizes_gb) * (1 + 2 * SPARE_SHARE) * 1e9 / 700_000)
    graph = DemoGraph(threads)
    lives = [LiveInstance(graph, how, blocks_max) for how in KvResize]
    for number in range(rounds):
        for gigabytes in sizes_gb:
            for live in lives:
                output.message(f"round {number + 1} of {rounds}: {gigabytes} GB, {live.how}")
                found += resizes(live, gigabytes, draw)

    def make(how: KvResize) -> Instance:
        return graph.instance(how, kv_blocks=BLOCKS, batch_max=BATCH)

    decoded = []
    for round_ in decode_rounds(make, decode_rounds_, DECODE_STEPS, draw):
        decoded.append(round_)
        growing, steady = 100 * round_.growing.cost_share, 100 * round_.steady.cost_share
        output.message(
            f"decode, round {len(decoded)}: {steady:+.1f} %, {growing:+.1f} % while it grows"
        )
    beside = make(KvResize.COPYING)
    fixed = Served(beside)
    fixed.back()
    output.message("decode while pages go back")
    quiet_s, returning_s = _beside(lives[0], fixed, max(sizes_gb), draw)
    for live in lives:
        live.close()
    beside.close()
    return Measured(
        resizes=found,
        decoded=decoded,
        footprint=footprint,
        quiet_step_s=mean(quiet_s),
        returning_step_s=mean(returning_s),
    )


def _beside(
    live: LiveInstance, served: Served, gigabytes: float, draw: random.Random
) -> tuple[list[float], list[float]]:
    """Steps of a batch before the pages of another instance go back, and while they do."""
    quiet_s: list[float] = []
    returning_s: list[float] = []
    for _ in range(BESIDE_ROUNDS):
        live.resize(live.blocks(gigabytes))
        live.fill(live.blocks(gigabytes))
        served.begin(draw_prompts(draw, BESIDE_BATCH))
        quiet_s += [served.step_s() for _ in range(DECODE_STEPS // BESIDE_ROUNDS)]
        live.drop_to(0, draw)
        live.resize(1)
        returning_s += steps_during(served, lambda: live.held_bytes > live.block_bytes)
        served.drop()
    return quiet_s, returning_s


def report(measured: Measured, sizes_gb: tuple[float, ...]) -> None:
    rows = []
    for live_gb in sizes_gb:
        for operation in OPERATIONS:
            ours = measured.of(KvResize.ELASTIC, operation, live_gb)
            elastic_ms = measured.stall_ms(KvResize.ELASTIC, operation, live_gb)
            copying_ms = measured.stall_ms(KvResize.COPYING, operation, live_gb)
            rows.append(
                (
                    f"{live_gb:g}",
                    operation,
                    f"{elastic_ms:.2f}",
                    f"{1e3 * max(r.stall_s for r in ours):.2f}",
                    f"{copying_ms:.1f}",
                    f"{copying_ms / elastic_ms:.0f}",
                    "" if operation == GROW else f"{1e3 * median(r.returned_s for r in ours):.0f}",
                )
            )
    show_table(
        ("live GB", "", "elastic", "worst", "copying", "ratio", "pages back"),
        rows,
        title="one resize, medians in ms; all elastic pages are back after",
        words=2,
    )
    found = figures(measured)
    footprint = measured.footprint
    print(
        f"given back: {100 * (found['returned_share'] or 0):.1f} % of it left the process. "
        f"Decode: {100 * (found['decode_cost_share'] or 0):+.1f} % against a fixed cache, "
        f"{100 * (found['decode_cost_growing_share'] or 0):+.1f} % while pages come, "
        f"{100 * (found['returning_cost_share'] or 0):+.1f} % while another instance's pages go "
        "back."
    )
    print(
        f"an idle instance takes {footprint.taken_bytes / 1e6:.0f} MB; by the books "
        f"{footprint.booked_bytes / 1e6:.0f} MB, one byte a weight "
        f"{footprint.packed_bytes / 1e6:.0f} MB"
    )
    last_line(found)


def figures(measured: Measured) -> dict[str, float | None]:
    elastic = [r for r in measured.resizes if r.how is KvResize.ELASTIC]
    returning = [r for r in elastic if r.given_back_bytes >= RETURN_GB_MIN * 1e9]
    sizes_gb = {r.live_gb for r in elastic}
    most_gb = max(sizes_gb)
    returned_s = [r.returned_s for r in measured.of(KvResize.ELASTIC, EMPTY, most_gb)]
    footprint = measured.footprint
    return {
        "elastic_ms_max": round(1e3 * max(r.stall_s for r in elastic), 3),
        "elastic_ms_p50": round(1e3 * median(r.stall_s for r in elastic), 3),
        "cached_ms_max": round(1e3 * max(r.stall_s for r in elastic if r.operation == CACHED), 3),
        "speedup_1gb": _speedup(measured, 1.0) if 1.0 in sizes_gb else None,
        "returned_share": _returned_share(returning) if returning else None,
        "returned_ms_at_most_gb": round(1e3 * median(returned_s), 1),
        "live_gb_max": most_gb,
        "decode_cost_share": round(median(d.steady.cost_share for d in measured.decoded), 4),
        "decode_cost_growing_share": round(
            median(d.growing.cost_share for d in measured.decoded), 4
        ),
        "returning_cost_share": round(measured.returning_step_s / measured.quiet_step_s - 1, 4),
        "footprint_ratio": round(footprint.taken_bytes / footprint.booked_bytes, 3),
        "footprint_ratio_packed": round(footprint.taken_bytes / footprint.packed_bytes, 3),
    }


def _speedup(measured: Measured, live_gb: float) -> float:
    ratios = [
        measured.stall_ms(KvResize.COPYING, operation, live_gb)
        / measured.stall_ms(KvResize.ELASTIC, operation, live_gb)
        for operation in (GROW, SHRINK)
    ]
    return round(min(ratios), 1)


def _returned_share(returning: list[Resize]) -> float:
    left = sum(r.left_bytes for r in returning)
    return round(left / sum(r.given_back_bytes for r in returning), 4)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", type=float, nargs="+", default=SIZES_GB, metavar="GB")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--decode-rounds", type=int, default=DECODE_ROUNDS)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    sizes = tuple(options.sizes)
    with errors_told():
        measured = measure(
            sizes, options.rounds, options.decode_rounds, options.threads, options.seed
        )
    report(measured, sizes)


if __name__ == "__main__":
    main()
