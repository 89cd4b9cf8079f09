"""Who may ask a cell for what: roles, keys, callers, and the limits of tenants.

A key belongs to a tenant, or to nobody where its role needs none. Before: `mesh.controller.keys`,
which knows the keys. After: whoever is asked for something by a caller.
"""

from enum import StrEnum
from typing import NewType

from mesh.domain.deployment import DeploymentSpec
from mesh.domain.values import dataclass

TenantName = NewType("TenantName", str)
NOBODY = TenantName("")


class Role(StrEnum):
    ADMIN = "admin"
    """Everything, of everybody."""
    TENANT = "tenant"
    """Deploy, call and see what is its tenant's own."""
    NODE = "node"
    """Compute for the cell, and nothing else."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """Whoever asks. Where no keys are wanted, everyone is an operator without one."""

    role: Role = Role.ADMIN
    tenant: TenantName = NOBODY
    key_id: str = ""
    vouched: bool = False
    """A front asks for it, and vouches that a cell has accepted the call before."""
    best_effort: bool = False
    """A batch file asks: whatever SLO its calls name, they have what all others leave."""

    def may_see(self, spec: DeploymentSpec) -> bool:
        return self.role is Role.ADMIN or (self.role is Role.TENANT and spec.tenant == self.tenant)

    def sees(self, tenant: str) -> bool:
        """Whether the caller is told what concerns a tenant; what is nobody's is for operators."""
        return self.role is Role.ADMIN or tenant == self.tenant != NOBODY


ANYONE = Caller()


@dataclass(frozen=True, slots=True, kw_only=True)
class Key:
    """What is kept of a key: the key itself is not. Times in seconds since 1970."""

    key_id: str
    role: Role
    tenant: TenantName
    created_unix_s: float
    expires_unix_s: float | None = None
    revoked_unix_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantLimits:
    """The limits of a tenant; `None` means that there is no limit."""

    requests_per_s: float | None = None
    tokens_per_min: float | None = None
    """Prompt and output."""
    running: int | None = None
    """Calls at one time, those that wait included."""
    deployments: int | None = None
