"""The Control service: what operators call. Checks again what clients say they have checked.

Before it are the clients of an operator; after it, an operation's event is posted into the core and
what the core says of it is streamed back. Reads are answered from the core's snapshot of the cell.
"""

import asyncio
import json
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from typing import Any, Protocol

from mesh.controller.lookup import find_deployment, no_deployment, no_request
from mesh.controller.snapshots import with_starting
from mesh.controller.viewed import Viewed
from mesh.domain.access import Role
from mesh.domain.actions import ReplyProgress
from mesh.domain.deployment import DeploymentSpec
from mesh.domain.errors import Forbidden, InvalidInput, StorageError
from mesh.domain.ids import DeploymentName, ModelId, NodeId, RequestId
from mesh.domain.text import TextAssets
from mesh.domain.usage import usage_by
from mesh.domain.values import replace
from mesh.domain.views import Arrivals, CellSnapshot, Deployed, RequestSnapshot
from mesh.report.plain import plain
from mesh.runtime.operator import Operator, Replies
from mesh.v1 import control_pb2 as pb
from mesh.v1 import model_pb2
from mesh.v1.control_pb2_grpc import ControlServicer
from mesh.wire.access import caller
from mesh.wire.codec import from_wire, to_wire

# The methods carry the names of the service; grpc's stubs know handlers as iterators only, and
# these write to their context.
# ruff: noqa: N802
# mypy: disable-error-code="override"


class OpenCalls(Protocol):
    """What operators ask the gateway."""

    def deployed(self) -> list[Deployed]: ...

    def snapshot(self) -> CellSnapshot:
        """The cell as the caller may see it."""
        ...

    def requests(self) -> tuple[RequestSnapshot, ...]: ...

    def cancel(self, request_id: RequestId) -> None: ...


