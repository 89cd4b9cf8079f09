"""The memory book under any sequence of reservations."""

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from mesh.domain.ids import InstanceId
from mesh.memory.book import MemoryBook

CAPACITY = 1000
IDS = st.sampled_from([InstanceId(f"i{n}") for n in range(5)])


class BookMachine(RuleBasedStateMachine):
    """Against a plain dict."""

    def __init__(self) -> None:
        super().__init__()
        self.book = MemoryBook(CAPACITY)
        self.held: dict[InstanceId, int] = {}

    @rule(instance_id=IDS, size_bytes=st.integers(0, 700))
    def reserve(self, instance_id: InstanceId, size_bytes: int) -> None:
        others = sum(size for i, size in self.held.items() if i != instance_id)
        fits = others + size_bytes <= CAPACITY
        assert self.book.reserve(instance_id, size_bytes) == fits
        if fits:
            self.held[instance_id] = size_bytes

    @rule(instance_id=IDS)
    def release(self, instance_id: InstanceId) -> None:
        self.book.release(instance_id)
        self.held.pop(instance_id, None)

    @invariant()
    def balanced(self) -> None:
        assert self.book.reserved_bytes == sum(self.held.values()) <= CAPACITY
        assert self.book.reserved_bytes + self.book.free_bytes == CAPACITY


TestBook = BookMachine.TestCase
