"""Contract: what was computed is not computed again, no token changes, and it costs nobody."""

import random
from dataclasses import replace

import pytest

from mesh.domain.ids import DeploymentName, InstanceId
from mesh.memory.block_keys import digests_of
from tests.contract.conftest import LoadInstance
from tests.contract.driving import Driver, greedy, note_prefixes

SALT = "tenant"
SYSTEM = tuple(range(5, 90))


@pytest.fixture
def caching(driver: Driver) -> Driver:
    if not driver.engine.capabilities.caches_prefixes:
        pytest.skip("this engine caches no prefixes")
    return driver


def answered(driver: Driver, name: str, prompt: tuple[int, ...], salt: str | None = SALT) -> Driver:
    driver.submit(name, prompt, salt=salt)
    driver.finish()
    return driver


def whole_blocks(driver: Driver, tokens: int) -> int:
    return tokens // driver.block_tokens * driver.block_tokens


def test_a_second_turn_computes_only_what_is_new(caching: Driver) -> None:
    alone = caching.run("alone", SYSTEM)
    history = (*SYSTEM, *alone, 7, 8, 9)
    expected = caching.run("alone-2", history)
    first = caching.submit("turn-1", SYSTEM, salt=SALT)
    caching.finish()
    assert (first.tokens, first.found, first.adopted) == (alone, 0, 0)
    second = caching.submit("turn-2", history, salt=SALT)
    # The answer's last token was never computed.
    kept = whole_blocks(caching, len(SYSTEM) + len(alone) - 1)
    result = caching.step(256)
    assert result.prefill_tokens == len(history) - kept
    assert result.prefill_past_tokens == kept
    caching.finish()
    assert (second.tokens, second.found, second.adopted) == (expected, kept, kept)


def test_a_prompt_that_is_all_there_computes_its_last_token_all_the_same(caching: Driver) -> None:
    prompt = SYSTEM[: 2 * caching.block_tokens]
    alone = caching.run("alone", prompt)
    answered(caching, "first", prompt)
    again = caching.submit("again", prompt, salt=SALT)
    assert again.found == len(prompt) - caching.block_tokens
    caching.finish()
    assert again.tokens == alone


def test_nothing_crosses_salts_and_without_one_nothing_is_kept(caching: Driver) -> None:
    answered(caching, "none", SYSTEM, salt=None)
    assert caching.books.kv_blocks_cached == 0
    answered(caching, "mine", SYSTEM)
    assert caching.books.kv_blocks_cached > 0
    for salt in ("other", "", None):
        stranger = caching.submit(f"by-{salt}", SYSTEM, salt=salt)
        caching.finish()
        assert (stranger.found, stranger.adopted) == (0, 0)


def test_those_who_run_at_once_share_what_one_of_them_has_computed(caching: Driver) -> None:
    alone = caching.run("alone", SYSTEM)
    caching.submit("first", SYSTEM, greedy(40), salt=SALT)
    caching.step(256)
    used = caching.books.kv_blocks_used
    second = caching.submit("second", SYSTEM, salt=SALT)
    caching.step(256)
    assert second.adopted == whole_blocks(caching, len(SYSTEM))
    assert caching.books.kv_blocks_used <= used + 2, "the block that is not full, and one more"
    caching.finish()
    assert second.tokens == alone


def test_what_was_aborted_or_goes_on_elsewhere_finds_its_own_blocks(caching: Driver) -> None:
    alone = caching.run("alone", SYSTEM, greedy(30))
    first = caching.submit("first", SYSTEM, greedy(30), salt=SALT)
    while len(first.tokens) < 20:
        caching.step(256)
    so_far = tuple(first.tokens)
    caching.abort("first")
    again = caching.submit("again", SYSTEM, greedy(30), output=so_far, salt=SALT)
    assert again.found == whole_blocks(caching, len(SYSTEM) + len(so_far) - 1)
    caching.finish()
    assert [*so_far, *again.tokens] == alone


