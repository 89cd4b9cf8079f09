"""Fetches a model of the Hugging Face hub, through huggingface_hub and its cache.

Only the files that an import reads are fetched. What lies in the local Hugging Face cache already
is used from there, so a model fetched once needs no network again. HF_TOKEN, HF_HOME, HF_ENDPOINT
and HF_HUB_OFFLINE mean what they mean to huggingface_hub. The endpoint is the operator's, at
whatever address it is; what it redirects to must be within the reach.
"""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from huggingface_hub import HfApi, constants, get_session, set_client_factory, snapshot_download
from huggingface_hub.errors import (
    DisabledRepoError,
    DryRunError,
    GatedRepoError,
    HfHubHTTPError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from tqdm import tqdm  # type: ignore[import-untyped]

from mesh.domain.errors import (
    InvalidInput,
    MeshError,
    NotFound,
    StorageError,
    Unavailable,
    UnsupportedModel,
)
from mesh.runtime.engine import Progress
from mesh_loader.disk import require_free
from mesh_loader.download import PIECE_BYTES, phase_of
from mesh_loader.download_rate import UNBOUND, DownloadRate
from mesh_loader.model_files import WANTED_PATTERNS
from mesh_loader.quantisation import MODELOPT_CONFIG
from mesh_loader.reach import REDIRECTS_MAX, Reach
from mesh_loader.sources import Repository

DOWNLOADS_AT_ONCE_MAX = 4
CONFIGS = ("config.json", MODELOPT_CONFIG)
_OTHER_WEIGHTS = (".xml", ".bin", ".onnx", ".h5", ".msgpack", ".pth", ".pt")
_PORTS = {"http": 80, "https": 443}


def fetch_repository(
    repository: Repository,
    rate: DownloadRate,
    progress: Progress,
    reach: Reach,
    look: Callable[[Path], None] | None = None,
) -> Path:
    """The folder of the repository's snapshot in the Hugging Face cache. `look` is called with it
    while it has nothing but configurations, and stops the download by what it raises.

    Within a rate it comes by HTTP, in small pieces: Xet, which asks nobody before it fetches the
    next, could not be held up.

    Raises NotFound, Unavailable (no network, no access), UnsupportedModel, StorageError, or
    InvalidInput where the hub redirects beyond the reach, one line each.
    """
    _keep_within(reach)
    progress(f"download {repository.name}", 0.0)
    try:
        if not constants.HF_HUB_OFFLINE:
            _require_room(repository)
        if rate.bounded:
            constants.HF_HUB_DISABLE_XET = True
            constants.DOWNLOAD_CHUNK_SIZE = PIECE_BYTES
        bar = _reporting(repository.name, rate, progress)
        if look is not None:
            look(Path(str(_snapshot(repository, CONFIGS, tqdm_class=bar))))
        folder = Path(str(_snapshot(repository, WANTED_PATTERNS, tqdm_class=bar)))
        if not (any(folder.glob("*.safetensors")) or constants.HF_HUB_OFFLINE):
            _refuse_other_weights(repository)
    except MeshError:
        raise
    except (OSError, HfHubHTTPError, ValueError) as error:
        raise _plain_error(repository, error) from error
    progress(f"download {repository.name}", 1.0)
    return folder


def _refuse_other_weights(repository: Repository) -> None:
    """Raises UnsupportedModel for a repository whose weights are of a kind that is not fetched."""
    name, revision = repository.name, repository.revision
    siblings = HfApi().model_info(name, revision=revision).siblings or ()
    files = sorted(one.rfilename for one in siblings)
    ggufs = [one for one in files if one.endswith(".gguf") and "mmproj" not in one]
    if ggufs:
        raise UnsupportedModel(
            f"{name} holds GGUF files, of which one must be named",
            hint=f"for instance {constants.ENDPOINT}/{name}/resolve/{revision}/{ggufs[0]}",
        )
    others = [one for one in files if one.endswith(_OTHER_WEIGHTS)]
    if others:
        raise UnsupportedModel(
            f"{name} has no safetensors weights, and its {others[0]} is not fetched from the hub",
            hint=f"`hf download {name} --local-dir DIR`, and name file://DIR: what mesh imports of "
            "other formats is in docs/model-store.md",
        )
    if "config.json" not in files:
        raise UnsupportedModel(
            f"{name} on the Hugging Face hub holds no model: there is no config.json",
            hint="name a repository with config.json and .safetensors files",
        )


def _keep_within(reach: Reach) -> None:
    """Have huggingface_hub's client look at every hop before it asks it."""
    client = get_session()
    own = urlsplit(constants.ENDPOINT)

    def check(request: Any) -> None:
        scheme, host = request.url.scheme, request.url.host
        if scheme == "http" and own.scheme == "https":
            raise InvalidInput(
                f"{own.hostname} redirects from https to http, which anybody on the way can read "
                "and change",
                hint="set HF_ENDPOINT to a hub that stays with https",
            )
        port = request.url.port or _PORTS.get(scheme, 0)
        if (host, port) != (own.hostname, own.port or _PORTS.get(own.scheme, 0)):
            reach.check(host, port)

    check.is_ours = True  # type: ignore[attr-defined]
    hooks = [hook for hook in client.event_hooks["request"] if not hasattr(hook, "is_ours")]
    # Its own class: httpx of another release of huggingface_hub has another name.
    kind: Callable[..., Any] = type(client)
    set_client_factory(
        lambda: kind(
            event_hooks={"request": [*hooks, check]},
            follow_redirects=True,
            max_redirects=REDIRECTS_MAX,
            timeout=None,
        )
    )


def _snapshot(repository: Repository, patterns: Sequence[str], **options: Any) -> Any:
    return snapshot_download(
        repository.name,
        revision=repository.revision,
        allow_patterns=list(patterns),
        max_workers=DOWNLOADS_AT_ONCE_MAX,
        **options,
    )


def _require_room(repository: Repository) -> None:
    """Compares what is still to be fetched with the free space on the cache's disk."""
    try:
        bar = _reporting("", UNBOUND, _unheard)
        files = _snapshot(repository, WANTED_PATTERNS, dry_run=True, tqdm_class=bar)
    except DryRunError:
        return  # the hub does not answer; the cache may hold it all
    missing_bytes = sum(file.file_size for file in files if file.will_download)
    cache = Path(constants.HF_HUB_CACHE)
    while not cache.exists():
        cache = cache.parent
    require_free(cache, missing_bytes, f"the download of {repository.name}")


def _reporting(name: str, rate: DownloadRate, progress: Progress) -> type[Any]:
    """A progress bar for huggingface_hub that reports instead of drawing, and returns when what has
    come is within the rate.
    """

    class Reporting(tqdm):  # type: ignore[misc]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            # Of its several bars, only those that count bytes are of use: one that does so as they
            # come, and another, or the same, as they are written.
            counts_bytes, what = kwargs.get("unit") == "B", str(kwargs.get("desc", ""))
            self._comes = counts_bytes and what.startswith("Downloading")
            self._is_written = counts_bytes and what != "Downloading bytes"
            self._done = kwargs.get("initial", 0)
            super().__init__(*args, **{**kwargs, "disable": True})

        def update(self, n: float | None = 1) -> bool | None:
            n = int(n or 0)
            self._done += n
            told = phase_of(name, self._done, self.total)
            if self._comes and n:
                rate.wait(n, partial(progress, *told))
            if self._is_written and self.total:
                progress(*told)
            return None

    return Reporting


def _unheard(phase: str, share: float) -> None:
    """Looking at sizes is no download."""


def _plain_error(repository: Repository, error: Exception) -> MeshError:
    name, revision = repository.name, repository.revision
    if isinstance(error, GatedRepoError | DisabledRepoError):
        return Unavailable(
            f"{name} on the Hugging Face hub needs its licence accepted, or is disabled",
            hint=f"accept it at https://huggingface.co/{name} and set HF_TOKEN",
        )
    if isinstance(error, RevisionNotFoundError):
        return NotFound(
            f"{name} has no revision {revision} on the Hugging Face hub",
            hint="leave @revision out for the main branch",
        )
    if isinstance(error, RepositoryNotFoundError):
        return NotFound(
            f"{name} is not on the Hugging Face hub, or it is private",
            hint="check the name; for a private repository set HF_TOKEN",
        )
    if constants.HF_HUB_OFFLINE:
        return Unavailable(
            f"{name} is not in the local Hugging Face cache, and HF_HUB_OFFLINE is set",
            hint="unset HF_HUB_OFFLINE, or import a copy on this machine: file:///path/to/model",
        )
    if isinstance(error, HfHubHTTPError) and error.response is not None:
        return Unavailable(
            f"the Hugging Face hub answered {error.response.status_code} for {name}",
            hint="try again later; for a private repository set HF_TOKEN",
        )
    if isinstance(error, PermissionError) or getattr(error, "errno", None) in (28, 122):
        return StorageError(
            f"{name} cannot be written to the Hugging Face cache: {error}",
            hint=f"make room in or give rights to {constants.HF_HUB_CACHE}, or set HF_HOME",
        )
    reason = "" if isinstance(error, LocalEntryNotFoundError) else f" ({type(error).__name__})"
    return Unavailable(
        f"the Hugging Face hub cannot be reached for {name}{reason}",
        hint="check the network, or import a copy on this machine: file:///path/to/model",
    )
