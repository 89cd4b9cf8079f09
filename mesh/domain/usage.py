"""What was used of a deployment in an hour, for those who send bills."""

from collections.abc import Iterable, Mapping
from enum import StrEnum

from mesh.domain.energy import plus
from mesh.domain.errors import InvalidInput
from mesh.domain.ids import DeploymentName
from mesh.domain.values import dataclass, replace

HOUR_S = 3600


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """The usage of one deployment, or of all."""

    hour_unix_s: int
    """When the hour began, in seconds since 1970; 0: of all hours."""
    deployment: DeploymentName
    """Empty: calls of names that are not deployed, or of all deployments."""
    requests: int = 0
    """The requests that ended after they were admitted, cancelled and failed ones included."""
    prompt_tokens: int = 0
    """The prompt tokens of requests that got a token."""
    output_tokens: int = 0
    refused: int = 0
    tenant: str = ""
    """The tenant whose key was used; empty stands for nobody's key, or for all tenants. The same
    holds for `key_id`.
    """
    key_id: str = ""
    slo_class: str = ""
    """The SLO class; empty where the deployment has none, or for all classes."""
    energy_j: float | None = None
    """What nodes took in this hour while they computed for it; `None` where none told that."""

    @property
    def place(self) -> tuple[int | str, ...]:
        """In the books: one line each."""
        return self.hour_unix_s, self.deployment, self.tenant, self.key_id, self.slo_class

    def plus(self, other: "Usage") -> "Usage":
        """The sum of both, under this one's hour, deployment, tenant and key."""
        return replace(
            self,
            requests=self.requests + other.requests,
            prompt_tokens=self.prompt_tokens + other.prompt_tokens,
            output_tokens=self.output_tokens + other.output_tokens,
            refused=self.refused + other.refused,
            energy_j=plus((self.energy_j, other.energy_j)),
        )


class UsageBy(StrEnum):
    DEPLOYMENT = "deployment"
    HOUR = "hour"
    BOTH = "both"
    """Hour and deployment."""
    TENANT = "tenant"
    KEY = "key"
    CLASS = "class"
    """Deployment and SLO class."""


PLACE = ("hour_unix_s", "deployment", "tenant", "key_id", "slo_class")
KEPT: Mapping[UsageBy | None, tuple[str, ...]] = {
    UsageBy.DEPLOYMENT: ("deployment",),
    UsageBy.HOUR: ("hour_unix_s",),
    UsageBy.BOTH: ("hour_unix_s", "deployment"),
    UsageBy.TENANT: ("tenant",),
    UsageBy.KEY: ("tenant", "key_id"),
    UsageBy.CLASS: ("deployment", "slo_class"),
    None: PLACE,
}
"""Which parts of a usage's place are kept apart; it is summed over the others."""
_SHOWN_CHARS = 40
_ALL = Usage(hour_unix_s=0, deployment=DeploymentName(""))


def usage_by(name: str) -> UsageBy:
    """Raises InvalidInput."""
    if name not in set(UsageBy):
        raise InvalidInput(
            f"by={name[:_SHOWN_CHARS]!r} is nothing that usage is summed by",
            hint=f"there are {', '.join(UsageBy)}",
        )
    return UsageBy(name)


def summed(usages: Iterable[Usage], by: UsageBy | None) -> tuple[Usage, ...]:
    """In order of what they are by; the rest is summed over."""
    found: dict[tuple[int | str, ...], Usage] = {}
    for usage in usages:
        one = replace(_ALL, **{name: getattr(usage, name) for name in KEPT[by]})
        found[one.place] = found.get(one.place, one).plus(usage)
    return tuple(found[place] for place in sorted(found))
