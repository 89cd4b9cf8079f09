"""Tells the controller what a node does before its hello, for which `mesh nodes` shows it.

`main` owns one; whatever takes long at a start says so. Nothing is dialled before the first word,
and nothing depends on it: a controller that does not listen, or knows no such call, is left alone.
After: the agent, which joins.
"""

import threading
from collections.abc import Iterator
from typing import Any

import grpc

from mesh.domain.messages import NodeStarting
from mesh.domain.values import replace
from mesh.v1 import node_link_pb2 as pb
from mesh.v1.node_link_pb2_grpc import NodeLinkStub
from mesh.wire.channel import dial_blocking
from mesh.wire.codec import to_wire
from mesh.wire.credentials import credentials


class Announcer:
    """`node` has what does not change. Calls come from any thread, and never wait."""

    def __init__(self, address: str, node: NodeStarting) -> None:
        self._address = address
        self._said = node
        self._news = threading.Condition()
        self._untold = False
        self._closed = False
        self._channel: grpc.Channel | None = None
        self._call: object = None
        """A call that nothing refers to is cancelled."""

    def say(self, phase: str, share: float) -> None:
        """What the node does now, and how much of that is done, 0 to 1. Only the latest is sent."""
        with self._news:
            self._said = replace(self._said, phase=phase, share=min(max(share, 0.0), 1.0))
            self._untold = True
            self._news.notify()
            if self._channel is None and not self._closed:
                self._channel = dial_blocking(self._address)
                start: Any = NodeLinkStub(self._channel).Start
                self._call = start(
                    self._messages(), metadata=credentials().metadata, wait_for_ready=True
                )

    def close(self) -> None:
        """The node has joined, or ends. May be called twice."""
        with self._news:
            self._closed = True
            self._news.notify()
            channel, self._channel = self._channel, None
        if channel is not None:
            channel.close()

    def _messages(self) -> Iterator[pb.NodeStarting]:
        while True:
            with self._news:
                self._news.wait_for(lambda: self._untold or self._closed)
                if self._closed:
                    return
                self._untold = False
                said = self._said
            yield to_wire(said, pb.NodeStarting)
