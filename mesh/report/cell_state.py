"""The cell as one JSON value for viewers, and what changes of it from one second to the next.

The fields are named as `-o json` names them, because they come from the same values by the same
`plain`. What has a name is keyed by it, so that a change says only what is new: an RFC 7396 merge
patch. Pure: pictures in, plain values out.
"""

from collections.abc import Mapping, Sequence

from mesh.domain.ids import DeploymentName
from mesh.domain.lifecycle import DeploymentState
from mesh.domain.recent import RecentCalls
from mesh.domain.values import dataclass
from mesh.domain.views import CellStatus, DeploymentSnapshot, NodeSnapshot, PrefetchView
from mesh.report.memory_parts import free_bytes, parts
from mesh.report.plain import Plain, plain_fields

State = dict[str, Plain]


@dataclass(frozen=True, slots=True, kw_only=True)
class CellPicture:
    """The cell at one time, as one caller may see it."""

    status: CellStatus
    nodes: Sequence[NodeSnapshot]
    deployments: Sequence[DeploymentSnapshot]
    recent: RecentCalls
    """The recent calls of all of these deployments."""
    recent_of: Mapping[DeploymentName, RecentCalls]


def status_fields(status: CellStatus, deployments: Sequence[DeploymentSnapshot]) -> State:
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


def cell_state(picture: CellPicture) -> State:
    """The whole picture. Instances stand by themselves, for each is of a node and a deployment."""
    instances = {i.instance_id: i for one in picture.deployments for i in one.instances}
    instances |= {i.instance_id: i for node in picture.nodes for i in node.instances}
    return {
        "status": status_fields(picture.status, picture.deployments),
        "recent": _recent(picture.recent),
        "nodes": {str(node.node_id): _node(node) for node in picture.nodes},
        "deployments": {
            str(one.spec.name): {
                **_without_instances(one),
                "recent": _recent(picture.recent_of[one.spec.name]),
            }
            for one in picture.deployments
        },
        "instances": {str(name): plain_fields(one) for name, one in sorted(instances.items())},
    }


def change(before: State, after: State) -> State:
    """The merge patch that makes `before` into `after`; empty where they are alike."""
    patch: State = {name: None for name in before if name not in after}
    for name, value in after.items():
        earlier = before.get(name)
        if isinstance(value, dict) and isinstance(earlier, dict):
            inner = change(earlier, value)
            if inner:
                patch[name] = inner
        elif name not in before or earlier != value:
            patch[name] = value
    return patch


def _prefetches(seen: PrefetchView) -> Plain:
    return {**plain_fields(seen), "hit_rate": seen.hit_rate}


def _recent(calls: RecentCalls) -> Plain:
    return {**plain_fields(calls), "attainment": calls.attainment}


def _node(node: NodeSnapshot) -> Plain:
    shown: list[Plain] = [
        {"letter": p.letter, "name": p.name, "size_bytes": p.size_bytes} for p in parts(node)
    ]
    return {**_without_instances(node), "free_bytes": free_bytes(node), "parts": shown}


def _without_instances(one: NodeSnapshot | DeploymentSnapshot) -> State:
    found = plain_fields(one)
    del found["instances"]
    return found
