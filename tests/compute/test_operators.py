"""Counted iterations: which are asked for, and the tables that come of them."""

from itertools import pairwise

import pytest

from mesh.compute.operators import OperatorSurvey
from mesh.domain.errors import EngineError
from mesh.domain.operators import Role
from mesh.domain.profile import REST, Grid, IterationShape
from tests.compute.models import machine_s

SHARES = {Role.ATTENTION: 0.25, Role.GATE_UP: 0.65}
PREFILL = Grid(rows=(1, 512), columns=(0,), seconds=((0.01,), (0.3,)))
DECODE = Grid(rows=(1, 16), columns=(128, 1024), seconds=((0.01, 0.01), (0.02, 0.03)))


def survey(kv_tokens: int = 16384, batch_max: int = 16) -> OperatorSurvey:
    return OperatorSurvey(
        context_tokens_max=2048,
        batch_max=batch_max,
        kv_tokens=kv_tokens,
        prefill_tokens_max=512,
        expected_s=machine_s,
    )


def count(one: OperatorSurvey, disturbed_at: int = -1) -> list[IterationShape]:
    """All of it; what was asked for. The disturbed call takes twice as long, all of it the rest."""
    asked: list[IterationShape] = []
    while (shape := one.next_shape()) is not None:
        whole_s = machine_s(shape)
        operators = [(role, share * whole_s) for role, share in SHARES.items()]
        one.note(whole_s * (2 if len(asked) == disturbed_at else 1), operators)
        asked.append(shape)
    return asked


@pytest.mark.parametrize("disturbed_at", [-1, 3])
def test_operators_and_rest_are_the_whole_iterations_of_the_profile(disturbed_at: int) -> None:
    one = survey()
    count(one, disturbed_at)
    found = {each.name: each for each in one.operators(PREFILL, DECODE)}
    assert set(found) == {Role.ATTENTION, Role.GATE_UP, REST}
    assert found[Role.ATTENTION].decode.at(16, 1024) == pytest.approx(0.25 * 0.03)
    assert found[Role.GATE_UP].prefill.at(512, 0) == pytest.approx(0.65 * 0.3)
    assert found[REST].prefill.at(512, 0) == pytest.approx(0.1 * 0.3)
    summed_s = sum(each.decode.at(8, 512) for each in found.values())
    assert summed_s == pytest.approx(DECODE.at(8, 512))
    assert one.share == 1.0


def test_short_iterations_come_first() -> None:
    asked = list(dict.fromkeys(count(survey())))
    for kind in (False, True):
        taken_s = [machine_s(shape) for shape in asked if bool(shape.decode_batch) is kind]
        assert taken_s == sorted(taken_s)


def test_prompts_hardly_ever_follow_one_of_their_size() -> None:
    """In use they do not; an engine prepares itself anew for each, which no operator tells of."""
    prompts = [shape for shape in count(survey()) if shape.prefill_tokens]
    last = max(prompts, key=machine_s)
    again = [one for one, two in pairwise(prompts) if one == two and one is not last]
    assert len(again) < len(prompts) / 10


def test_what_an_instance_cannot_hold_is_not_asked_for() -> None:
    asked = count(survey(kv_tokens=2048, batch_max=4))
    assert {shape.decode_batch for shape in asked} == {0, 1, 2, 4}
    assert max(shape.prefill_tokens + shape.prefill_past_tokens for shape in asked) <= 2048


def test_without_a_counted_decode_there_is_no_profile_of_operators() -> None:
    one = survey()
    while (shape := one.next_shape()) is not None:
        if shape.decode_batch:
            one.skip()
        else:
            one.note(0.2, [(Role.DOWN, 0.1)])
    with pytest.raises(EngineError, match="no iteration could be counted"):
        one.operators(PREFILL, DECODE)
