"""The Inference service: calls of the gateway, written as protobuf into gRPC contexts."""

from typing import Any

from mesh.controller.gateway import Gateway
from mesh.v1 import inference_pb2 as pb
from mesh.v1.inference_pb2_grpc import InferenceServicer
from mesh.wire.codec import event_to_wire, invocation_from_wire


class Inference(InferenceServicer):
    """Errors of the tree become the call's status in `mesh.wire.serving`."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    async def Invoke(  # type: ignore[override]  # noqa: N802
        self, request: pb.InvokeRequest, context: Any
    ) -> None:
        asked = invocation_from_wire(request)
        async with self._gateway.call(asked, context.invocation_metadata) as call:
            async for event in call:
                await context.write(event_to_wire(event))
