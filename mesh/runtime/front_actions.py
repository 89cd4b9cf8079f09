"""Carries out what the core of a front decides: two ports, to clients and to cells.

One performer for a live front and the simulator, as `controller_actions` is for controllers.
"""

from typing import Protocol, assert_never

from mesh.domain.actions import DeliverTokens, RefuseRequest, TellAccepted, TellWaiting
from mesh.domain.front import AskCell, DropCall, FailRequest, FrontAction
from mesh.runtime.controller_actions import Clients


class FrontClients(Clients, Protocol):
    """Those who wait at a front."""

    def fail(self, failure: FailRequest) -> None: ...


class CellCalls(Protocol):
    """The calls to cells. One that has ended meanwhile is ignored."""

    def ask(self, asked: AskCell) -> None: ...

    def drop(self, dropped: DropCall) -> None: ...


class FrontPerformer:
    def __init__(self, *, clients: FrontClients, calls: CellCalls) -> None:
        self._clients = clients
        self._calls = calls

    def perform(self, action: FrontAction) -> None:
        match action:
            case DeliverTokens():
                self._clients.deliver(action)
            case AskCell():
                self._calls.ask(action)
            case DropCall():
                self._calls.drop(action)
            case TellAccepted():
                self._clients.accepted(action)
            case TellWaiting():
                self._clients.waiting(action)
            case RefuseRequest():
                self._clients.refuse(action)
            case FailRequest():
                self._clients.fail(action)
            case _:
                assert_never(action)
