"""The cells of a front: who leads each, what it serves, and all of them in one picture.

A cell's controllers are asked four times a second which of them leads, and the one that does is
asked for its deployments and nodes. The core is told of both; operators and the gateway see the
cells as one, with the names of nodes and instances behind that of their cell. Before: `server`.
After: gRPC.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from math import inf
from typing import Any, cast

import grpc

from mesh.core.controller.snapshot import Looking
from mesh.core.front import TAKEOVER_S_MAX, FrontCore, look_of, ranked
from mesh.domain.access import TenantName
from mesh.domain.actions import ReplyDone, ReplyProgress
from mesh.domain.deployment import Deployment, DeploymentSpec
from mesh.domain.energy import together
from mesh.domain.errors import InvalidInput, MeshError, Refused, Unavailable
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
from mesh.domain.limits import AWAY_S_MAX
from mesh.domain.request import Request
from mesh.domain.text import TextAssets
from mesh.domain.usage import Usage, UsageBy, summed
from mesh.domain.values import replace
from mesh.domain.views import (
    CellSnapshot,
    ClassView,
    Deployed,
    DeploymentSnapshot,
    InstanceSnapshot,
    NodeSnapshot,
    NodesWanted,
    ProfileView,
)
from mesh.runtime.clock import Now
from mesh.runtime.link_life import LOOK_S
from mesh.runtime.operator import Replies
from mesh.v1 import control_pb2 as pb
from mesh.v1.control_pb2_grpc import ControlStub
from mesh.wire.access import caller, said_for
from mesh.wire.channel import dial, dial_blocking
from mesh.wire.client import UNARY_S_MAX
from mesh.wire.codec import from_wire, view_from_wire
from mesh.wire.credentials import credentials
from mesh.wire.errors import EndedCall, error_of, is_told
from mesh.wire.handshake import why_refused
from mesh.wire.leader import WAITS, Look, look
from mesh.wire.work_threads import WorkThreads

LIST_S = 0.5
LIST_SHARE_MAX = 0.1
"""The share of its time that a front looks at deployments and nodes: seldom where there are many.
"""
REFRESH_S_MAX = 2.0
"""So long an operator's change waits for the cells to be looked at before."""
Tell = Callable[[CellSeen | CellSilent], None]

logger = logging.getLogger(__name__)


