"""`file:///absolute/path`: a model that already lies on this machine."""

import os
from pathlib import Path
from urllib.parse import unquote

from mesh.domain.errors import InvalidInput, NotFound, StorageError, UnsupportedModel
from mesh.domain.model import WeightPrecision

IR_XML = "openvino_model.xml"


def path_of_file(source: str) -> Path:
    """The absolute path of a file:// source. Raises InvalidInput for a relative path or a host."""
    text = source.removeprefix("file://")
    if text.startswith("localhost/"):
        text = text.removeprefix("localhost")
    if not text.startswith("/") or "\0" in text:
        hint = "write file:// and an absolute path: file:///models/chat.gguf"
        if text:
            hint = f"write the absolute path: file://{Path(text.replace(chr(0), '')).absolute()}"
        raise InvalidInput(f"{source!r} is not an absolute path", hint=hint)
    plain = Path(text)
    # A percent sign may be part of the name or an escape: the name that exists is meant.
    return plain if os.path.lexists(plain) or "%" not in text else Path(unquote(text))


def require_present(source: str, path: Path) -> None:
    """Raises NotFound where nothing lies there, StorageError where it cannot be read."""
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        raise NotFound(
            f"{source}: no such file or folder", hint="check the path; it is read on the node"
        ) from None
    except OSError as error:
        raise StorageError(f"{source} cannot be looked at: {error.strerror}") from error
    if not os.access(path, os.R_OK):
        raise StorageError(
            f"{source} cannot be read", hint=f"give this user the right to read {path}"
        )


def check_weights(source: str, weights: WeightPrecision | None) -> None:
    """Raises UnsupportedModel where the model is to be held otherwise than it can be, and it shows
    before anything is read: an OpenVINO IR on this machine.
    """
    if weights is not None and source.startswith("file://"):
        path = path_of_file(source)
        if (path / IR_XML).is_file():
            raise not_held_as(path.name, weights)


def not_held_as(name: str, weights: WeightPrecision) -> UnsupportedModel:
    return UnsupportedModel(
        f"{name} is an OpenVINO IR, whose weights are what they were exported as and cannot be "
        f"held as {weights}",
        hint="leave spec.weights out, or deploy the model that it was exported from",
    )
