"""What an import child writes to its stdout: one JSON object a line.

`{"phase": …, "share": …}` while it works, and last `{"model": …, "path": …}` or
`{"error": {"type": …, "message": …, "hint": …}}`. __main__ writes them, importing reads them;
children of engines that prepare a model write the same, without a last line when all went well.
"""

import json
import sys
import time
from pathlib import Path
from typing import Any

from mesh.domain import errors
from mesh.domain.errors import MeshError, ModelError
from mesh.runtime.engine import same_phase
from mesh_loader.model_info import from_json, to_json
from mesh_loader.store import StoredModel

LINE_BYTES_MAX = 1 << 20
TEXT_CHARS_MAX = 2000
"""The longest message, and the longest hint."""
PROGRESS_EVERY_S = 0.1
"""Within one phase, progress is written no more often."""


class Reporter:
    """Writes progress, at most so often."""

    def __init__(self) -> None:
        self._phase, self._written_s = "", 0.0

    def report(self, phase: str, share: float) -> None:
        now_s = time.monotonic()
        late = now_s >= self._written_s + PROGRESS_EVERY_S
        if not same_phase(phase, self._phase) or late or share >= 1.0:
            self._phase, self._written_s = phase, now_s
            write_line(json.dumps({"phase": phase, "share": round(share, 4)}))


def write_line(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def model_line(stored: StoredModel) -> str:
    return json.dumps({"model": to_json(stored.info), "path": str(stored.path)})


def error_line(error: MeshError) -> str:
    kind, message, hint = type(error).__name__, _clipped(error.message), _clipped(error.hint)
    return json.dumps({"error": {"type": kind, "message": message, "hint": hint}})


def _clipped(text: str) -> str:
    """Names in a model's files, which a message repeats, may be of any length."""
    return text if len(text) <= TEXT_CHARS_MAX else f"{text[: TEXT_CHARS_MAX - 1]}…"


def parse_line(line: bytes) -> tuple[str, float] | StoredModel | MeshError:
    """Progress, the result, or the error in a line. Raises ValueError for any other line."""
    try:
        value = json.loads(line)
        if "phase" in value:
            return str(value["phase"]), float(value["share"])
        if "error" in value:
            return _error(value["error"])
        return StoredModel(path=Path(value["path"]), info=from_json(value["model"]))
    except (KeyError, TypeError) as error:
        raise ValueError(f"not a line of an import: {line[:200]!r}") from error


def _error(value: dict[str, Any]) -> MeshError:
    kind = getattr(errors, str(value["type"]), None)
    message, hint = str(value["message"]), str(value.get("hint", ""))
    if isinstance(kind, type) and issubclass(kind, MeshError) and kind is not errors.Refused:
        return kind(message, hint=hint)
    return ModelError(message, hint=hint)
