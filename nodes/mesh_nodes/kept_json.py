"""Small files in which a node keeps what it has learnt, replaced whole or not at all.

For what a node can do without: nothing is forced to the disk, and nothing waits for it. Before:
`kept_loads`, and the books of engines, which read them again at the next start.
"""

import json
import os
from collections.abc import Mapping
from pathlib import Path


def keep_json(path: Path, content: Mapping[str, object]) -> None:
    """For one thread at a time; other processes may write the same file. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        temporary.write_text(json.dumps(content), encoding="utf-8")
        os.replace(temporary, path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
