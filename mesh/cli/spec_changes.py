"""What differs between two specs of a deployment, as fields of a manifest.

`deploy --dry-run` compares what is there with what would be, `rollout status` each revision with
the one before it.
"""

from collections.abc import Iterator, Sequence
from dataclasses import fields, is_dataclass

from mesh.domain.deployment import DeploymentSpec
from mesh.domain.slo import Slo
from mesh.domain.values import dataclass

_OF_NO_MANIFEST = ("name", "tenant")
"""A revision's name in the cell has its number, and its tenant stays."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """`field` is spelled as in a manifest's spec: `slo.ttft_s`."""

    field: str
    before: str
    after: str

    def __str__(self) -> str:
        return f"{self.field} {self.before} → {self.after}"


def changes(before: DeploymentSpec, after: DeploymentSpec) -> tuple[Change, ...]:
    """In the order of the manifest's fields."""
    return tuple(
        change for change in _changes(before, after) if change.field not in _OF_NO_MANIFEST
    )


def _changes(before: object, after: object, path: str = "") -> Iterator[Change]:
    for field in fields(before):  # type: ignore[arg-type]  # a dataclass by what calls it
        one, other = getattr(before, field.name), getattr(after, field.name)
        name = f"{path}{field.name}"
        if is_dataclass(one) and is_dataclass(other):
            yield from _changes(one, other, f"{name}.")
        elif name == "classes":
            yield from _class_changes(one, other)
        elif one != other:
            yield Change(field=name, before=_shown(one), after=_shown(other))


def _class_changes(before: Sequence[Slo], after: Sequence[Slo]) -> Iterator[Change]:
    """By the classes' names, as a manifest has them."""
    old, new = ({one.name: one for one in classes} for classes in (before, after))
    for name in dict.fromkeys((*old, *new)):
        field = f"classes.{name}"
        if name in old and name in new:
            yield from _changes(old[name], new[name], f"{field}.")
        else:
            yield Change(field=field, before=_shown(old.get(name)), after=_shown(new.get(name)))


def _shown(value: object) -> str:
    if value is None:
        return "unset"
    if isinstance(value, Slo):
        return "best effort" if value.best_effort else f"{value.ttft_s:g} s, {value.tpot_s:g} s"
    if isinstance(value, float):
        return f"{value:g}"
    return ", ".join(map(str, value)) if isinstance(value, tuple) else str(value)
