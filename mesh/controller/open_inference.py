"""The Open Inference Protocol over gRPC: KServe's calls, and Triton's stream of them.

Calls of the gateway, written as its tensors of text. Before: clients that others wrote, by the
codec. After: the gateway, the same as every protocol's.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from mesh import __version__
from mesh.controller.gateway import Call, Gateway
from mesh.controller.invocation_checks import wrong_task
from mesh.domain.deployment import Deployment
from mesh.domain.errors import Cancelled, InvalidInput, MeshError, NotFound, Unavailable
from mesh.domain.ids import DeploymentName, RequestId
from mesh.domain.invocation import Finished, Tokens, check_complete
from mesh.domain.lifecycle import NodeState
from mesh.v1 import open_inference_pb2 as pb
from mesh.v1.open_inference_pb2_grpc import GRPCInferenceServiceServicer
from mesh.wire.codec_infer import (
    INPUTS,
    OUTPUT,
    STOP,
    TextInference,
    answer_to_wire,
    inference_from_wire,
)
from mesh.wire.errors import status_of
from mesh.wire.malformed import Malformed
from mesh.wire.own_slo import with_own_slo
from mesh.wire.serving import ABORT_S_MAX
from mesh.wire.tensors import TEXT

STREAM_REQUESTS_MAX = 64
"""At most so many requests of one stream are under way; the next one is read when one of them has
ended.
"""
STREAM_ANSWERS_MAX = 64
"""At most so many answers of one stream wait to be written."""
_Tensor = pb.ModelMetadataResponse.TensorMetadata


class OpenInference(GRPCInferenceServiceServicer):
    """Errors of the tree become a call's status in `mesh.wire.serving`; in a stream, a message."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    async def ServerLive(  # noqa: N802
        self, request: pb.ServerLiveRequest, context: Any
    ) -> pb.ServerLiveResponse:
        return pb.ServerLiveResponse(live=True)

    async def ServerReady(  # noqa: N802
        self, request: pb.ServerReadyRequest, context: Any
    ) -> pb.ServerReadyResponse:
        nodes = self._gateway.snapshot().nodes
        ready = any(node.state is NodeState.READY for node in nodes)
        return pb.ServerReadyResponse(ready=ready and not self._gateway.stopping)

    async def ModelReady(  # noqa: N802
        self, request: pb.ModelReadyRequest, context: Any
    ) -> pb.ModelReadyResponse:
        """As Triton has it, what is not there is not ready, rather than an error."""
        try:
            self._deployment(request.name, request.version)
        except (NotFound, Unavailable, InvalidInput):
            return pb.ModelReadyResponse(ready=False)
        return pb.ModelReadyResponse(ready=not self._gateway.stopping)

    async def ServerMetadata(  # noqa: N802
        self, request: pb.ServerMetadataRequest, context: Any
    ) -> pb.ServerMetadataResponse:
        return pb.ServerMetadataResponse(
            name="mesh", version=__version__, extensions=["parameters"]
        )

    async def ModelMetadata(  # noqa: N802
        self, request: pb.ModelMetadataRequest, context: Any
    ) -> pb.ModelMetadataResponse:
        deployment = self._deployment(request.name, request.version)
        return pb.ModelMetadataResponse(
            name=request.name,
            versions=[str(deployment.revision)],
            platform="mesh",
            inputs=[
                _Tensor(name=name, datatype=datatypes[-1], shape=[-1 if name == STOP else 1])
                for name, datatypes in INPUTS.items()
            ],
            outputs=[_Tensor(name=OUTPUT, datatype=TEXT, shape=[1])],
        )

    async def ModelInfer(  # noqa: N802
        self, request: pb.ModelInferRequest, context: Any
    ) -> pb.ModelInferResponse:
        inference = inference_from_wire(request)
        if inference.stream:
            raise InvalidInput(
                "ModelInfer answers by one message", hint="call ModelStreamInfer", field="stream"
            )
        async with self._answering(inference, context) as (request_id, answers):
            await context.send_initial_metadata((("x-request-id", request_id),))
            (whole,) = [answer async for answer in answers]
        return whole

    async def ModelStreamInfer(  # type: ignore[override]  # noqa: N802
        self, request_iterator: AsyncIterator[pb.ModelInferRequest | Malformed], context: Any
    ) -> None:
        room = asyncio.Semaphore(STREAM_REQUESTS_MAX)
        told: asyncio.Queue[pb.ModelStreamInferResponse | None] = asyncio.Queue(STREAM_ANSWERS_MAX)

        async def write() -> None:
            """In a task of its own: gRPC takes no message while one that was broken off is under
            way, as it would be where a request is cancelled.
            """
            while (message := await told.get()) is not None:
                await context.write(message)

        async def answer(request: pb.ModelInferRequest | Malformed) -> None:
            asked_id = ""
            try:
                if isinstance(request, Malformed):
                    raise InvalidInput(request.message)
                asked_id = request.id
                async with self._answering(inference_from_wire(request), context) as (_, answers):
                    async for one in answers:
                        await told.put(pb.ModelStreamInferResponse(infer_response=one))
            except MeshError as error:
                async with asyncio.timeout(ABORT_S_MAX):
                    await told.put(_failed(asked_id, error))
            finally:
                room.release()

        # Else gRPC could not end a call whose first message is not taken.
        await context.send_initial_metadata(())
        try:
            async with asyncio.TaskGroup() as call:
                call.create_task(write())
                async with asyncio.TaskGroup() as answering:
                    async for request in request_iterator:
                        await room.acquire()
                        answering.create_task(answer(request))
                await told.put(None)
        except ExceptionGroup as errors:
            if errors.subgroup(TimeoutError) is None:
                raise
            raise Cancelled("the stream is not read", hint="read answers as they come") from None

    def _deployment(self, name: str, version: str) -> Deployment:
        """A deployment that computes text. Raises NotFound, InvalidInput for one with a task, or
        Unavailable while it is being imported.
        """
        deployment = self._gateway.deployment(DeploymentName(name))
        if deployment.spec.task is not None:
            raise wrong_task(name, None, deployment.spec.task)
        serving = str(deployment.revision)
        if version not in ("", serving):
            raise NotFound(
                f"{name!r} serves revision {serving}, not {version[:16]!r}",
                hint="leave the version out",
            )
        return deployment

    @asynccontextmanager
    async def _answering(
        self, inference: TextInference, context: Any
    ) -> AsyncIterator[tuple[RequestId, AsyncIterator[pb.ModelInferResponse]]]:
        """The request's id, and its answer: in pieces, or all of it at once. Raises errors of the
        tree; leaving the block cancels what has not ended.
        """
        metadata = dict(context.invocation_metadata() or ())
        asked = with_own_slo(inference.asked, metadata.get)
        version = self._deployment(asked.deployment, inference.version).revision
        async with self._gateway.call(asked, context.invocation_metadata) as call:
            yield call.request_id, _answers(call, inference, version)


async def _answers(
    call: Call, inference: TextInference, version: int
) -> AsyncIterator[pb.ModelInferResponse]:
    text = ""
    async for event in call:
        match event:
            case Tokens():
                text += event.text
                if not (inference.stream and text):
                    continue
                finished = None
            case Finished():
                check_complete(event)
                finished = event
            case _:
                continue
        yield answer_to_wire(
            inference, text, version=version, request_id=call.request_id, finished=finished
        )
        text = ""


def _failed(request_id: str, error: MeshError) -> pb.ModelStreamInferResponse:
    """What other calls tell by their status and its metadata."""
    status = status_of(error)
    hint = f" ({error.hint})" if error.hint else ""
    failed = pb.ModelStreamInferResponse(error_message=status.details + hint)
    failed.infer_response.id = request_id
    for name, value in status.metadata:
        if isinstance(value, str):
            failed.infer_response.parameters[name].string_param = value
    return failed
