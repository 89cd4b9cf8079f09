"""Engine processes that are forked before anybody needs them, and have got hold of their device.

A process makes its own context on a GPU, which takes some tenths of a second of a load if it only
begins there. Owns the processes that wait; after each load one takes the place of that which was
used, in a thread of its own. Before: `engine`, at a load from disk. After: `remote`.
"""

import logging
import threading

from mesh.domain.errors import MeshError
from mesh.domain.ids import InstanceId
from mesh_nodes.engines.vllm.messages import Verb
from mesh_nodes.engines.vllm.remote import Remote
from mesh_nodes.engines.vllm.spawner import Spawner

_NOBODY = InstanceId("nobody yet")

log = logging.getLogger(__name__)


class SpareProcesses:
    """May be called from any thread."""

    def __init__(self, spawner: Spawner, *, count_max: int, pool: int | None = None) -> None:
        """`pool`: see `Spawner.spawn`."""
        self._spawner = spawner
        self._pool = pool
        self._count_max = count_max
        self._filling = threading.Lock()
        self._table = threading.Lock()
        """Guards what follows, never a call."""
        self._waiting: list[Remote] = []
        self._coming: Remote | None = None
        self._closed = False

    def take(self, instance_id: InstanceId) -> Remote:
        """One that waits, else a new one. Raises EngineError when none can be started."""
        remote = self._pop()
        if remote is None:
            return Remote(instance_id, self._spawner, self._pool)
        remote.instance_id = instance_id
        return remote

    def fill(self) -> None:
        """See that as many wait as may, soon."""
        if self._count_max:
            threading.Thread(target=self._fill, name="mesh-vllm-ahead", daemon=True).start()

    def close(self) -> None:
        """End those that wait, and one that is coming. None comes any more."""
        with self._table:
            self._closed = True
            remotes = [*self._waiting, *filter(None, [self._coming])]
            self._waiting.clear()
        for remote in remotes:
            remote.end()

    def _pop(self) -> Remote | None:
        while True:
            with self._table:
                remote = self._waiting.pop(0) if self._waiting else None
            if remote is None or remote.alive:
                return remote
            remote.end()

    def _fill(self) -> None:
        """A load does without it if it fails."""
        with self._filling:
            try:
                while self._lacks_some():
                    self._start()
            except MeshError as error:
                log.warning("no engine process is ready ahead of its load: %s", error.message)

    def _lacks_some(self) -> bool:
        with self._table:
            return not self._closed and len(self._waiting) < self._count_max

    def _start(self) -> None:
        remote = Remote(_NOBODY, self._spawner, self._pool)
        with self._table:
            self._coming = remote
        try:
            # Ended by `close` if that comes first: then this call says so.
            if not self._closed:
                remote.call(Verb.PREPARE)
                if not remote.alive:
                    # Not tried again at once: the next one may end the same way.
                    raise remote.why_gone()
        except MeshError:
            remote.end()
            raise
        finally:
            with self._table:
                self._coming = None
                closed = self._closed
                if not closed and remote.alive:
                    self._waiting.append(remote)
        if closed:
            remote.end()
