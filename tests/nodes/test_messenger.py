"""Calls carried to the loop: all of them, in order, from any thread; none once it has closed."""

import asyncio
import threading
from functools import partial

from mesh_nodes.lanes import Messenger


async def test_calls_arrive_on_the_loops_thread_in_the_order_of_posting() -> None:
    messenger = Messenger(asyncio.get_running_loop())
    came: list[tuple[int, int]] = []
    done = asyncio.Event()

    def arrived(number: int) -> None:
        came.append((number, threading.get_ident()))

    def post_all() -> None:
        for number in range(200):
            messenger.post(partial(arrived, number))
        messenger.post(done.set)

    await asyncio.to_thread(post_all)
    async with asyncio.timeout(10):
        await done.wait()
    assert came == [(number, threading.get_ident()) for number in range(200)]
    messenger.close(10)


def test_a_closed_loop_ends_it_quietly() -> None:
    loop, before = asyncio.new_event_loop(), set(threading.enumerate())
    messenger = Messenger(loop)
    loop.close()
    messenger.post(lambda: None)
    messenger.close(10)
    left = set(threading.enumerate()) - before
    assert not [t for t in left if t.name == "mesh-messenger" and t.is_alive()]
