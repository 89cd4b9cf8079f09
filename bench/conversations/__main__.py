"""How many calls of conversations one node answers in time, with its prefix cache and without.

Users ask, read and think (`mesh_workloads.conversations`); the most of them is looked for with
which 99 % of all calls are met, by TTFT with mean TPOT and by every token's deadline, live, and on
a virtual cell that a first run has calibrated. Each trial has tokens of its own. The last line is
one JSON object: `capacity_ratio` is the calls per second with the cache over those without,
`sim_difference` by what share the simulated capacity with the cache differs from the live one.
"""

import argparse
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path

from bench.cells import LOADED_S_MAX, local_cell, wait_calm
from bench.conversations.capacity import Trial, most
from bench.conversations.live import play
from bench.demo_model import SOURCE, stored_model
from bench.printing import errors_told, last_line, show_status, show_table
from mesh.cli.cell import LocalCell
from mesh.cli.waiting import Goal, wait_for
from mesh.domain.deployment import DeploymentSpec, Scaling
from mesh.domain.ids import DeploymentName
from mesh.domain.outcome import Outcome
from mesh.domain.slo import Slo
from mesh.evaluation.fidelity.live import live_run
from mesh.evaluation.fidelity.planning import simulate
from mesh.evaluation.fidelity.report import Calibrated, calibrated
from mesh.evaluation.judging import judge
from mesh.sim.workload import arrivals_of
from mesh.wire.client import MeshClient
from mesh_workloads.conversations import Conversations, generate
from mesh_workloads.trace import Trace

ON, OFF = DeploymentName("kept"), DeploymentName("computed")
SLO = Slo(ttft_s=1.0, tpot_s=0.12)
CONTEXT_TOKENS = 2048
SECONDS, QUICK_SECONDS = 90.0, 20.0
PROBE_USERS = 40
"""Enough for batches of all sizes: iterations of one or two take longer in service, over what the
profile says, than those of many.
"""
GUESS_USERS = 8
LEAD_S = 60.0
"""Virtual seconds before the first call, for loads."""

Play = Callable[[Trace, DeploymentName], Sequence[Outcome]]


class Bench:
    """A cell of one node, with its state in `folder`; both deployments are of the demo model."""

    def __init__(self, folder: Path, options: argparse.Namespace) -> None:
        self._home, self._journals = folder / "home", folder / "journals"
        self._home.mkdir()
        self._journals.mkdir()
        self._seconds = QUICK_SECONDS if options.quick else options.seconds
        self._seed = options.seed
        self._trials = count(1)

    def run(self) -> None:
        made = self._probed()
        simulated = partial(_simulated, made)
        expected = {
            name: most(self._trial(simulated, name, f"simulated, {name}"), GUESS_USERS)[0]
            for name in (ON, OFF)
        }
        found: dict[DeploymentName, Trial | None] = {}
        rows: list[tuple[str, Trial]] = [
            (f"{name}, simulated", trial) for name, trial in expected.items() if trial is not None
        ]
        with local_cell(home=self._home) as cell:
            self._ready(cell)
            for name in (ON, OFF):
                expectation = expected[name]
                guess = GUESS_USERS if expectation is None else expectation.users
                live = self._trial(partial(self._live, cell), name, f"live, {name}")
                found[name], trials = most(live, guess)
                rows += [(name, trial) for trial in trials]
        report(rows, found, expected)

    def _probed(self) -> Calibrated:
        """What a first run tells of the machine; what it has found out of the model's times stays
        in the cell's registry. Nothing is surveyed, but by the cell itself.
        """
        specs = [
            DeploymentSpec(
                name=name,
                source=SOURCE,
                context_tokens_max=CONTEXT_TOKENS,
                slo=SLO,
                scaling=Scaling(replicas_min=1, replicas_max=1, keep_alive_s=600.0),
                prefix_cache=name == ON,
            )
            for name in (ON, OFF)
        ]
        stored_model()
        with (
            local_cell(home=self._home, node_journals=self._journals) as cell,
            MeshClient(cell.address) as client,
        ):
            for spec in specs:
                client.deploy(spec)
            self._ready(cell)
            show_status(f"live, {PROBE_USERS} users, to calibrate")
            played = play(cell.address, ON, SLO, self._trace(PROBE_USERS), "probe")
            (node,) = client.nodes()
            views = client.profiles(ON)
        profile = next(v.profile for v in views if v.profile.fingerprint == node.fingerprint)
        run = live_run(
            self._home,
            self._journals / f"{node.node_id}.journal",
            node=node,
            profile=profile,
            calls=[one.call for one in played],
            answers=[one.answer for one in played],
            calibrated_s=self._seconds,
        )
        return calibrated(replace(run, lead_s=LEAD_S))

    def _ready(self, cell: LocalCell) -> None:
        with MeshClient(cell.address) as client:
            for name in (ON, OFF):
                wait_for(client, name, Goal.READY, LOADED_S_MAX)
        wait_calm(cell)

    def _trace(self, users: int) -> Trace:
        made = Conversations(
            duration_s=self._seconds,
            users=users,
            token_s=SLO.tpot_s,
            first_token_s=SLO.ttft_s,
            context_tokens_max=CONTEXT_TOKENS,
        )
        return generate(made, self._seed)

    def _trial(self, player: Play, name: DeploymentName, told: str) -> Callable[[int], Trial]:
        def trial(users: int) -> Trial:
            trace = self._trace(users)
            show_status(f"{told}: {users} users, {len(trace.arrivals)} calls")
            outcomes = player(trace, name)
            met = [outcome.met_in_the_mean_without_grace for outcome in outcomes]
            every = [outcome.met_without_grace for outcome in outcomes]
            return Trial(
                users=users,
                calls_per_s=len(trace.arrivals) / trace.duration_s,
                met_share=sum(met) / len(met),
                met_every_token_share=sum(every) / len(every),
            )

        return trial

    def _live(self, cell: LocalCell, trace: Trace, name: DeploymentName) -> list[Outcome]:
        played = play(cell.address, name, SLO, trace, f"trial {next(self._trials)}")
        cell.check_alive()
        judged = judge([one.call for one in played], [one.answer for one in played])
        return [each.outcome for each in judged.all]


