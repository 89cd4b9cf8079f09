"""How many calls of conversations one node answers in time, with its prefix cache and without.

Users ask, read and think (`mesh_workloads.conversations`); the most of them is looked for with
which 99 % of all calls are met, by TTFT with mean TPOT and by every token's deadline, live, and on
a virtual cell that a first run has calibrated. Each trial has tokens of its own. The last line is
one JSON object: `capacity_ratio` is the calls per second with the cache over those without,
`sim_difference` by what share the simulated capacity with the cache differs from the live one.
"""

import asyncio
import random
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import count, groupby
from pathlib import Path

from bench.cells import LOADED_S_MAX, local_cell, wait_calm
from bench.demo_model import SOURCE, stored_model
from bench.harness import Report, Table, show_status
from mesh.cli.cell import LocalCell
from mesh.cli.waiting import Goal, wait_for
from mesh.domain.deployment import DeploymentSpec, Scaling
from mesh.domain.errors import InvalidInput
from mesh.domain.ids import DeploymentName
from mesh.domain.invocation import Tokens
from mesh.domain.outcome import Outcome
from mesh.domain.slo import Slo
from mesh.evaluation.fidelity.live import live_run
from mesh.evaluation.fidelity.planning import simulate
from mesh.evaluation.fidelity.report import Calibrated, calibrated
from mesh.evaluation.judging import judge
from mesh.evaluation.load_client import Answer, Call, Invoke, heard, invoke_of, request_of
from mesh.sim.workload import arrivals_of
from mesh.wire.channel import dial
from mesh.wire.client import MeshClient
from mesh_workloads.conversations import Conversations, generate
from mesh_workloads.trace import Arrival, Trace, Turn

