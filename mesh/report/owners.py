"""Whose a decision is: the deployment that it is about, and that deployment's tenant.

It remembers which instance, request and operation is of which deployment, the latest of each, for
decisions name these. Before: the narrator, which puts decisions into words. After: `look`, which
gives what is deployed under a name.
"""

from collections.abc import Sequence
from typing import TypeVar

from mesh.domain.actions import (
    RefuseRequest,
    ReplyError,
    SendCommand,
    StoreRevisions,
    TellAccepted,
)
from mesh.domain.deployment import DeploymentSpec
from mesh.domain.events import (
    DeleteRequested,
    DeploymentStored,
    DeployRequested,
    InvokeRequested,
    LoadRequested,
    NodeConnected,
    NodeReported,
    ProfileRequested,
    ScaleRequested,
    UndoRequested,
    UnloadRequested,
)
from mesh.domain.ids import DeploymentName, InstanceId, OperationId, RequestId
from mesh.domain.limits import forget_oldest
from mesh.domain.messages import (
    AbortRequest,
    ContinueRequest,
    ImportDone,
    ImportFailed,
    InstanceGone,
    InstanceLoaded,
    KvResized,
    LoadFailed,
    LoadInstance,
    ProfileDone,
    ProfileFailed,
    ProfileInstance,
    ProfileRefined,
    RequestReturned,
    ResizeKv,
    SubmitRequest,
    UnloadInstance,
    UseProfile,
)
from mesh.domain.revision import public_name
from mesh.domain.values import dataclass
from mesh.report.calls import Look

KNOWN_MAX = 10_000
"""At most so many names of each kind are remembered: those that were spoken of last."""
K = TypeVar("K")


@dataclass(frozen=True, slots=True, kw_only=True)
class Owner:
    deployment: str = ""
    tenant: str = ""


NOBODY = Owner()
"""Nodes and the cell itself are no tenant's, nor is what is not known any more."""


class Owners:
    def __init__(self, look: Look) -> None:
        self._look = look
        self._deployments: dict[DeploymentName, Owner] = {}
        self._instances: dict[InstanceId, Owner] = {}
        self._requests: dict[RequestId, Owner] = {}
        self._operations: dict[OperationId, Owner] = {}

    def of_event(self, event: object, actions: Sequence[object]) -> Owner:
        """The owner of what has happened, on which these actions were decided. Each event is asked
        about, before its actions are: what it names is remembered.
        """
        match event:
            case DeployRequested(operation_id=operation_id, spec=spec):
                owner = _owner(spec)
                _keep(self._operations, operation_id, owner)
                if not any(isinstance(action, ReplyError) for action in actions):
                    _keep(self._deployments, spec.name, owner)
                return owner
            case (
                DeleteRequested()
                | UndoRequested()
                | ScaleRequested()
                | LoadRequested()
                | UnloadRequested()
                | ProfileRequested()
            ):
                return _keep(self._operations, event.operation_id, self._deployed(event.name))
            case InvokeRequested(request=request):
                owner = self._deployed(request.deployment)
                return _keep(self._requests, request.request_id, owner)
            case NodeConnected(hello=hello):
                for instance in hello.instances:
                    _keep(
                        self._instances, instance.instance_id, self._deployed(instance.deployment)
                    )
                for held in hello.requests:
                    request = held.order.request
                    _keep(self._requests, request.request_id, self._deployed(request.deployment))
                return NOBODY
            case NodeReported(report=report):
                return self._named(report)
            case DeploymentStored(operation_id=operation_id):
                return _found(self._operations, operation_id)
            case _:
                return NOBODY

    def of_action(self, event: object, action: object) -> Owner:
        """The owner of an action that was decided on the event."""
        match action:
            case SendCommand(command=LoadInstance() as load):
                owner = self._deployed(load.deployment)
                return _keep(self._instances, load.instance_id, owner)
            case SendCommand(command=ResizeKv() as resize):
                return self._resized(event, resize)
            case SendCommand(command=command):
                return self._named(command)
            case StoreRevisions(deployment=deployment):
                return _owner(deployment.spec)
            case _:
                return self._named(action)

    def _resized(self, event: object, resize: ResizeKv) -> Owner:
        """Nobody's where an instance of somebody else's made room for it: the line names that."""
        owner = _found(self._instances, resize.instance_id)
        match event:
            case NodeReported(report=InstanceGone() | KvResized() as freed):
                other = _found(self._instances, freed.instance_id)
                return owner if other.tenant == owner.tenant else NOBODY
            case _:
                return owner

    def _named(self, said: object) -> Owner:
        """The owner of the instance, request or operation that is spoken of."""
        match said:
            case SubmitRequest(order=order):
                return _found(self._requests, order.request.request_id)
            case (
                RefuseRequest()
                | TellAccepted()
                | AbortRequest()
                | ContinueRequest()
                | RequestReturned()
            ):
                return _found(self._requests, said.request_id)
            case (
                InstanceLoaded()
                | LoadFailed()
                | InstanceGone()
                | KvResized()
                | ProfileRefined()
                | ProfileInstance()
                | UnloadInstance()
                | UseProfile()
            ):
                return _found(self._instances, said.instance_id)
            case ImportDone() | ImportFailed() | ProfileDone() | ProfileFailed() | ReplyError():
                return _found(self._operations, said.operation_id)
            case _:
                return NOBODY

    def _deployed(self, name: DeploymentName) -> Owner:
        """The owner of a deployment; of one that is not there any more, as it was last."""
        name = public_name(name)
        spec = self._look(name)
        if spec is not None:
            return _keep(self._deployments, name, _owner(spec))
        return _found(self._deployments, name)


def _owner(spec: DeploymentSpec) -> Owner:
    return Owner(deployment=str(public_name(spec.name)), tenant=str(spec.tenant))


def _keep(known: dict[K, Owner], name: K, owner: Owner) -> Owner:
    known.pop(name, None)
    known[name] = owner
    forget_oldest(known, KNOWN_MAX)
    return owner


def _found(known: dict[K, Owner], name: K) -> Owner:
    owner = known.get(name)
    return NOBODY if owner is None else _keep(known, name, owner)
