"""The cells of a front: who leads each, what it serves, and all of them in one picture.

A cell's controllers are asked four times a second which of them leads, and the one that does is
asked for its deployments and nodes. The core is told of both; operators and the gateway see the
cells as one, with the names of nodes and instances behind that of their cell. Before: `server`.
After: gRPC.
"""

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from threading import Lock
from typing import Any, cast

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from mesh.core.front import FrontCore, lacking, look_of
from mesh.domain.actions import ReplyDone, ReplyProgress
from mesh.domain.deployment import Deployment, DeploymentSpec
from mesh.domain.errors import MeshError, Refused, Unavailable
from mesh.domain.front import CellSeen, CellSilent
from mesh.domain.ids import (
    CellName,
    DeploymentName,
    InstanceId,
    ModelId,
    NodeId,
    OperationId,
    RequestId,
)
from mesh.domain.lifecycle import DeploymentState, NodeState
from mesh.domain.request import Request
from mesh.domain.revision import RevisionState, public
from mesh.domain.text import TextAssets
from mesh.domain.usage import Usage
from mesh.domain.views import (
    CellSnapshot,
    ClassView,
    DeploymentSnapshot,
    InstanceSnapshot,
    NodeSnapshot,
    NodesWanted,
    ProfileView,
)
from mesh.runtime.clock import Now
from mesh.runtime.operator import Replies
from mesh.v1 import control_pb2 as pb
from mesh.v1 import model_pb2
from mesh.v1.control_pb2_grpc import ControlStub
from mesh.wire.channel import dial, dial_blocking
from mesh.wire.client import UNARY_S_MAX
from mesh.wire.codec import from_wire, to_wire, view_from_wire
from mesh.wire.credentials import credentials
from mesh.wire.errors import EndedCall, error_of, is_told
from mesh.wire.resuming import LOOK_S, LOOK_S_MAX

LIST_S = 0.5
LIST_SHARE_MAX = 0.1
"""The share of its time that a front looks at deployments and nodes: seldom where there are many.
"""
SPREAD_AFTER_S = 5.0
"""Cells that differ for so long are brought to what the newest spec says: an operator may be at it.
"""
SPREAD_RETRY_S, SPREAD_RETRY_S_MAX = 10.0, 600.0
"""The pause after a failure; it doubles."""
TEXTS_MAX = 16
"""So many models' tokenizers are kept as they were fetched, beside those that are in use."""
Tell = Callable[[CellSeen | CellSilent], None]

logger = logging.getLogger(__name__)


