"""Checks used, cached and free blocks through random histories, in one room with other
instances.
"""

import threading
from collections.abc import Collection
from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from mesh.memory.block_keys import digest_of, keys_of
from mesh.memory.cache_budget import CacheBudget
from mesh.memory.kv_blocks import KvBlocks
from mesh.memory.prefix_walk import PrefixWalk

SIZE = 4
"""Tokens of a block."""
PROMPTS = st.lists(st.integers(0, 1), min_size=1, max_size=26)
"""The prompts have two different tokens: many have the same beginning."""
INSTANCES = st.integers(0, 1)
BLOCK_BYTES = (1, 2)
WEIGHTS_BYTES = 3


class Memory:
    """Places that remember what was written."""

    total = 64

    def __init__(self) -> None:
        self.contents: dict[int, tuple[int, ...]] = {}

    def claim(self, count: int) -> list[int]:
        free = [block for block in range(self.total) if block not in self.contents]
        self.contents |= dict.fromkeys(free[:count], ())
        return free[:count]

    def release(self, blocks: Collection[int]) -> None:
        for block in blocks:
            if block not in self.contents:
                raise ValueError(f"KV block {block} is given back twice")
            del self.contents[block]

    forget = release


@dataclass
class Request:
    tokens: list[int]
    salt: str
    walk: PrefixWalk
    table: list[int] = field(default_factory=list)
    computed: int = 0


