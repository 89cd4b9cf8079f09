"""`hf://`: the whole way through huggingface_hub, against a hub on this machine and without one."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from mesh.domain.units import format_bytes
from tests.loader.hub_server import COMMIT, hub
from tests.support.tiny_model import write_tiny_llama

EACH = """
import sys
from mesh_loader.__main__ import main
_, store, *sources = sys.argv
for source in sources:
    assert main(["import", source, "--store", store]) == 1
"""


@dataclass(frozen=True)
class Machine:
    """Runs imports with a hub, a cache and a store of their own."""

    folder: Path
    endpoint: str

    def imports(
        self, source: str, store: str = "store", *options: str, **environment: str
    ) -> list[Any]:
        """The lines of an import in a child: huggingface_hub reads its settings once, on import."""
        where = str(self.folder / store)
        arguments = ["-m", "mesh_loader", "import", source, "--store", where, *options]
        status, lines = self._ran(arguments, environment)
        assert status == (1 if "error" in lines[-1] else 0)
        return lines

    def errors(self, *sources: str) -> list[Any]:
        """Why these cannot be imported, one after the other in a child."""
        status, lines = self._ran(["-c", EACH, str(self.folder / "store"), *sources], {})
        assert status == 0
        return [line["error"] for line in lines if "error" in line]

    def _ran(self, arguments: list[str], environment: dict[str, str]) -> tuple[int, list[Any]]:
        child = subprocess.run(
            [sys.executable, *arguments],
            env={
                **os.environ,
                "HF_ENDPOINT": self.endpoint,
                "HF_HOME": str(self.folder / "hf"),
                "HF_HUB_OFFLINE": "0",
                **environment,
            },
            capture_output=True,
            text=True,
            check=False,
        )
        assert "Traceback" not in child.stderr
        return child.returncode, [json.loads(line) for line in child.stdout.splitlines()]


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    folder = write_tiny_llama(tmp_path / "repository")
    (folder / "pytorch_model.bin").write_bytes(b"pickled")
    with hub({"org/tiny": folder}) as endpoint:
        yield Machine(tmp_path, endpoint)


def test_a_repository_is_fetched_and_found_offline(machine: Machine, tmp_path: Path) -> None:
    lines = machine.imports("hf://org/tiny")
    assert lines[-1]["model"]["architecture"] == "llama"
    told = [line for line in lines[:-1] if line["phase"].startswith("download org/tiny")]
    shares = [line["share"] for line in told]
    assert shares[0] == 0.0
    assert shares[-1] == 1.0
    snapshot = tmp_path / "hf" / "hub" / "models--org--tiny" / "snapshots" / COMMIT
    assert not (snapshot / "pytorch_model.bin").exists(), "only what is imported is fetched"
    stored = Path(lines[-1]["path"]) / "model.safetensors"
    assert stored.samefile(snapshot / "model.safetensors"), "the cache's blob is linked, not copied"
    again = machine.imports("hf://org/tiny", HF_HUB_OFFLINE="1")
    assert len(again) == 1
    from_cache = machine.imports("hf://org/tiny", "another-store", HF_HUB_OFFLINE="1")
    assert from_cache[-1]["model"]["model_id"] == lines[-1]["model"]["model_id"]


def test_a_repository_comes_within_the_rate(machine: Machine, tmp_path: Path) -> None:
    files = [p for p in (tmp_path / "repository").iterdir() if p.name != "pytorch_model.bin"]
    size_bytes = sum(path.stat().st_size for path in files)
    begun_s = time.monotonic()
    lines = machine.imports("hf://org/tiny", "store", "--download-rate", str(size_bytes / 2.0))
    assert time.monotonic() - begun_s >= 2.0
    assert "model" in lines[-1]
    told = [line["phase"] for line in lines[:-1] if line["phase"].startswith("download org/tiny, ")]
    whole = format_bytes(size_bytes)
    assert told[-1] == f"download org/tiny, {whole} of {whole}"


def test_what_the_hub_refuses_is_told(machine: Machine) -> None:
    cases = {
        "hf://org/none": ("NotFound", "org/none is not on the Hugging Face hub"),
        "hf://org/tiny@v9": ("NotFound", "org/tiny has no revision v9"),
        "hf://org/gated": ("Unavailable", "needs its licence accepted"),
    }
    for error, (kind, said) in zip(machine.errors(*cases), cases.values(), strict=True):
        assert error["type"] == kind
        assert said in error["message"]
        assert error["hint"]
        assert "\n" not in error["message"]


def test_a_repository_of_other_files_says_which_they_are(tmp_path: Path) -> None:
    cases = (
        (["a-Q4_0.gguf", "mmproj-a.gguf"], "one must be named", "/resolve/main/a-Q4_0.gguf"),
        (["openvino_model.xml", "config.json"], "openvino_model.xml is not fetched", "file://DIR"),
        (["pytorch_model.bin", "config.json"], "pytorch_model.bin is not fetched", "file://DIR"),
        (["model.onnx"], "model.onnx is not fetched", "docs/model-store.md"),
        (["README.md"], "holds no model", "safetensors"),
    )
    repositories = {f"org/other{number}": tmp_path / str(number) for number in range(len(cases))}
    for folder, (files, _, _) in zip(repositories.values(), cases, strict=True):
        folder.mkdir()
        for name in files:
            (folder / name).write_text("{}")
    with hub(repositories) as endpoint:
        errors = Machine(tmp_path, endpoint).errors(*(f"hf://{name}" for name in repositories))
    for error, (_, said, hint) in zip(errors, cases, strict=True):
        assert error["type"] == "UnsupportedModel"
        assert said in error["message"]
        assert hint in error["hint"]


def test_offline_says_so_in_one_line(machine: Machine) -> None:
    error = machine.imports("hf://org/tiny", HF_HUB_OFFLINE="1")[-1]["error"]
    assert error["type"] == "Unavailable"
    assert "HF_HUB_OFFLINE is set" in error["message"]
    assert "file:///" in error["hint"]


def test_without_a_network_it_says_so_in_one_line(tmp_path: Path) -> None:
    error = Machine(tmp_path, "http://127.0.0.1:9").imports("hf://org/tiny")[-1]["error"]
    assert error["type"] == "Unavailable"
    assert error["message"] == "the Hugging Face hub cannot be reached for org/tiny"
    assert "check the network" in error["hint"]


def test_weights_of_no_use_to_the_node_are_not_fetched(machine: Machine, tmp_path: Path) -> None:
    config = tmp_path / "repository" / "config.json"
    quantised = {"quantization_config": {"quant_method": "fp8"}}
    config.write_text(json.dumps({**json.loads(config.read_text()), **quantised}))
    lines = machine.imports("hf://org/tiny", "store", "--plain")
    assert lines[-1]["error"]["type"] == "UnsupportedModel"
    assert "quantised by 'fp8'" in lines[-1]["error"]["message"]
    assert "vLLM nodes" in lines[-1]["error"]["hint"]
    assert list((tmp_path / "hf").rglob("config.json"))
    assert not list((tmp_path / "hf").rglob("*.safetensors"))


@pytest.mark.parametrize("name", ["localhost", "127.0.0.1"], ids=["host", "port"])
@pytest.mark.parametrize("allowed", [False, True])
def test_a_hub_redirects_to_private_addresses_as_allowed(
    tmp_path: Path, allowed: bool, name: str
) -> None:
    """Also to another port of its own host."""
    folder = write_tiny_llama(tmp_path / "repository")
    with hub({"org/tiny": folder}) as files, hub({"org/tiny": folder}, files) as endpoint:
        machine = Machine(tmp_path, endpoint.replace("127.0.0.1", name))
        options = ("--reach", "127.0.0.1") if allowed else ()
        last = machine.imports("hf://org/tiny", "store", *options)[-1]
    if allowed:
        assert "model" in last
    else:
        assert last["error"]["type"] == "InvalidInput"
        assert "127.0.0.1 is at an address that is not public" in last["error"]["message"]
