"""Contract: an instance's weights leave the device and come back, and nothing else of it does."""

import threading
from dataclasses import replace

import pytest

from mesh.domain.errors import EngineError
from mesh.domain.ids import InstanceId
from mesh.domain.profile import IterationShape
from mesh.domain.request import SamplingParams
from mesh.runtime.engine import Engine
from tests.contract.conftest import LoadInstance
from tests.contract.driving import Driver, greedy
from tests.contract.engine_contract import EngineUnderTest, StoredModel

PROMPT = tuple(range(5, 45))
SAMPLED = SamplingParams(temperature=0.8, seed=7, max_tokens=12, ignore_eos=True)


@pytest.fixture(autouse=True)
def swapping(engine: Engine) -> None:
    if not engine.capabilities.swaps:
        pytest.skip("this engine does not swap")


def swap_through(driver: Driver) -> None:
    driver.swap(False)
    driver.swap(True)


def test_a_swap_amid_requests_changes_no_token(driver: Driver) -> None:
    """Amid a prompt, between tokens, and twice."""
    alone = [driver.run("a", PROMPT), driver.run("b", PROMPT[:9], SAMPLED)]
    first = driver.submit("c", PROMPT)
    driver.step(16)
    swap_through(driver)
    second = driver.submit("d", PROMPT[:9], SAMPLED)
    driver.step()
    driver.step()
    assert first.tokens
    assert second.tokens
    swap_through(driver)
    swap_through(driver)
    driver.finish()
    assert [first.tokens, second.tokens] == alone


def test_requests_come_and_go_while_it_is_out(driver: Driver) -> None:
    alone = driver.run("alone", PROMPT)
    stays = driver.submit("stays", PROMPT)
    driver.submit("goes", PROMPT)
    driver.step()
    driver.swap(False)
    driver.abort("goes")
    comes = driver.submit("comes", PROMPT)
    driver.submit("comes and goes", PROMPT)
    driver.abort("comes and goes")
    driver.swap(True)
    driver.finish()
    assert stays.tokens == comes.tokens == alone


def test_two_instances_take_turns(load: LoadInstance) -> None:
    """They have different limits, so that they share nothing."""
    drivers = [load("i-1"), load("i-2", context_tokens_max=128)]
    alone = [driver.run("alone", PROMPT, greedy(4)) for driver in drivers]
    drivers[1].swap(False)
    running = [driver.submit("r", PROMPT, greedy(4)) for driver in drivers]
    while any(driver.running for driver in drivers):
        for one, other in (drivers, drivers[::-1]):
            if one.running:
                one.step(16)
            one.swap(False)
            other.swap(True)
    assert [r.tokens for r in running] == alone


def test_of_two_that_share_weights_each_comes_and_goes_alone(load: LoadInstance) -> None:
    one, other = load("i-1"), load("i-2")
    alone = one.run("alone", PROMPT)
    one.swap(False)
    assert other.books.weights_bytes == other.loaded.footprint.instance_bytes(0)
    assert other.run("r", PROMPT) == alone
    other.swap(False)
    one.swap(True)
    assert one.run("r", PROMPT) == alone
    assert one.books.weights_bytes == one.loaded.footprint.instance_bytes(0)


def test_the_books_have_no_weights_while_it_is_out(driver: Driver) -> None:
    driver.submit("r", PROMPT)
    driver.step()
    before = driver.books
    driver.swap(False)
    assert driver.books.weights_bytes < before.weights_bytes
    assert driver.books.kv_blocks_used == before.kv_blocks_used > 0
    driver.swap(False)
    driver.swap(True)
    driver.swap(True)
    assert driver.books == before


def test_weights_go_and_come_by_parts(driver: Driver) -> None:
    if not driver.engine.capabilities.swaps_parts:
        pytest.skip("this engine moves whole weights")
    alone, footprint = driver.run("alone", PROMPT), driver.loaded.footprint
    running = driver.submit("r", PROMPT)
    driver.step(16)
    whole_bytes = driver.books.weights_bytes
    driver.swap(0.0)
    stays_bytes, held_bytes = driver.books.weights_bytes, []
    driver.swap(1.0)
    for part in (0.75, 0.25, 0.5, 0.0, 0.5):
        most_bytes = stays_bytes + part * (whole_bytes - stays_bytes)
        driver.swap((most_bytes - footprint.stays_bytes) / footprint.weights_bytes)
        assert driver.books.weights_bytes <= most_bytes + 1
        held_bytes.append(driver.books.weights_bytes)
        with pytest.raises(EngineError):
            driver.engine.step(driver.instance_id, 64)
    assert held_bytes[0] > held_bytes[2] > held_bytes[1] > held_bytes[3]
    assert held_bytes[4] == held_bytes[2]
    driver.swap(1.0)
    driver.finish()
    assert running.tokens == alone


