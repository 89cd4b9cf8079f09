"""Each line says whose it is, and none that names another tenant's instance is anybody's."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from mesh.domain.actions import RefuseRequest, ReplyError, SendCommand
from mesh.domain.deployment import DeploymentSpec
from mesh.domain.events import (
    DeleteRequested,
    DeployRequested,
    InvokeRequested,
    NodeConnected,
    NodeReported,
)
from mesh.domain.ids import DeploymentName, InstanceId, OperationId
from mesh.domain.messages import (
    ImportFailed,
    InstanceGone,
    LoadInstance,
    NodeCommand,
    ResizeKv,
    UnloadInstance,
)
from mesh.domain.reasons import RefusalReason
from mesh.domain.views import CellLine
from mesh.report import owners
from mesh.report.narrate import Narrator
from tests.core.cells import commands, deployment, hello, instance_report, one_node, request

HERS = replace(deployment("chat").spec, tenant="acme")
HIS = replace(HERS, name=DeploymentName("code"), tenant="other")
OPERATION = OperationId("o1-1")


class Story:
    """What is told while these specs are deployed."""

    def __init__(self, *specs: DeploymentSpec) -> None:
        self.deployed = {spec.name: spec for spec in specs}
        self._narrate = Narrator(self.deployed.get)

    def told(self, event: object, actions: Sequence[object] = ()) -> list[tuple[str, str]]:
        """The deployment and tenant of each line."""
        return [(line.deployment, line.tenant) for line in self.lines(event, actions)]

    def lines(self, event: object, actions: Sequence[object] = ()) -> list[CellLine]:
        return self._narrate(event, actions)

    def has_loaded(self, *names: str) -> None:
        """Nodes come back with an instance of each of these deployments, as it is named."""
        instances = tuple(
            instance_report(
                instance_id=InstanceId(name), deployment=DeploymentName(name), kv_blocks=4
            )
            for name in names
        )
        self.told(NodeConnected(link_id=1, hello=replace(hello(), instances=instances)))


def sent(command: NodeCommand) -> SendCommand:
    return SendCommand(link_id=1, command=command)


def gone(name: str) -> NodeReported:
    return NodeReported(link_id=1, report=InstanceGone(instance_id=InstanceId(name)))


def test_calls_loads_and_what_becomes_of_them_are_of_their_deployment() -> None:
    cell, link = one_node(deployment("chat"))
    story = Story(HERS, HIS)
    asked = InvokeRequested(request=request())
    actions = cell.tell(asked)
    (load,) = commands(actions, LoadInstance)
    assert story.told(asked, actions) == [("chat", "acme")]
    for said in story.told(None, cell.loaded(link, load.instance_id)):
        assert said == ("chat", "acme"), "the request goes there"
    refused = RefuseRequest(
        request_id=asked.request.request_id, reason=RefusalReason.QUEUE_FULL, message=""
    )
    assert story.told(None, [refused]) == [("chat", "acme")]
    assert story.told(gone(load.instance_id)) == [("chat", "acme")]


def test_nodes_and_what_nobody_knows_are_no_tenants() -> None:
    story = Story(HERS)
    assert story.told(NodeConnected(link_id=1, hello=hello())) == [("", "")]
    assert story.told(gone("chat-1-1")) == [("", "")]
    assert story.told(InvokeRequested(request=request()), [sent(UNKNOWN)]) == [("", "")]


UNKNOWN = UnloadInstance(instance_id=InstanceId("chat-1-9"))


def test_what_is_deployed_is_whose_it_is_from_the_first_word_to_the_last() -> None:
    """Before it is there, and after it has gone."""
    story = Story()
    asked = DeployRequested(operation_id=OPERATION, spec=HERS)
    failed = ImportFailed(operation_id=OPERATION, error="StorageError", message="torn")
    assert story.told(asked) == [("chat", "acme")]
    assert story.told(NodeReported(link_id=1, report=failed)) == [("chat", "acme")]
    story.has_loaded("chat")
    deleted = DeleteRequested(operation_id=OperationId("o1-2"), name=HERS.name)
    assert story.told(deleted) == story.told(gone("chat")) == [("chat", "acme")]


def test_a_name_that_is_refused_stays_whose_it_is() -> None:
    story = Story()
    story.told(DeployRequested(operation_id=OPERATION, spec=HERS))
    again = DeployRequested(operation_id=OperationId("o1-2"), spec=replace(HERS, tenant="other"))
    refused = ReplyError(
        operation_id=again.operation_id, error="AlreadyExists", message="taken", hint=""
    )
    assert story.told(again, [refused]) == [("chat", "other"), ("chat", "other")]
    deleted = DeleteRequested(operation_id=OperationId("o1-3"), name=HERS.name)
    assert story.told(deleted) == [("chat", "acme")]


@pytest.mark.parametrize(
    ("other", "owner"), [("chat", ("chat", "acme")), ("mine", ("chat", "acme")), ("code", ("", ""))]
)
def test_a_line_that_names_an_instance_of_another_tenant_is_an_operators(
    other: str, owner: tuple[str, str]
) -> None:
    story = Story(HERS, HIS, replace(HERS, name=DeploymentName("mine")))
    story.has_loaded("chat", "mine", "code")
    resize = sent(ResizeKv(instance_id=InstanceId("chat"), kv_blocks=8))
    lines = story.lines(gone(other), [resize])
    found = [(line.deployment, line.tenant) for line in lines if "resize" in line.text]
    assert found == ([owner] if other != "chat" else [])


def test_what_is_remembered_has_a_bound_and_what_is_spoken_of_stays(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(owners, "KNOWN_MAX", 2)
    story = Story(HERS, HIS)
    story.has_loaded("chat", "code")
    assert story.told(gone("chat")) == [("chat", "acme")]
    story.has_loaded("third")
    assert story.told(gone("code")) == [("", "")]
    assert story.told(gone("chat")) == [("chat", "acme")]
