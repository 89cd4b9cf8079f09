"""A bounded queue with one reader, who takes all that has come at once.

`put` never waits and says when there is no room: what then becomes of a slow peer is decided by
whoever put. For one asyncio loop; the links and the streams to clients are built on it.
"""

import asyncio
from typing import Generic, TypeVar

T = TypeVar("T")


class Mailbox(Generic[T]):
    """Not thread-safe."""

    def __init__(self, items_max: int) -> None:
        self._items_max = items_max
        self._items: list[T] = []
        self._closed = False
        self._reader: asyncio.Future[None] | None = None

    def put(self, item: T) -> bool:
        """Whether there was room. A closed mailbox has none."""
        if self._closed or len(self._items) >= self._items_max:
            return False
        self._items.append(item)
        self._wake()
        return True

    @property
    def room(self) -> int:
        """How many items may still be put."""
        return 0 if self._closed else self._items_max - len(self._items)

    def close(self) -> None:
        """Nothing more will come; what is in it can still be taken."""
        self._closed = True
        self._wake()

    async def take(self) -> list[T]:
        """Everything in it, in order, as soon as there is anything; nothing once it is closed."""
        if not self._items and not self._closed:
            self._reader = asyncio.get_running_loop().create_future()
            try:
                await self._reader
            finally:
                self._reader = None
        items, self._items = self._items, []
        return items

    def _wake(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)