@dataclass
class Instance:
    memory: Memory
    pool: KvBlocks
    requests: list[Request] = field(default_factory=list)
    told: set[int] = field(default_factory=set)
    """Digests that the controller believes to be there."""

    def compute(self, request: Request, count: int) -> None:
        """As an engine: adopt, take what is missing, write it, name it."""
        known = request.tokens
        if request.computed == len(request.table) * SIZE:
            request.table += [0] * (len(known) // SIZE + 1)
            adopted = request.walk.adopt(known, request.computed, request.table, self.pool)
            del request.table[(request.computed + adopted) // SIZE :]
            request.computed += adopted
        end = min(request.computed + count, len(known))
        missing = -(-end // SIZE) - len(request.table)
        if missing > 0:
            request.table += self.pool.take(min(missing, self.pool.free))
        end = min(end, len(request.table) * SIZE)
        for at in range(request.computed, end):
            self.memory.contents[request.table[at // SIZE]] += (known[at],)
        request.computed = max(end, request.computed)
        request.walk.name(known, request.computed, request.table, self.pool)


class Histories(RuleBasedStateMachine):
    @initialize(memory_bytes=st.integers(0, 80))
    def begin(self, memory_bytes: int) -> None:
        self.memory_bytes = memory_bytes
        self.loading_bytes = 0
        self.budget = CacheBudget()
        self.budget.bound(memory_bytes)
        self.instances = []
        for n, block_bytes in enumerate(BLOCK_BYTES):
            memory = Memory()
            pool = KvBlocks(
                8,
                memory,
                self.budget,
                block_bytes=block_bytes,
                weights_bytes=WEIGHTS_BYTES,
                overflows=n == 0,
            )
            self.instances.append(Instance(memory, pool))

    @rule(n=INSTANCES, tokens=PROMPTS, salt=st.sampled_from(["a", "b"]))
    def submit(self, n: int, tokens: list[int], salt: str) -> None:
        request = Request(tokens, salt, PrefixWalk(salt, SIZE))
        instance = self.instances[n]
        found = request.walk.found_tokens(tokens, instance.pool)
        assert found < len(tokens)
        instance.requests.append(request)
        if found and instance.pool.free >= found // SIZE:
            instance.compute(request, 1)
            assert request.walk.adopted_tokens == found

    @precondition(lambda self: any(i.requests for i in self.instances))
    @rule(data=st.data(), count=st.integers(1, 9))
    def compute(self, data: st.DataObject, count: int) -> None:
        instance, request = self._draw(data)
        instance.compute(request, count)

    @precondition(lambda self: any(i.requests for i in self.instances))
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        instance, request = self._draw(data)
        instance.requests.remove(request)
        instance.pool.release(request.table)

    @rule(n=INSTANCES, blocks=st.integers(1, 20))
    def resize(self, n: int, blocks: int) -> None:
        pool = self.instances[n].pool
        if blocks >= pool.used:
            pool.resize(blocks)

    @rule(memory_bytes=st.integers(0, 80))
    def bound(self, memory_bytes: int) -> None:
        self.budget.bound(memory_bytes)
        self.memory_bytes = memory_bytes

    @rule(loading_bytes=st.integers(0, 40))
    def load(self, loading_bytes: int) -> None:
        self.budget.begin_load("next", loading_bytes)
        self.loading_bytes = loading_bytes
        if not loading_bytes:
            self.budget.end_load("next")

    @rule(n=INSTANCES)
    def tell(self, n: int) -> None:
        instance = self.instances[n]
        change = instance.pool.tell()
        if change is not None:
            assert not set(change.came) & instance.told, "nothing comes twice"
            assert set(change.went) <= instance.told, "what goes has come"
            instance.told |= set(change.came)
            instance.told -= set(change.went)
        assert instance.told == {digest_of(key) for key, _ in instance.pool.named()}

    @invariant()
    def each_block_is_free_used_or_cached(self) -> None:
        for instance in getattr(self, "instances", ()):
            used = {block for request in instance.requests for block in request.table}
            named = {block for _, block in instance.pool.named()}
            assert instance.pool.used == len(used) <= instance.pool.blocks
            assert instance.pool.cached == len(named - used)
            assert set(instance.memory.contents) == used | named

    @invariant()
    def references_are_holders(self) -> None:
        for instance in getattr(self, "instances", ()):
            for _, block in instance.pool.named():
                holders = sum(block in request.table for request in instance.requests)
                assert instance.pool.holders(block) == holders

    @invariant()
    def keys_say_what_blocks_hold(self) -> None:
        for instance in getattr(self, "instances", ()):
            named = dict(instance.pool.named())
            for request in instance.requests:
                held = instance.memory.contents
                said = [token for block in request.table for token in held[block]]
                assert said[: request.computed] == request.tokens[: request.computed]
                full = request.computed // SIZE
                keys = list(keys_of(request.tokens, SIZE, request.salt))[:full]
                assert [named[key] for key in keys] == request.table[:full]

    @invariant()
    def what_is_cached_was_promised_to_nobody(self) -> None:
        pools = [instance.pool for instance in getattr(self, "instances", ())]
        for pool in pools:
            assert pool.overflows or not pool.extra
        booked = sum(pool.blocks * pool.block_bytes + WEIGHTS_BYTES for pool in pools)
        extra = sum(pool.extra * pool.block_bytes for pool in pools)
        if pools and extra:
            assert booked + extra + self.loading_bytes <= self.memory_bytes

    def _draw(self, data: st.DataObject) -> tuple[Instance, Request]:
        both = [(i, request) for i in self.instances for request in i.requests]
        return data.draw(st.sampled_from(both))


TestHistories = Histories.TestCase
TestHistories.settings = settings(stateful_step_count=50)


def filled(budget: CacheBudget, *prompts: list[int]) -> Instance:
    """With the blocks of these prompts cached, in their order."""
    memory = Memory()
    instance = Instance(memory, KvBlocks(20, memory, budget, overflows=True))
    for tokens in prompts:
        request = Request(tokens, "", PrefixWalk("", SIZE))
        instance.compute(request, 100)
        instance.pool.release(request.table)
    return instance


def held(pool: KvBlocks, tokens: list[int]) -> list[bool]:
    return [pool.holds(key) for key in keys_of(tokens, SIZE, "")]


def test_leaves_go_before_their_parents() -> None:
    pool = filled(CacheBudget(), [1] * 12).pool
    for left in ([True, True, True], [True, True, False], [True, False, False], [False] * 3):
        assert held(pool, [1] * 12) == left
        if any(left):
            pool.forgotten([pool.forget_oldest()])


def test_the_oldest_of_all_instances_goes_first_and_what_is_used_again_is_young() -> None:
    budget = CacheBudget()
    budget.bound(100)
    instance = filled(budget, [1] * 4, [2] * 4)
    one, other = instance.pool, filled(budget, [3] * 4).pool
    one.resize(0)
    other.resize(0)
    again = Request([1] * 5, "", PrefixWalk("", SIZE))
    one.resize(1)
    instance.compute(again, 0)
    one.release(again.table)
    one.resize(0)
    for memory_bytes, left in ((3, "123"), (2, "13"), (1, "1"), (0, "")):
        budget.bound(memory_bytes)
        found = [name for name, pool in (("1", one), ("2", one), ("3", other))
                 if all(held(pool, [int(name)] * 4))]  # fmt: skip
        assert "".join(found) == left


def test_two_that_compute_the_same_at_once_end_up_with_one_block() -> None:
    budget = CacheBudget()
    pool = KvBlocks(8, Memory(), budget)
    both = [Request([5] * 9, "", PrefixWalk("", SIZE)) for _ in range(2)]
    tables = [pool.take(3) for _ in both]
    for request, table in zip(both, tables, strict=True):
        request.table = table
        request.walk.name(request.tokens, 9, request.table, pool)
    assert both[0].table[:2] == both[1].table[:2]
    assert both[0].table[2] != both[1].table[2], "a block that is not full is its owner's alone"
    assert pool.used == 4


def test_callers_with_other_salts_find_nothing() -> None:
    pool = filled(CacheBudget(), [1] * 12).pool
    assert PrefixWalk("", SIZE).found_tokens([1] * 12, pool) == 8
    assert PrefixWalk("other", SIZE).found_tokens([1] * 12, pool) == 0


def test_a_load_that_begins_takes_what_cached_blocks_have() -> None:
    budget = CacheBudget()
    pool = filled(budget, [1] * 40).pool
    assert pool.cached == 10
    budget.bound(25)
    pool.resize(1)
    assert pool.cached == 10
    budget.begin_load("next", 20)
    assert pool.cached == 5, "25 less 20 promised: one in force, four beyond it"
    with pytest.raises(ValueError, match="KV blocks wanted"):
        pool.take(2)


def test_a_load_may_take_memory_while_another_thread_computes() -> None:
    """As a node's: its loads begin beside the iterations of others."""
    budget = CacheBudget(100, threading.RLock())
    instance = filled(budget)
    pool = instance.pool
    over = threading.Event()
    failures: list[BaseException] = []

    def compute() -> None:
        try:
            for n in range(400):
                request = Request([n % 7] * 30, "", PrefixWalk("", SIZE))
                instance.compute(request, 30)
                pool.release(request.table)
                pool.tell()
        except BaseException as error:
            failures.append(error)
        over.set()

    computing = threading.Thread(target=compute)
    computing.start()
    while not over.is_set():
        budget.begin_load("next", 90)
        budget.end_load("next")
        pool.tell()
    computing.join()
    assert not failures
    assert pool.used == 0
