"""Which model sources a cell's operator allows: by role, scheme and host.

The controller compares the source of a deploy with the rules of the caller's role. A node takes
from the same rules the hosts that it may fetch from although their addresses are private. Rules
come from `--sources` of `mesh up`, `mesh controller` and `mesh node`. `mesh_loader.reach` looks at
the addresses themselves.
"""

import posixpath
from collections.abc import Iterable, Mapping
from dataclasses import field
from ipaddress import ip_address, ip_network
from urllib.parse import unquote, urlsplit

from mesh.domain.access import Role
from mesh.domain.errors import Forbidden, InvalidInput
from mesh.domain.values import dataclass

ALL = "all"
SCHEMES = ("pkg", "file", "hf", "http", "https", "s3")
WEB = ("http", "https")
RULES_MAX = 256
"""The most rules of all roles together."""
_FOR_TENANTS = ("pkg", "hf", "http", "https", "s3")
"""What a tenant may use unless the operator says otherwise: no files of the nodes."""
_OPTION = "--sources"
_HINT = "write ROLE=RULE,…, like tenant=pkg,hf,https or admin=all,http://models.internal"


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceRules:
    """The rules of each role that may deploy.

    A rule is `all`, a scheme (`hf`), or a scheme with the beginning of what may follow: a host, a
    host with its port or a network of http(s), an organisation of the hub, a bucket, a folder.
    """

    by_role: Mapping[Role, tuple[str, ...]] = field(default_factory=dict)

    def check(self, role: Role, source: str) -> None:
        """Raises Forbidden for a source that the role may not use."""
        rules = self.by_role.get(role, _FOR_TENANTS if role is Role.TENANT else (ALL,))
        if any(_permits(rule, source) for rule in rules):
            return
        scheme = source.partition("://")[0]
        raise Forbidden(
            f"a {role} of this cell may not deploy from this {scheme[:16]}:// source; what it may "
            f"use is {', '.join(rules) or 'nothing'}",
            hint=f"ask the operator, who allows more by {_OPTION} {role}=…",
        )

    def named_hosts(self) -> tuple[str, ...]:
        """Hosts, with their ports where those are given, and networks that rules of http(s) name:
        what the operator has named may have a private address."""
        rules = (rule for rules in self.by_role.values() for rule in rules)
        named = (rule.partition("://") for rule in rules)
        return tuple(sorted({host.lower() for scheme, _, host in named if scheme in WEB and host}))


def read_source_rules(texts: Iterable[str]) -> SourceRules:
    """The rules in the texts of `--sources`; several texts of one role count together. Raises
    InvalidInput.
    """
    by_role: dict[Role, tuple[str, ...]] = {}
    for text in texts:
        name, separator, rules = text.partition("=")
        if not separator or name not in (Role.ADMIN, Role.TENANT):
            raise InvalidInput(f"{_OPTION}: {text!r} names no role that deploys", hint=_HINT)
        given = tuple(rule.strip() for rule in rules.split(",") if rule.strip())
        for rule in given:
            _check_rule(rule)
        by_role[Role(name)] = (*by_role.get(Role(name), ()), *given)
    count = sum(map(len, by_role.values()))
    if count > RULES_MAX:
        raise InvalidInput(f"{_OPTION}: {count} rules are given; {RULES_MAX} is the limit")
    return SourceRules(by_role=by_role)


def names_host(named: Iterable[str], host: str, port: int) -> bool:
    """Whether one of `named_hosts` is this host, or is the network that this address is of."""
    return any(_names(one, host.lower(), port) for one in named)


def _check_rule(rule: str) -> None:
    scheme, separator, rest = rule.partition("://")
    known = rule == ALL or (scheme in SCHEMES and bool(rest or not separator))
    if not known or (scheme in WEB and rest and _host_and_port(rest) is None):
        raise InvalidInput(f"{_OPTION}: {rule!r} is no rule for sources", hint=_HINT)


def _permits(rule: str, source: str) -> bool:
    scheme, separator, rest = source.partition("://")
    wanted, _, begins = rule.partition("://")
    if rule == ALL:
        return True
    if not separator or scheme != wanted:
        return False
    if not begins:
        return True
    if scheme in WEB:
        return _permits_host(begins, source)
    if scheme == "file":
        return _lies_below(rest.removeprefix("localhost"), begins)
    ends = "/@" if scheme == "hf" else "/"
    begins = begins.rstrip("/")
    return rest == begins or any(rest.startswith(begins + end) for end in ends)


def _permits_host(named: str, source: str) -> bool:
    try:
        parts = urlsplit(source)
        port = parts.port or (443 if parts.scheme == "https" else 80)
    except ValueError:
        return False
    return _names(named.lower(), parts.hostname or "", port)


def _lies_below(path: str, folder: str) -> bool:
    """A percent sign may be part of a name or an escape: it lies there either way. Where a step
    upwards leads is not known, since it may follow a link.
    """
    below = posixpath.normpath(folder).rstrip("/") + "/"
    ways = (path, unquote(path))
    return all(
        ".." not in way.split("/") and f"{posixpath.normpath(way)}/".startswith(below)
        for way in ways
    )


def _names(named: str, host: str, port: int) -> bool:
    pair = _host_and_port(named)
    if pair is None:
        return False
    name, only_port = pair
    if only_port not in (None, port):
        return False
    if name == host:
        return True
    try:
        return ip_address(host) in ip_network(name)
    except ValueError:
        return False


def _host_and_port(text: str) -> tuple[str, int | None] | None:
    """The host and port of a host, a host with its port, an address or a network; `None` where the
    text is neither.
    """
    try:
        return str(ip_network(text.strip("[]"))), None
    except ValueError:
        pass
    try:
        parts = urlsplit(f"//{text}")
        host, port = parts.hostname, parts.port
    except ValueError:
        return None
    plain = parts.netloc == text and "@" not in text and "\\" not in text
    return (host, port) if host and plain else None