class CellLink:
    """One cell, by the addresses of its controllers; `tell` is told what is seen of it."""

    def __init__(self, name: CellName, addresses: Sequence[str], clock: Now, tell: Tell) -> None:
        self.name = name
        self._tell = tell
        self._listing = asyncio.Lock()
        self.leader = ""
        """The address of the controller that leads; empty where none does."""
        self.listed = False
        """Whether it was ever looked at whole."""
        self.deployments: Mapping[DeploymentName, DeploymentSnapshot] = {}
        self.serving: Mapping[DeploymentName, Deployment] = {}
        self.nodes: Sequence[NodeSnapshot] = ()
        self.version = 0
        """It rises with each look."""
        self.looked = asyncio.Event()
        """It was looked at once, whatever came of it."""
        self._clock = clock
        self._next_s = 0.0
        """When it is to be listed next."""
        self._channels = {address: dial(address) for address in addresses}
        self._hurry = asyncio.Event()

    def channel(self) -> grpc.aio.Channel:
        """To the controller that leads. Raises Unavailable."""
        if not self.leader:
            raise Unavailable(
                f"the cell {self.name} is away: none of {', '.join(self._channels)} leads it",
                hint="`mesh status --controller ADDRESS` asks one of them",
            )
        return self._channels[self.leader]

    def hurry(self) -> None:
        """Look at once: a call to it has broken."""
        self._hurry.set()

    async def close(self) -> None:
        for channel in self._channels.values():
            await channel.close(None)

    async def watch(self) -> None:
        """Look at it, until cancelled."""
        listing: asyncio.Task[None] | None = None
        try:
            while True:
                self._hurry.clear()
                led, self.leader = self.leader, await self._who_leads()
                if led != self.leader:
                    self.version += 1
                    said = f"is led by {self.leader}" if self.leader else "is away"
                    logger.info("%s %s", self.name, said)
                if not self.leader:
                    self._tell(CellSilent(cell=self.name))
                    self.looked.set()
                else:
                    self._tell(CellSeen(cell=self.name, leader=self.leader))
                    due = led != self.leader or self._clock.now_s() >= self._next_s
                    if due and (listing is None or listing.done()):
                        listing = asyncio.create_task(self.list())
                with suppress(TimeoutError):
                    async with asyncio.timeout(LOOK_S):
                        await self._hurry.wait()
        finally:
            if listing is not None:
                listing.cancel()

    async def _who_leads(self) -> str:
        """The address of the controller that leads; the same as before where it still says so."""
        asked = [self._leads(channel) for channel in self._channels.values()]
        said = await asyncio.gather(*asked)
        leads = [at for at, yes in zip(self._channels, said, strict=True) if yes]
        return self.leader if self.leader in leads else next(iter(leads), "")

    async def _leads(self, channel: grpc.aio.Channel) -> bool:
        asked = health_pb2.HealthCheckRequest(service="mesh.v1.Inference")
        try:
            told = await health_pb2_grpc.HealthStub(channel).Check(asked, timeout=LOOK_S_MAX)
        except grpc.aio.AioRpcError:
            return False
        return bool(told.status == health_pb2.HealthCheckResponse.SERVING)

    async def list(self) -> None:
        """Ask who leads for all deployments and nodes. A controller that ends meanwhile is found by
        the next look.
        """
        async with self._listing:
            if self.leader:
                await self._list(self.leader)
        self.looked.set()

    async def _list(self, leader: str) -> None:
        began_s = self._clock.now_s()
        stub, shown = ControlStub(self._channels[leader]), credentials().metadata
        limits: dict[str, Any] = {"timeout": UNARY_S_MAX, "metadata": shown}
        try:
            deployments, nodes = await asyncio.gather(
                stub.ListDeployments(pb.ListDeploymentsRequest(), **limits),
                stub.ListNodes(pb.ListNodesRequest(), **limits),
            )
            found = [view_from_wire(one, DeploymentSnapshot) for one in deployments.deployments]
            self.nodes = [view_from_wire(one, NodeSnapshot) for one in nodes.nodes]
        except (grpc.aio.AioRpcError, MeshError) as error:
            said = explained(self.name, error) if isinstance(error, grpc.aio.AioRpcError) else error
            logger.warning("%s cannot be looked at: %s", self.name, said.message)
            self._next_s = self._clock.now_s() + LIST_S
            return
        self.deployments = {one.spec.name: one for one in found}
        made = ((name, _made(one)) for name, one in self.deployments.items())
        self.serving = {name: one for name, one in made if one is not None}
        self.version += 1
        self.listed = True
        self._tell(CellSeen(cell=self.name, leader=leader, look=look_of(found, self.nodes)))
        now_s = self._clock.now_s()
        self._next_s = now_s + max(LIST_S, (now_s - began_s) / LIST_SHARE_MAX)

    async def asked(self, method: str, request: Any, *shown: tuple[str, str]) -> Any:
        """The answer to a call of an operator's, as the front's or for whom `shown` names. Raises
        errors of the tree.
        """
        call = getattr(ControlStub(self.channel()), method)
        metadata = (*credentials().metadata, *shown)
        try:
            return await call(request, timeout=UNARY_S_MAX, metadata=metadata)
        except grpc.aio.AioRpcError as error:
            raise explained(self.name, error) from error

    async def operate(self, method: str, request: Any, *shown: tuple[str, str]) -> Replies:
        """The replies to an operation. Raises as `asked` does."""
        call = getattr(ControlStub(self.channel()), method)(
            request, metadata=(*credentials().metadata, *shown)
        )
        try:
            async for event in call:
                if event.WhichOneof("event") == "done":
                    yield ReplyDone(operation_id=OperationId(""), message=event.done.message)
                else:
                    told = event.progress
                    yield ReplyProgress(
                        operation_id=OperationId(""), phase=told.phase, share=told.share
                    )
        except grpc.aio.AioRpcError as error:
            raise explained(self.name, error) from error
        finally:
            call.cancel()


