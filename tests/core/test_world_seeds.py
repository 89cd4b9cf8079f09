"""Long seeded runs of both cores with everything in them: bursts, growth, faults, and time to work.

Hypothesis shrinks what it finds, but leaves most rules out of most runs; these runs keep nodes busy
and short of memory, and say so if they become tame. `MESH_WORLD_RUNS` says how many there are of
each policy, each of about a thousand events of the cores; a run that fails prints its seed.
`MESH_WORLD_SEED` is that of the first.
"""

import os
from collections import Counter
from random import Random

import pytest

from mesh.domain.events import OperationCancelled
from mesh.domain.ids import DeploymentName
from tests.core.test_world import CellMachine, FirstComeCellMachine, SharingCellMachine
from tests.support.depth import DEEP

RUNS = int(os.environ.get("MESH_WORLD_RUNS") or (40 if DEEP else 2))
CALLS = 60
MANY = 40
"""Runs, in which whatever is rare has happened."""
Call = tuple[str, dict[str, object]]
WEIGHTS = {
    "serve": 30,
    "invoke": 18,
    "ask_for_several": 4,
    "compute": 5,
    "loading": 3,
    "deliver_up": 4,
    "deliver_down": 4,
    "connect": 6,
    "run_well": 2,
    "dial": 2,
    "advance": 6,
    "cancel": 3,
    "profile": 2,
    "cancel_profile": 1,
    "scale": 2,
    "deploy": 2,
    "undo": 1,
    "delete": 1,
    "drain": 2,
    "undrain": 3,
    "break_link": 3,
    "crash": 1,
    "fail_a_load": 1,
    "fail_a_step": 1,
    "fail_a_measurement": 1,
    "fail_a_resize": 3,
    "lose_an_instance": 1,
    "restart_controller": 0.3,
}
OFTEN = {
    "controller events": 300.0,
    "node events": 300.0,
    "ended length": 4.0,
    "grows": 4.0,
    "shrinks": 2.0,
    "waits": 2.0,
    "woken": 1.5,
    "starvations": 4.0,
    "evictions": 0.2,
    "parks": 0.4,
    "resumes": 0.08,
    "reclaims": 0.08,
    "expiries": 0.04,
    "failed resizes": 0.2,
    "short shrinks": 0.08,
    "failed loads": 0.04,
    "loads given up": 0.04,
    "prefetches": 0.05,
}
"""What a run has at least, in the mean of all."""


def draw(random: Random) -> Call:
    (name,) = random.choices(list(WEIGHTS), list(WEIGHTS.values()))
    node, which = random.randrange(3), DeploymentName(random.choice("aabcccd"))
    arguments: dict[str, dict[str, object]] = {
        "serve": {"rounds": random.choice((2, 10, 30, 60)), "step_s": random.choice((0.001, 0.01))},
        "invoke": {
            "name": which,
            "prompt": random.choice((1, 8, 8, 100, 100, 300, 450, 600)),
            "max_tokens": random.choice((1, 8, 40, 120, 400)),
            "count": random.randint(1, 4),
        },
        "ask_for_several": {
            "name": which,
            "prompt": random.choice((1, 8, 100, 300)),
            "max_tokens": random.choice((1, 8, 40)),
            "count": random.randint(2, 5),
        },
        "compute": {
            "node": node,
            "steps": random.randint(1, 6),
            "step_s": random.choice((0.0, 0.001, 0.01, 0.1)),
        },
        "deliver_up": {"node": node, "count": random.randint(1, 6)},
        "deliver_down": {"node": node, "count": random.randint(1, 6)},
        "advance": {"by_s": random.choice((0.1, 1.1, 1.1, 5.0, 11.0, 31.0))},
        "cancel": {"pick": random.randrange(64)},
        "cancel_profile": {"pick": random.randrange(64)},
        "profile": {"name": which, "node": random.choice((None, node))},
        "scale": {"name": which, "low": random.choice((0, 0, 1, 3))},
        "deploy": {
            "name": which,
            "low": 0,
            "changed": random.random() < 0.5,
            "cancelled": random.random() < 0.2,
        },
        "undo": {"name": which, "to": random.choice((None, None, 1, 2))},
        "delete": {"name": which},
        "drain": {"node": node, "undo": False},
        "undrain": {"node": node},
        "lose_an_instance": {"node": node, "pick": random.randrange(8)},
        "crash": {"node": node, "noticed": random.random() < 0.5},
        "restart_controller": {},
    }
    return name, arguments.get(name, {"node": node})


def make(machine: CellMachine, call: Call) -> None:
    """One call, and all that has to hold after it."""
    name, arguments = call
    world = machine.world
    match name:
        case "cancel":
            running = world.callers.open_ids()
            if running:
                world.cancel(running[int(str(arguments["pick"])) % len(running)])
        case "cancel_profile":
            if machine.profiles:
                made = machine.profiles[int(str(arguments["pick"])) % len(machine.profiles)]
                world.tell(OperationCancelled(operation_id=made))
        case "undrain":
            machine.drain(**arguments, undo=True)
        case "delete" if len(world.registry.deployments) <= 2:
            pass
        case "restart_controller" if world.epoch >= 3:
            pass
        case _:
            getattr(machine, name)(**arguments)
    for rule in machine.invariants:
        rule.function(machine)


def run(kind: type[CellMachine], calls: list[Call]) -> Counter[str]:
    machine = kind()
    machine.begin(up=True)
    for call in calls:
        make(machine, call)
    seen = machine.world.seen()
    seen.update(f"ended {outcome.end}" for outcome in machine.world.callers.outcomes)
    machine.teardown()
    return seen


@pytest.mark.parametrize("kind", [CellMachine, FirstComeCellMachine, SharingCellMachine])
@pytest.mark.timeout(3600)
def test_seeded_runs(kind: type[CellMachine]) -> None:
    seen: Counter[str] = Counter()
    first = int(os.environ.get("MESH_WORLD_SEED") or 0)
    for seed in range(first, first + RUNS):
        random = Random(seed)
        try:
            seen += run(kind, [draw(random) for _ in range(CALLS)])
        except Exception as error:
            error.add_note(f"seed={seed} of {kind.__name__}")
            raise
    tame = {name: seen[name] for name, least in OFTEN.items() if seen[name] < least * RUNS}
    assert RUNS < MANY or not tame, f"too few of these in {RUNS} runs: {tame}"
