"""A cell's decisions in words, one line each, for `mesh logs`.

The core's action list is its log; this is where it becomes readable. Token traffic is left out.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence

from mesh.domain.actions import (
    CloseLink,
    DeliverTokens,
    RefuseRequest,
    ReplyError,
    ReportMissingNodes,
    SendCommand,
    StoreRevisions,
    TellAccepted,
    WantInstances,
    WantNodes,
)
from mesh.domain.events import (
    DeleteRequested,
    DeploymentStored,
    DeployRequested,
    DrainRequested,
    LoadRequested,
    NodeConnected,
    NodeDisconnected,
    NodeReported,
    ProfileRequested,
    ScaleRequested,
    ShutdownRequested,
    UndoRequested,
    UnloadRequested,
)
from mesh.domain.front import CellTold
from mesh.domain.messages import (
    ContinueRequest,
    ImportDone,
    ImportFailed,
    InstanceGone,
    InstanceLoaded,
    LoadFailed,
    LoadInstance,
    NodeReport,
    ProfileDone,
    ProfileFailed,
    ProfileInstance,
    ProfileRefined,
    RequestReturned,
    SubmitRequest,
    TokensReport,
    UnloadInstance,
    UseProfile,
)
from mesh.domain.revision import public_name
from mesh.domain.units import format_bytes
from mesh.domain.values import replace
from mesh.domain.views import CellLine
from mesh.report.calls import Look
from mesh.report.narrate_memory import MemoryStory
from mesh.report.owners import NOBODY, Owner, Owners


class Narrator:
    """Puts a cell's decisions into words. It is called with each decision in turn: what happened,
    then what was decided on it. `look` gives what is deployed under a name, or `None`.
    """

    def __init__(self, look: Look = lambda _: None) -> None:
        self._memory = MemoryStory()
        self._owners = Owners(look)
        self._nodes: dict[int, str] = {}
        """The nodes by their links."""

    def __call__(self, event: object, actions: Sequence[object]) -> list[CellLine]:
        lines: list[CellLine] = []
        if isinstance(event, NodeConnected):
            self._nodes[event.link_id] = event.hello.node_id
        if not _is_of_tokens(event):
            owner = self._owners.of_event(event, actions)
            said = [*_happened(event, self._nodes), *self._memory.happened(event)]
            lines = _owned(said, owner)
        for action in actions:
            if isinstance(action, DeliverTokens):
                continue
            said = [*_decided(action, self._nodes), *self._memory.decided(event, action)]
            if said:
                lines += _owned(said, self._owners.of_action(event, action))
        if isinstance(event, NodeDisconnected):
            self._nodes.pop(event.link_id, None)
        return lines


def _is_of_tokens(event: object) -> bool:
    """Whether it comes for each iteration or token, and says nothing by itself."""
    if isinstance(event, NodeReported):
        return isinstance(event.report, TokensReport)
    return isinstance(event, CellTold)


def _owned(lines: Iterable[CellLine], owner: Owner) -> list[CellLine]:
    if owner == NOBODY:
        return list(lines)
    return [replace(line, deployment=owner.deployment, tenant=owner.tenant) for line in lines]


def _line(kind: str, subject: str, text: str) -> CellLine:
    return CellLine(kind=kind, subject=subject, text=text)


def _fault(kind: str, subject: str, text: str) -> CellLine:
    return CellLine(kind=kind, subject=subject, text=text, fault=True)


def _happened(event: object, nodes: Mapping[int, str]) -> Iterator[CellLine]:
    match event:
        case NodeReported():
            yield from _reported(event.report)
        case DeployRequested():
            yield _line("deployment", event.spec.name, f"deploy {event.spec.source}")
        case DeleteRequested():
            yield _line("deployment", event.name, "delete")
        case UndoRequested():
            yield _line("deployment", event.name, "undo")
        case ScaleRequested():
            yield _line("deployment", event.name, "scale")
        case LoadRequested():
            yield _line("deployment", event.name, "load, asked by an operator")
        case UnloadRequested():
            yield _line("deployment", event.name, "unload, asked by an operator")
        case DeploymentStored():
            yield _line("cell", event.operation_id, "registry written")
        case DrainRequested():
            yield _line("node", event.node_id, "take new work again" if event.undo else "drain")
        case ProfileRequested():
            where = f" on {event.node_id}" if event.node_id is not None else ""
            yield _line("deployment", event.name, f"measure a profile{where}")
        case NodeConnected():
            hello = event.hello
            text = f"connected: {hello.device}, {hello.engine}, {format_bytes(hello.memory_bytes)}"
            yield _line("node", hello.node_id, f"{text}, {len(hello.instances)} instances")
        case NodeDisconnected():
            yield _fault("node", _node(nodes, event.link_id), f"disconnected: {event.reason}")
        case ShutdownRequested():
            yield _line("cell", "controller", "stopping")


def _node(nodes: Mapping[int, str], link_id: int) -> str:
    return nodes.get(link_id, f"link {link_id}")


def _rolled_out(action: StoreRevisions) -> Iterator[CellLine]:
    """A revision has taken over, or has been given up."""
    serves, newest = action.deployment, action.revisions[-1]
    name = public_name(serves.spec.name)
    if newest.number > serves.revision:
        yield _fault("deployment", name, f"revision {newest.number} failed: {newest.message}")
    else:
        yield _line("deployment", name, f"revision {serves.revision} serves from now on")


def _reported(report: NodeReport) -> Iterator[CellLine]:
    match report:
        case ImportDone():
            model = report.model
            text = f"imported {model.model_id} ({model.architecture}) from {model.source}"
            yield _line("deployment", report.operation_id, text)
        case ImportFailed():
            yield _fault("deployment", report.operation_id, f"import failed: {report.message}")
        case InstanceLoaded():
            size = format_bytes(report.footprint.instance_bytes(report.kv_blocks))
            tier, blocks = report.tier.value, report.kv_blocks
            text = f"loaded from {tier} in {report.elapsed_s:.2f} s, {size}, {blocks} KV blocks"
            yield _line("instance", report.instance_id, text)
        case LoadFailed():
            yield _fault("instance", report.instance_id, f"load failed: {report.message}")
        case InstanceGone():
            if report.message:
                yield _fault("instance", report.instance_id, f"gone: {report.message}")
            else:
                yield _line("instance", report.instance_id, "gone")
        case RequestReturned():
            yield _fault("request", report.request_id, f"returned by its node: {report.message}")
        case ProfileDone():
            profile = report.profile
            text = f"measured model {profile.model_id} in {profile.measured_s:.0f} s"
            yield _line("deployment", report.operation_id, f"{text}, on {profile.hardware}")
        case ProfileRefined():
            text = f"iterations refined the profile of model {report.profile.model_id}"
            yield _line("instance", report.instance_id, text)
        case ProfileFailed():
            yield _fault("deployment", report.operation_id, f"measuring failed: {report.message}")


def _decided(action: object, nodes: Mapping[int, str]) -> Iterator[CellLine]:
    match action:
        case RefuseRequest():
            yield _line(
                "request", action.request_id, f"refused ({action.reason}): {action.message}"
            )
        case TellAccepted() if action.grace_s > 0:
            text = f"told that its first token will be {action.grace_s:.2f} s late, for a load"
            yield _line("request", action.request_id, text)
        case StoreRevisions():
            yield from _rolled_out(action)
        case WantInstances():
            text = f"{action.wanted} instances are planned: {action.why}"
            yield _line("deployment", public_name(action.name), text)
        case WantNodes():
            yield _line("cell", action.device, f"{action.wanted} nodes are wanted: {action.why}")
        case ReportMissingNodes():
            missing = action.wanted - action.ready
            text = f"{missing} of {action.wanted} wanted nodes have not joined"
            yield _fault("cell", action.device, f"{text} for {action.for_s:.0f} s")
        case ReplyError():
            yield _fault("cell", action.operation_id, f"failed ({action.error}): {action.message}")
        case CloseLink():
            yield _fault("node", _node(nodes, action.link_id), f"closed: {action.message}")
        case SendCommand():
            command = action.command
            match command:
                case LoadInstance():
                    text = (
                        f"load {public_name(command.deployment)} with {command.kv_blocks} KV blocks"
                    )
                    yield _line("instance", command.instance_id, text)
                case UnloadInstance():
                    yield _line("instance", command.instance_id, "unload")
                case ProfileInstance():
                    yield _line("instance", command.instance_id, "measure iteration times")
                case UseProfile():
                    text = f"new profile: {command.profile.scaled_from or 'measured'}"
                    yield _line("instance", command.instance_id, text)
                case SubmitRequest():
                    request, tries = command.order.request, command.order.tries
                    text = f"to {command.instance_id}, {len(request.prompt_tokens)} prompt tokens"
                    more = f", attempt {tries}" if tries > 1 else ""
                    more += ", ahead of its move" if command.order.paused else ""
                    yield _line("request", request.request_id, text + more)
                case ContinueRequest() if command.token_ids and not command.paused:
                    text = f"drawn by {command.instance_id}, too, to which it moves"
                    yield _line("request", command.request_id, text)