def explained(cell: CellName, error: grpc.aio.AioRpcError) -> MeshError:
    """What a cell has raised, or why it did not answer."""
    if not is_told(cast(EndedCall, error)):
        return Unavailable(f"the cell {cell} did not answer: {error.details()}", hint="try again")
    said = error_of(cast(EndedCall, error))
    if type(said).__name__ == "Unauthenticated":
        return Unavailable(
            f"the cell {cell} does not take the front's key: {said.message}",
            hint="a front needs the key of an operator of each cell: MESH_KEY, or --key-file",
        )
    return said


def _made(one: DeploymentSnapshot) -> Deployment | None:
    """The deployment as the gateway needs it, where it takes requests."""
    if one.state is not DeploymentState.READY or one.model is None:
        return None
    return Deployment(
        spec=one.spec,
        model=one.model,
        context_tokens_max=one.context_tokens_max,
        revision=one.revision,
    )


def _newest(one: DeploymentSnapshot) -> DeploymentSpec:
    """What a deployment is to become: the spec that serves, or that of a revision on its way."""
    coming = (RevisionState.IMPORTING, RevisionState.STARTING)
    specs = [one.spec, *(public(r.spec) for r in one.revisions if r.state in coming)]
    return max(specs, key=lambda spec: spec.edition)


