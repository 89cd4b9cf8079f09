"""Files in which the kernel tells of the machine and of this process."""

from pathlib import Path


def read(path: Path) -> str:
    """Its text; empty where it cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
