"""Whether a controller could start on a state folder, found out without one.

`mesh up` asks before it starts anything: what is wrong with a file there, or that another
controller has it, would be the same after every restart.
"""

from contextlib import closing
from pathlib import Path

from mesh.controller.keys import FILE_NAME as KEYS
from mesh.controller.keys import KeyBook
from mesh.controller.registry import SqliteRegistry
from mesh.controller.usage import UsageBook


def check_state(home: Path) -> None:
    """Raises StorageError, which names the file and says what to do."""
    folder = home / "controller"
    with closing(SqliteRegistry(folder)) as registry:
        registry.deployments()
        registry.profiles()
        registry.histories()
        registry.revisions()
    with closing(UsageBook(folder)):
        pass
    if (folder / KEYS).exists():
        with closing(KeyBook(folder)) as keys:
            keys.all_keys()
