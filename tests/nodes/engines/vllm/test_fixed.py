"""Without elastic memory, as on GPUs, the bound on KV blocks holds all the same, and the books say
that nothing comes back.
"""

from collections.abc import Iterator

import pytest

from mesh.domain.ids import InstanceId
from mesh_nodes.engines.vllm import VllmEngine
from tests.contract.driving import Driver, greedy
from tests.contract.engine_contract import StoredModel, vllm_spawner

BLOCKS = 12


@pytest.fixture
def fixed() -> Iterator[VllmEngine]:
    engine = VllmEngine(spawner=vllm_spawner(), elastic=False)
    yield engine
    engine.close()


def test_a_shrink_bounds_the_blocks_and_gives_no_memory_back(
    fixed: VllmEngine, model: StoredModel
) -> None:
    assert not fixed.capabilities.resize_kv
    driver = Driver(fixed, model.order(InstanceId("i"), kv_blocks=BLOCKS))
    held_bytes = BLOCKS * driver.books.kv_block_bytes
    assert driver.books.kv_held_bytes == held_bytes
    prompt = [9] * (2 * driver.block_tokens)
    alone = driver.run("alone", prompt, greedy(6))
    assert driver.resize(2) == 2
    assert driver.books.kv_held_bytes == held_bytes
    running = driver.submit("r", prompt, greedy(6))
    driver.step(256)
    assert driver.step(256).starved == ("r",)
    assert driver.resize(BLOCKS + 50) == BLOCKS, "what was not allocated cannot be had"
    driver.finish()
    assert running.tokens == alone
