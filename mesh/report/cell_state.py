"""The cell as one JSON value for viewers, and what changes of it from one second to the next.

The fields are named as `-o json` names them, because they come from the same values, of which an
encoder makes what `plain` does. What has a name is keyed by it, so that a change says only what is
new: an RFC 7396 merge patch. Pure: pictures in, values for the encoder out.
"""

from collections.abc import Mapping, Sequence
from dataclasses import is_dataclass
from typing import Any

from mesh.domain.ids import DeploymentName
from mesh.domain.lifecycle import DeploymentState
from mesh.domain.recent import CellSample, RecentCalls
from mesh.domain.values import dataclass
from mesh.domain.views import CellStatus, DeploymentSnapshot, NodeSnapshot, PrefetchView
from mesh.report.memory_parts import free_bytes, parts
from mesh.report.plain import Plain, members, plain_fields
from mesh.runtime.turns import Steps

State = dict[str, Any]
"""Its leaves are plain, or values of the domain without tables of pairs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CellPicture:
    """The cell at one time, as one caller may see it."""

    status: CellStatus
    nodes: Sequence[NodeSnapshot]
    deployments: Sequence[DeploymentSnapshot]
    recent: RecentCalls
    """The recent calls of all of these deployments."""
    recent_of: Mapping[DeploymentName, RecentCalls]
    samples: Sequence[CellSample] = ()
    """The last quarter of an hour, the oldest first."""


def status_fields(
    status: CellStatus, deployments: Sequence[DeploymentSnapshot]
) -> dict[str, Plain]:
    """The status as `mesh status -o json` has it, without its instances: with the SLO classes of
    the deployments, and with why those have failed that have.
    """
    failed: Plain = {
        str(one.spec.name): one.phase for one in deployments if one.state is DeploymentState.FAILED
    }
    prefetches = _prefetches(status.prefetches)
    classes: Plain = {
        str(one.spec.name): [
            {"name": slo.name, **plain_fields(view)}
            for slo, view in zip(one.spec.classes, one.classes, strict=False)
        ]
        for one in deployments
        if one.spec.classes
    }
    told = {"prefetches": prefetches, "failed": failed, "classes": classes}
    return {**plain_fields(status), **told}


def cell_state(picture: CellPicture) -> Steps[State]:
    """The whole picture. Instances stand by themselves, for each is of a node and a deployment."""
    nodes, deployments = {}, {}
    instances: State = {}
    for one in picture.deployments:
        recent = _recent(picture.recent_of[one.spec.name])
        deployments[str(one.spec.name)] = {**_without_instances(one), "recent": recent}
        instances |= {str(i.instance_id): i for i in one.instances}
        yield
    for node in picture.nodes:
        nodes[str(node.node_id)] = _node(node)
        instances |= {str(i.instance_id): i for i in node.instances}
        yield
    return {
        "status": status_fields(picture.status, picture.deployments),
        "recent": _recent(picture.recent),
        "nodes": nodes,
        "deployments": deployments,
        "instances": dict(sorted(instances.items())),
    }


def change(before: State, after: State, depth: int = 1) -> Steps[State]:
    """The merge patch that makes `before` into `after`; empty where they are alike. Members that
    are nested deeper than `depth` are compared in one step each.
    """
    patch: State = {name: None for name in before if name not in after}
    for name, value in after.items():
        earlier: Any = before.get(name)
        nested = isinstance(value, dict) and isinstance(earlier, dict)
        if (depth <= 0 or not nested) and earlier == value:
            if nested:
                yield
            continue
        if nested:
            inner = yield from change(earlier, value, depth - 1)
        elif is_dataclass(value) and is_dataclass(earlier):
            inner = yield from change(members(earlier), members(value))
        else:
            patch[name] = value
            continue
        if inner:
            patch[name] = inner
    yield
    return patch


def _prefetches(seen: PrefetchView) -> Plain:
    return {**plain_fields(seen), "hit_rate": seen.hit_rate}


def _recent(calls: RecentCalls) -> State:
    return {**members(calls), "attainment": calls.attainment}


def _node(node: NodeSnapshot) -> State:
    shown = [{"letter": p.letter, "name": p.name, "size_bytes": p.size_bytes} for p in parts(node)]
    return {**_without_instances(node), "free_bytes": free_bytes(node), "parts": shown}


def _without_instances(one: NodeSnapshot | DeploymentSnapshot) -> State:
    found = members(one)
    del found["instances"]
    return found
