"""Contract: what one step computes: prefill chunks under a budget, decodes beside them, batches."""

import random

from mesh.domain.ids import RequestId
from tests.contract.conftest import LoadInstance
from tests.contract.driving import Driver, greedy

SHORT = tuple(range(5, 15))
LONG = tuple(5 + n % 80 for n in range(200))


def test_a_step_with_nothing_to_do_is_empty(driver: Driver) -> None:
    result = driver.step()
    assert result.outputs == ()
    assert (result.prefill_tokens, result.decode_batch, result.context_tokens) == (0, 0, 0)
    assert (result.prefill_left, result.starved, result.kv_blocks_used) == ((), (), 0)


def test_a_prompt_within_the_budget_yields_its_first_token_at_once(driver: Driver) -> None:
    driver.submit("r", SHORT)
    first = driver.step(64)
    assert [(output.request_id, output.first_index) for output in first.outputs] == [("r", 0)]
    assert (first.prefill_tokens, first.decode_batch) == (10, 0)
    second = driver.step(64)
    assert (second.prefill_tokens, second.decode_batch, second.context_tokens) == (0, 1, 11)


def test_a_long_prompt_is_computed_in_chunks_of_the_budget(driver: Driver) -> None:
    driver.submit("r", LONG)
    seen = []
    while not (result := driver.step(64)).outputs:
        seen.append((result.prefill_tokens, result.prefill_left))
    assert seen == [(64, (("r", 136),)), (64, (("r", 72),)), (64, (("r", 8),))]
    assert (result.prefill_tokens, result.prefill_left) == (8, ())


def test_a_chunk_says_how_many_tokens_were_in_the_cache_before_it(driver: Driver) -> None:
    driver.submit("r", LONG)
    seen = [driver.step(64).prefill_past_tokens for _ in range(5)]
    assert seen == [0, 64, 128, 192, 0], "the last step is a decode"


def test_of_several_chunks_each_token_counts_what_was_before_its_own(driver: Driver) -> None:
    """42 tokens after 8, and 18 after nothing: 336 / 60 is 5.6."""
    driver.submit("a", LONG[:50])
    assert driver.step(8).prefill_past_tokens == 0
    driver.submit("b", LONG[:30])
    result = driver.step(60)
    assert (result.prefill_tokens, result.prefill_past_tokens) == (60, 6)


def test_prompts_are_prefilled_in_the_order_they_were_submitted(driver: Driver) -> None:
    """And what one leaves of a budget goes to the next."""
    for name, count in (("a", 50), ("b", 30), ("c", 30)):
        driver.submit(name, LONG[:count])
    assert driver.step(40).prefill_left == (("a", 10), ("b", 30), ("c", 30))
    result = driver.step(30)
    assert [output.request_id for output in result.outputs] == ["a"]
    assert result.prefill_left == (("b", 10), ("c", 30))
    result = driver.step(40)
    assert {output.request_id for output in result.outputs} == {"a", "b", "c"}


def test_decodes_go_on_while_a_long_prompt_is_prefilled(driver: Driver) -> None:
    alone = driver.run("alone", SHORT, greedy(20))
    short = driver.submit("short", SHORT, greedy(20))
    driver.step()
    long = driver.submit("long", LONG, greedy(4))
    steps = 0
    while not long.tokens:
        result = driver.step(16)
        steps += 1
        assert RequestId("short") in {output.request_id for output in result.outputs}
    assert steps == 13, "200 tokens in chunks of 16"
    driver.finish()
    assert short.tokens == alone


def test_a_budget_of_nothing_still_decodes(driver: Driver) -> None:
    driver.submit("decoding", SHORT)
    driver.step()
    driver.submit("waiting", SHORT)
    result = driver.step(0)
    assert [output.request_id for output in result.outputs] == ["decoding"]
    assert result.prefill_left == (("waiting", 10),)


def test_chunk_sizes_do_not_change_a_greedy_request(driver: Driver) -> None:
    whole = driver.submit("whole", LONG)
    driver.finish(prefill_tokens_max=256)
    for budget in (1, 7, 64):
        chunked = driver.submit(f"by-{budget}", LONG)
        driver.finish(prefill_tokens_max=budget)
        assert chunked.tokens == whole.tokens


def test_joins_and_leaves_do_not_change_a_greedy_request(driver: Driver) -> None:
    """Six prompts, joining at random steps beside others that are aborted half way."""
    rng = random.Random(11)
    prompts = {
        f"r{n}": [rng.randrange(5, 90) for _ in range(rng.randrange(1, 120))] for n in range(6)
    }
    alone = {name: driver.run(f"{name}-alone", prompt) for name, prompt in prompts.items()}
    mixed = {}
    waiting = list(prompts)
    while waiting or driver.running:
        if waiting and rng.random() < 0.3:
            name = waiting.pop()
            mixed[name] = driver.submit(name, prompts[name])
            driver.submit(f"{name}-beside", prompts[name][::-1], greedy(30))
        if driver.running and rng.random() < 0.2:
            beside = [name for name in driver.running if name.endswith("-beside")]
            for name in beside[:1]:
                driver.abort(name)
        driver.step(rng.choice([5, 32, 100]))
    assert {name: running.tokens for name, running in mixed.items()} == alone


def test_a_batch_has_its_bound_and_the_rest_waits_its_turn(load: LoadInstance) -> None:
    driver = load(batch_max=2)
    for name in "abc":
        driver.submit(name, SHORT, greedy(3))
    seen = []
    while driver.running:
        seen.append({output.request_id for output in driver.step(64).outputs})
    assert seen == [{"a", "b"}] * 3 + [{"c"}] * 3
