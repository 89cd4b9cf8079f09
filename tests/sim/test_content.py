"""What prompts are made of: pieces that others begin with, and what was said in conversations."""

from pathlib import Path

import pytest

from mesh.domain.errors import InvalidInput
from mesh.sim.content import Said
from mesh.sim.scenario import arrivals, read_scenario
from mesh_workloads.trace import Turn

TALKING = Path(__file__).parents[2] / "workloads" / "fault_conversations.toml"


def turn(conversation: int, left: int) -> Turn:
    return Turn(conversation=conversation, left=left, system_tokens=10)


def test_a_prompt_goes_on_with_the_answer_that_an_engine_gave_and_a_question_of_its_own() -> None:
    said = Said()
    first = said.prompt(turn(1, 1), 0, 15, own=1)
    said.answer(turn(1, 1), first, (7, 8))
    second = said.prompt(turn(1, 0), 0, 20, own=2)
    assert second[:17] == (*first, 7, 8)
    assert len(second) == 20
    assert not set(second[17:]) & set(first)


def test_conversations_of_a_function_share_how_they_begin_and_nothing_else() -> None:
    said = Said()
    one, other, apart = (
        said.prompt(turn(n, 0), function, 15, own=n) for n, function in ((1, 0), (2, 0), (3, 1))
    )
    assert one[:10] == other[:10] != apart[:10]
    assert not set(one[10:]) & set(other[10:])


def test_what_is_over_is_forgotten() -> None:
    said = Said()
    first = said.prompt(turn(1, 0), 0, 15, own=1)
    said.answer(turn(1, 0), first, (7,))
    assert said.prompt(turn(1, 0), 0, 15, own=1) == first


def test_a_workload_that_tells_how_prompts_begin_takes_no_other_beginnings(tmp_path: Path) -> None:
    written = tmp_path / "both.toml"
    written.write_text("beginnings = 3\n" + TALKING.read_text())
    with pytest.raises(InvalidInput, match="tells itself what its prompts begin with"):
        arrivals(read_scenario(written))
