"""Whether a controller could start on a state folder, found out without one.

`mesh up` asks before it starts anything, and before it starts a controller again that has ended:
what is wrong with a file there, or that another controller has it, would be the same after every
restart.
"""

import sqlite3
from contextlib import closing
from pathlib import Path

from mesh.controller.keys import FILE_NAME as KEYS
from mesh.controller.keys import KeyBook
from mesh.controller.registry import SqliteRegistry
from mesh.controller.usage import UsageBook
from mesh.domain.errors import StorageError

_PASSING = frozenset({sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR})
"""What may be otherwise at the next start."""


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


def check_restart(home: Path) -> None:
    """The same, without what may pass by itself, as a full disk does. Raises StorageError."""
    try:
        check_state(home)
    except StorageError as error:
        code = getattr(error.__cause__, "sqlite_errorcode", 0) & 0xFF
        if code not in _PASSING:
            raise