def test_the_keys_that_come_and_go_are_told_whichever_way_they_do(caching: Driver) -> None:
    """By steps, of several iterations, too; and where none follows, by the engine when asked."""
    engine, name = caching.engine, caching.instance_id
    told: set[int] = set()

    def all_of(tokens: tuple[int, ...]) -> list[int]:
        ((_, digests),) = digests_of(tokens, [caching.block_tokens], SALT)
        return list(digests)

    note_prefixes(told, engine.tell_prefixes().get(name))
    caching.submit("first", SYSTEM, greedy(140), salt=SALT)
    answer: list[int] = []
    while len(answer) < 140:
        result = engine.step(name, 48, 50)
        answer += [token for output in result.outputs for token in output.token_ids]
        note_prefixes(told, result.prefixes)
    there = all_of((*SYSTEM, *answer[:-1]))
    assert len(there) >= 7
    assert told == set(there)
    assert not engine.tell_prefixes()
    engine.bound_memory(0)
    engine.resize_kv(name, 2)
    note_prefixes(told, engine.tell_prefixes()[name])
    assert told == set(there[:2]), "leaves go before their parents"


def test_a_cached_block_is_never_a_reason_to_wait(load: LoadInstance) -> None:
    driver = load(kv_blocks=10)
    if not driver.engine.capabilities.caches_prefixes:
        pytest.skip("this engine caches no prefixes")
    for n in range(6):
        answered(driver, f"r{n}", tuple(range(n, n + 70)))
    assert driver.books.kv_blocks_used == 0
    assert driver.books.kv_blocks_cached <= 10
    prompt = [9] * (driver.block_tokens * 9)
    limited = [n for n in prompt if len(prompt) < driver.order.context_tokens_max - 12]
    for n in range(3):
        driver.run(f"all-{n}", limited or prompt[: driver.order.context_tokens_max - 13])


def test_cached_blocks_outlive_a_shrink_while_nobody_wants_the_memory(caching: Driver) -> None:
    answered(caching, "first", SYSTEM)
    cached = caching.books.kv_blocks_cached
    assert cached >= 2
    books = caching.books
    caching.engine.bound_memory(books.weights_bytes + (1 + cached) * books.kv_block_bytes)
    caching.resize(1)
    overflows = caching.books.kv_blocks_cached > 1
    if overflows:
        assert caching.books.kv_blocks_cached == cached
        caching.engine.bound_memory(books.weights_bytes + 2 * books.kv_block_bytes)
        assert caching.books.kv_blocks_cached == 2, "one in force, one that nobody wants"
    caching.engine.bound_memory(0)
    assert caching.books.kv_blocks_cached <= 1
    caching.resize(64)
    caching.run("later", SYSTEM)


