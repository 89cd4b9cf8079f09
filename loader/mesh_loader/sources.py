"""Model sources: what a source text means, and how it becomes files on this disk.

`pkg://package/path` is a file in a Python package, `file:///path` a file or folder of this machine,
`hf://org/name@revision` a repository of the Hugging Face hub, `http(s)://host/path` a file of the
web, `s3://bucket/prefix` one of a bucket, or a folder of it. One module a scheme does the
fetching; model_plan looks at what came, and the store remembers which source it came from.
"""

from collections.abc import Callable
from pathlib import Path

from mesh.domain.errors import Unavailable, UnknownSource
from mesh.domain.model import WeightPrecision
from mesh.runtime.engine import Progress
from mesh_loader.download_rate import UNBOUND, DownloadRate
from mesh_loader.reach import NOWHERE_PRIVATE, Reach
from mesh_loader.source_file import path_of_file, require_present
from mesh_loader.source_hf import parse_hf
from mesh_loader.source_http import parse_http
from mesh_loader.source_pkg import fetch_package_file, parse_pkg
from mesh_loader.source_s3 import parse_s3

SUPPORTED = (
    "pkg://package/file, file:///path, hf://org/name@revision, https://host/file or "
    "s3://bucket/prefix"
)
REMOTE = ("http://", "https://", "s3://")
"""Those that are fetched in parts, which outlive a killed import."""


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
    elif scheme in ("http", "https"):
        parse_http(source)
    elif scheme == "s3":
        parse_s3(source)
    else:
        raise UnknownSource(
            f"{source!r} has the scheme {scheme}, which mesh does not know", hint=f"use {SUPPORTED}"
        )


def fetch(
    source: str,
    scratch: Path,
    progress: Progress,
    rate: DownloadRate = UNBOUND,
    reach: Reach = NOWHERE_PRIVATE,
    look: Callable[[Path], None] | None = None,
    weights: WeightPrecision | None = None,
) -> Path:
    """The file or folder that the source stands for; downloads go into `scratch`, an earlier
    one of a REMOTE source into the same goes on there, within the rate and the reach. `look` is
    called with a folder that has the configurations, before a repository's weights are fetched.
    `weights`: as a folder of objects is to be held, which an OpenVINO IR cannot be.

    Raises NotFound, Unavailable (no network), InvalidInput, UnknownSource or StorageError.
    """
    check_source(source)
    if source.startswith("pkg://"):
        return fetch_package_file(source, scratch, progress)
    if source.startswith("hf://"):
        return _fetch_repository(source, rate, progress, reach, look)
    if source.startswith("s3://"):
        return _fetch_objects(source, scratch, rate, progress, reach, weights)
    if source.startswith(REMOTE):
        return _fetch_web_file(source, scratch, rate, progress, reach)
    path = path_of_file(source)
    require_present(source, path)
    return path


def _fetch_repository(
    source: str,
    rate: DownloadRate,
    progress: Progress,
    reach: Reach,
    look: Callable[[Path], None] | None,
) -> Path:
    # Here and not above: it would double the time that every other use of the store takes to start.
    from mesh_loader.hub_download import fetch_repository

    return fetch_repository(parse_hf(source), rate, progress, reach, look)


def _fetch_web_file(
    source: str, scratch: Path, rate: DownloadRate, progress: Progress, reach: Reach
) -> Path:
    from mesh_loader.http_download import fetch_web_file

    return fetch_web_file(parse_http(source), scratch, rate, progress, reach)


def _fetch_objects(
    source: str,
    scratch: Path,
    rate: DownloadRate,
    progress: Progress,
    reach: Reach,
    weights: WeightPrecision | None,
) -> Path:
    try:
        from mesh_loader.s3_download import fetch_objects
    except ImportError as error:
        raise Unavailable(
            f"{source} needs boto3, which this Python does not have",
            hint="pip install 'mesh-serve[s3]' on the node",
        ) from error
    return fetch_objects(parse_s3(source), scratch, rate, progress, reach, weights)