class FrontCells:
    """All cells: what the gateway asks of a cell, and operators of the cells. `post` has the core
    told.
    """

    def __init__(
        self,
        cells: Mapping[CellName, Sequence[str]],
        *,
        core: FrontCore,
        clock: Now,
        post: Tell,
    ) -> None:
        self.links = {name: CellLink(name, at, clock, post) for name, at in cells.items()}
        self._core = core
        self._clock = clock
        self._snapshot: tuple[tuple[int, ...], CellSnapshot] = (), _merged({})
        self._texts: OrderedDict[ModelId, TextAssets] = OrderedDict()
        self._texts_lock = Lock()
        self._tries: dict[tuple[DeploymentName, CellName], tuple[float, float]] = {}
        """When a cell that lacks a deployment gets it, and the pause after the next failure."""
        self._spreading: dict[CellName, asyncio.Task[None]] = {}

    async def watch(self) -> None:
        """Look at all cells, and bring those that differ to what the newest specs say, until
        cancelled.
        """
        async with asyncio.TaskGroup() as tasks:
            for link in self.links.values():
                tasks.create_task(link.watch())
            tasks.create_task(self._spread())

    async def looked(self) -> None:
        """Wait until each cell was looked at once."""
        await asyncio.gather(*(link.looked.wait() for link in self.links.values()))

    async def close(self) -> None:
        await asyncio.gather(*(link.close() for link in self.links.values()))

    def deployment(self, name: DeploymentName) -> Deployment | None:
        """Raises Refused where the cells that serve it are away, and Unavailable where one that has
        not been seen yet may serve it.
        """
        found = self._core.model(name)
        if found is None:
            unseen = [link.name for link in self.links.values() if not link.listed]
            if unseen and not self.has(name):
                raise Unavailable(
                    f"no cell that answers serves {name!r}; not seen yet: {', '.join(unseen)}",
                    hint="try again; `mesh nodes` at the front shows which cells answer",
                )
            return None
        away = self._core.away(name, self._clock.now_s())
        if away is not None:
            raise Refused(away.message, reason=away.reason, retry_after_s=away.retry_after_s)
        cell, _ = found
        return self.links[cell].serving[name]

    def has(self, name: DeploymentName) -> bool:
        return any(name in link.deployments for link in self.links.values())

    def spec(self, name: DeploymentName) -> DeploymentSpec | None:
        specs = self.specs(name).values()
        return max(specs, key=lambda spec: spec.edition, default=None)

    def specs(self, name: DeploymentName) -> dict[CellName, DeploymentSpec]:
        """What the cells have of it, or had when they were looked at last."""
        return {
            link.name: _newest(link.deployments[name])
            for link in self.links.values()
            if name in link.deployments
            and link.deployments[name].state is not DeploymentState.DELETING
        }

    @property
    def led(self) -> list[CellName]:
        return [link.name for link in self.links.values() if link.leader]

    def asked_before(self, request_id: RequestId) -> tuple[Request, Sequence[int]] | None:
        return self._core.asked_before(request_id)

    def load(self) -> tuple[int, int]:
        return self._core.load()

    def wanted(self, now_s: float) -> tuple[NodesWanted, ...]:
        """Each cell says so of its own nodes."""
        return ()

    def profiles(self, name: DeploymentName) -> tuple[ProfileView, ...] | None:
        raise Unavailable("profiles are a cell's", hint="ask a controller of the cell for them")

    def snapshot(self, now_s: float) -> CellSnapshot:
        """All cells in one."""
        version = tuple(link.version for link in self.links.values())
        if self._snapshot[0] != version:
            self._snapshot = version, _merged(self.links)
        return self._snapshot[1]

    async def usage(self, since_unix_s: float) -> Sequence[Usage]:
        """That of all cells. Raises Unavailable where one is away."""
        request = pb.GetUsageRequest(since_unix_s=since_unix_s)
        answers = await asyncio.gather(
            *(link.asked("GetUsage", request) for link in self.links.values())
        )
        summed: dict[tuple[int | str, ...], Usage] = {}
        for answer in answers:
            for one in (view_from_wire(usage, Usage) for usage in answer.usages):
                known = summed.get(one.place)
                summed[one.place] = one if known is None else known.plus(one)
        return list(summed.values())

    def text(self, model_id: ModelId) -> TextAssets | None:
        """The text assets of a model, from a cell that has it; waits for it, in a thread. Raises
        Unavailable.
        """
        with self._texts_lock:
            if model_id in self._texts:
                self._texts.move_to_end(model_id)
                return self._texts[model_id]
        for link in list(self.links.values()):
            leader = link.leader
            names = [n for n, one in link.serving.items() if one.model.model_id == model_id]
            if leader and names and (found := _fetched(leader, names[0])) is not None:
                with self._texts_lock:
                    self._texts[model_id] = found
                    while len(self._texts) > TEXTS_MAX:
                        self._texts.popitem(last=False)
                return found
        raise Unavailable(
            f"no cell that answers has the tokenizer of model {model_id}", hint="try again"
        )

    async def _spread(self) -> None:
        while True:
            await asyncio.sleep(LIST_S)
            now_s, versions = self._clock.now_s(), set(self.led)
            names = {name: None for link in self.links.values() for name in link.deployments}
            wanted: dict[tuple[DeploymentName, CellName], DeploymentSpec] = {}
            for name in names:
                found = self.specs(name)
                if not found:
                    continue
                specs = list(found.values())
                if len(found) >= specs[0].cells and all(spec == specs[0] for spec in specs):
                    continue
                newest, cells = lacking(name, list(self.links), found, versions)
                wanted |= {(name, cell): newest for cell in cells}
            self._tries = {
                of: self._tries.get(of, (now_s + SPREAD_AFTER_S, SPREAD_RETRY_S)) for of in wanted
            }
            for (name, cell), spec in wanted.items():
                due_s, pause_s = self._tries[name, cell]
                running = self._spreading.get(cell)
                if now_s >= due_s and (running is None or running.done()):
                    longer_s = min(2 * pause_s, SPREAD_RETRY_S_MAX)
                    self._tries[name, cell] = now_s + pause_s, longer_s
                    self._spreading[cell] = asyncio.create_task(self._bring(spec, cell))

    async def _bring(self, spec: DeploymentSpec, cell: CellName) -> None:
        """Deploy what another cell has."""
        request = pb.DeployRequest(spec=to_wire(spec, model_pb2.DeploymentSpec))
        try:
            async for _ in self.links[cell].operate("Deploy", request):
                pass
            logger.info("%s has got %s, edition %d", cell, spec.name, spec.edition)
        except MeshError as error:
            logger.warning("%s does not get %s: %s", cell, spec.name, error.message)


