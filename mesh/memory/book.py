"""A node's memory book: its capacity, and what each instance has reserved of it.

The controller core is its only writer. An instance holds its reservation from the decision to load
it until the node says that it is gone, so that the book never promises a byte twice.
"""

from mesh.domain.ids import InstanceId


class MemoryBook:
    """Invariant: reserved + free = capacity, unless a node reports more loaded than it has."""

    def __init__(self, capacity_bytes: int) -> None:
        self.capacity_bytes = capacity_bytes
        self._reserved: dict[InstanceId, int] = {}
        self._reserved_bytes = 0

    @property
    def reserved_bytes(self) -> int:
        return self._reserved_bytes

    @property
    def free_bytes(self) -> int:
        return self.capacity_bytes - self._reserved_bytes

    def held_bytes(self, instance_id: InstanceId) -> int:
        """What an instance has reserved; 0 for an unknown one."""
        return self._reserved.get(instance_id, 0)

    def reserve(self, instance_id: InstanceId, size_bytes: int) -> bool:
        """Reserve, or change nothing and return False when it does not fit."""
        if size_bytes > self.free_bytes + self.held_bytes(instance_id):
            return False
        self.record(instance_id, size_bytes)
        return True

    def record(self, instance_id: InstanceId, size_bytes: int) -> None:
        """Book what a node says is so already, fitting or not."""
        self._reserved_bytes += size_bytes - self.held_bytes(instance_id)
        self._reserved[instance_id] = size_bytes

    def release(self, instance_id: InstanceId) -> None:
        """Give an instance's reservation back. An unknown id is no error: it may never have fit."""
        self._reserved_bytes -= self._reserved.pop(instance_id, 0)
