"""Calls each of 20 deployments once from zero, and compares what callers are told with what comes.

Each has a model of its own, of the demo model's shape. In two scenes, each on a fresh cell that
knows no profile and no load time: one call after the other, and all at once. There is memory for
all. A caller is told when it is admitted by how much its first token will be late for the sake of a
load, if at all. How long loads were expected to take is compared with what they took. The last line
is one JSON object, with lists by scene: `late_over_told` is by how much first tokens were late over
what was told. Exit code 1 when a target was missed.
"""

import argparse
import random
import shutil
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from bench.cells import local_cell
from bench.late_starts.report import Scene, report, targets
from bench.own_models import own_source, plant_models
from bench.printing import errors_told, exit_by, show_status
from mesh.domain.deployment import DeploymentSpec
from mesh.domain.ids import DeploymentName
from mesh.domain.slo import Slo
from mesh.evaluation.judging import judge
from mesh.evaluation.load_client import Answer, Call, offer
from mesh.wire.client import MeshClient

DEPLOYMENTS = 20
SLO = Slo(ttft_s=2.0, tpot_s=0.25)
CONTEXT_TOKENS = 1024
PROMPT_TOKENS, OUTPUT_TOKENS = 27, 32
TOKEN_IDS = range(100, 2000)
CALL_S_MAX = 180.0

Offer = Callable[[str, Sequence[Call]], list[Answer]]


def one_by_one(address: str, calls: Sequence[Call]) -> list[Answer]:
    """Each when the one before it has ended."""
    return [answer for call in calls for answer in offer(address, [call], call_s_max=CALL_S_MAX)]


def all_at_once(address: str, calls: Sequence[Call]) -> list[Answer]:
    return offer(address, calls, call_s_max=CALL_S_MAX)


SCENES: dict[str, Offer] = {"one by one": one_by_one, "all at once": all_at_once}


def drawn_calls(deployments: int, seed: int) -> list[Call]:
    draw = random.Random(seed)
    return [
        Call(
            at_s=0.0,
            deployment=DeploymentName(f"late-{number:02}"),
            slo=SLO,
            prompt_tokens=tuple(draw.choices(TOKEN_IDS, k=PROMPT_TOKENS)),
            output_tokens=OUTPUT_TOKENS,
        )
        for number in range(1, deployments + 1)
    ]


def play(name: str, offered: Offer, calls: Sequence[Call], store: Path) -> Scene:
    """Raises MeshError when a part of the cell ends."""
    with local_cell(store=store) as cell:
        with MeshClient(cell.address) as client:
            for call in calls:
                show_status(f"{name}: deploy {call.deployment}")
                client.deploy(
                    DeploymentSpec(
                        name=call.deployment,
                        source=own_source(call.deployment),
                        context_tokens_max=CONTEXT_TOKENS,
                        slo=call.slo,
                    )
                )
        show_status(f"{name}: {len(calls)} calls")
        answers = offered(cell.address, calls)
        cell.check_alive()
        with MeshClient(cell.address) as client:
            instances = [i for deployment in client.list() for i in deployment.instances]
    loads = tuple(i for i in instances if i.tier is not None)
    return Scene(name=name, judged=judge(calls, answers), loads=loads)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--deployments", type=int, default=DEPLOYMENTS, help="(%(default)s)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--uncompiled", action="store_true", help="the shape has no blob when a scene begins"
    )
    options = parser.parse_args()
    with errors_told(), tempfile.TemporaryDirectory() as folder:
        store = Path(folder)
        calls = drawn_calls(options.deployments, options.seed)
        plant_models(store, [call.deployment for call in calls])
        scenes = []
        for name, offered in SCENES.items():
            if options.uncompiled:
                shutil.rmtree(store / "compiled", ignore_errors=True)
            scenes.append(play(name, offered, calls, store))
    report(scenes)
    exit_by(targets(scenes))


if __name__ == "__main__":
    main()
