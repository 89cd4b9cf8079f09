"""The policy that a cell is told to decide by: one of those by name, or a file from outside.

A file has the policy as `POLICY`, a value of `mesh.policy.interface.Policy`; README.md there tells
how to write one. It runs as part of the controller, with all that this may do: take none that you
do not trust. Before: `--policy`, a scenario, a journal's first line. After: the controller core.
"""

from hashlib import sha256
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any, cast

from mesh.domain.errors import InvalidInput
from mesh.policy.interface import Policy, checked
from mesh.policy.registry import policy
from mesh.policy.rules.turns import TurnRule, name_of

_MEMBERS = tuple(name for name in vars(Policy) if not name.startswith("_"))
DIGEST_CHARS = 16
"""This much of the digest of a policy file is told."""


def policy_of(text: str) -> Policy:
    """By its name, or from a FILE.py. Raises InvalidInput where there is none."""
    return checked(_read(Path(text))) if text.endswith(".py") else policy(text)


def rule_of_file(text: str) -> TurnRule | None:
    """The turn rule that a policy brings along; None where every node has it. Raises InvalidInput
    where there is no such policy.
    """
    rule = policy_of(text).rule if text.endswith(".py") else None
    return rule if rule is not None and name_of(rule).digest else None


def _read(path: Path) -> Policy:
    hint = "mesh/policy/README.md tells how to write a policy"
    if not path.is_file():
        raise InvalidInput(f"there is no policy file {path}", hint=hint)
    spec = spec_from_file_location(f"mesh_policy_{path.stem}", path)
    assert spec is not None, "a path that ends in .py"
    assert spec.loader is not None
    module = module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        why = f"{type(error).__name__}: {error}"
        raise InvalidInput(f"the policy file {path} cannot be run: {why}", hint=hint) from error
    found = getattr(module, "POLICY", None)
    kind: Any = type(getattr(found, "rule", None))
    if kind.__module__ == module.__name__:
        # Nodes have to have the same file: this is how they and the controller know.
        kind.digest = sha256(path.read_bytes()).hexdigest()[:DIGEST_CHARS]
    missing = [name for name in _MEMBERS if not hasattr(found, name)]
    if missing:
        what = "has no POLICY" if found is None else f"has a POLICY without {', '.join(missing)}"
        raise InvalidInput(f"the policy file {path} {what}", hint=hint)
    return cast(Policy, found)
