"""Identifiers. Each is a plain string at run time and a type of its own for the checker."""

from typing import NewType

DeploymentName = NewType("DeploymentName", str)
NodeId = NewType("NodeId", str)
InstanceId = NewType("InstanceId", str)
RequestId = NewType("RequestId", str)
ModelId = NewType("ModelId", str)
"""Content hash of an imported model, `sha256-` and 16 hex digits."""
OperationId = NewType("OperationId", str)
"""One administrative call (deploy, delete, …) from its arrival to its answer."""
CellName = NewType("CellName", str)
"""A cell, as the fronts before it call it."""
