"""What `deploy --wait` and `wait` wait for, on what the controller says of a deployment."""

from dataclasses import replace
from unittest.mock import Mock

import pytest

from mesh.cli.waiting import Goal, wait_for
from mesh.domain.deployment import Scaling
from mesh.domain.errors import Cancelled, NotFound
from mesh.domain.views import DeploymentSnapshot, InstanceSnapshot
from mesh.wire.client import MeshClient
from tests.cli.views import CHAT_SMALL, LOADING, PARKED, READY

NAME = CHAT_SMALL.spec.name


def client(*found: DeploymentSnapshot | NotFound) -> Mock:
    """A controller that says this of the deployment, one after the other, and then goes on so."""
    mock = Mock(spec=MeshClient)
    mock.get.side_effect = [*found, *[found[-1]] * 10]
    return mock


def having(*instances: InstanceSnapshot, replicas_min: int = 1) -> DeploymentSnapshot:
    spec = replace(CHAT_SMALL.spec, scaling=Scaling(replicas_min=replicas_min))
    return replace(CHAT_SMALL, spec=spec, instances=instances)


@pytest.mark.parametrize("goal", [Goal.READY, Goal.LOADED])
def test_a_parked_instance_is_not_waited_for(goal: Goal) -> None:
    """What an unchanged deployment has may be parked, and stays so until a request comes."""
    wait_for(client(having(PARKED)), NAME, goal, 0.0)


@pytest.mark.parametrize("goal", [Goal.READY, Goal.LOADED])
def test_one_that_loads_is_waited_for(goal: Goal) -> None:
    wait_for(client(having(LOADING), having(READY)), NAME, goal, 5.0)
    with pytest.raises(Cancelled, match=f"not {goal} after 0 s: 0 of 1 instances"):
        wait_for(client(having(LOADING)), NAME, goal, 0.0)


def test_at_zero_a_deployment_is_ready_but_not_loaded() -> None:
    at_zero = having(replicas_min=0)
    wait_for(client(at_zero), NAME, Goal.READY, 0.0)
    with pytest.raises(Cancelled, match="0 of 1"):
        wait_for(client(at_zero), NAME, Goal.LOADED, 0.0)


def test_what_is_being_imported_is_not_ready() -> None:
    with pytest.raises(Cancelled):
        wait_for(client(replace(having(replicas_min=0), model=None)), NAME, Goal.READY, 0.0)


def test_only_who_waits_for_its_end_may_wait_for_what_is_unknown() -> None:
    wait_for(client(having(READY), NotFound("it is gone")), NAME, Goal.GONE, 5.0)
    with pytest.raises(NotFound):
        wait_for(client(NotFound("no such deployment")), NAME, Goal.READY, 5.0)
    with pytest.raises(Cancelled, match="not gone"):
        wait_for(client(having(READY)), NAME, Goal.GONE, 0.0)
