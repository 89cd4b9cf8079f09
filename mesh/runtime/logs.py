"""How a process logs to stderr: lines for people, or, as MESH_LOG=json asks for, for programs.

For the composition roots: each calls `begin_logging` once, before anything is said.
"""

import logging
import os
import sys

from mesh.domain.errors import InvalidInput

VARIABLE = "MESH_LOG"
TEXT, JSON = "text", "json"
MEMBERS = {"levelname": "level", "name": "logger"}
"""By the names that Python's own have."""


def begin_logging(level: int, line: str) -> None:
    """`line`: the format for people. Raises InvalidInput where the variable names no form."""
    form = os.environ.get(VARIABLE) or TEXT
    if form not in (TEXT, JSON):
        raise InvalidInput(f"{VARIABLE} is {form!r}", hint=f"forms: {TEXT} (the default), {JSON}")
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_for_programs() if form == JSON else logging.Formatter(line))
    logging.basicConfig(level=level, handlers=[handler])


def _for_programs() -> logging.Formatter:
    """Objects with timestamp, level, logger and message, and exc_info where there is a trace."""
    from pythonjsonlogger.json import JsonFormatter

    return JsonFormatter(
        "{levelname}{name}{message}", style="{", rename_fields=MEMBERS, timestamp=True
    )
