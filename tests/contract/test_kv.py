"""Contract: the KV cache grows, shrinks, runs out and recovers, and no token changes with it."""

import random
import time

from mesh.domain.ids import RequestId
from tests.contract.conftest import LoadInstance
from tests.contract.driving import Driver, greedy

HELD_S_MAX = 10.0
PROMPT = tuple(range(5, 45))


def test_growing_and_shrinking_keep_the_tokens_of_running_requests(load: LoadInstance) -> None:
    driver = load(kv_blocks=40)
    rng = random.Random(4)
    prompts = {
        f"r{n}": [rng.randrange(5, 90) for _ in range(rng.randrange(20, 120))] for n in range(5)
    }
    alone = {name: driver.run(f"{name}-alone", p, greedy(30)) for name, p in prompts.items()}
    mixed = {name: driver.submit(name, p, greedy(30)) for name, p in prompts.items()}
    gone = driver.submit("gone", [7] * 100, greedy(100))
    for turn in range(400):
        if not driver.running:
            break
        if turn == 6:
            driver.abort("gone")
        driver.resize(rng.randrange(driver.books.kv_blocks_used + 1, 60))
        driver.step(48)
    assert not driver.running
    assert {name: running.tokens for name, running in mixed.items()} == alone
    assert gone.finish is None


def test_a_shrink_never_goes_below_the_blocks_in_use(driver: Driver) -> None:
    running = driver.submit("r", PROMPT * 3, greedy(8))
    driver.step(256)
    used = driver.books.kv_blocks_used
    assert used >= 120 // driver.block_tokens
    assert used <= driver.resize(1) <= used + 1
    driver.resize(64)
    driver.finish()
    assert len(running.tokens) == 8


def test_an_idle_cache_shrinks_to_what_is_asked_and_grows_again(driver: Driver) -> None:
    assert driver.resize(5) == 5
    assert driver.resize(70) == 70
    assert driver.resize(70) == 70
    assert len(driver.run("r", PROMPT)) == 12


def test_out_of_blocks_requests_starve_and_a_grow_feeds_them(load: LoadInstance) -> None:
    driver = load(kv_blocks=4)
    names = ("a", "b")
    prompt = [9] * (2 * driver.block_tokens)
    alone = driver.run("alone", prompt, greedy(6))
    running = {name: driver.submit(name, prompt, greedy(6)) for name in names}
    for _ in range(20):
        result = driver.step(256)
        if set(result.starved) == set(names):
            break
    assert set(result.starved) == set(names), "both need a third block"
    assert result.outputs == ()
    assert driver.step(256).starved == result.starved, "nothing comes of itself"
    driver.resize(6)
    driver.finish()
    assert all(r.tokens == alone for r in running.values())


def test_blocks_that_come_free_feed_the_starving(load: LoadInstance) -> None:
    driver = load(kv_blocks=4)
    prompt = [9] * (2 * driver.block_tokens)
    alone = driver.run("alone", prompt, greedy(6))
    driver.submit("a", prompt, greedy(6))
    survivor = driver.submit("b", prompt, greedy(6))
    for _ in range(20):
        if RequestId("b") in driver.step(256).starved:
            break
    driver.abort("a")
    driver.finish()
    assert survivor.tokens == alone


def test_a_prompt_larger_than_the_cache_waits_for_a_grow(load: LoadInstance) -> None:
    driver = load(kv_blocks=1)
    running = driver.submit("r", [9] * (2 * driver.block_tokens + 5), greedy(3))
    for _ in range(20):
        if driver.step(256).starved:
            break
    assert running.tokens == []
    driver.resize(4)
    driver.finish()
    assert len(running.tokens) == 3


def test_all_blocks_come_back(driver: Driver) -> None:
    for n in range(12):
        driver.submit(f"r{n}", [5 + n] * (1 + 17 * n), greedy(1 + n))
    driver.finish()
    assert driver.books.kv_blocks_used == 0


def test_what_a_shrink_gives_back_is_held_no_more_before_long(driver: Driver) -> None:
    driver.submit("r", PROMPT * 3, greedy(4))
    driver.step(256)
    driver.finish()
    driver.submit("short", PROMPT[:3], greedy(driver.block_tokens - 3))
    driver.step(256)
    blocks = driver.resize(1)
    give_up_s = time.monotonic() + HELD_S_MAX
    while driver.books.kv_held_bytes > blocks * driver.books.kv_block_bytes:
        assert time.monotonic() < give_up_s
        time.sleep(0.001)
    driver.finish()
