"""Whether the controller at an address leads its cell: nodes, clients and fronts that have several
addresses to choose from ask for its health.

A channel is kept from one look to the next: a new one each time would cost who is looked at a
handshake of TLS, four times a second for each node.
"""

from enum import Enum, auto
from typing import Any

import grpc

LOOK_S_MAX = 0.5
"""For the answer."""
WAITS = ("mesh-waits", "1")
"""In the metadata of a look: a standby holds its answer until it leads, for LOOK_S at most
(`mesh.runtime.link_life`). A controller of an earlier version answers at once.
"""
UNCONNECTED = "failed to connect"
"""In gRPC's words where nobody took a call."""


class Look(Enum):
    LEADS = auto()
    """Or a front is there that takes calls."""
    FOLLOWS = auto()
    """It does not lead, or leads no longer."""
    GONE = auto()
    """Nobody is there."""
    SILENT = auto()
    """It has not answered in time."""


async def look(channel: grpc.aio.Channel, *shown: tuple[str, str]) -> Look:
    """`shown`: the metadata."""
    try:
        check, asked = _check(channel)
        return _answer(await check(asked, timeout=LOOK_S_MAX, metadata=shown))
    except grpc.RpcError as error:
        return _failure(error)
    except grpc.aio.BaseError:  # gRPC cannot use the channel just now
        return Look.SILENT


def look_blocking(channel: grpc.Channel) -> Look:
    return looked(begin_look(channel))


def begin_look(channel: grpc.Channel, *shown: tuple[str, str]) -> Any:
    """A look that is under way: `done()` says whether it is over, `looked` how it ended."""
    check, asked = _check(channel)
    return check.future(asked, timeout=LOOK_S_MAX, metadata=shown)


def looked(begun: Any) -> Look:
    """Waits for its end."""
    try:
        return _answer(begun.result())
    except grpc.FutureCancelledError:  # its channel was closed meanwhile
        return Look.SILENT
    except grpc.RpcError as error:
        return _failure(error)


def _check(channel: Any) -> tuple[Any, Any]:
    from grpc_health.v1 import health_pb2, health_pb2_grpc  # few have to choose

    asked = health_pb2.HealthCheckRequest(service="mesh.v1.Inference")
    return health_pb2_grpc.HealthStub(channel).Check, asked


def _answer(told: Any) -> Look:
    return Look.LEADS if told.status == type(told).SERVING else Look.FOLLOWS


def _failure(error: Any) -> Look:
    if UNCONNECTED in (error.details() or ""):
        return Look.GONE
    silent = error.code() in (grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.UNAVAILABLE)
    return Look.SILENT if silent else Look.FOLLOWS
