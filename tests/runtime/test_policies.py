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
from mesh.runtime.link_life import LinkLife, LinkLimits
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
