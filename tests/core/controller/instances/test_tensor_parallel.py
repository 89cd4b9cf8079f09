"""Instances that are to span more devices than a node's engine can go nowhere, and are told why."""

from dataclasses import replace

import pytest

from mesh.core.controller.snapshot import profile_views
from mesh.domain.actions import RefuseRequest, ReplyError
from mesh.domain.deployment import Deployment
from mesh.domain.events import DeployRequested, ProfileRequested
from mesh.domain.ids import DeploymentName, NodeId, OperationId
from mesh.domain.messages import ImportModel, LoadInstance
from mesh.domain.reasons import RefusalReason
from tests.core.cells import CellUnderTest, commands, deployment, hello, only

OP = OperationId("op-1")


def wide(devices: int = 2) -> Deployment:
    """A deployment whose instances span so many devices."""
    made = deployment()
    return replace(made, spec=replace(made.spec, tensor_parallel=devices))


def test_it_is_not_deployed_where_no_node_can() -> None:
    cell = CellUnderTest()
    cell.join()
    reply = only(cell.tell(DeployRequested(operation_id=OP, spec=wide().spec)), ReplyError)
    assert reply.error == "Unavailable"
    assert "are to span 2 devices (tensor_parallel)" in reply.message
    assert "can span 1" in reply.message
    assert "tensor_parallel: 1" in reply.hint
    assert cell.core.cell.deployments == {}


def test_without_a_node_that_is_the_reason() -> None:
    cell = CellUnderTest()
    reply = only(cell.tell(DeployRequested(operation_id=OP, spec=wide().spec)), ReplyError)
    assert reply.message.startswith("no cpu node is up to import")


def test_a_node_that_can_imports_and_loads_it() -> None:
    """Whatever the others have free."""
    cell = CellUnderTest(wide())
    cell.join(hello("large", run_id="run-2", memory_bytes=2**40))
    link, _ = cell.join(hello("n2", tensor_parallel_max=2))
    cell.invoke()
    (instance,) = cell.core.cell.instances.values()
    assert instance.node.link_id == link
    asked = replace(wide().spec, name=DeploymentName("other"))
    actions = cell.tell(DeployRequested(operation_id=OP, spec=asked))
    assert len(commands(actions, ImportModel)) == 1


def test_a_request_is_refused_at_once_and_its_minimum_is_not_loaded() -> None:
    """The deployment is of before; the nodes that could are gone."""
    made = wide(4)
    scaling = replace(made.spec.scaling, replicas_min=1)
    cell = CellUnderTest(replace(made, spec=replace(made.spec, scaling=scaling)))
    _, joined = cell.join(hello(tensor_parallel_max=2))
    assert commands(joined, LoadInstance) == []
    refused = only(cell.invoke(), RefuseRequest)
    assert refused.reason is RefusalReason.NO_NODE
    assert "span 4 devices" in refused.message
    assert "can span 2" in refused.message


@pytest.mark.parametrize("node_id", [None, NodeId("n1")])
def test_it_is_not_profiled_there_either(node_id: NodeId | None) -> None:
    cell = CellUnderTest(wide())
    cell.join()
    asked = ProfileRequested(operation_id=OP, name=wide().spec.name, node_id=node_id)
    reply = only(cell.tell(asked), ReplyError)
    assert "span 2 devices" in reply.message
    assert "can span 1" in reply.message


def test_what_is_expected_of_nodes_that_cannot_is_not_told() -> None:
    cell = CellUnderTest(wide())
    cell.join()
    cell.join(hello("n2", tensor_parallel_max=2, fingerprint="other"))
    told = profile_views(cell.core.cell, wide())
    assert {node for view in told for node in view.nodes} == {"n2"}