STEP = 1.1
"""From a rung to the next."""
USERS_MAX = 2000
MET_LEAST = 0.99
"""The least share of all calls that must be met, by either measure."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    users: int
    calls_per_s: float
    met_share: float
    """TTFT and mean TPOT."""
    met_every_token_share: float

    @property
    def passes(self) -> bool:
        return min(self.met_share, self.met_every_token_share) >= MET_LEAST


def rungs() -> list[int]:
    """Numbers of users, ascending."""
    found, users = [1], 1.0
    while users < USERS_MAX:
        users *= STEP
        if round(users) > found[-1]:
            found.append(round(users))
    return found


def most(trial: Callable[[int], Trial], guess: int) -> tuple[Trial | None, list[Trial]]:
    """The highest rung that passes, next to one that does not; and all trials. None: none does."""
    ladder = rungs()
    at = min(range(len(ladder)), key=lambda n: abs(ladder[n] - guess))
    trials = [trial(ladder[at])]
    upwards = trials[0].passes
    while True:
        at += 1 if upwards else -1
        if not 0 <= at < len(ladder):
            break
        trials.append(trial(ladder[at]))
        if trials[-1].passes is not upwards:
            break
    passed = [one for one in trials if one.passes]
    return max(passed, key=lambda one: one.users, default=None), trials


TOKEN_IDS = range(1000, 40_000)
CALL_S_MAX = 60.0
LEAD_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Played:
    call: Call
    answer: Answer


def play(address: str, name: DeploymentName, slo: Slo, trace: Trace, seed: str) -> list[Played]:
    """In the order of their sending. With another seed conversations have other tokens, but for
    what all of the trace's function begin with.
    """
    return asyncio.run(_play(address, name, slo, trace, seed))


def _talks(trace: Trace) -> Iterator[list[tuple[Turn, Arrival]]]:
    turns = [(a.turn, a) for a in trace.arrivals if a.turn is not None]
    turns.sort(key=lambda pair: (pair[0].conversation, pair[1].t_s))
    for _, talk in groupby(turns, key=lambda pair: pair[0].conversation):
        yield list(talk)


async def _play(
    address: str, name: DeploymentName, slo: Slo, trace: Trace, seed: str
) -> list[Played]:
    async with dial(address) as channel:
        invoke, start_s = invoke_of(channel), time.monotonic() + LEAD_S
        talks = [_talk(invoke, name, slo, talk, start_s, seed) for talk in _talks(trace)]
        played = [one for talk in await asyncio.gather(*talks) for one in talk]
    return sorted(played, key=lambda one: one.answer.sent_s)


async def _talk(
    invoke: Invoke,
    name: DeploymentName,
    slo: Slo,
    turns: Sequence[tuple[Turn, Arrival]],
    start_s: float,
    seed: str,
) -> list[Played]:
    played: list[Played] = []
    turn, first = turns[0]
    draw = random.Random(f"{seed}/{turn.conversation}")
    system = random.Random(f"system of {first.function}")
    said = system.choices(TOKEN_IDS, k=turn.system_tokens)
    for _, arrival in turns:
        await asyncio.sleep(max(start_s + arrival.t_s - time.monotonic(), 0.0))
        # What an answer lacks, where it was refused, is made up.
        missing = max(arrival.input_tokens - len(said), 0)
        prompt = (said + draw.choices(TOKEN_IDS, k=missing))[: arrival.input_tokens]
        sent_s = time.monotonic()
        call = Call(
            at_s=sent_s - start_s,
            deployment=name,
            slo=slo,
            prompt_tokens=tuple(prompt),
            output_tokens=arrival.output_tokens,
        )
        stream = invoke(request_of(call).SerializeToString(), timeout=CALL_S_MAX)
        answer, events = await heard(stream, sent_s)
        played.append(Played(call=call, answer=answer))
        tokens = [event.token_ids for _, event in events if isinstance(event, Tokens)]
        said = prompt + [token_id for ids in tokens for token_id in ids]
    return played


ON, OFF = DeploymentName("kept"), DeploymentName("computed")
SLO = Slo(ttft_s=1.0, tpot_s=0.12)
CONTEXT_TOKENS = 2048
SECONDS, QUICK_SECONDS = 90.0, 20.0
PROBE_USERS = 40
"""Enough for batches of all sizes: iterations of one or two take longer in service, over what the
profile says, than those of many.
"""
GUESS_USERS = 8
SIM_LEAD_S = 60.0
"""Virtual seconds before the first call, for loads."""

Play = Callable[[Trace, DeploymentName], Sequence[Outcome]]


class Bench:
    """A cell of one node, with its state in `folder`; both deployments are of the demo model."""

    def __init__(self, folder: Path, seconds: float, seed: int) -> None:
        self._home, self._journals = folder / "home", folder / "journals"
        self._home.mkdir()
        self._journals.mkdir()
        self._seconds = seconds
        self._seed = seed
        self._trials = count(1)

    def run(self) -> Report:
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
        return report(rows, found, expected)

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
        return calibrated(replace(run, lead_s=SIM_LEAD_S))

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
    return simulate(made.cell, costs, list(arrivals_of(trace, [name])), lead_s=SIM_LEAD_S)


def _ratio(one: Trial | None, other: Trial | None) -> float | None:
    if one is None or other is None:
        return None
    return round(one.calls_per_s / other.calls_per_s, 3)


def report(
    rows: Sequence[tuple[str, Trial]],
    found: dict[DeploymentName, Trial | None],
    expected: dict[DeploymentName, Trial | None],
) -> Report:
    table = Table(
        headings=("prefixes", "users", "calls/s", "met", "every token"),
        rows=[
            (
                *(name, str(one.users), f"{one.calls_per_s:.2f}"),
                *(f"{one.met_share:.3f}", f"{one.met_every_token_share:.3f}"),
            )
            for name, one in rows
        ],
        title=f"TTFT {SLO.ttft_s:g} s, TPOT {SLO.tpot_s:g} s",
    )
    over = _ratio(expected[ON], found[ON])
    return Report(
        figures={
            "capacity_ratio": _ratio(found[ON], found[OFF]),
            "capacity_ratio_simulated": _ratio(expected[ON], expected[OFF]),
            "sim_difference": None if over is None else round(over - 1.0, 3),
            "calls_per_s": {name: one and round(one.calls_per_s, 3) for name, one in found.items()},
            "calls_per_s_simulated": {
                name: one and round(one.calls_per_s, 3) for name, one in expected.items()
            },
            "users": {name: one and one.users for name, one in found.items()},
        },
        shown=[table],
    )


def run(*, seconds: float = SECONDS, seed: int = 1, quick: bool = False) -> Report:
    if seconds < QUICK_SECONDS:
        raise InvalidInput(f"a trial of {seconds:g} s is shorter than {QUICK_SECONDS:g} s")
    with tempfile.TemporaryDirectory() as folder:
        return Bench(Path(folder), QUICK_SECONDS if quick else seconds, seed).run()