def test_conversations_keep_their_tokens_through_shrinks_and_evictions(load: LoadInstance) -> None:
    """Joins, aborts, shrinks to the last block; each turn is the history of its conversation."""
    driver = load(kv_blocks=40)
    if not driver.engine.capabilities.caches_prefixes:
        pytest.skip("this engine caches no prefixes")
    most = driver.resize(40 * 32 // driver.block_tokens)
    kept_bytes = most * 3 // 2 * driver.books.kv_block_bytes
    driver.engine.bound_memory(driver.books.weights_bytes + kept_bytes)
    rng = random.Random(11)
    histories: dict[int, tuple[int, ...]] = dict.fromkeys(range(4), SYSTEM)
    adopted = 0
    for turn in range(12):
        asked = {n: (*h, *rng.choices(range(5, 90), k=9)) for n, h in histories.items()}
        asked = {n: prompt for n, prompt in asked.items() if len(prompt) < 230}
        expected = {n: driver.run(f"alone-{turn}-{n}", p) for n, p in asked.items()}
        running = {n: driver.submit(f"t{turn}-{n}", p, salt=SALT) for n, p in asked.items()}
        for _ in range(300):
            if not driver.running:
                break
            driver.resize(rng.randrange(driver.books.kv_blocks_used + 2, most + 5))
            driver.step(rng.choice([16, 48, 256]))
        assert not driver.running
        assert {n: r.tokens for n, r in running.items()} == expected
        adopted += sum(r.adopted for r in running.values())
        histories |= {n: (*p, *expected[n]) for n, p in asked.items()}
        driver.resize(rng.choice([1, 5, most]))
        driver.resize(40)
    assert adopted > 500


@pytest.fixture
def left(caching: Driver) -> tuple[Driver, set[int]]:
    """An instance that was unloaded after a request, and the digests of the blocks that it left."""
    engine, books = caching.engine, caching.books
    engine.bound_memory(4 * books.weights_bytes + 300 * books.kv_block_bytes)
    answered(caching, "first", SYSTEM)
    engine.unload(caching.instance_id)
    if not engine.kept_bytes():
        pytest.skip("this engine keeps nothing of an unloaded instance")
    told = engine.tell_prefixes()[caching.instance_id]
    kept = whole_blocks(caching, len(SYSTEM) + 11) // caching.block_tokens
    assert (len(told.came), told.went) == (kept, ())
    assert engine.kept_bytes() == kept * books.kv_block_bytes
    return caching, set(told.came)


def test_a_load_after_an_unload_finds_its_blocks(
    left: tuple[Driver, set[int]], load: LoadInstance
) -> None:
    _, digests = left
    again = load("i-2")
    assert again.engine.kept_bytes() == 0
    assert set(again.loaded.prefixes) == digests
    assert again.books.kv_blocks_cached == len(digests)
    alone = again.run("alone", SYSTEM)
    stranger = again.submit("stranger", SYSTEM, salt="other")
    again.finish()
    second = again.submit("second", SYSTEM, salt=SALT)
    again.finish()
    assert stranger.found == 0
    assert (second.found, second.adopted) == (whole_blocks(again, len(SYSTEM)),) * 2
    assert second.tokens == stranger.tokens == alone
    again.engine.unload(again.instance_id)
    again = load("i-3", kv_blocks=2)
    assert digests < set(again.loaded.prefixes), "those of the stranger have come"


def test_another_context_or_deployment_finds_nothing(
    left: tuple[Driver, set[int]], load: LoadInstance
) -> None:
    before, _ = left
    engine, kept_bytes = before.engine, before.engine.kept_bytes()
    order = replace(before.order, instance_id=InstanceId("i-2"), deployment=DeploymentName("b"))
    other = Driver(engine, order)
    assert (other.loaded.prefixes, engine.kept_bytes()) == ((), kept_bytes)
    shorter = load("i-3", context_tokens_max=128)
    assert (shorter.loaded.prefixes, engine.kept_bytes()) == ((), 0)
    stranger = shorter.submit("stranger", SYSTEM, salt=SALT)
    assert stranger.found == 0


def test_memory_that_a_load_wants_is_taken_from_what_unloaded_instances_left(
    left: tuple[Driver, set[int]],
) -> None:
    before, digests = left
    engine, stated = before.engine, before.loaded.footprint
    order = replace(before.order, instance_id=InstanceId("i-2"), deployment=DeploymentName("b"))
    room_bytes = stated.instance_bytes(order.kv_blocks) + 2 * stated.kv_block_bytes
    engine.bound_memory(room_bytes)
    assert engine.kept_bytes() == len(digests) * stated.kv_block_bytes, "there was room for them"
    Driver(engine, order)
    told = engine.tell_prefixes()[before.instance_id]
    assert (len(digests) - len(told.went), told.came) == (2, ())
    engine.bound_memory(0)
    assert len(engine.tell_prefixes()[before.instance_id].went) == 2


def test_what_is_dropped_before_the_next_load_is_told(
    left: tuple[Driver, set[int]], load: LoadInstance
) -> None:
    caching, digests = left
    again = load("i-2", context_tokens_max=64)
    assert again.loaded.prefixes == ()
    change = again.engine.tell_prefixes()[caching.instance_id]
    assert (change.came, set(change.went)) == ((), digests)
    assert caching.instance_id not in again.engine.tell_prefixes()
