"""Ties the node agent to the process that started it, so that no agent outlives its `mesh up`.

A parent that is killed with -9 cannot stop its children; the kernel can. Linux only.
"""

import ctypes
import os
import signal

from mesh.domain.errors import InvalidInput, Unavailable

_PR_SET_PDEATHSIG = 1


def die_with_parent(parent_pid: int) -> None:
    """Have the kernel send this process SIGTERM when its parent ends.

    `parent_pid` is what the parent said of itself: when it ended before this call, no signal would
    ever come. Raises Unavailable then, and InvalidInput for a number that is no process id.
    """
    if parent_pid < 1:
        raise InvalidInput(f"--parent-pid {parent_pid} is not the id of a process")
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGTERM), 0, 0, 0) != 0:
        error = ctypes.get_errno()
        raise Unavailable(f"cannot tie this process to process {parent_pid}: {os.strerror(error)}")
    if os.getppid() != parent_pid:
        raise Unavailable(
            f"process {parent_pid} is not the parent of this one (it is {os.getppid()})",
            hint="it has probably ended; --parent-pid is for a process that starts a node itself",
        )
