"""What a scenario's file may not say is refused with its place and what would do there."""

from dataclasses import asdict
from pathlib import Path

import pytest

from mesh.domain.errors import InvalidInput, NotFound
from mesh.domain.limits import CellLimits
from mesh.sim.scenario import NOT_0, read_scenario
from tests.sim.scenarios import SMALL, scenario

FAULTS = "[faults]\nper_minute = { crash = 1 }\nuntil_s = "


@pytest.mark.parametrize(
    ("was", "now", "said"),
    [
        ("count = 3", "count = 4.5", "deployments[0].count: 4.5 is not a whole number"),
        ("count = 3", 'count = "3"', "deployments[0].count: '3' is not a whole number"),
        ("memory_gib = 64", "memory_gib = true", "nodes[0].memory_gib: True is not a number"),
        ("memory_gib = 64", "", "nodes[0].memory_gib: it is missing"),
        ('model = "llama-2-7b"', "model = 7", "deployments[0].model: 7 is not text"),
        ('device = "cpu"', 'device = "tpu"', "nodes[0].device: 'tpu' is none of cpu, gpu"),
        ("seed = 3", "sead = 3", "there is no sead here; did you mean seed?"),
        ("[workload]", "[workload]\nspeed = 2", "workload: there is no speed here; there are dur"),
        ("seed = 3", FAULTS + '9\nvary = "false"', "faults.vary: 'false' is not true or false"),
    ],
)
def test_a_value_of_another_kind_is_not_turned_into_one(
    tmp_path: Path, was: str, now: str, said: str
) -> None:
    assert was in SMALL
    text = SMALL.replace(was, now, 1)
    if FAULTS in now:  # a table ends where the next one begins
        text = SMALL + now
    with pytest.raises(InvalidInput) as raised:
        scenario(tmp_path, text)
    assert f"small.toml: {said}" in raised.value.message
    assert "docs/simulator.md" in raised.value.hint


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ("[limits]\nbatch_max = 0", "limits: batch_max is 0; it must be above 0"),
        ("[limits]\nlease_check_s = 0.0", "limits: lease_check_s is 0"),
        ("[limits]\nparked_s_max = -1", "limits: parked_s_max is -1; it must be 0 or more"),
        (FAULTS + "inf", "until_s is inf; it must be above 0 and at most 86400"),
    ],
)
def test_what_would_never_end_or_never_begin_is_refused(
    tmp_path: Path, more: str, said: str
) -> None:
    with pytest.raises(InvalidInput, match=said):
        scenario(tmp_path, SMALL + more)


def test_limits_that_must_not_be_0_are_limits_of_a_cell() -> None:
    made = asdict(CellLimits())
    assert set(made) >= NOT_0
    assert all(made[name] != 0 for name in NOT_0)


@pytest.mark.parametrize(
    ("was", "now", "said"),
    [
        ("memory_gib = 64", "memory_gib = inf", "memory_gib is inf"),
        ("memory_gib = 64", "memory_gib = 64\ncosts = { load_s = inf }", "load_s is inf"),
        ("memory_gib = 64", "memory_gib = 64\nprocesses = 50", "beside its processes is -11"),
        ("seed = 3", "output_tokens_max = 0", "output_tokens_max is 0; it must be above 0"),
        ("memory_gib = 64", "memory_gib = 64\ncosts = { factor = inf }", "factor is inf"),
        ("seed = 3", "link_delay_s = inf", "link_delay_s is inf"),
        ("seed = 3", "seed = -3", "seed is -3; it must be 0 or more"),
    ],
)
def test_what_must_be_finite_is(tmp_path: Path, was: str, now: str, said: str) -> None:
    with pytest.raises(InvalidInput, match=said):
        scenario(tmp_path, SMALL.replace(was, now, 1))


def test_a_whole_number_does_where_any_number_does_and_what_may_be_0_is(tmp_path: Path) -> None:
    read = scenario(tmp_path, SMALL + "[limits]\nparked_s_max = 0\nevictions_max = 0")
    assert (read.limits.parked_s_max, read.limits.evictions_max) == (0.0, 0)
    assert isinstance(read.limits.parked_s_max, float)


def test_a_file_that_cannot_be_read_is_not_found_and_says_why(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match=r"absent.toml: no such file") as raised:
        read_scenario(tmp_path / "absent.toml")
    assert "workloads/" in raised.value.hint
    with pytest.raises(NotFound, match="is a directory"):
        read_scenario(tmp_path)
    (tmp_path / "bytes.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(InvalidInput, match=r"bytes.toml is no TOML"):
        read_scenario(tmp_path / "bytes.toml")
