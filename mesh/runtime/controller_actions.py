"""Carries out what the controller core decides: four ports, to links, clients, registry, clock.

One performer for the live cell and the simulator; only the objects behind the ports differ.
"""

import logging
from collections.abc import Callable
from typing import Protocol, assert_never

from mesh.domain.actions import (
    AcceptLink,
    CloseLink,
    ControllerAction,
    DeliverTokens,
    NotePolicyFault,
    RefuseRequest,
    RemoveDeployment,
    ReplyDone,
    ReplyError,
    ReplyProgress,
    ReportMissingNodes,
    SendCommand,
    SetTimer,
    StoreDeployment,
    StoreHistory,
    StoreProfile,
    StoreRevisions,
    TellAccepted,
    TellWaiting,
    WantInstances,
    WantNodes,
)
from mesh.domain.deployment import Deployment
from mesh.domain.errors import StorageError
from mesh.domain.events import ControllerEvent, DecisionTookLong, DeploymentStored, StoreFailed
from mesh.domain.history import OutputHistory
from mesh.domain.ids import DeploymentName, OperationId
from mesh.domain.messages import NodeCommand
from mesh.domain.node_rule import NodeRule
from mesh.domain.profile import Profile
from mesh.domain.reasons import PolicyFaultKind
from mesh.domain.revision import Revisions
from mesh.domain.text import TextAssets
from mesh.runtime.clock import Clock
from mesh.runtime.host import DECISION_S_MAX

log = logging.getLogger(__name__)


def took_long(seconds: float) -> ControllerEvent:
    """What the core is told of a decision that took so long; for `Host`."""
    return DecisionTookLong(seconds=seconds, limit_s=DECISION_S_MAX)


class NodeLinks(Protocol):
    """The controller's ends of the links. A link that has closed meanwhile is ignored."""

    def accept(self, link_id: int, rule: NodeRule) -> None: ...

    def send(self, link_id: int, command: NodeCommand) -> None: ...

    def close(self, link_id: int, *, error: str, message: str, hint: str) -> None: ...


class Clients(Protocol):
    """Those who wait for the tokens of a request. One that has gone meanwhile is ignored."""

    def accepted(self, told: TellAccepted) -> None: ...

    def waiting(self, told: TellWaiting) -> None: ...

    def deliver(self, tokens: DeliverTokens) -> None: ...

    def refuse(self, refusal: RefuseRequest) -> None: ...


class Operators(Protocol):
    """Those who wait for an administrative call."""

    def reply(self, reply: ReplyProgress | ReplyDone | ReplyError) -> None: ...


Done = Callable[[StorageError | None], None]
"""It is called once: when a write is durable, or with why nothing has changed."""


class Registry(Protocol):
    """What outlives the controller. Writes are carried out in the order in which they were asked
    for. Without `done` nobody waits for one: what is lost of it is decided or learned again.
    """

    def store(
        self,
        deployment: Deployment,
        text: TextAssets | None,
        revisions: Revisions | None,
        done: Done | None = None,
    ) -> None: ...

    def remove(self, name: DeploymentName, done: Done | None = None) -> None: ...

    def store_profile(self, profile: Profile, done: Done | None = None) -> None: ...

    def store_history(self, name: DeploymentName, history: OutputHistory) -> None: ...


class ControllerPerformer:
    """`post` is the host's; it may be set after construction, since the two know each other."""

    def __init__(
        self,
        *,
        links: NodeLinks,
        clients: Clients,
        operators: Operators,
        registry: Registry,
        clock: Clock,
    ) -> None:
        self._links = links
        self._clients = clients
        self._operators = operators
        self._registry = registry
        self._clock = clock
        self.post: Callable[[ControllerEvent], None] = _unbound

    def perform(self, action: ControllerAction) -> None:
        match action:
            case DeliverTokens():
                self._clients.deliver(action)
            case SendCommand():
                self._links.send(action.link_id, action.command)
            case TellAccepted():
                self._clients.accepted(action)
            case TellWaiting():
                self._clients.waiting(action)
            case RefuseRequest():
                self._clients.refuse(action)
            case SetTimer():
                timer = action.timer
                self._clock.call_at(action.at_s, lambda: self.post(timer))
            case AcceptLink():
                self._links.accept(action.link_id, action.rule)
            case CloseLink():
                self._links.close(
                    action.link_id, error=action.error, message=action.message, hint=action.hint
                )
            case StoreDeployment():
                done = self._told(action.operation_id)
                self._registry.store(action.deployment, action.text, action.revisions, done)
            case StoreRevisions():
                self._registry.store(action.deployment, None, action.revisions)
            case RemoveDeployment():
                self._registry.remove(action.name, self._told(action.operation_id))
            case StoreProfile(operation_id=operation_id):
                asked = None if operation_id is None else self._told(operation_id)
                self._registry.store_profile(action.profile, asked)
            case StoreHistory():
                self._registry.store_history(action.name, action.history)
            case ReplyProgress() | ReplyDone() | ReplyError():
                self._operators.reply(action)
            case NotePolicyFault(policy=policy, call=call, kind=kind, message=message):
                # A machine that is busy makes any policy slow now and then.
                slow = kind is PolicyFaultKind.TOOK_LONG
                level = logging.DEBUG if slow else logging.WARNING
                log.log(level, "policy %s, %s: %s (%s)", policy, call, message, kind)
            case WantInstances(name=name, wanted=wanted, why=why):
                log.info("%d instances of %s are planned: %s", wanted, name, why)
            case WantNodes(device=device, wanted=wanted, why=why):
                log.info("%d %s nodes are wanted: %s", wanted, device, why)
            case ReportMissingNodes(device=device, wanted=wanted, ready=ready, for_s=for_s):
                log.warning(
                    "%d of %d %s nodes that are wanted have not joined for %.0f s",
                    *(wanted - ready, wanted, device, for_s),
                )
            case _:
                assert_never(action)

    def _told(self, operation_id: OperationId) -> Done:
        """Tells the core what became of a write."""

        def done(error: StorageError | None) -> None:
            if error is None:
                self.post(DeploymentStored(operation_id=operation_id))
            else:
                self.post(StoreFailed(operation_id=operation_id, message=error.message))

        return done


def _unbound(event: ControllerEvent) -> None:
    raise RuntimeError(f"the performer has no host yet, so {type(event).__name__} is lost")