def _simulated(made: Calibrated, trace: Trace, name: DeploymentName) -> tuple[Outcome, ...]:
    costs = replace(made.costs, pace=made.pace, jitter=made.jitter)
    return simulate(made.cell, costs, list(arrivals_of(trace, [name])), lead_s=LEAD_S)


def report(
    rows: Sequence[tuple[str, Trial]],
    found: dict[DeploymentName, Trial | None],
    expected: dict[DeploymentName, Trial | None],
) -> None:
    show_table(
        ("prefixes", "users", "calls/s", "met", "every token"),
        [
            (
                name,
                str(one.users),
                f"{one.calls_per_s:.2f}",
                f"{one.met_share:.3f}",
                f"{one.met_every_token_share:.3f}",
            )
            for name, one in rows
        ],
        title=f"TTFT {SLO.ttft_s:g} s, TPOT {SLO.tpot_s:g} s",
    )
    ratio, simulated_ratio = _ratio(found[ON], found[OFF]), _ratio(expected[ON], expected[OFF])
    over = _ratio(expected[ON], found[ON])
    last_line(
        {
            "capacity_ratio": ratio,
            "capacity_ratio_simulated": simulated_ratio,
            "sim_difference": None if over is None else round(over - 1.0, 3),
            "calls_per_s": {name: one and round(one.calls_per_s, 3) for name, one in found.items()},
            "calls_per_s_simulated": {
                name: one and round(one.calls_per_s, 3) for name, one in expected.items()
            },
            "users": {name: one and one.users for name, one in found.items()},
        },
        surveyed=False,
    )


def _ratio(one: Trial | None, other: Trial | None) -> float | None:
    if one is None or other is None:
        return None
    return round(one.calls_per_s / other.calls_per_s, 3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=SECONDS, help="of a trial")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--quick", action="store_true", help="short trials, to see that it works")
    options = parser.parse_args()
    if not options.seconds >= QUICK_SECONDS:
        parser.error(f"--seconds must be {QUICK_SECONDS:g} or more")
    with errors_told(), tempfile.TemporaryDirectory() as folder:
        Bench(Path(folder), options).run()


if __name__ == "__main__":
    main()
