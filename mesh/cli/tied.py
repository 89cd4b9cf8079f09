"""Runs a module as `python -m` would, tied to the life of the process that started it.

`mesh up` starts its children with `python -m mesh.cli.tied PARENT_PID MODULE ARGUMENT…`: should the
parent die, even by SIGKILL, the kernel sends the child SIGTERM. The child asks for that itself,
because doing it between fork and exec is unsafe in a parent with threads.
"""

import runpy
import sys

from mesh.domain.errors import MeshError
from mesh_loader.bounded_child import die_with_parent


def main() -> None:
    parent_pid, module, *arguments = sys.argv[1:]
    try:
        die_with_parent(int(parent_pid))
    except MeshError as error:
        # Nobody is left to read more than the log.
        sys.exit(f"error: {error.message}\nhint: {error.hint}")
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
