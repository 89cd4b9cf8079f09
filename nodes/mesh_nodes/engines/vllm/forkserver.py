"""A process that has vLLM imported and forks engine processes: ten seconds are spent only once.

`python -m mesh_nodes.engines.vllm.forkserver FD` imports vLLM, says so on the socket FD, and obeys:
"fork" makes an engine process, with a socket that comes beside it, and the host's pool of weights
if that does, too; "reap PID" says how one ended. It never starts a thread or computes anything, so
that a fork of it is whole. It ends with the agent's end of its socket, and the kernel kills the
engine processes with it: none outlives the agent, however that ended.
Before: `spawner`, in the agent. After: `process`.
"""

import array
import contextlib
import ctypes
import gc
import os
import signal
import socket
import sys
from multiprocessing.connection import Connection

_PR_SET_PDEATHSIG = 1
_INT_BYTES = array.array("i").itemsize
MESSAGE_BYTES_MAX = 4096
READY, FAILED = b"ready", b"failed "


def main(descriptor: int) -> None:
    # What vLLM prints is no data of the agent's.
    os.dup2(2, 1)
    commands = socket.socket(fileno=descriptor)
    try:
        from mesh_nodes.engines.vllm.told_gpu import answer_for_nvml

        answer_for_nvml()
        from mesh_nodes.engines.vllm.device import preload
        from mesh_nodes.engines.vllm.internals import check_parts, register_kernels
        from mesh_nodes.engines.vllm.process import serve

        preload()
        check_parts()
        register_kernels()
    except Exception as error:
        words = f"{type(error).__name__}: {error}".encode()
        commands.send(FAILED + words[: MESSAGE_BYTES_MAX - len(FAILED)])
        return
    # Pages of what is there now are shared with all that is forked, as long as nobody writes there.
    gc.collect()
    gc.freeze()
    commands.send(READY)
    while message := commands.recvmsg(MESSAGE_BYTES_MAX, socket.CMSG_SPACE(2 * _INT_BYTES)):
        words, beside = message[0], message[1]
        if not words:
            return
        verb, _, argument = words.partition(b" ")
        if verb == b"fork":
            end, *pool = array.array("i", beside[0][2])
            parent = os.getpid()
            pid = os.fork()
            if pid == 0:
                commands.close()
                _die_with(parent)
                serve(Connection(end), *pool)
            for descriptor in (end, *pool):
                os.close(descriptor)
            commands.send(b"%d" % pid)
        else:
            _, status = os.waitpid(int(argument), 0)
            commands.send(b"%d" % os.waitstatus_to_exitcode(status))


def _die_with(parent: int) -> None:
    """Have the kernel kill this process as soon as its parent ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


if __name__ == "__main__":
    # The agent may end meanwhile: then there is nobody to tell.
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        main(int(sys.argv[1]))
