"""The revisions of a deployment as the controller core knows them: which serves, which comes, and
which still answer. Owned by the controller core, like all entries.
"""

from dataclasses import field

from mesh.core.controller.state.deployment import DeploymentEntry
from mesh.domain.deployment import Deployment
from mesh.domain.ids import DeploymentName
from mesh.domain.revision import Revisions, public_name, starting
from mesh.domain.values import dataclass


@dataclass(slots=True, kw_only=True, eq=False)
class RolloutEntry:
    """The revisions of a deployment that has been changed."""

    current: DeploymentEntry
    revisions: Revisions = ()
    """As they are stored."""
    coming: DeploymentEntry | None = None
    """The deployment of the revision that is being imported, saved or started."""
    retiring: dict[DeploymentName, DeploymentEntry] = field(default_factory=dict)
    until_s: float | None = None
    """When the coming one is given up; None until its start has been looked at."""

    @property
    def name(self) -> DeploymentName:
        return public_name(self.current.name)

    @property
    def target(self) -> Deployment | None:
        """What the coming one is to be, once it is stored."""
        found = starting(self.revisions)
        return found.deployment if found is not None else None

    @property
    def rests(self) -> bool:
        return self.coming is None and not self.retiring

    def use(self, revisions: Revisions) -> None:
        """They are stored so."""
        self.revisions = revisions

    def begin(self, coming: DeploymentEntry) -> None:
        """A revision is to take over."""
        self.coming, self.until_s = coming, None

    def note_until(self, until_s: float) -> None:
        self.until_s = until_s

    def switch(self) -> tuple[DeploymentEntry, DeploymentEntry]:
        """The coming one takes over: that which served, and that which does."""
        old, new = self.current, self.coming
        assert new is not None
        self.current, self.coming = new, None
        self.retiring[old.name] = old
        return old, new

    def forget(self, entry: DeploymentEntry) -> None:
        """One of them has gone."""
        if self.coming is entry:
            self.coming = None
        self.retiring.pop(entry.name, None)
