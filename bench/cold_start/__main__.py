"""From a request to its first token, by where the model's weights are, beside other engines.

For each model, in turns and by the caller's clock: mesh with the model loaded but parked, with
another instance of it in memory, and from its files, in the page cache and out of it; the same with
a compile; OpenVINO GenAI's model cache and llama.cpp's mapped file, in processes of their own. What
a start adds to a warm first token is set beside its floor, the weights' bytes at the rate of memcpy
or of the disk. The last line is one JSON object, of the demo model, with `models` of all. Exit code
1 when a target was missed for the demo model.
"""

import argparse
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from bench.cold_start.cell import starts
from bench.cold_start.files import bring, forget, rates
from bench.cold_start.peers import PACKAGES, installed, started, starter
from bench.cold_start.report import Measured, report, targets
from bench.cold_start.shapes import DEMO, SHAPES, Forms, made
from bench.cold_start.starts import Engine, Start, Tier
from bench.demo_model import store_path
from bench.peer import Peer
from bench.printing import errors_told, exit_by, show_status
from mesh.domain.errors import Unavailable
from mesh_nodes.gpus import Gpus

ROUNDS = 5
QUICK_ROUNDS = 2

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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", choices=list(SHAPES), default=list(SHAPES))
    parser.add_argument("--rounds", type=int, default=None, help=f"({ROUNDS})")
    parser.add_argument("--quick", action="store_true", help="the demo model, two rounds")
    parser.add_argument("--no-peers", dest="peers", action="store_false", help="mesh alone")
    parser.add_argument("--gpu", action="store_true", help="with a row for one")
    options = parser.parse_args()
    names = [DEMO] if options.quick else list(dict.fromkeys(options.models))
    rounds = options.rounds or (QUICK_ROUNDS if options.quick else ROUNDS)
    measured = []
    with errors_told():
        for name in names:
            # Of gigabytes: beside the store, and no longer than it is measured.
            kept = store_path().parent / "bench"
            kept.mkdir(exist_ok=True)
            with tempfile.TemporaryDirectory(dir=kept, prefix="cold-start-") as folder:
                show_status(f"{name}: the model, for each engine")
                forms = made(name, Path(folder))
                measured.append(measure(forms, rounds, peers=options.peers))
    missing = [engine for engine in PACKAGES if not (options.peers and installed(engine))]
    report(measured, missing, no_gpu() if options.gpu else None)
    exit_by(targets(measured[0]))


if __name__ == "__main__":
    main()
