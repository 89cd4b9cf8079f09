"""What an operator does with a deployment: checked, put into the core, and its replies.

Before: `control`, by gRPC, and `mesh.http.operating`, for the page. After: `operations`. Each
method raises NotFound for a name that its caller may not see, and InvalidInput, before the core is
asked; `deploy` and `replay` do so at the first step of their replies, or after a wait.
"""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass

from mesh.controller.lookup import find_deployment
from mesh.controller.operations import Operations
from mesh.controller.replaying import Replaying
from mesh.controller.snapshots import with_starting
from mesh.controller.tenants import check_deployments
from mesh.domain.access import Role, TenantLimits, TenantName
from mesh.domain.actions import ReplyDone, ReplyProgress
from mesh.domain.checks import check_scaling, check_spec
from mesh.domain.deployment import DeploymentSpec
from mesh.domain.errors import AlreadyExists, InvalidInput, NotFound
from mesh.domain.events import (
    DeleteRequested,
    DeployRequested,
    DrainRequested,
    LoadRequested,
    ProfileRequested,
    ScaleRequested,
    UndoRequested,
    UnloadRequested,
)
from mesh.domain.ids import DeploymentName, NodeId, OperationId
from mesh.domain.lifecycle import NodeState
from mesh.domain.messages import NodeStarting
from mesh.domain.source_rules import SourceRules
from mesh.domain.values import replace
from mesh.domain.views import Arrivals, CellSnapshot, Deployed, InstancePlan, Prospect
from mesh.runtime.clock import Now
from mesh.runtime.operator import Replies
from mesh.wire.access import caller

STARTING_S_MAX = 120.0
"""For so long a deploy waits for nodes that are starting. A trial of precisions takes 24 s on two
cores, and a minute at most.
"""
STARTING_POLL_S = 0.2


