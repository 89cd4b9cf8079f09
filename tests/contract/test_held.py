"""Requests that are computed ahead: they yield nothing while they are held, and the same after."""

import pytest

from mesh.domain.ids import RequestId
from mesh.domain.request import SamplingParams
from mesh.runtime.engine import EngineRequest
from tests.contract.driving import Driver, greedy

PROMPT = tuple(range(3, 43))
SAMPLED = SamplingParams(temperature=0.8, seed=7, max_tokens=12, ignore_eos=True)


def ahead(
    driver: Driver, output: tuple[int, ...], sampling: SamplingParams, *, paused: bool = True
) -> EngineRequest:
    request = EngineRequest(
        request_id=RequestId("moves"),
        attempt=2,
        prompt_tokens=PROMPT,
        output_tokens=output,
        sampling=sampling,
        paused=paused,
    )
    driver.engine.submit(driver.instance_id, request)
    return request


@pytest.fixture
def holder(driver: Driver) -> Driver:
    if not driver.engine.capabilities.computes_ahead:
        pytest.skip("this engine cannot hold requests")
    return driver


@pytest.mark.parametrize("sampling", [greedy(), SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("chunk", [16, 64])
def test_a_held_request_goes_on_as_if_it_had_never_moved(
    holder: Driver, sampling: SamplingParams, chunk: int
) -> None:
    expected = tuple(holder.run("whole", PROMPT, sampling))
    engine, instance_id = holder.engine, holder.instance_id
    for sent in (2, 5, 6):
        ahead(holder, expected[:sent], sampling)
        for _ in range(10):
            result = engine.step(instance_id, chunk)
            assert not result.outputs, "it is held"
            if not result.prefill_left:
                break
        assert not result.prefill_left
        assert engine.step(instance_id, chunk).prefill_tokens == 0, "all that it may is computed"
    ahead(holder, expected[:7], sampling, paused=False)
    tokens: list[int] = list(expected[:7])
    result = engine.step(instance_id, chunk)
    assert result.prefill_tokens == 2, "the last, and one that came meanwhile"
    while True:
        (output,) = result.outputs
        assert (output.attempt, output.first_index) == (2, len(tokens))
        tokens += output.token_ids
        if output.finish is not None:
            break
        result = engine.step(instance_id, chunk)
    assert tuple(tokens) == expected
    holder.check_books()


def test_a_held_request_can_be_dropped(holder: Driver) -> None:
    ahead(holder, (5,), greedy())
    holder.engine.step(holder.instance_id, 64)
    assert holder.books.kv_blocks_used
    holder.abort("moves")
    assert holder.books.kv_blocks_used == 0


def test_others_decode_beside_it(holder: Driver) -> None:
    expected = holder.run("alone", PROMPT[:10])
    beside = holder.submit("beside", PROMPT[:10])
    holder.step()
    ahead(holder, (5, 6), greedy())
    for _ in range(20):
        result = holder.engine.step(holder.instance_id, 64)
        for output in result.outputs:
            assert output.request_id == "beside"
            beside.tokens += output.token_ids
        if any(output.finish for output in result.outputs):
            break
    assert beside.tokens == expected


def test_one_that_decodes_pauses_and_goes_on_as_if_it_had_not(holder: Driver) -> None:
    expected = tuple(holder.run("whole", PROMPT, SAMPLED))
    engine, instance_id = holder.engine, holder.instance_id
    ahead(holder, expected[:2], SAMPLED, paused=False)
    tokens: list[int] = list(expected[:2])
    finish = None
    while finish is None:
        (output,) = engine.step(instance_id, 64).outputs
        assert output.first_index == len(tokens)
        tokens += output.token_ids
        finish = output.finish
        if finish is None and len(tokens) % 3 == 0:
            ahead(holder, expected[:2], SAMPLED)
            paused = engine.step(instance_id, 64)
            assert not [*paused.outputs, *paused.prefill_left, *paused.starved]
            ahead(holder, expected[:2], SAMPLED, paused=False)
    assert tuple(tokens) == expected
    holder.check_books()


def test_others_decode_beside_one_that_pauses(holder: Driver) -> None:
    expected = holder.run("alone", PROMPT[:10])
    ahead(holder, (5, 6), greedy(), paused=False)
    beside = holder.submit("beside", PROMPT[:10])
    for output in holder.engine.step(holder.instance_id, 64).outputs:
        if output.request_id == "beside":
            beside.tokens += output.token_ids
    ahead(holder, (5, 6), greedy())
    while len(beside.tokens) < len(expected):
        (output,) = holder.engine.step(holder.instance_id, 64).outputs
        assert output.request_id == "beside"
        beside.tokens += output.token_ids
    assert beside.tokens == expected
