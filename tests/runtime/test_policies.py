"""A policy by its name or from a file; when a node dials anew; what a process writes."""

import json
import os
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from mesh.domain.errors import InvalidInput
from mesh.policy.rules.registry import rule_named
from mesh.policy.rules.turns import name_of
from mesh.runtime.link_life import ROUND_S_MAX, CellEpoch, LinkLife, LinkLimits
from mesh.runtime.policies import policy_of, rule_of_file

WRONG = """
from dataclasses import replace
from mesh.policy.fcfs import FCFS
POLICY = replace(FCFS, promises=True)
"""
EXAMPLES = Path(__file__).parents[2] / "examples" / "policies"


def test_one_is_found_by_its_name_and_one_in_its_file() -> None:
    assert policy_of("fcfs").name == "fcfs"
    assert policy_of(str(EXAMPLES / "lru_swap.py")).name == "lru-swap"


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("x = 1", "has no POLICY"),
        ("POLICY = 'llm-mesh'", "has a POLICY without name"),
        ("1 / 0", "cannot be run: ZeroDivisionError"),
        (
            WRONG,
            "nothing can be promised by its turn rule 'first_come'",
        ),
    ],
)
def test_a_file_that_has_none_says_what_is_wrong(tmp_path: Path, text: str, why: str) -> None:
    path = tmp_path / "mine.py"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(InvalidInput, match=why):
        policy_of(str(path))
    with pytest.raises(InvalidInput, match="no policy file"):
        policy_of(str(tmp_path / "other.py"))


OWN_RULE = """
from dataclasses import dataclass, replace
from typing import ClassVar
from mesh.policy.fcfs import FCFS
from mesh.policy.rules.first_come import FirstCome

@dataclass(frozen=True)
class Own(FirstCome):
    quota: int = 3
    name: ClassVar[str] = "own"

POLICY = replace(FCFS, rule=Own(quota=5))
"""


def test_a_node_runs_the_rule_of_its_own_file_if_that_is_the_controllers(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(OWN_RULE, encoding="utf-8")
    told, own = name_of(policy_of(str(path)).rule), rule_of_file(str(path))
    assert (told.name, told.parameters, len(told.digest)) == ("own", (("quota", 5),), 16)
    assert rule_named(told, own) == own
    assert rule_named(replace(told, parameters=(("quota", 7.0),)), own) == type(own)(quota=7)  # type: ignore[call-arg]
    path.write_text(OWN_RULE + "# another", encoding="utf-8")
    with pytest.raises(InvalidInput, match=f"no turn rule 'own' of digest {told.digest}"):
        rule_named(told, rule_of_file(str(path)))
    with pytest.raises(InvalidInput, match="does not take"):
        rule_named(replace(told, parameters=(("speed", 7.0),)), own)


def test_a_policy_by_name_or_of_a_built_in_rule_brings_none_along() -> None:
    for text in ("", "fcfs", str(EXAMPLES / "lru_swap.py")):
        assert rule_of_file(text) is None


def life(seed: int = 1) -> LinkLife:
    return LinkLife(random.Random(seed), LinkLimits())


def test_pauses_double_are_bounded_and_spread() -> None:
    pauses = []
    for seed in range(50):
        made = life(seed)
        pauses.append([made.end("Unavailable") or 0.0 for _ in range(12)])
    assert all(0.1 <= dials[0] <= 0.2 for dials in pauses), "one failure has doubled it once"
    assert all(2.5 <= dials[-1] <= 5.0 for dials in pauses)
    assert len({dials[3] for dials in pauses}) > 40


def test_a_welcome_begins_anew() -> None:
    made = life()
    for _ in range(9):
        made.end("Unavailable")
    made.welcome()
    pause_s = made.end("Unavailable")
    assert pause_s is not None
    assert pause_s <= 0.1
    assert not made.welcomed


def test_what_waiting_does_not_heal_ends_it_before_a_welcome_alone() -> None:
    for error in ("AlreadyExists", "InvalidInput", "Unauthenticated", "Forbidden"):
        made = life()
        assert made.end(error) is None
        made.welcome()
        assert made.end(error) is not None


SAYS = """
import logging
from mesh.runtime.logs import begin_logging
begin_logging(logging.INFO, "%(levelname)s %(message)s")
logging.getLogger("mesh.it").info("%d of %s", 3, "chat")
try:
    1 / 0
except ZeroDivisionError:
    logging.getLogger("mesh.it").exception("no")
"""


def said(form: str | None) -> "subprocess.CompletedProcess[str]":
    given = {} if form is None else {"MESH_LOG": form}
    env = {name: value for name, value in os.environ.items() if name != "MESH_LOG"}
    return subprocess.run(
        [sys.executable, "-c", SAYS], env={**env, **given}, capture_output=True, text=True
    )


def test_lines_are_for_people_unless_json_is_asked_for() -> None:
    for form in (None, "", "text"):
        assert said(form).stderr.splitlines()[0] == "INFO 3 of chat"
    first, second = (json.loads(line) for line in said("json").stderr.splitlines())
    assert (first["level"], first["logger"], first["message"]) == ("INFO", "mesh.it", "3 of chat")
    assert first["timestamp"] < second["timestamp"]
    assert "ZeroDivisionError" in second["exc_info"]


def test_a_form_that_is_none_is_told() -> None:
    assert "MESH_LOG is 'xml'" in said("xml").stderr


def test_of_several_addresses_the_next_is_dialled_at_once_and_a_round_of_all_is_one_try() -> None:
    several = LinkLife(random.Random(1), LinkLimits(), 3)
    for _ in range(20):
        dialled, pauses_s = [], []
        for _ in range(3):
            dialled.append(several.dial())
            pauses_s.append(several.end("Unavailable") or 0.0)
        assert dialled == [0, 1, 2]
        assert pauses_s[:2] == [0.0, 0.0]
        assert 0 < pauses_s[2] <= ROUND_S_MAX


def test_a_link_ends_for_another_controller_when_that_begins_to_lead_and_not_because_it_leads() -> (
    None
):
    several = LinkLife(random.Random(1), LinkLimits(), 2)
    several.dial()
    several.welcome()
    assert several.others() == [1]
    assert [several.looked(1, leads=leads) for leads in (True, False, False)] == [False] * 3
    assert several.looked(1, leads=True)
    assert several.end("Unavailable") == 0.0
    assert several.dial() == 1


def test_a_node_obeys_no_earlier_leader_and_none_of_another_cell() -> None:
    obeyed = CellEpoch(7, "a")
    assert not CellEpoch(7, "a").why_not_after(obeyed)
    assert not CellEpoch(8, "").why_not_after(obeyed), "of an earlier version, which told no cell"
    assert not CellEpoch(1, "b").why_not_after(CellEpoch()), "it has obeyed none"
    assert "later than epoch 6" in CellEpoch(6, "a").why_not_after(obeyed)
    assert "of the cell a" in CellEpoch(9, "b").why_not_after(obeyed)
