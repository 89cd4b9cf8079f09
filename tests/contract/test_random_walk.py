"""Contract: whatever an agent does with an engine, in whatever order, the books hold, every request
ends once, and a greedy prompt always has the same output.

A Hypothesis state machine submits, aborts, steps, measures and resizes at random; `Driver` checks
every answer.
"""

from collections.abc import Iterator
from contextlib import suppress
from itertools import count

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from mesh.domain.errors import OutOfMemory
from mesh.domain.ids import RequestId
from tests.contract.conftest import LoadInstance
from tests.contract.driving import Driver, greedy
from tests.contract.engine_contract import EngineUnderTest
from tests.support.depth import DEEP

KV_BLOCKS_MAX = 20
ROOM = 64


class Walk(RuleBasedStateMachine):
    """One walk over an instance that outlives it: what a walk leaves is finished at its end."""

    def __init__(self, driver: Driver, outputs: dict[tuple[int, int], list[int]]) -> None:
        super().__init__()
        self.driver = driver
        self.outputs = outputs
        """Greedy output by prompt (its first token, its length), over all walks."""
        self.known: dict[tuple[int, int], list[int]] = {}
        """The same of this walk alone, since what a walk does may not depend on earlier ones."""
        self.prompts: dict[RequestId, tuple[int, int]] = {}
        self.names = (f"r{n}" for n in count())
        driver.resize(8)

    @rule(first=st.integers(5, 8), length=st.integers(1, 150), tokens=st.integers(1, 12))
    def submit(self, first: int, length: int, tokens: int) -> None:
        name = next(self.names)
        self.driver.submit(name, self.prompt(first, length), greedy(tokens))
        self.prompts[RequestId(name)] = (first, length)

    @precondition(lambda self: self.known)
    @rule(data=st.data(), given=st.integers(0, 12))
    def resume(self, data: st.DataObject, given: int) -> None:
        """With output that an earlier request had for the same prompt."""
        first, length = data.draw(st.sampled_from(sorted(self.known)))
        output = self.known[first, length][:given]
        name = next(self.names)
        sampling = greedy(len(output) + 2)
        self.driver.submit(name, self.prompt(first, length), sampling, output=output)
        self.prompts[RequestId(name)] = (first, length)

    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        names = [*self.driver.running, *list(self.driver.ended)[-2:], RequestId("never-there")]
        self.driver.abort(data.draw(st.sampled_from(names)))

    @rule(budget=st.integers(0, 128), times=st.integers(1, 4))
    def step(self, budget: int, times: int) -> None:
        for _ in range(times):
            self.driver.step(budget)

    @precondition(lambda self: self.driver.running)
    @rule(data=st.data())
    def step_some(self, data: st.DataObject) -> None:
        names = st.sampled_from(list(self.driver.running))
        shares = data.draw(st.dictionaries(names, st.integers(0, 60), max_size=3))
        self.driver.step(tuple(shares.items()), tuple(data.draw(st.sets(names))))

    @rule(blocks=st.integers(0, KV_BLOCKS_MAX))
    def resize(self, blocks: int) -> None:
        assert self.driver.resize(blocks) >= max(blocks, 1)

    @rule(
        prefill=st.integers(1, 40),
        past=st.integers(0, 60),
        batch=st.integers(0, 3),
        context=st.integers(1, 70),
    )
    def measure(self, prefill: int, past: int, batch: int, context: int) -> None:
        with suppress(OutOfMemory):
            self.driver.measure(
                prefill_tokens=prefill,
                prefill_past_tokens=past,
                decode_batch=batch,
                decode_context_tokens=context,
            )

    @invariant()
    def a_prompt_has_one_output(self) -> None:
        for request_id, key in self.prompts.items():
            running = self.driver.running.get(request_id) or self.driver.ended.get(request_id)
            if running is not None:
                output = [*running.request.output_tokens, *running.tokens]
                for outputs in (self.known, self.outputs):
                    known = outputs.setdefault(key, [])
                    known.extend(output[len(known) :])
                    assert output == known[: len(output)]

    def teardown(self) -> None:
        """Given blocks enough, everything that still runs ends, and the cache is empty."""
        self.driver.resize(ROOM + len(self.driver.running) * ROOM)
        self.driver.finish(prefill_tokens_max=256)
        self.a_prompt_has_one_output()
        assert self.driver.books.kv_blocks_used == 0
        self.driver.ended.clear()

    @staticmethod
    def prompt(first: int, length: int) -> list[int]:
        return [first + n * n % 80 for n in range(length)]


@pytest.fixture
def walked(load: LoadInstance) -> Iterator[Driver]:
    driver = load(kv_blocks=8)
    yield driver
    assert driver.books.kv_blocks_used == 0


def test_random_walks(under_test: EngineUnderTest, walked: Driver) -> None:
    outputs: dict[tuple[int, int], list[int]] = {}

    class WalkOverIt(Walk):
        def __init__(self) -> None:
            super().__init__(walked, outputs)

    run_state_machine_as_test(
        WalkOverIt,
        settings=settings(
            max_examples=under_test.walks // (1 if DEEP else 6),
            stateful_step_count=40,
            deadline=None,
            derandomize=True,
            suppress_health_check=list(HealthCheck),
        ),
    )