def _fetched(address: str, name: DeploymentName) -> TextAssets | None:
    """The assets, of the controller there; `None` where it does not answer or knows of none."""
    channel = dial_blocking(address)
    try:
        asked = pb.GetTokenizerRequest(name=name)
        return from_wire(ControlStub(channel).GetTokenizer(asked, timeout=UNARY_S_MAX), TextAssets)
    except grpc.RpcError:
        return None
    finally:
        channel.close()


def _merged(links: Mapping[CellName, CellLink]) -> CellSnapshot:
    """All cells in one picture. What is known of a cell that is away is as it was, its nodes are
    lost.
    """
    names = sorted({name for link in links.values() for name in link.deployments})
    deployments = [_whole(name, links) for name in names]
    nodes = [
        _node(link.name, node) if link.leader else _lost(link.name, node)
        for link in links.values()
        for node in link.nodes
    ]
    return CellSnapshot(
        deployments=tuple(deployments),
        nodes=tuple(sorted(nodes, key=lambda node: node.node_id)),
        queued=sum(one.queued for one in deployments),
        running=sum(one.running for one in deployments),
        served=sum(one.served for one in deployments),
        refused=(),
    )


def _whole(name: DeploymentName, links: Mapping[CellName, CellLink]) -> DeploymentSnapshot:
    """One deployment in all cells, as the first that serves it has it."""
    having = [link for link in links.values() if name in link.deployments]
    here = [link for link in having if link.leader]
    parts = [link.deployments[name] for link in here]
    if not here:
        away = ", ".join(link.name for link in having)
        gone = f"served by cells that are away: {away}"
        (first, *_) = [link.deployments[name] for link in having]
        return replace(first, state=DeploymentState.FAILED, phase=gone, instances=())
    first = next((one for one in parts if one.state is DeploymentState.READY), parts[0])
    return replace(
        first,
        **{
            field: sum(getattr(one, field) for one in parts)
            for field in (
                "queued",
                "running",
                "served",
                "refused",
                "prompt_tokens",
                "cached_tokens",
            )
        },
        instances=tuple(
            _instance(link.name, one) for link in here for one in link.deployments[name].instances
        ),
        classes=tuple(map(_class_sum, zip(*(one.classes for one in parts), strict=False))),
    )


def _class_sum(views: Iterable[ClassView]) -> ClassView:
    first, *others = views
    counts = ("queued", "running", "served", "met", "refused")
    sums = {n: getattr(first, n) + sum(getattr(one, n) for one in others) for n in counts}
    return replace(first, **sums)


def _instance(cell: CellName, one: InstanceSnapshot) -> InstanceSnapshot:
    return replace(
        one,
        instance_id=InstanceId(f"{cell}/{one.instance_id}"),
        node_id=NodeId(f"{cell}/{one.node_id}"),
    )


def _node(cell: CellName, one: NodeSnapshot) -> NodeSnapshot:
    instances = tuple(_instance(cell, instance) for instance in one.instances)
    operations = tuple(
        replace(o, instance_id=InstanceId(f"{cell}/{o.instance_id}")) for o in one.operations
    )
    node_id = NodeId(f"{cell}/{one.node_id}")
    return replace(one, node_id=node_id, instances=instances, operations=operations)


def _lost(cell: CellName, one: NodeSnapshot) -> NodeSnapshot:
    node_id = NodeId(f"{cell}/{one.node_id}")
    return replace(one, node_id=node_id, state=NodeState.LOST, instances=(), operations=())
