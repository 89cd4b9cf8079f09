"""`mesh deploy --wait` on what the controller says of a deployment."""

from dataclasses import replace
from unittest.mock import Mock

import pytest

from mesh.cli.verbs.deploy import wait_ready
from mesh.domain.deployment import Scaling
from mesh.domain.errors import Cancelled
from mesh.wire.client import MeshClient
from tests.cli.views import CHAT_SMALL, LOADING, PARKED

SPEC = replace(CHAT_SMALL.spec, scaling=Scaling(replicas_min=1))


def test_a_parked_instance_is_not_waited_for() -> None:
    """What an unchanged deployment has may be parked, and stays so until a request comes."""
    client = Mock(spec=MeshClient)
    client.get.return_value = replace(CHAT_SMALL, instances=(PARKED,))
    wait_ready(client, SPEC, 0.001)


def test_one_that_loads_is_waited_for() -> None:
    client = Mock(spec=MeshClient)
    client.get.return_value = replace(CHAT_SMALL, instances=(LOADING,))
    with pytest.raises(Cancelled, match="0 of 1 instances"):
        wait_ready(client, SPEC, 0.001)
