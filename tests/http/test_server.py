"""Who watches a connection's client, where one answer ends as the next has begun."""

import asyncio
from typing import Any

import uvicorn
from uvicorn.server import ServerState

from mesh.http.exchange import WATCH
from mesh.http.server import BoundedProtocol


class Transport(asyncio.Transport):
    """A transport that belongs to nobody."""

    def is_closing(self) -> bool:
        return False

    def close(self) -> None:
        pass


async def test_an_answer_that_ends_leaves_the_next_one_watched() -> None:
    config = uvicorn.Config("none", log_config=None)
    config.load_app = lambda: None  # type: ignore[method-assign]
    config.load()
    protocol = BoundedProtocol(config=config, server_state=ServerState(), app_state={})
    protocol.connection_made(Transport())
    left: list[str] = []
    protocol.on_message_begin()
    watch: Any = protocol.scope["extensions"][WATCH]
    unwatch = watch(lambda: left.append("first"))
    watch(lambda: left.append("second"))
    unwatch()
    protocol.connection_lost(None)
    assert left == ["second"]
    watch(lambda: left.append("third"))
    assert left == ["second", "third"], "who comes too late is told at once"
