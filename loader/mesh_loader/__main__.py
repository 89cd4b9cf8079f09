"""`python -m mesh_loader import SOURCE --store DIR`: one import in a process of its own.

Writes the lines of protocol to stdout and ends with 0, or with 1 after an error line. SIGTERM stops
it cleanly. Node agents start it through importing, so that an import never disturbs serving.
"""

import argparse
import os
import signal
import sys
import threading
from pathlib import Path
from types import FrameType

from mesh.domain.errors import Cancelled, MeshError, ModelError
from mesh.domain.model import WeightPrecision
from mesh_loader.bounded_child import die_with_parent, end_first
from mesh_loader.protocol import Reporter, error_line, model_line, write_line
from mesh_loader.reach import Reach
from mesh_loader.store import ModelStore

STOP_GRACE_S = 3.0
"""After SIGTERM, how long the cleaning up may take before the process just ends."""
NICE = 10
"""Below the serving processes: an import may take longer, a token may not."""


def main(arguments: list[str]) -> int:
    options = _parser().parse_args(arguments)
    try:
        if options.parent is not None:
            die_with_parent(options.parent, signal.SIGKILL)
        os.nice(NICE)
        end_first()
        signal.signal(signal.SIGTERM, _stop)
        store = ModelStore(
            options.store,
            download_bytes_per_s=options.download_rate,
            as_is=options.as_is.split(",") if options.as_is else (),
            plain=options.plain,
            reach=Reach(named=tuple(options.reach)),
        )
        weights = WeightPrecision(options.weights) if options.weights else None
        stored = store.import_model(options.source, Reporter().report, weights=weights)
    except MeshError as error:
        write_line(error_line(error))
        return 1
    except Exception as error:
        what = f"the import of {options.source} failed: {type(error).__name__}: {error}"
        write_line(error_line(ModelError(" ".join(what.split()))))
        raise
    write_line(model_line(stored))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m mesh_loader", description=__doc__)
    verbs = parser.add_subparsers(required=True)
    verb = verbs.add_parser("import", help="import a model into a store")
    verb.add_argument("source")
    verb.add_argument("--store", type=Path, required=True)
    verb.add_argument(
        "--download-rate", type=float, metavar="BYTES", help="a second, for all imports that say so"
    )
    verb.add_argument(
        "--as-is", metavar="A,B", help="architectures that may be taken without mesh's knowing them"
    )
    verb.add_argument(
        "--plain", action="store_true", help="refuse what its makers quantised, before it is read"
    )
    verb.add_argument("--weights", choices=list(WeightPrecision), help="how it is to be held")
    verb.add_argument(
        "--reach",
        action="append",
        default=[],
        metavar="HOST",
        help="a host that may have a private address: HOST, HOST:PORT or a network; repeatable",
    )
    verb.add_argument("--parent", type=int, help="end when the process with this id ends")
    return parser


def _stop(signal_number: int, frame: FrameType | None) -> None:
    # A download library may hold the main thread up for long; the next import sweeps what is left.
    timer = threading.Timer(STOP_GRACE_S, os._exit, (1,))
    timer.daemon = True
    timer.start()
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise Cancelled("the import was stopped")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
