"""What was used of a deployment in an hour, for those who send bills."""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from mesh.domain.ids import DeploymentName

HOUR_S = 3600


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Of one deployment, or of all."""

    hour_unix_s: int
    """When the hour began, in seconds since 1970; 0: of all hours."""
    deployment: DeploymentName
    """Empty: calls of names that are not deployed, or of all deployments."""
    requests: int = 0
    """That ended after they were admitted, cancelled and failed ones included."""
    prompt_tokens: int = 0
    """Of those that got a token."""
    output_tokens: int = 0
    refused: int = 0

    def plus(self, other: "Usage") -> "Usage":
        """Both, under this one's hour and deployment."""
        return Usage(
            hour_unix_s=self.hour_unix_s,
            deployment=self.deployment,
            requests=self.requests + other.requests,
            prompt_tokens=self.prompt_tokens + other.prompt_tokens,
            output_tokens=self.output_tokens + other.output_tokens,
            refused=self.refused + other.refused,
        )


class UsageBy(StrEnum):
    DEPLOYMENT = "deployment"
    HOUR = "hour"
    BOTH = "both"


def summed(usages: Iterable[Usage], by: UsageBy) -> tuple[Usage, ...]:
    """By hour and then deployment, of which one may be summed over."""
    found: dict[tuple[int, str], Usage] = {}
    for usage in usages:
        hour_unix_s = 0 if by is UsageBy.DEPLOYMENT else usage.hour_unix_s
        deployment = DeploymentName("") if by is UsageBy.HOUR else usage.deployment
        none = Usage(hour_unix_s=hour_unix_s, deployment=deployment)
        key = hour_unix_s, deployment
        found[key] = found.get(key, none).plus(usage)
    return tuple(found[key] for key in sorted(found))
