"""A mailbox keeps order, has a bound, and never keeps its writer waiting."""

import asyncio

from mesh.wire.mailbox import Mailbox


async def test_the_reader_gets_all_that_has_come_in_order() -> None:
    box: Mailbox[int] = Mailbox(3)
    assert [box.put(n) for n in range(4)] == [True, True, True, False]
    assert await box.take() == [0, 1, 2]
    reading = asyncio.create_task(box.take())
    await asyncio.sleep(0)
    assert not reading.done()
    box.put(5)
    assert await reading == [5]


async def test_a_closed_mailbox_gives_what_it_has_and_then_nothing() -> None:
    box: Mailbox[int] = Mailbox(3)
    box.put(1)
    box.close()
    assert not box.put(2)
    assert await box.take() == [1]
    assert await box.take() == []


async def test_closing_wakes_the_reader_and_a_cancelled_reader_loses_nothing() -> None:
    box: Mailbox[int] = Mailbox(3)
    reading = asyncio.create_task(box.take())
    await asyncio.sleep(0)
    reading.cancel()
    await asyncio.gather(reading, return_exceptions=True)
    box.put(1)
    assert await box.take() == [1]
    reading = asyncio.create_task(box.take())
    await asyncio.sleep(0)
    box.close()
    assert await reading == []