class Control(ControlServicer):
    """`texts` gives a model's text assets from the registry, and `hand_over` has another controller
    lead.
    """

    def __init__(
        self,
        *,
        calls: OpenCalls,
        operating: Operator,
        viewed: Viewed,
        texts: Callable[[ModelId], TextAssets | None],
        hand_over: Callable[[], Awaitable[None]],
    ) -> None:
        self._calls = calls
        self._operating = operating
        self._viewed = viewed
        self._texts = texts
        self._hand_over = hand_over

    async def Deploy(self, request: pb.DeployRequest, context: Any) -> None:
        if not request.HasField("spec"):
            raise InvalidInput("the request holds no spec")
        await _write(self._operating.deploy(from_wire(request.spec, DeploymentSpec)), context)

    async def Undo(self, request: pb.UndoRequest, context: Any) -> None:
        to = request.to if request.HasField("to") else None
        await _write(self._operating.undo(DeploymentName(request.name), to), context)

    async def Delete(self, request: pb.DeleteRequest, context: Any) -> None:
        await _write(self._operating.delete(DeploymentName(request.name)), context)

    async def Scale(self, request: pb.ScaleRequest, context: Any) -> None:
        given: dict[str, Any] = {
            field: getattr(request, field) if request.HasField(field) else None
            for field in ("replicas_min", "replicas_max", "keep_alive_s", "revision")
        }
        await _write(self._operating.scale(DeploymentName(request.name), **given), context)

    async def Load(self, request: pb.LoadRequest, context: Any) -> None:
        await _write(self._operating.load(DeploymentName(request.name)), context)

    async def Unload(self, request: pb.UnloadRequest, context: Any) -> None:
        await _write(self._operating.unload(DeploymentName(request.name)), context)

    async def Drain(self, request: pb.DrainRequest, context: Any) -> None:
        node_id = NodeId(request.node_id)
        await _write(self._operating.drain(node_id, undo=request.undo), context)

    async def Profile(self, request: pb.ProfileRequest, context: Any) -> None:
        node_id = NodeId(request.node_id) if request.HasField("node_id") else None
        replies = self._operating.profile(
            DeploymentName(request.name),
            node_id,
            operators=request.operators,
            cores=tuple(request.cores),
        )
        await _write(replies, context)

    async def GetProfiles(
        self, request: pb.GetProfilesRequest, context: Any
    ) -> pb.GetProfilesResponse:
        known = self._viewed.profiles(caller(), DeploymentName(request.name))
        return pb.GetProfilesResponse(profiles=[to_wire(one, pb.KnownProfile) for one in known])

    async def GetPlan(self, request: pb.GetPlanRequest, context: Any) -> pb.InstancePlan:
        calls = from_wire(request.calls, Arrivals) if request.HasField("calls") else None
        found = self._operating.plan(DeploymentName(request.name), calls)
        # A tenant sees no node by name.
        nodes = found.nodes if caller().role is Role.ADMIN else ()
        return to_wire(replace(found, nodes=nodes), pb.InstancePlan)

    async def GetTokenizer(
        self, request: pb.GetTokenizerRequest, context: Any
    ) -> model_pb2.TextAssets:
        deployed = self._calls.deployed()
        found = find_deployment(DeploymentName(request.name), deployed)
        if found.model is None:
            raise no_deployment(found.spec.name, deployed)
        # It waits for a write under way, which a disk may take seconds for.
        assets = await asyncio.to_thread(self._texts, found.model.model_id)
        if assets is None:
            raise StorageError(f"the registry holds no tokenizer of model {found.model.model_id}")
        return to_wire(assets, model_pb2.TextAssets)

    async def GetDeployment(self, request: pb.GetDeploymentRequest, context: Any) -> pb.Deployment:
        return to_wire(
            find_deployment(DeploymentName(request.name), self._calls.snapshot().deployments),
            pb.Deployment,
        )

    async def ListDeployments(
        self, request: pb.ListDeploymentsRequest, context: Any
    ) -> pb.ListDeploymentsResponse:
        if request.nodes and caller().role is not Role.ADMIN:
            raise Forbidden("nodes are told to operators alone", hint="use the key of an operator")
        snapshot = self._calls.snapshot()
        return pb.ListDeploymentsResponse(
            deployments=[to_wire(one, pb.Deployment) for one in snapshot.deployments],
            nodes=self._nodes(snapshot) if request.nodes else (),
            tells_nodes=request.nodes,
        )

    async def ListNodes(self, request: pb.ListNodesRequest, context: Any) -> pb.ListNodesResponse:
        return pb.ListNodesResponse(nodes=self._nodes(self._calls.snapshot()))

    async def GetStatus(self, request: pb.GetStatusRequest, context: Any) -> pb.Status:
        status = self._viewed.status(self._calls.snapshot(), self._viewed.batches())
        return to_wire(status, pb.Status)

    async def GetUsage(self, request: pb.GetUsageRequest, context: Any) -> pb.GetUsageResponse:
        by = usage_by(request.by) if request.HasField("by") else None
        with self._viewed.threads.place():
            found = await self._viewed.usage(caller(), request.since_unix_s, by)
            return await self._viewed.threads.run(
                lambda: pb.GetUsageResponse(usages=[to_wire(one, pb.Usage) for one in found])
            )

    async def GetReport(self, request: pb.GetReportRequest, context: Any) -> pb.GetReportResponse:
        with self._viewed.threads.place():
            found = await self._viewed.report(caller(), request.since_s)
        return pb.GetReportResponse(report=json.dumps(plain(found), ensure_ascii=False))

    async def ListRequests(
        self, request: pb.ListRequestsRequest, context: Any
    ) -> pb.ListRequestsResponse:
        return pb.ListRequestsResponse(
            requests=[to_wire(one, pb.OpenRequest) for one in self._open()]
        )

    async def Cancel(self, request: pb.CancelRequest, context: Any) -> pb.CancelResponse:
        request_id = RequestId(request.request_id)
        if request_id not in {one.request_id for one in self._open()}:
            raise no_request(request_id)
        self._calls.cancel(request_id)
        return pb.CancelResponse()

    async def StepDown(self, request: pb.StepDownRequest, context: Any) -> pb.StepDownResponse:
        await self._hand_over()
        return pb.StepDownResponse()

    def _open(self) -> list[RequestSnapshot]:
        visible = {one.spec.name for one in self._calls.deployed()}
        return [one for one in self._calls.requests() if one.deployment in visible]

    async def Watch(self, request: pb.WatchRequest, context: Any) -> None:
        log = self._viewed.log
        watch = log.watch(backlog=request.backlog, follow=request.follow, asks=caller())
        async with aclosing(watch):
            async for event in watch:
                await context.write(to_wire(event, pb.CellEvent))

    def _nodes(self, snapshot: CellSnapshot) -> list[pb.Node]:
        nodes = with_starting(snapshot.nodes, self._viewed.starting())
        return [to_wire(one, pb.Node) for one in nodes]


async def _write(operation: Replies, context: Any) -> None:
    # Closed at once when the caller goes, so that the core knows at once.
    async with aclosing(operation) as replies:
        async for reply in replies:
            if isinstance(reply, ReplyProgress):
                progress = pb.Progress(phase=reply.phase, share=reply.share)
                await context.write(pb.OperationEvent(progress=progress))
            else:
                done = pb.Done(message=reply.message, amiss=reply.amiss)
                await context.write(pb.OperationEvent(done=done))
