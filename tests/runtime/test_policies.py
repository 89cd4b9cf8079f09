"""A policy by its name, or from a file."""

from pathlib import Path

import pytest

from mesh.domain.errors import InvalidInput
from mesh.runtime.policies import policy_of

WRONG = """
from dataclasses import replace
from mesh.policy.fcfs import FCFS
POLICY = replace(FCFS, promises=True)
"""
EXAMPLES = Path(__file__).parents[2] / "examples" / "policies"


def test_one_is_found_by_its_name_and_one_in_its_file() -> None:
    assert policy_of("fcfs").name == "fcfs"
    assert policy_of(str(EXAMPLES / "lru_swap.py")).name == "lru-swap"
    assert policy_of(str(EXAMPLES / "kvpr.py")).promises


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("x = 1", "has no POLICY"),
        ("POLICY = 'llm-mesh'", "has a POLICY without name"),
        ("1 / 0", "cannot be run: ZeroDivisionError"),
        (
            WRONG,
            "does not model turns by first_come",
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


@pytest.mark.parametrize(("name", "lines_max"), [("lru_swap.py", 80), ("kvpr.py", 120)])
def test_an_example_fits_on_a_page(name: str, lines_max: int) -> None:
    assert len((EXAMPLES / name).read_text(encoding="utf-8").splitlines()) <= lines_max
