"""Contract: how requests begin and end: refusals, limits, stop tokens, aborts, resumption."""

from dataclasses import replace
from typing import Any

import pytest

from mesh.domain.errors import EngineError
from mesh.domain.ids import RequestId
from mesh.domain.reasons import FinishReason
from mesh.domain.request import SamplingParams
from tests.contract.conftest import LoadInstance
from tests.contract.driving import Driver, greedy
from tests.contract.engine_contract import CONTEXT_TOKENS_MAX

PROMPT = tuple(range(5, 45))


def test_an_id_that_is_there_already_is_refused(driver: Driver) -> None:
    running = driver.submit("r", PROMPT)
    with pytest.raises(EngineError):
        driver.engine.submit(driver.instance_id, running.request)
    driver.step()
    with pytest.raises(EngineError):
        driver.engine.submit(driver.instance_id, running.request)
    driver.finish()
    assert len(running.tokens) == 12


def test_an_id_may_come_again_once_it_has_ended(driver: Driver) -> None:
    first = driver.run("r", PROMPT)
    assert driver.run("r", PROMPT) == first
    driver.submit("r", PROMPT)
    driver.step()
    driver.abort("r")
    assert driver.run("r", PROMPT) == first


def test_what_can_never_fit_is_refused_and_leaves_nothing(driver: Driver) -> None:
    full = CONTEXT_TOKENS_MAX
    for count, output in ((0, 0), (full, 0), (full + 50, 0), (full - 6, 6)):
        with pytest.raises(EngineError):
            driver.submit("r", [5] * count, greedy(20), output=[5] * output)
        assert driver.step().prefill_left == ()
        assert driver.run("r", PROMPT)


def test_max_tokens_ends_a_request_with_length(driver: Driver) -> None:
    for count in (1, 2, 9):
        running = driver.submit(f"r{count}", PROMPT, greedy(count))
        driver.finish()
        assert (len(running.tokens), running.finish) == (count, FinishReason.LENGTH)
    assert driver.books.kv_blocks_used == 0


def test_a_full_context_ends_a_request_with_length(load: LoadInstance) -> None:
    """Prompt and output together never exceed the context of the order."""
    driver = load(context_tokens_max=64)
    running = driver.submit("r", PROMPT, greedy(500))
    driver.finish()
    assert len(PROMPT) + len(running.tokens) == 64
    assert running.finish is FinishReason.LENGTH
    last = driver.submit("last", [5] * 63, greedy(500))
    driver.finish()
    assert len(last.tokens) == 1


def test_a_stop_token_is_reported_and_ends_the_request(driver: Driver) -> None:
    free = driver.run("free", PROMPT, greedy(20))
    stop = free[7]
    sampling = SamplingParams(max_tokens=20)
    stopped = driver.submit("r", PROMPT, sampling, stop_ids=(stop, 3))
    driver.finish()
    assert stopped.tokens == free[: free.index(stop) + 1]
    assert stopped.finish is FinishReason.STOP
    assert driver.books.kv_blocks_used == 0


def test_ignore_eos_runs_past_stop_tokens(driver: Driver) -> None:
    free = driver.run("free", PROMPT, greedy(20))
    ignoring = driver.submit("r", PROMPT, greedy(20), stop_ids=tuple(free))
    driver.finish()
    assert (ignoring.tokens, ignoring.finish) == (free, FinishReason.LENGTH)


def test_a_stop_of_its_own_ends_a_request_wherever_eos_does_not(driver: Driver) -> None:
    free = driver.run("free", PROMPT, greedy(20))
    own = replace(greedy(20), stop_token_ids=(free[7],))
    stopped = driver.submit("r", PROMPT, own, stop_ids=tuple(free))
    driver.finish()
    assert stopped.tokens == free[: free.index(free[7]) + 1]
    assert stopped.finish is FinishReason.STOP


def test_no_stop_ends_a_request_before_it_has_its_tokens(driver: Driver) -> None:
    free = driver.run("free", PROMPT, greedy(20))
    sampling = SamplingParams(max_tokens=20, min_tokens=12)
    stopped = driver.submit("r", PROMPT, sampling, stop_ids=tuple(free[:3]))
    driver.finish()
    assert len(stopped.tokens) > 12
    again = driver.submit(
        "b", PROMPT, sampling, stop_ids=tuple(free[:3]), output=stopped.tokens[:9]
    )
    driver.finish()
    assert stopped.tokens == [*stopped.tokens[:9], *again.tokens]
    assert again.finish is stopped.finish


def test_an_abort_frees_the_blocks_before_the_next_step(driver: Driver) -> None:
    driver.submit("prefilling", [5] * 200)
    driver.submit("decoding", PROMPT)
    driver.step(64)
    assert driver.books.kv_blocks_used > 0
    driver.abort("prefilling")
    driver.step(64)
    driver.abort("decoding")
    assert driver.books.kv_blocks_used == 0
    assert driver.step().outputs == ()


def test_an_abort_before_the_first_step_drops_the_request(driver: Driver) -> None:
    driver.submit("r", PROMPT)
    driver.abort("r")
    assert driver.step().prefill_tokens == 0


def test_aborts_of_unknown_and_ended_requests_are_ignored(driver: Driver) -> None:
    driver.run("ended", PROMPT, greedy(2))
    running = driver.submit("r", PROMPT)
    driver.step()
    for name in ("ended", "never-there", "never-there"):
        driver.engine.abort(driver.instance_id, RequestId(name))
    driver.finish()
    assert len(running.tokens) == 12


DRAWN = {"temperature": 0.9, "seed": 5}
PENALTIES = {"presence_penalty": 0.4, "frequency_penalty": 0.3}


@pytest.mark.parametrize(
    "how",
    [
        {},
        DRAWN,
        {**DRAWN, "repetition_penalty": 1.3},
        {"repetition_penalty": 1.3},
        {**DRAWN, **PENALTIES, "min_p": 0.01},
    ],
    ids=["greedy", "sampled", "sampled with penalty", "greedy with penalty", "all penalties"],
)
def test_a_resumed_request_goes_on_as_if_it_had_never_stopped(
    driver: Driver, how: dict[str, Any]
) -> None:
    """Under another id, as after a move to another node; its output counts towards max_tokens."""
    sampling = replace(greedy(24), **how)
    whole = driver.run("whole", PROMPT, sampling)
    for given in (1, 10, 23):
        resumed = driver.submit(f"resumed {given}", PROMPT, sampling, output=whole[:given])
        driver.finish(prefill_tokens_max=17)
        assert resumed.tokens == whole[given:]
        assert resumed.finish is FinishReason.LENGTH


def test_a_resumed_requests_output_is_computed_as_prompt(driver: Driver) -> None:
    whole = driver.run("whole", PROMPT, greedy(24))
    driver.submit("resumed", PROMPT, greedy(24), output=whole[:10])
    assert driver.step(45).prefill_left == (("resumed", 5),)
    assert [output.first_index for output in driver.step(45).outputs] == [10]
