"""What each call of either protocol needs: the roles that may make it, in one table a protocol.

`Gate.admit` says who calls, or refuses; what that caller may see is decided where it is looked up,
by `caller()`. Before: the interceptor of gRPC and the middleware of HTTP. After: the handlers. A
call that is in no table is an operator's.
"""

from collections.abc import Callable, Iterable, Mapping
from contextvars import ContextVar

from mesh.domain.access import ANYONE, Caller, Role, TenantName
from mesh.domain.errors import Forbidden, Unauthenticated

AUTHORIZATION = "authorization"
FOR = "mesh-for"
"""Metadata by which an operator, as fronts are, names for whom a call is made: see `said_for`."""
NODE_LINK = "/mesh.v1.NodeLink/Connect"
NODE_START = "/mesh.v1.NodeLink/Start"
NODE_NAME = "mesh node"
"""The common name of certificates that may join a cell."""
_SCHEME = "bearer "
_CHARS_MAX = 512
_USERS = frozenset({Role.ADMIN, Role.TENANT})
_OPERATORS = frozenset({Role.ADMIN})
_NODES = frozenset({Role.ADMIN, Role.NODE})
_CONTROL = {
    _USERS: (
        *("Deploy", "Undo", "Delete", "Scale", "Load", "Unload", "Profile", "GetDeployment"),
        *(
            "ListDeployments",
            "GetProfiles",
            "GetPlan",
            "GetTokenizer",
            "GetUsage",
            "GetReport",
            "ListRequests",
            "Cancel",
            "Watch",
        ),
    ),
    _OPERATORS: ("Drain", "ListNodes", "GetStatus", "StepDown"),
}
_OPEN_INFERENCE: Mapping[str, frozenset[Role] | None] = {
    "ServerLive": None,
    "ServerReady": None,
    "ModelReady": _USERS,
    "ServerMetadata": _USERS,
    "ModelMetadata": _USERS,
    "ModelInfer": _USERS,
    "ModelStreamInfer": _USERS,
}
RPCS: Mapping[str, frozenset[Role] | None] = {
    "/mesh.v1.Inference/Invoke": _USERS,
    "/mesh.v1.Inference/InvokeMany": _OPERATORS,
    **{
        f"/inference.GRPCInferenceService/{method}": roles
        for method, roles in _OPEN_INFERENCE.items()
    },
    NODE_LINK: _NODES,
    NODE_START: _NODES,
    **{
        f"/mesh.v1.Control/{method}": roles
        for roles, methods in _CONTROL.items()
        for method in methods
    },
}
ROUTES: Mapping[str, frozenset[Role] | None] = {
    "/": None,
    "/page/{file:path}": None,
    "/v1": None,
    "/v1/chat/completions": _USERS,
    "/v1/completions": _USERS,
    "/v1/messages": _USERS,
    "/v1/messages/count_tokens": _USERS,
    "/v1/responses": _USERS,
    "/v1/responses/input_tokens": _USERS,
    "/v1/responses/{id}": _USERS,
    "/v1/responses/{id}/cancel": _USERS,
    "/v1/files": _USERS,
    "/v1/files/{id}": _USERS,
    "/v1/files/{id}/content": _USERS,
    "/v1/batches": _USERS,
    "/v1/batches/{id}": _USERS,
    "/v1/batches/{id}/cancel": _USERS,
    "/v1/embeddings": _USERS,
    "/rerank": _USERS,
    "/v1/rerank": _USERS,
    "/v2/rerank": _USERS,
    "/v1/models": _USERS,
    "/v1/models/{model:path}": _USERS,
    "/tokenize": _USERS,
    "/detokenize": _USERS,
    "/api/v1/cell": _USERS,
    "/api/v1/events": _USERS,
    "/api/v1/session": None,
    "/api/v1/deployments/{model}/{verb}": _USERS,
    "/api/chat": _USERS,
    "/api/generate": _USERS,
    "/api/tags": _USERS,
    "/api/embed": _USERS,
    "/api/ps": _USERS,
    "/api/show": _USERS,
    "/api/version": None,
    "/api/{unbuilt}": _USERS,
    "/api/v1/deployments/{model}/profiles": _USERS,
    "/api/v1/deploy": _USERS,
    "/api/v1/prospect": _OPERATORS,
    "/api/v1/manifest": _USERS,
    "/api/v1/requests": _USERS,
    "/api/v1/requests/{request_id}": _USERS,
    "/api/v1/requests/{request_id}/cancel": _USERS,
    "/api/v1/trace": _USERS,
    "/api/v1/usage": _USERS,
    "/api/v1/report": _USERS,
    "/api/v1/report.html": _USERS,
    "/api/v1/nodes/wanted": _NODES,
    "/api/v1/keys": _OPERATORS,
    "/api/v1/keys/{key_id}/revoke": _OPERATORS,
    "/metrics": _OPERATORS,
    "/healthz": None,
    "/readyz": None,
    "/ping": None,
    "/version": None,
    "/openapi.json": None,
}
"""The roles that may call each route; `None` lets anyone call it, without a key."""
_CALLER: ContextVar[Caller] = ContextVar("caller", default=ANYONE)


