"""Contract: a step of several iterations is as many steps of one, as long as the batch stays."""

from mesh.domain.ids import RequestId
from mesh.domain.request import RequestTokens
from mesh.runtime.engine import StepResult
from tests.contract.driving import Driver, greedy

A, B = tuple(range(5, 15)), tuple(range(30, 55))
PROMPTS = {"a": A, "b": B, "c": tuple(range(60, 80))}


def turn(driver: Driver, iterations: int, prefill_tokens_max: int = 64) -> StepResult:
    """By the engine itself: the driver's account is of single iterations."""
    return driver.engine.step(driver.instance_id, prefill_tokens_max, iterations)


def test_only_those_decode_that_are_named(driver: Driver) -> None:
    """The others' tokens are the same as without it, once it is their turn."""
    alone = {name: driver.run(f"{name}0", prompt, greedy(6)) for name, prompt in PROMPTS.items()}
    for name, prompt in PROMPTS.items():
        driver.submit(name, prompt, greedy(6))
    driver.step(256)
    for named in ("b", "c", "b", "ac", "a"):
        result = driver.step(decode=tuple(RequestId(name) for name in named))
        assert {output.request_id for output in result.outputs} == set(named)
        assert result.decode_batch == len(named)
    assert driver.step(decode=()).outputs == ()
    assert driver.step(decode=(RequestId("nobody"),)).outputs == ()
    driver.finish()
    assert {name: driver.ended[RequestId(name)].tokens for name in alone} == alone


def test_several_iterations_of_those_that_are_named(driver: Driver) -> None:
    alone = driver.run("b0", B, greedy(9))
    driver.submit("a", A, greedy(9))
    driver.submit("b", B, greedy(9))
    driver.step()
    b = (RequestId("b"),)
    result = driver.engine.step(driver.instance_id, 0, 5, b)
    assert (result.iterations, result.decode_batch, len(result.outputs)) == (5, 1, 1)
    assert list(of("b", result).token_ids) == alone[1:6]


def test_prompts_that_are_named_compute_as_much_as_is_said_of_each(driver: Driver) -> None:
    alone = {name: driver.run(f"{name}0", prompt, greedy(3)) for name, prompt in PROMPTS.items()}
    for name, prompt in PROMPTS.items():
        driver.submit(name, prompt, greedy(3))
    shares = ((RequestId("c"), 9), (RequestId("b"), 99))
    result = driver.step(shares)
    left = {"a": len(PROMPTS["a"]), "c": len(PROMPTS["c"]) - 9}
    assert (dict(result.prefill_left), len(result.outputs)) == (left, 1)
    result = driver.step(((RequestId("c"), 99),), decode=())
    assert [output.request_id for output in result.outputs] == ["c"], "b waits for its turn"
    driver.finish()
    assert {name: driver.ended[RequestId(name)].tokens for name in alone} == alone


def of(name: str, result: StepResult) -> RequestTokens:
    """Its output, of which there is one."""
    (found,) = [output for output in result.outputs if output.request_id == name]
    return found


def test_its_tokens_are_those_of_single_iterations(driver: Driver) -> None:
    alone = [driver.run("a0", A, greedy(9)), driver.run("b0", B, greedy(9))]
    driver.submit("a", A, greedy(9))
    driver.submit("b", B, greedy(9))
    driver.step()
    result = turn(driver, 5)
    a, b = of("a", result), of("b", result)
    assert [list(a.token_ids), list(b.token_ids)] == [one[1:6] for one in alone]
    assert (result.iterations, result.decode_batch) == (5, 2)
    assert (a.first_index, b.first_index, a.finish) == (1, 1, None)
    last = turn(driver, 99)
    assert [list(of(name, last).token_ids) for name in "ab"] == [one[6:] for one in alone]


def test_it_says_how_much_context_its_decodes_had_on_the_average(driver: Driver) -> None:
    driver.submit("a", A, greedy(9))
    driver.step()
    assert turn(driver, 3).context_tokens == 12, "the mean of 11, 12 and 13"


def test_it_ends_with_the_first_request_that_ends(driver: Driver) -> None:
    driver.submit("a", A, greedy(9))
    driver.submit("b", B, greedy(3))
    driver.step()
    result = turn(driver, 8)
    assert result.iterations == 2
    assert [o.request_id for o in result.outputs if o.finish is not None] == ["b"]
    driver.engine.abort(driver.instance_id, RequestId("a"))
    assert driver.books.kv_blocks_used == 0


def test_it_ends_where_a_request_lacks_a_block(driver: Driver) -> None:
    """The prompt fills its blocks but for two tokens, and there is no other."""
    room = driver.block_tokens * 2
    driver.engine.resize_kv(driver.instance_id, 2)
    driver.submit("a", (A * room)[: room - 2], greedy(9))
    while driver.running[RequestId("a")].left:
        driver.step()
    result = turn(driver, 8)
    assert (len(of("a", result).token_ids), result.iterations, result.decode_batch) == (2, 2, 1)
    assert result.starved == ("a",)
    driver.engine.resize_kv(driver.instance_id, 4)
    assert len(of("a", turn(driver, 3)).token_ids) == 3


def test_an_iteration_that_computes_a_prompt_is_alone(driver: Driver) -> None:
    driver.submit("a", A, greedy(9))
    driver.step()
    driver.submit("b", B, greedy(9))
    result = turn(driver, 5)
    assert (result.iterations, result.prefill_tokens, len(result.outputs)) == (1, 25, 2)


def test_with_prompts_left_it_is_one_iteration(driver: Driver) -> None:
    driver.submit("a", A, greedy(9))
    driver.step()
    driver.submit("b", B, greedy(9))
    result = turn(driver, 5, prefill_tokens_max=8)
    assert (result.iterations, result.prefill_tokens, len(result.outputs)) == (1, 8, 1)
    assert result.prefill_left == (("b", 17),)


def test_with_nothing_to_do_it_is_empty(driver: Driver) -> None:
    result = turn(driver, 5)
    assert (result.outputs, result.iterations, result.decode_batch) == ((), 1, 0)
