"""Tells others of the machine which stored models this node loads or has loaded.

A recorder of the node's host: a load is seen as it is decided, before anything of it runs, and a
model is free again with the end of its last instance. Owns a shared lock per instance, which ends
with the process however it ends. `mesh store rm` and `gc` look at these locks.
"""

import logging
import os
from collections.abc import Sequence
from pathlib import Path

from mesh.domain.ids import InstanceId
from mesh.domain.messages import InstanceGone, LoadFailed, LoadInstance
from mesh.domain.model import stored_id
from mesh_loader import locks

log = logging.getLogger(__name__)


class ModelsInUse:
    """See `mesh.runtime.host.Recorder`. One call at a time."""

    def __init__(self, store_path: Path) -> None:
        self._store_path = store_path
        self._held: dict[InstanceId, int] = {}

    def record(self, now_s: float, event: object, actions: Sequence[object]) -> None:
        if isinstance(event, LoadFailed) or (isinstance(event, InstanceGone) and not event.error):
            self._release(event.instance_id)
        for action in actions:
            if isinstance(action, LoadInstance):
                self._hold(action)

    def close(self) -> None:
        for instance_id in list(self._held):
            self._release(instance_id)

    def _hold(self, action: LoadInstance) -> None:
        self._release(action.instance_id)
        path = locks.model_lock(self._store_path, stored_id(action.model.model_id))
        try:
            self._held[action.instance_id] = locks.share(path)
        except OSError as error:
            log.warning("%s is in use without a lock: %s", action.model.model_id, error)

    def _release(self, instance_id: InstanceId) -> None:
        descriptor = self._held.pop(instance_id, None)
        if descriptor is not None:
            os.close(descriptor)
