"""The turn rules that every node has, by name."""

from collections.abc import Callable
from typing import Any

from mesh.domain.errors import InvalidInput
from mesh.domain.node_rule import RuleName
from mesh.policy.rules.alternate import Alternate
from mesh.policy.rules.arbitration import Arbitration
from mesh.policy.rules.chunked import Chunked
from mesh.policy.rules.first_come import FirstCome
from mesh.policy.rules.headroom import Headroom
from mesh.policy.rules.rounds import Rounds
from mesh.policy.rules.swapping import Swapping
from mesh.policy.rules.turns import TurnRule, name_of

BUILT_IN: dict[str, Callable[..., TurnRule]] = {
    rule.name: rule
    for rule in (Headroom, FirstCome, Alternate, Swapping, Rounds, Arbitration, Chunked)
}


def rule_named(name: RuleName, own: TurnRule | None = None) -> TurnRule:
    """The rule that a controller has named. `own`: the rule of the node's policy file.

    Raises InvalidInput where there is none of this name, this digest or these parameters.
    """
    made = BUILT_IN.get(name.name)
    if name.digest:
        made = type(own) if own is not None and _same(name_of(own), name) else None
    if made is None:
        raise InvalidInput(
            f"this node has no turn rule {name.name!r}"
            + (f" of digest {name.digest}" if name.digest else ""),
            hint="start it with the --policy FILE.py of its controller"
            if name.digest
            else f"turn rules of this version: {', '.join(BUILT_IN)}",
        )
    # Numbers cross the wire as doubles: whole ones are counts.
    parameters: dict[str, Any] = {
        key: int(value) if float(value).is_integer() else value for key, value in name.parameters
    }
    try:
        return made(**parameters)
    except TypeError as error:
        raise InvalidInput(
            f"the turn rule {name.name!r} of this node does not take {parameters}",
            hint="run controller and nodes of one version",
        ) from error


def _same(one: RuleName, other: RuleName) -> bool:
    return (one.name, one.digest) == (other.name, other.digest)
