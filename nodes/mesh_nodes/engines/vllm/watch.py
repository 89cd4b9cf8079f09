"""Notices the end of engine processes at once, whether or not anybody is talking to them.

Owns one thread, which waits at the pidfds of all of them. Before: `engine`, which has each watched
once it is loaded and knows whether an end was its own doing. After: the node core, by `engine`.
"""

import logging
import select
import socket
import threading
from collections.abc import Callable

from mesh_nodes.engines.vllm.remote import Remote

END_S_MAX = 5.0

log = logging.getLogger(__name__)


class Watch:
    """`ended` is called on the watch's own thread, once for each watched process that has ended."""

    def __init__(self, ended: Callable[[Remote], None]) -> None:
        self._ended = ended
        self._watched: dict[int, Remote] = {}
        """By pidfd. A remote closes its own when nobody has it any more, so not before its end."""
        self._lock = threading.Lock()
        self._closed = False
        self._poll = select.epoll()
        self._wake, self._woken = socket.socketpair()
        self._poll.register(self._woken.fileno(), select.EPOLLIN)
        self._thread = threading.Thread(target=self._wait, name="mesh-vllm-watch", daemon=True)
        self._thread.start()

    def add(self, remote: Remote) -> None:
        """May be called from any thread, and again: it is watched once. Of a process that has ended
        already it tells at once, unless it has.
        """
        with self._lock:
            if not self._closed and remote.pidfd not in self._watched:
                self._watched[remote.pidfd] = remote
                self._poll.register(remote.pidfd, select.EPOLLIN)

    def close(self) -> None:
        """Nothing is told any more once this has returned, but for a call that does not end."""
        with self._lock:
            self._closed = True
        self._wake.close()
        self._thread.join(END_S_MAX)

    def _wait(self) -> None:
        with self._poll, self._woken:
            while True:
                ready = [descriptor for descriptor, _ in self._poll.poll()]
                if self._woken.fileno() in ready:
                    return
                for descriptor in ready:
                    self._poll.unregister(descriptor)
                    self._tell(self._watched.pop(descriptor))

    def _tell(self, remote: Remote) -> None:
        """The thread must outlive whatever is called on it."""
        try:
            self._ended(remote)
        except Exception:
            log.exception("the end of engine process %d is not told", remote.pid)