class CellLink:
    """One cell, by the addresses of its controllers; `tell` is told what is seen of it."""

    def __init__(self, name: CellName, addresses: Sequence[str], clock: Now, tell: Tell) -> None:
        self.name = name
        self._tell = tell
        self._listing = asyncio.Lock()
        self.leader: str | None = None
        """The address of the controller that leads; empty where none does, `None` before it is
        known.
        """
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
        self._looking = {address: dial(address) for address in addresses}
        """Looks and lists have a connection of their own: calls may fill the other one."""
        self._said: dict[str, Look] = {}
        """What each address answered last."""
        self._lead: list[str] = []
        """Addresses that say that they lead, in the order in which they began to."""
        self._answered_s = -inf
        """When the one that leads, or did last, has said so."""
        self._last = ""
        """The address that led last."""
        self._hurry, self._hurries = asyncio.Event(), 0
        self._refused: Unavailable | None = None
        """Why nobody leads it, where somebody answers that is no controller as it is asked."""
        self._tasks: dict[str, asyncio.Task[None]] = {}

    @property
    def _led_by_none(self) -> str:
        return f"none of {', '.join(self._channels)} leads it"

    @property
    def away(self) -> bool:
        """Nobody leads it, and that is no late look, nor a takeover."""
        return not self.leader and self._clock.now_s() - self._answered_s > TAKEOVER_S_MAX

    def channel(self) -> grpc.aio.Channel:
        """To the controller that leads. Raises Unavailable."""
        if not self.leader and self._refused is not None:
            why, hint = self._refused.message, self._refused.hint
            raise Unavailable(f"the cell {self.name} is away: {why}", hint=hint)
        if not self.leader:
            raise Unavailable(
                f"the cell {self.name} is away: {self._led_by_none}",
                hint="`mesh status --controller ADDRESS` asks one of them",
            )
        return self._channels[self.leader]

    async def _led(self) -> grpc.aio.Channel:
        """The same for an operator's call, which waits for one until the cell is away. Raises
        Unavailable.
        """
        while not (self.leader or self.away):  # noqa: ASYNC110
            await asyncio.sleep(LOOK_S)
        return self.channel()

    def hurry(self) -> None:
        """Look at once: a call to it has broken."""
        self._hurries += 1
        self._hurry.set()
        self._hurry.clear()

    async def close(self) -> None:
        for channel in (*self._channels.values(), *self._looking.values()):
            await channel.close(None)

    async def watch(self) -> None:
        """Look at each address by itself, until cancelled: none waits for one that hangs."""
        try:
            async with asyncio.TaskGroup() as looks:
                for address in self._looking:
                    looks.create_task(self._look_at(address))
        finally:
            for task in self._tasks.values():
                task.cancel()

    async def _look_at(self, address: str) -> None:
        """Every LOOK_S, and at once where a call has broken. A round in which the leader's
        deployments are listed makes no look at it.
        """
        hurries = before = self._hurries
        while True:
            begun_s = self._clock.now_s()
            if hurries != before or not self._is_to_be_listed(address):
                self._note(address, await look(self._looking[address], WAITS))
            if self._is_to_be_listed(address):
                self._tasks["list"] = asyncio.create_task(self.list())
            before = hurries
            if before == self._hurries:
                with suppress(TimeoutError):
                    async with asyncio.timeout(begun_s + LOOK_S - self._clock.now_s()):
                        await self._hurry.wait()
            hurries = self._hurries

    def _is_to_be_listed(self, address: str) -> bool:
        listing = self._tasks.get("list")
        due = self._clock.now_s() >= self._next_s and (listing is None or listing.done())
        return address == self.leader and due

    def _note(self, address: str, answer: Look) -> None:
        """What an address answers. Of several that say that they lead the one that began last does,
        since the others may not know yet that they were followed. Where that one does not answer,
        nobody leads for TAKEOVER_S_MAX: another that says so still would answer for it.
        """
        self._said[address], now_s = answer, self._clock.now_s()
        if answer is Look.LEADS and address not in self._lead:
            if self._lead:
                others = ", ".join(self._lead)
                logger.warning("%s is led by %s, as it says, and by %s", self.name, address, others)
            self._lead.append(address)
        elif answer in (Look.FOLLOWS, Look.GONE) and address in self._lead:
            self._lead.remove(address)
        leader, in_time = "", now_s - self._answered_s <= TAKEOVER_S_MAX
        for at in reversed(self._lead):
            leads = self._said[at] is Look.LEADS
            if leads or (at == self._last and in_time):
                leader = at if leads else ""
                break
        if not leader and len(self._said) < len(self._looking):
            return
        self.leader, changes = leader, leader != self.leader
        if changes:
            self.version += 1
            said = f"is led by {leader}" if leader else f"is away: {self._led_by_none}"
            logger.info("%s %s", self.name, said)
            self._refused, self._next_s = None, 0.0
            for task in self._tasks.values():  # they ask the one that led before, or why none did
                task.cancel()
            self._tasks = {} if leader else {"explain": asyncio.create_task(self._explain())}
        if not leader:
            drains = self._said.get(self._last) is Look.FOLLOWS
            self._tell(CellSilent(cell=self.name, drains=drains))
            self.looked.set()
        elif changes or address == leader:
            self._last, self._answered_s = leader, now_s
            self._tell(CellSeen(cell=self.name, leader=leader))

    async def _explain(self) -> None:
        """Look why nobody leads it: TLS may fail, or another service answer."""
        for address in self._channels:
            refused = await asyncio.to_thread(why_refused, address, credentials().tls)
            if refused is not None:
                logger.warning("%s: %s", self.name, refused.message)
                self._refused = refused

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
        stub, shown = ControlStub(self._looking[leader]), credentials().metadata
        asked = pb.ListDeploymentsRequest(nodes=True)
        try:
            told = await stub.ListDeployments(asked, timeout=UNARY_S_MAX, metadata=shown)
            found = [view_from_wire(one, DeploymentSnapshot) for one in told.deployments]
            nodes = told.nodes
            if not told.tells_nodes:  # a controller of an earlier version
                one_by_one = pb.ListNodesRequest()
                alone = await stub.ListNodes(one_by_one, timeout=UNARY_S_MAX, metadata=shown)
                nodes = alone.nodes
            found_nodes = [view_from_wire(one, NodeSnapshot) for one in nodes]
        except (grpc.aio.AioRpcError, MeshError) as error:
            said = explained(self.name, error) if isinstance(error, grpc.aio.AioRpcError) else error
            logger.warning("%s cannot be looked at: %s", self.name, said.message)
            self._next_s = self._clock.now_s() + LIST_S
            return
        if self.leader != leader:
            return  # another one leads by now
        self.nodes = found_nodes
        self.deployments = {one.spec.name: one for one in found}
        made = ((name, _made(one)) for name, one in self.deployments.items())
        self.serving = {name: one for name, one in made if one is not None}
        self.version += 1
        self.listed = True
        self._tell(CellSeen(cell=self.name, leader=leader, look=look_of(found, self.nodes)))
        took_s = self._clock.now_s() - began_s
        self._next_s = began_s + max(LIST_S, took_s / LIST_SHARE_MAX)

    async def asked(self, method: str, request: Any, *shown: tuple[str, str]) -> Any:
        """The answer to a call of an operator's, as the front's or for whom `shown` names. Raises
        errors of the tree.
        """
        call = getattr(ControlStub(await self._led()), method)
        metadata = (*credentials().metadata, *shown)
        try:
            return await call(request, timeout=UNARY_S_MAX, metadata=metadata)
        except grpc.aio.AioRpcError as error:
            raise explained(self.name, error) from error

    async def operate(self, method: str, request: Any, *shown: tuple[str, str]) -> Replies:
        """The replies to an operation. Raises as `asked` does."""
        call = getattr(ControlStub(await self._led()), method)(
            request, metadata=(*credentials().metadata, *shown)
        )
        try:
            async for event in call:
                if event.WhichOneof("event") == "done":
                    done = event.done
                    yield ReplyDone(
                        operation_id=OperationId(""), message=done.message, amiss=done.amiss
                    )
                else:
                    told = event.progress
                    yield ReplyProgress(
                        operation_id=OperationId(""), phase=told.phase, share=told.share
                    )
        except grpc.aio.AioRpcError as error:
            raise explained(self.name, error) from error
        finally:
            call.cancel()


