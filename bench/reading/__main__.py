"""Files of weights of 0.1 to 2 GB into memory, cold and warm: mesh's way beside other readers.

Cold, the page cache has been told to forget the file; warm, it was read just before. All readers
take turns, in another order each round. The disk's limit is the best of several O_DIRECT loops that
keep nothing. The last line is one JSON object: `ssd_ratio_to_fio` (mesh's cold rate over that
limit), `ratio_to_torch` (over torch.load's, cold), `memory_ratio_to_memcpy` (mesh's warm rate over
a copy of as many bytes into memory that is there), `digest_cost_share` (by how much longer a cold
load with digests takes), at the largest size.
"""

import argparse
import gc
import importlib.util
import random
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from statistics import median

from bench.printing import errors_told, last_line, rounded, show_status, show_table
from bench.reading.readers import LIMITS, PEERS, READERS, Reader, memcpy_s, write_files
from mesh.cli import output
from mesh_loader.disk import require_free
from mesh_loader.page_cache import forget

SIZES_GB = (0.1, 0.5, 2.0)
ROUNDS, QUICK_ROUNDS = 5, 2
COLD, WARM = "cold", "warm"

Seconds = dict[tuple[str, str], list[float]]
"""By reader, and cold or warm."""


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="bench.reading", description=__doc__)
    parser.add_argument("--sizes", nargs="+", type=float, metavar="GB", help=f"{SIZES_GB}")
    parser.add_argument("--rounds", type=int, help=f"({ROUNDS})")
    parser.add_argument(
        "--quick", action="store_true", help=f"{QUICK_ROUNDS} rounds of the smaller ones"
    )
    parser.add_argument("--no-peers", action="store_true", help="without torch and what needs it")
    parser.add_argument("--folder", type=Path, default=Path(), help="on the disk to be measured")
    options = parser.parse_args(arguments)
    sizes_gb = options.sizes or (SIZES_GB[:-1] if options.quick else SIZES_GB)
    rounds = options.rounds or (QUICK_ROUNDS if options.quick else ROUNDS)
    with errors_told():
        readers = READERS | _peers(not options.no_peers)
        found: Seconds = {}
        for size_gb in sorted(sizes_gb):
            size_bytes = int(size_gb * 1e9)
            require_free(options.folder, 2 * size_bytes, "the files that are read")
            with tempfile.TemporaryDirectory(dir=options.folder, prefix=".bench-load-") as name:
                show_status(f"writing {size_gb:g} GB")
                write_files(Path(name), size_bytes, torch="torch.load" in readers)
                found = _measure(Path(name), readers, rounds)
                read_bytes = (Path(name) / "model.safetensors").stat().st_size
            _show(size_gb, read_bytes, found, readers)
    copy_s, mesh_s = memcpy_s(read_bytes, rounds), median(found["mesh", WARM])
    limit_s = min(median(found[name, COLD]) for name in LIMITS)
    torch_s = found.get(("torch.load", COLD))
    cold_s = median(found["mesh", COLD])
    last_line(
        {
            "size_gb": rounded(read_bytes / 1e9),
            "limit": "own O_DIRECT loops, the best of them",
            "ssd_ratio_to_fio": rounded(limit_s / cold_s),
            "ratio_to_torch": rounded(median(torch_s) / cold_s if torch_s else None),
            "memory_ratio_to_memcpy": rounded(copy_s / mesh_s),
            "digest_cost_share": rounded(
                median(found["mesh, digests checked", COLD]) / cold_s - 1.0
            ),
        }
    )


def _peers(wanted: bool) -> dict[str, Reader]:
    """Those that can be had; of the others it is said that they are missing."""
    found = {}
    for name, (package, reader) in PEERS.items():
        if wanted and importlib.util.find_spec(package) is not None:
            found[name] = reader
        else:
            reason = f"{package} is not installed" if wanted else "--no-peers"
            output.message(f"without {name}: {reason}")
    return found


def _measure(folder: Path, readers: dict[str, Reader], rounds: int) -> Seconds:
    seconds: Seconds = defaultdict(list)
    order, rng = list({**readers, **LIMITS}.items()), random.Random(0)
    for number in range(rounds):
        # What a disk gives depends on what it was asked for just before.
        rng.shuffle(order)
        for name, reader in order:
            show_status(f"round {number + 1} of {rounds}: {name}")
            gc.collect()
            for path in folder.iterdir():
                forget(path)
            seconds[name, COLD].append(_timed(reader, folder))
            if name not in LIMITS:
                reader(folder)
                seconds[name, WARM].append(_timed(reader, folder))
    show_status("")
    return seconds


def _timed(reader: Reader, folder: Path) -> float:
    start_s = time.perf_counter()
    kept = reader(folder)
    elapsed_s = time.perf_counter() - start_s
    del kept
    return elapsed_s


def _show(size_gb: float, size_bytes: int, seconds: Seconds, readers: dict[str, Reader]) -> None:
    def rate(name: str, cache: str) -> str:
        taken = seconds.get((name, cache))
        return f"{size_bytes / 1e9 / median(taken):.2f}" if taken else "-"

    rows = [[name, rate(name, COLD), rate(name, WARM)] for name in (*readers, *LIMITS)]
    show_table(["READER", "COLD_GB_PER_S", "WARM_GB_PER_S"], rows, title=f"{size_gb:g} GB")


if __name__ == "__main__":
    main()