def test_cached_prefixes_stay(driver: Driver) -> None:
    if not driver.engine.capabilities.caches_prefixes:
        pytest.skip("this engine caches none")
    alone = driver.submit("alone", PROMPT * 3, salt="tenant")
    driver.finish()
    driver.swap(False)
    again = driver.submit("again", PROMPT * 3, salt="tenant")
    driver.swap(True)
    driver.finish()
    assert again.adopted >= driver.block_tokens
    assert again.tokens == alone.tokens


def test_what_needs_weights_is_refused_while_it_is_out(driver: Driver) -> None:
    running = driver.submit("r", PROMPT)
    driver.step(16)
    driver.swap(False)
    before = driver.books
    with pytest.raises(EngineError):
        driver.engine.step(driver.instance_id, 64)
    with pytest.raises(EngineError):
        driver.engine.measure(driver.instance_id, IterationShape(prefill_tokens=4))
    assert driver.books == before
    driver.swap(True)
    driver.finish()
    assert len(running.tokens) == 12


def test_its_kv_cache_grows_and_shrinks_while_it_is_out(driver: Driver) -> None:
    alone = driver.run("alone", PROMPT, greedy(20))
    running = driver.submit("r", PROMPT, greedy(20))
    for blocks in (8, 70):
        driver.step(24)
        driver.swap(False)
        assert driver.resize(blocks) == blocks
        driver.swap(True)
    driver.finish()
    assert running.tokens == alone


def test_its_kv_cache_is_resized_while_parts_of_its_weights_move(driver: Driver) -> None:
    if not driver.engine.capabilities.swaps_parts:
        pytest.skip("this engine moves whole weights")
    alone = driver.run("alone", PROMPT, greedy(20))
    running = driver.submit("r", PROMPT, greedy(20))
    driver.step(24)

    def swaps() -> None:
        for share in (0.0, 0.25, 0.5, 0.75, 1.0):
            driver.engine.swap(driver.instance_id, share)

    swapper = threading.Thread(target=swaps)
    swapper.start()
    try:
        resized = [driver.engine.resize_kv(driver.instance_id, n).kv_blocks for n in (8, 70, 12)]
    finally:
        swapper.join()
    assert resized == [8, 70, 12]
    driver.check_books()
    driver.finish()
    assert running.tokens == alone


def test_one_comes_up_without_its_weights(
    under_test: EngineUnderTest, engine: Engine, model: StoredModel, load: LoadInstance
) -> None:
    alone = load("other").run("alone", PROMPT)
    engine.unload(InstanceId("other"))
    order = replace(model.order(InstanceId("i-2"), kv_blocks=24), swapped=True)
    driver = Driver(engine, order, spare_blocks=under_test.spare_blocks_per_request)
    driver.submit("goes", PROMPT)
    driver.abort("goes")
    running = driver.submit("r", PROMPT)
    with pytest.raises(EngineError):
        engine.step(driver.instance_id, 64)
    assert driver.resize(30) == 30
    driver.swap(True)
    driver.finish()
    assert running.tokens == alone
    swap_through(driver)
    assert driver.run("again", PROMPT) == alone


def test_one_that_is_not_loaded_is_not_swapped(engine: Engine) -> None:
    for resident in (False, True):
        with pytest.raises(EngineError):
            engine.swap(InstanceId("nobody"), resident)


def test_one_that_is_out_can_be_unloaded_and_loaded_again(
    engine: Engine, load: LoadInstance
) -> None:
    driver = load()
    alone = driver.run("alone", PROMPT)
    driver.submit("left", PROMPT)
    driver.step()
    driver.swap(False)
    engine.unload(driver.instance_id)
    assert engine.memory() == ()
    assert load().run("r", PROMPT) == alone


def test_a_swap_disturbs_no_step_of_another(load: LoadInstance, driver: Driver) -> None:
    """Nor do requests of the instance that is swapped, which come and go meanwhile."""
    alone = driver.run("alone", PROMPT, greedy(40))
    other = load("beside", context_tokens_max=128)
    running = driver.submit("r", PROMPT, greedy(40))

    def swaps() -> None:
        for _ in range(3):
            other.engine.swap(other.instance_id, False)
            other.engine.swap(other.instance_id, True)

    swapper = threading.Thread(target=swaps)
    swapper.start()
    for number in range(40):
        driver.step()
        other.submit(f"r{number}", PROMPT[:5], greedy(4))
        other.engine.abort(other.instance_id, other.running.popitem()[0])
    swapper.join()
    assert running.tokens == alone
    assert other.run("r", PROMPT[:5], greedy(4)) == driver.run("s", PROMPT[:5], greedy(4))