@dataclass(slots=True, kw_only=True)
class Operating:
    """What operators ask of a cell, checked for its caller and given to the core."""

    operations: Operations
    clock: Now
    seen: Callable[[], Sequence[Deployed]]
    """The deployments that the caller may see."""
    whole: Callable[[], CellSnapshot]
    """The cell as it is."""
    foreseen: Callable[[DeploymentSpec], Prospect | None]
    planned: Callable[[DeploymentName, Arrivals | None], InstancePlan]
    limits: Callable[[TenantName], TenantLimits]
    sources: SourceRules
    """What each role may deploy from."""
    starting: Callable[[], Sequence[NodeStarting]]
    """The nodes that have not joined the cell yet."""
    writable: Callable[[], None]
    """Raises Unavailable where the registry takes no writes now."""
    acknowledged: Callable[[DeploymentName], Awaitable[str]]
    """The callback for each deployment that was acknowledged: it returns what is amiss with it, or
    an empty text.
    """
    replaying: Replaying

    def prospect(self, spec: DeploymentSpec) -> Prospect:
        """What would become of the deployment, were it deployed so. Raises NotFound."""
        check_spec(spec)
        found = self.foreseen(spec)
        if found is None:
            raise NotFound(
                f"how large {spec.source} is in that precision is not known yet",
                hint="deploy it with replicas_min: 0: it is imported, and nothing is loaded",
            )
        return found

    def plan(self, name: DeploymentName, calls: Arrivals | None) -> InstancePlan:
        """How many instances these calls need, or those that have come lately. Raises InvalidInput
        where nothing can be planned, or no plan keeps the SLO, and Unavailable without nodes.
        """
        find_deployment(name, self.seen())
        found = self.planned(name, calls)
        if found.lacks:
            raise InvalidInput(found.lacks, hint=found.hint)
        return found

    async def replay(self, name: DeploymentName, of: DeploymentName | None) -> Replies:
        """Ask it again for a minute of its own calls, or of another deployment's."""
        message = await self.replaying.replay(name, name if of is None else of)
        yield ReplyDone(operation_id=OperationId(""), message=message)

    async def deploy(self, given: DeploymentSpec) -> Replies:
        """Raises InvalidInput, Forbidden for a source that the caller may not deploy from,
        AlreadyExists for the name of another tenant, and Refused at the caller's limit; both
        again after the wait for a node that is starting.
        """
        spec = self._owned(given)
        check_spec(spec)
        self.sources.check(caller().role, spec.source)
        self.writable()  # before a model is imported in vain
        async for progress in self._wait_for_starting(spec):
            yield progress
        spec = self._owned(given)  # others have deployed meanwhile
        run = self.operations.run(lambda o: DeployRequested(operation_id=o, spec=spec))
        # Closed at once when the caller goes, so that the core knows at once.
        async with aclosing(run) as replies:
            async for reply in replies:
                if isinstance(reply, ReplyDone):
                    amiss = filter(None, (reply.amiss, await self.acknowledged(spec.name)))
                    reply = replace(reply, amiss="; ".join(amiss))
                yield reply

    async def _wait_for_starting(self, spec: DeploymentSpec) -> AsyncGenerator[ReplyProgress, None]:
        """While none of the nodes that could take the deployment has joined, and one is starting,
        which it tells. What the core says after that holds.
        """
        until_s = self.clock.now_s() + STARTING_S_MAX
        while self.clock.now_s() < until_s:
            joined = with_starting(self.whole().nodes, self.starting())
            nodes = [node for node in joined if node.device in spec.devices]
            if any(node.state is NodeState.READY for node in nodes):
                return
            node = next((node for node in nodes if node.state is NodeState.STARTING), None)
            if node is None:
                return
            phase = f"waits for node {node.node_id}, which {node.phase}"
            yield ReplyProgress(operation_id=OperationId(""), phase=phase, share=node.share)
            await asyncio.sleep(STARTING_POLL_S)

    def _owned(self, spec: DeploymentSpec) -> DeploymentSpec:
        """The spec as its caller's; what an operator changes stays whose it was."""
        asks, deployments = caller(), self.whole().deployments
        found = next((one.spec for one in deployments if one.spec.name == spec.name), None)
        if found is not None and not asks.may_see(found):
            raise AlreadyExists(f"the name {spec.name!r} is taken", hint="choose another one")
        if found is None and asks.tenant:
            mine = sum(one.spec.tenant == asks.tenant for one in deployments)
            check_deployments(asks.tenant, self.limits(asks.tenant), mine)
        # An operator may say whose it is, as one does through a front; it never becomes another's.
        own = spec.tenant if asks.role is Role.ADMIN else asks.tenant
        if found is not None and own and asks.role is Role.ADMIN and found.tenant != own:
            raise AlreadyExists(
                f"the name {spec.name!r} is of tenant {found.tenant or 'nobody'}, not of {own}",
                hint="choose another one, or delete that first",
            )
        return replace(spec, tenant=found.tenant if found is not None else own)

    def undo(self, name: DeploymentName, to: int | None) -> Replies:
        """Back to revision `to`, or to the one that served before."""
        find_deployment(name, self.seen())
        return self.operations.run(lambda o: UndoRequested(operation_id=o, name=name, to=to))

    def delete(self, name: DeploymentName) -> Replies:
        find_deployment(name, self.seen())
        return self.operations.run(lambda o: DeleteRequested(operation_id=o, name=name))

    def scale(
        self,
        name: DeploymentName,
        *,
        replicas_min: int | None,
        replicas_max: int | None,
        keep_alive_s: float | None,
        revision: int | None = None,
    ) -> Replies:
        """`None` leaves a limit as it is. With a `revision` it is refused unless that serves."""
        if replicas_min is None and replicas_max is None and keep_alive_s is None:
            raise InvalidInput(
                "nothing to change", hint="give replicas_min, replicas_max or keep_alive_s"
            )
        scaling = find_deployment(name, self.seen()).spec.scaling
        check_scaling(
            replace(
                scaling,
                replicas_min=scaling.replicas_min if replicas_min is None else replicas_min,
                replicas_max=scaling.replicas_max if replicas_max is None else replicas_max,
                keep_alive_s=scaling.keep_alive_s if keep_alive_s is None else keep_alive_s,
            )
        )
        return self.operations.run(
            lambda o: ScaleRequested(
                operation_id=o,
                name=name,
                replicas_min=replicas_min,
                replicas_max=replicas_max,
                keep_alive_s=keep_alive_s,
                revision=revision,
            )
        )

    def load(self, name: DeploymentName) -> Replies:
        find_deployment(name, self.seen())
        return self.operations.run(lambda o: LoadRequested(operation_id=o, name=name))

    def unload(self, name: DeploymentName) -> Replies:
        find_deployment(name, self.seen())
        return self.operations.run(lambda o: UnloadRequested(operation_id=o, name=name))

    def profile(
        self,
        name: DeploymentName,
        node_id: NodeId | None,
        *,
        operators: bool = False,
        cores: tuple[int, ...] = (),
    ) -> Replies:
        """Measure its model on a node, or on any that has room; if wanted, its operators,
        and these with some of the node's cores, too.
        """
        find_deployment(name, self.seen())
        return self.operations.run(
            lambda o: ProfileRequested(
                operation_id=o, name=name, node_id=node_id, operators=operators, cores=cores
            )
        )

    def drain(self, node_id: NodeId, *, undo: bool) -> Replies:
        """Give a node no new work; `undo` takes that back."""
        return self.operations.run(
            lambda o: DrainRequested(operation_id=o, node_id=node_id, undo=undo)
        )