def caller() -> Caller:
    """The caller for whom this code runs."""
    return _CALLER.get()


def act_as(whom: Caller) -> None:
    """Have this code run for whoever asked for it at another time."""
    _CALLER.set(whom)


def said_for(whom: Caller, *, vouched: bool = False) -> tuple[str, str]:
    """The metadata of a call that is made for another caller."""
    return FOR, "/".join((whom.role, whom.tenant, whom.key_id, "vouched" * vouched))


def act_for(said: str) -> None:
    """Have this code run for whom an operator has named. Raises Forbidden where no operator has."""
    parts = said.split("/")
    if caller().role is not Role.ADMIN or len(parts) != 4 or parts[0] not in _USERS:
        raise Forbidden(
            f"the caller may not act for others, and has sent {FOR}",
            hint="a front needs the key of an operator: MESH_KEY, or --key-file",
        )
    role, tenant, key_id, vouched = parts
    _CALLER.set(
        Caller(
            role=Role(role), tenant=TenantName(tenant), key_id=key_id, vouched=vouched == "vouched"
        )
    )


class Gate:
    """`find` knows the caller of a key, and raises Unauthenticated; None where none is wanted.
    `check_acted_for` raises Forbidden where the key of that id, for which an operator calls, holds
    no more.
    `mutual`: callers show certificates.
    """

    def __init__(
        self,
        find: Callable[[str], Caller] | None = None,
        check_acted_for: Callable[[str], None] = lambda key_id: None,
        *,
        mutual: bool = False,
    ) -> None:
        self._find = find
        self.check_acted_for = check_acted_for
        self._mutual = mutual

    @property
    def wants_keys(self) -> bool:
        return self._find is not None

    @property
    def looks(self) -> bool:
        return self.wants_keys or self._mutual

    def check_certificate(self, method: str, names: Iterable[bytes]) -> None:
        """`names`: the common ones of what a caller showed. Raises Forbidden."""
        of_nodes = method in (NODE_LINK, NODE_START)
        if self._mutual and of_nodes and NODE_NAME.encode() not in names:
            shown = ", ".join(name.decode("utf-8", "replace") for name in names)
            raise Forbidden(
                f"the certificate is of a {shown}, which may not join",
                hint="start the node with --tls and the folder with node.pem",
            )

    def admit(self, authorization: str | None, roles: Iterable[Role]) -> None:
        """Let a call in, as its caller's. Raises Unauthenticated or Forbidden."""
        found = self.check(authorization, roles)
        if found is not None:
            _CALLER.set(found)

    def knows(self, authorization: str | None) -> bool:
        """Whether a caller of any role shows this, or no key is wanted."""
        try:
            self.check(authorization, Role)
        except Unauthenticated:
            return False
        return True

    def check(self, authorization: str | None, roles: Iterable[Role]) -> Caller | None:
        """The caller; `None` where no key is wanted. Raises Unauthenticated or Forbidden."""
        if self._find is None:
            return None
        if authorization is None:
            raise Unauthenticated(
                "no key was given",
                hint="send Authorization: Bearer KEY; `mesh` sends MESH_KEY, or --key-file",
            )
        scheme = authorization[: len(_SCHEME)].lower()
        if scheme != _SCHEME or len(authorization) > _CHARS_MAX:
            raise Unauthenticated("the Authorization is no Bearer key")
        found = self._find(authorization[len(_SCHEME) :].strip())
        if found.role not in roles:
            raise Forbidden(
                f"the key {found.key_id} is of a {found.role}, which may not do this",
                hint=f"use the key of a role that may: {', '.join(sorted(roles))}",
            )
        return found
