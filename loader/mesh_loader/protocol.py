"""What an import child writes to its stdout: one JSON object a line.

`{"phase": …, "share": …}` while it works, and last `{"model": …, "path": …}` or
`{"error": {"type": …, "message": …, "hint": …}}`. __main__ writes them, importing reads them.
"""

import json
from pathlib import Path
from typing import Any

from mesh.domain import errors
from mesh.domain.errors import MeshError, ModelError
from mesh_loader.model_info import from_json, to_json
from mesh_loader.store import StoredModel

LINE_BYTES_MAX = 1 << 20


def progress_line(phase: str, share: float) -> str:
    return json.dumps({"phase": phase, "share": round(share, 4)})


def model_line(stored: StoredModel) -> str:
    return json.dumps({"model": to_json(stored.info), "path": str(stored.path)})


def error_line(error: MeshError) -> str:
    kind = type(error).__name__
    return json.dumps({"error": {"type": kind, "message": error.message, "hint": error.hint}})


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
