"""An operator's call under way, as the controller core knows it. Owned by the controller core."""

from mesh.core.controller.state.instance import InstanceEntry
from mesh.core.controller.state.node import NodeEntry
from mesh.domain.deployment import Deployment
from mesh.domain.ids import DeploymentName, OperationId
from mesh.domain.profile import Profile
from mesh.domain.reasons import OperationKind
from mesh.domain.revision import Revisions
from mesh.domain.values import dataclass


@dataclass(slots=True, kw_only=True, eq=False)
class OperationEntry:
    """An administrative call under way. Deploy: `node` imports; then `pending` is being stored.
    Profile: `instance` on `node` is kept for it, and measured; then `pending_profile` is being
    stored.
    """

    operation_id: OperationId
    kind: OperationKind
    name: DeploymentName
    node: NodeEntry | None = None
    pending: Deployment | None = None
    revisions: Revisions | None = None
    """The revisions that are stored with it, where the deployment was there before."""
    instance: InstanceEntry | None = None
    operators: bool = False
    """What operators take is counted, too."""
    cores: tuple[int, ...] = ()
    """It is counted once more with each of these numbers of cores."""
    measuring: bool = False
    """The node has been asked to measure."""
    pending_profile: Profile | None = None

    @property
    def writes(self) -> bool:
        """The registry is writing what it changes of a deployment: that cannot be taken back."""
        return self.pending is not None or self.kind is OperationKind.DELETE

    def store(self, what: Deployment | Profile, revisions: Revisions | None = None) -> None:
        """Its node has done its part: what came of it is being stored."""
        self.node, self.revisions = None, revisions
        if isinstance(what, Profile):
            self.pending_profile = what
        else:
            self.pending = what

    def keep(self, instance: InstanceEntry) -> None:
        """The profile is measured on this instance, which stays for it."""
        self.release()
        self.instance = instance
        instance.keep_for_profile()

    def release(self) -> InstanceEntry | None:
        """The instance that was kept need not stay for it any more; None if there was none."""
        instance, self.instance = self.instance, None
        if instance is not None:
            instance.release_from_profile()
        return instance

    def note_measuring(self) -> None:
        """The node is asked to measure."""
        self.measuring = True
