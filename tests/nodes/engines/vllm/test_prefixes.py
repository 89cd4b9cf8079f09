"""Cached blocks under a random life: numbers, keys and memory stay those of one another."""

import random

import pytest

from mesh.domain.ids import InstanceId
from mesh.memory.block_keys import digests_of
from mesh_nodes.engines.vllm import VllmEngine
from tests.contract.driving import Driver, Running, greedy, no_progress, note_prefixes
from tests.contract.engine_contract import StoredModel, vllm_spawner

SALTS = ("one", "two", None)


@pytest.mark.parametrize("elastic", [True, False], ids=["elastic", "copying"])
def test_every_answer_is_as_without_a_cache_and_told_keys_are_of_what_was_computed(
    model: StoredModel, elastic: bool
) -> None:
    """Requests that begin alike, in doubles at once, aborted, amid resizes to the last block."""
    rng = random.Random(5)
    engine = VllmEngine(spawner=vllm_spawner(), elastic=elastic)
    driver = Driver(engine, model.order(InstanceId("i"), kv_blocks=40))
    told: set[int] = set()
    possible: set[int] = set()
    answers: dict[tuple[int, ...], list[int]] = {}
    adopted = 0

    stems = [tuple(rng.choices(range(5, 90), k=120)) for _ in range(3)]
    for turn in range(25):
        running: list[Running] = []
        for n in range(rng.randrange(1, 6)):
            prompt = rng.choice(stems)[: rng.randrange(20, 120)] + (7,) * rng.randrange(1, 4)
            for copy in range(rng.choice([1, 1, 2])):
                name, salt = f"{turn}-{n}-{copy}", rng.choice(SALTS)
                running.append(driver.submit(name, prompt, greedy(20), salt=salt))
        while driver.running:
            driver.resize(rng.randrange(driver.books.kv_blocks_used + 5, 45))
            note_prefixes(told, driver.step(rng.choice([16, 64, 256])).prefixes)
            if rng.random() < 0.05:
                driver.abort(rng.choice(list(driver.running)))
        for one in running:
            prompt = one.request.prompt_tokens
            adopted += one.adopted
            if one.finish is not None:
                assert answers.setdefault(prompt, one.tokens) == one.tokens
            tokens = (*prompt, *one.tokens)
            for _, digests in digests_of(tokens, [driver.block_tokens], one.request.cache_salt):
                possible.update(digests)
        driver.resize(rng.choice([1, 4, 40]))
        driver.resize(40)
        note_prefixes(told, engine.tell_prefixes().get(driver.instance_id))
        assert told <= possible
        assert len(told) <= driver.books.kv_blocks_cached <= 40
    assert adopted > 500
    for prompt, answer in answers.items():
        assert driver.run(f"alone-{len(driver.ended)}", prompt, greedy(20)) == answer
    engine.close()


def test_what_is_cached_gives_way_to_whoever_wants_the_memory(model: StoredModel) -> None:
    """A survey takes blocks in force alone. Who was used the longest ago is asked first."""
    engine = VllmEngine(spawner=vllm_spawner())
    one, two = (Driver(engine, model.order(InstanceId(n), kv_blocks=8)) for n in ("one", "two"))
    books = one.books
    block = books.kv_block_bytes
    engine.bound_memory(2 * books.weights_bytes + (2 * 8 + 10) * block)
    for driver in (one, two):
        driver.submit("r", tuple(range(5, 90)) * 2, greedy(4), salt="tenant")
        driver.finish()
        assert driver.books.kv_blocks_cached == 5
        driver.measure(prefill_tokens=200)
        driver.resize(1)
    assert [d.books.kv_blocks_cached for d in (one, two)] == [5, 5]
    order = model.order(InstanceId("three"), kv_blocks=4)
    engine.bound_memory(3 * books.weights_bytes + (2 + 4 + 4) * block)
    assert [d.books.kv_blocks_cached for d in (one, two)] == [5, 5]
    engine.load(order, no_progress)
    assert [d.books.kv_blocks_cached for d in (one, two)] == [1, 5]
    engine.bound_memory(0)
    assert [d.books.kv_blocks_cached for d in (one, two)] == [1, 1]
    engine.close()