def explained(cell: CellName, error: grpc.aio.AioRpcError | EndedCall) -> MeshError:
    """What a cell has raised, or why it did not answer."""
    if not is_told(cast(EndedCall, error)):
        earlier = error.code() is grpc.StatusCode.UNIMPLEMENTED
        hint = "update the controllers of cells before fronts" if earlier else "try again"
        return Unavailable(f"the cell {cell} did not answer: {error.details()}", hint=hint)
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
        self._snapshot: tuple[object, CellSnapshot] = None, _merged({})

    async def watch(self) -> None:
        """Look at all cells, until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            for link in self.links.values():
                tasks.create_task(link.watch())

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
                    hint="see that their controllers run; the front's log tells which are away",
                )
            return None
        cell, _ = found
        deployment, away = (
            self.links[cell].serving[name],
            self._core.away(name, self._clock.now_s()),
        )
        if away is not None and caller().may_see(deployment.spec):
            raise Refused(away.message, reason=away.reason, retry_after_s=away.retry_after_s)
        return deployment

    def has(self, name: DeploymentName) -> bool:
        return any(name in link.deployments for link in self.links.values())

    def spec(self, name: DeploymentName) -> DeploymentSpec | None:
        """That by which it is served, or else what is known of it."""
        found = self._core.model(name)
        if found is not None:
            return self.links[found[0]].serving[name].spec
        return next(iter(self.specs(name).values()), None)

    def specs(self, name: DeploymentName) -> dict[CellName, DeploymentSpec]:
        """What serves in each cell that has it, or did when it was looked at last, the first home
        cell first.
        """
        return {cell: one.spec for cell, one in _parts(name, self.links).items()}

    async def refresh(self) -> None:
        """Look at all cells now; one that takes long, or is away, stays as it was."""
        with suppress(TimeoutError):
            async with asyncio.timeout(REFRESH_S_MAX):
                await asyncio.gather(*(link.list() for link in self.links.values()))

    def asked_before(self, request_id: RequestId) -> tuple[Request, Sequence[int]] | None:
        return self._core.asked_before(request_id)

    def load(self) -> tuple[int, int]:
        return self._core.load()

    def wanted(self, now_s: float) -> tuple[NodesWanted, ...]:
        """Each cell says so of its own nodes."""
        return ()

    def profiles(self, name: DeploymentName) -> tuple[ProfileView, ...] | None:
        raise InvalidInput(
            "a front knows no profiles",
            hint="ask a controller of one of its cells: --controller HOST:PORT",
        )

    def snapshot(self, now_s: float) -> CellSnapshot:
        """All cells in one."""
        version = [(link.version, link.away) for link in self.links.values()]
        if self._snapshot[0] != version:
            self._snapshot = version, _merged(self.links)
        return self._snapshot[1]

    def deployed(self, name: DeploymentName | None = None) -> tuple[Deployed, ...]:
        return tuple(
            Deployed(spec=one.spec, model=one.model, state=one.state)
            for one in self.snapshot(0.0).deployments
            if name in (None, one.spec.name)
        )

    def look(self) -> Looking:
        """The same, which is at hand, in one part."""
        return self.snapshot((yield))

    async def usage(
        self,
        threads: WorkThreads,
        since_unix_s: float,
        by: UsageBy | None,
        tenant: TenantName | None,
    ) -> Sequence[Usage]:
        """That of all cells. Raises Unavailable where one is away."""
        request = pb.GetUsageRequest(since_unix_s=since_unix_s, by=by)
        shown = () if tenant is None else (said_for(caller()),)  # a cell tells it of its own
        answers = await asyncio.gather(
            *(link.asked("GetUsage", request, *shown) for link in self.links.values())
        )
        told = (view_from_wire(usage, Usage) for answer in answers for usage in answer.usages)
        return await threads.run(summed, told, by)

    def text(self, model_id: ModelId) -> TextAssets | None:
        """The text assets of a model, from a cell that has it; waits for it, in a thread, and for
        the next leader of such a cell. Raises Unavailable.
        """
        until_s = self._clock.now_s() + AWAY_S_MAX
        comes, why = True, ""
        while comes and self._clock.now_s() < until_s:
            comes = False
            for link in list(self.links.values()):
                names = [n for n, one in link.serving.items() if one.model.model_id == model_id]
                comes = comes or bool(names)
                if not (names and link.leader):
                    continue
                try:
                    return _fetched(link.name, link.leader, names[0])
                except Unavailable as error:
                    why = f": {error.message}"
            time.sleep(LOOK_S)
        raise Unavailable(
            f"no cell that answers has the tokenizer of model {model_id}{why}", hint="try again"
        )


def _fetched(cell: CellName, address: str, name: DeploymentName) -> TextAssets:
    """The assets, of the controller there. Raises errors of the tree."""
    channel = dial_blocking(address)
    try:
        asked = pb.GetTokenizerRequest(name=name)
        return from_wire(ControlStub(channel).GetTokenizer(asked, timeout=UNARY_S_MAX), TextAssets)
    except grpc.RpcError as error:
        raise explained(cell, cast(grpc.aio.AioRpcError, error)) from error
    finally:
        channel.close()


def _merged(links: Mapping[CellName, CellLink]) -> CellSnapshot:
    """All cells in one picture. What is known of a cell that is away is as it was, its nodes are
    lost.
    """
    names = sorted({name for link in links.values() for name in link.deployments})
    deployments = [_whole(name, links) for name in names]
    nodes = [
        _lost(link.name, node) if link.away else _node(link.name, node)
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
        energy=together(one.energy for one in nodes),
    )


def _whole(name: DeploymentName, links: Mapping[CellName, CellLink]) -> DeploymentSnapshot:
    """One deployment in all cells, as the first that serves it has it."""
    having = _parts(name, links) or {
        link.name: link.deployments[name] for link in links.values() if name in link.deployments
    }
    here = [links[cell] for cell in having if not links[cell].away]
    parts = [having[link.name] for link in here]
    if not here:
        gone = f"served by cells that are away: {', '.join(having)}"
        first = next(iter(having.values()))
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
        differs=_differs(first.spec, having, links),
        energy=together(one.energy for one in parts),
    )


def _parts(
    name: DeploymentName, links: Mapping[CellName, CellLink]
) -> dict[CellName, DeploymentSnapshot]:
    """What the cells have of a deployment that is not being deleted, the first home cell first."""
    found = {
        link.name: link.deployments[name]
        for link in links.values()
        if name in link.deployments and link.deployments[name].state is not DeploymentState.DELETING
    }
    return {cell: found[cell] for cell in ranked(name, found)}


def _differs(
    spec: DeploymentSpec,
    having: Mapping[CellName, DeploymentSnapshot],
    links: Mapping[CellName, CellLink],
) -> str:
    """Which of its cells have it otherwise than `spec` says, or not at all."""
    said = []
    for cell, one in having.items():
        away = ", which is away" if links[cell].away else ""
        if one.spec.tenant != spec.tenant:
            said.append(f"the name is another tenant's in {cell}{away}")
        elif one.spec != spec:
            said.append(f"differs in {cell}{away}")
    lacking = spec.cells - len(having)
    if lacking > 0:
        free = [cell for cell in ranked(spec.name, links) if cell not in having][:lacking]
        said += [f"missing in {c}{', which is away' if links[c].away else ''}" for c in free]
    return "; ".join(said)


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
