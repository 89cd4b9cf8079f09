"""Python that ends amid what it does to a store, at a point of its own: no matter at which pace.

It is killed before one of its changes, which are files opened to be written and whatever is made,
renamed or removed, or as a file of its own grows beyond so many bytes.
"""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
BEGIN = """
import os, resource, signal, sys
from pathlib import Path
from mesh_loader.store import ModelStore
store, left, bytes_max = ModelStore(Path(sys.argv[1])), int(sys.argv[2]), int(sys.argv[3])
def count(event, arguments):
    global left
    opened = event == "open" and arguments[2] & (os.O_WRONLY | os.O_RDWR)
    if opened or event in ("os.mkdir", "os.rename", "os.remove", "os.rmdir"):
        left -= 1
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
sys.addaudithook(count)
if bytes_max >= 0:
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (bytes_max, bytes_max))
"""
UNBOUNDED = -1


def begin(
    code: str, store: Path, *arguments: str, change: int = 0, bytes_max: int = UNBOUNDED
) -> "subprocess.Popen[bytes]":
    """`code` finds a `store` and these from `sys.argv[4]` on. It is killed before this change, the
    first being 1, and ends by SIGXFSZ beyond these bytes of a file.
    """
    numbers = str(change), str(bytes_max)
    # Without -B, what it compiles of its imports would be changes.
    command = [sys.executable, "-B", "-c", BEGIN + code, str(store), *numbers, *arguments]
    return subprocess.Popen(command, cwd=ROOT, stderr=subprocess.DEVNULL)
