"""What loads were expected to take and took, by the controller's journal of a run.

A fresh core decides each event again: what it expects of a load stands in its books until the node
says that it is over.
"""

from collections.abc import Iterable, Iterator
from pathlib import Path

from mesh.core.controller.core import ControllerCore
from mesh.domain.events import ControllerEvent, NodeReported
from mesh.domain.messages import InstanceLoaded
from mesh.runtime.journal import ControllerStart, Decision, read_journal
from mesh.runtime.starting import controller_core


def load_errors(path: Path) -> Iterator[float]:
    """Raises InvalidInput when this is no journal of a controller."""
    start, decisions = read_journal(path)
    assert isinstance(start, ControllerStart), f"{path} is a node's journal"
    return errors_of(controller_core(start), decisions)


def errors_of(core: ControllerCore, decisions: Iterable[Decision]) -> Iterator[float]:
    """For each load that ended, first loads of a model included, how far the expectation at its
    beginning was off, as a share of the time from its command to the report.
    """
    for decision in decisions:
        event = decision.event
        assert isinstance(event, ControllerEvent), "a node's decision"
        if isinstance(event, NodeReported) and isinstance(event.report, InstanceLoaded):
            instance = core.cell.instances.get(event.report.instance_id)
            if instance is not None:
                took_s = decision.now_s - instance.load_started_s
                yield abs(took_s - instance.load_expected_s) / took_s
        core.handle(event, decision.now_s)
