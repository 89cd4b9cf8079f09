"""Offers a cell of an OpenVINO node and a vLLM node bursts that the first cannot compute alone.

Shadow validation sends what is too much for the first node to the second, and the quiet after each
burst comes back. The client times every token. The last line is one JSON object: `met_share` is of
the tokens of admitted requests, `spilled` counts requests of bursts that the second node served,
`returned` those after bursts that the first one did.
"""

import argparse
import tempfile
from pathlib import Path

from bench.mixed.cell import mixed_cell
from bench.mixed.report import report
from bench.mixed.running import model_in, promise, run
from bench.mixed.workload import Requests
from bench.printing import errors_told, show_status

ROUNDS, QUIET_REQUESTS = 6, 6
REQUESTS = Requests(prompt_tokens=64, served_s=4.0, ttft_s=8.0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="bursts")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    with errors_told(), tempfile.TemporaryDirectory() as folder, mixed_cell(Path(folder)) as cell:
        sized = promise(cell, model_in(Path(folder)), REQUESTS, show_status)
        made = run(
            cell,
            sized,
            rounds=options.rounds,
            quiet_requests=QUIET_REQUESTS,
            seed=options.seed,
            note=show_status,
        )
    report(made)


if __name__ == "__main__":
    main()
