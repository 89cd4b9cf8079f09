"""Contract: a measured iteration is timed and forgotten; no token, block or request changes."""

import random

import pytest

from mesh.domain.errors import EngineError, OutOfMemory
from mesh.domain.ids import InstanceId
from mesh.domain.operators import Role
from mesh.domain.profile import CountedIteration, IterationShape
from mesh.runtime.engine import Engine
from tests.contract.conftest import LoadInstance
from tests.contract.driving import Driver, greedy
from tests.contract.engine_contract import BATCH_MAX, CONTEXT_TOKENS_MAX

SHAPES = (
    {"prefill_tokens": 1},
    {"prefill_tokens": 100},
    {"prefill_tokens": 64, "prefill_past_tokens": 130},
    {"prefill_tokens": CONTEXT_TOKENS_MAX},
    {"decode_batch": 1, "decode_context_tokens": 1},
    {"decode_batch": BATCH_MAX, "decode_context_tokens": 33},
    {"decode_batch": 3, "decode_context_tokens": CONTEXT_TOKENS_MAX},
    {
        "decode_batch": BATCH_MAX - 1,
        "decode_context_tokens": 50,
        "prefill_tokens": 40,
        "prefill_past_tokens": 7,
    },
)


def test_every_shape_of_requests_is_timed(driver: Driver) -> None:
    for shape in SHAPES:
        assert driver.measure(**shape) > 0
        assert driver.measure(**shape) > 0
        assert driver.books.kv_blocks_used == 0


def test_operators_are_counted_or_the_engine_says_that_it_cannot(driver: Driver) -> None:
    driver.engine.bound_memory(2**40)
    name, shape = driver.engine.capabilities.name, IterationShape(prefill_tokens=8)
    for cores in (None, 1):
        if name == "openvino" or (name, cores) == ("vllm", None):
            check_counted(driver, driver.engine.count_operators(driver.instance_id, shape, cores))
        else:
            with pytest.raises(EngineError, match="has no counters of operators"):
                driver.engine.count_operators(driver.instance_id, shape, cores)


def check_counted(driver: Driver, counted: CountedIteration) -> None:
    assert counted.elapsed_s > 0
    operators = {name for name, _ in counted.operators}
    assert {Role.ATTENTION, Role.GATE_UP, Role.HEAD} <= operators <= set(Role)
    assert driver.books.kv_blocks_used == 0


def test_nothing_is_left_to_compute_after_a_measure(driver: Driver) -> None:
    driver.measure(prefill_tokens=64, prefill_past_tokens=64)
    result = driver.step()
    assert (result.outputs, result.prefill_left, result.prefill_tokens) == ((), (), 0)


def test_measures_between_steps_change_no_token_of_running_requests(load: LoadInstance) -> None:
    """While prompts are prefilled in chunks and others decode."""
    driver = load(kv_blocks=128)
    rng = random.Random(5)
    prompts = {f"r{n}": [rng.randrange(5, 90) for _ in range(20 + 30 * n)] for n in range(5)}
    alone = {name: driver.run(f"{name}-alone", p, greedy(20)) for name, p in prompts.items()}
    running = {name: driver.submit(name, p, greedy(20)) for name, p in prompts.items()}
    while driver.running:
        driver.step(40)
        driver.measure(**rng.choice(SHAPES))
    assert {name: r.tokens for name, r in running.items()} == alone


def test_blocks_that_a_measure_used_serve_a_request_as_well(load: LoadInstance) -> None:
    """All blocks were measured in; none of what was computed there comes up in the tokens."""
    prompt = [5 + n % 80 for n in range(100)]
    fresh = load("fresh", kv_blocks=8).run("r", prompt)
    used = load("used", kv_blocks=8)
    used.measure(decode_batch=2, decode_context_tokens=4 * used.block_tokens)
    assert used.run("r", prompt) == fresh


def test_measures_go_with_resizes(driver: Driver) -> None:
    """A shrink gives blocks back that were measured in, a grow brings them again."""
    prompt = tuple(range(5, 85))
    alone = driver.run("alone", prompt, greedy(30))
    running = driver.submit("r", prompt, greedy(30))
    for blocks in (8, 64, 20, 90):
        driver.step(30)
        driver.resize(blocks)
        driver.measure(decode_batch=4, decode_context_tokens=driver.block_tokens)
    driver.finish()
    assert running.tokens == alone


def test_a_shape_of_no_iteration_is_refused(driver: Driver) -> None:
    for shape in (
        {},
        {"prefill_past_tokens": 10},
        {"decode_context_tokens": 10},
        {"decode_batch": 1},
        {"prefill_tokens": -1},
        {"prefill_tokens": 5, "prefill_past_tokens": -1},
        {"prefill_tokens": 5, "decode_batch": -1, "decode_context_tokens": 5},
        {"decode_batch": 1, "decode_context_tokens": CONTEXT_TOKENS_MAX + 1},
        {"prefill_tokens": 1, "prefill_past_tokens": CONTEXT_TOKENS_MAX},
        {"decode_batch": BATCH_MAX + 1, "decode_context_tokens": 5},
        {"decode_batch": BATCH_MAX, "decode_context_tokens": 5, "prefill_tokens": 5},
    ):
        with pytest.raises(EngineError) as refused:
            driver.measure(**shape)
        assert not isinstance(refused.value, OutOfMemory), f"no grow would help {shape}"


def test_out_of_memory_names_the_blocks_wanted_and_the_blocks_free(load: LoadInstance) -> None:
    """Those of running requests are not to be had, and nothing of them is lost."""
    driver = load(kv_blocks=6)
    alone = driver.run("alone", [9] * 40, greedy(8))
    running = driver.submit("r", [9] * 40, greedy(8))
    driver.step()
    free = 6 - driver.books.kv_blocks_used
    context_tokens = driver.block_tokens + 1
    fitting = free // 2
    assert driver.measure(decode_batch=fitting, decode_context_tokens=context_tokens) > 0
    with pytest.raises(OutOfMemory, match=rf"{2 * fitting + 2} KV blocks, {free} are free"):
        driver.measure(decode_batch=fitting + 1, decode_context_tokens=context_tokens)
    driver.finish()
    assert running.tokens == alone


def test_an_instance_that_is_not_loaded_cannot_be_measured(driver: Driver, engine: Engine) -> None:
    with pytest.raises(EngineError, match="i-2"):
        engine.measure(InstanceId("i-2"), IterationShape(prefill_tokens=1))
