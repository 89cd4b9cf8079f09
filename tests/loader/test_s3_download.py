"""`s3://`: a model of a bucket, by boto3, from moto's server on this machine."""

import random
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import requests

from mesh.domain.errors import (
    Cancelled,
    InvalidInput,
    NotFound,
    TornModel,
    Unavailable,
    UnsupportedModel,
)
from mesh.domain.model import WeightPrecision
from mesh.text.assets import read_assets
from mesh_loader.download_rate import UNBOUND
from mesh_loader.fetching import fetch
from mesh_loader.reach import NOWHERE_PRIVATE
from mesh_loader.store import ModelStore, silent
from tests.loader.tiny_gguf import write_tiny_gguf
from tests.support.tiny_model import write_tiny_llama

boto3 = pytest.importorskip("boto3")
s3_download = pytest.importorskip("mesh_loader.s3_download")
EndpointConnectionError = pytest.importorskip("botocore.exceptions").EndpointConnectionError

CONTENT = random.Random(1).randbytes(3 << 20)
OTHER = random.Random(2).randbytes(3 << 20)


@pytest.fixture(scope="module")
def connected() -> Iterator[Any]:
    """The client of a server here, whose making takes a third of a second, as its import does."""
    moto_server = pytest.importorskip("moto.server")
    server = moto_server.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {
            "AWS_ENDPOINT_URL": f"http://{host}:{port}",
            "AWS_ACCESS_KEY_ID": "testing",
            "AWS_SECRET_ACCESS_KEY": "testing",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
            "NO_PROXY": "127.0.0.1",
        }.items():
            patch.setenv(name, value)
        with closing(boto3.Session().client("s3")) as client:
            yield client
    server.stop()


@pytest.fixture
def client(connected: Any) -> Any:
    """The same, with an empty bucket named models."""
    requests.post(f"{connected.meta.endpoint_url}/moto-api/reset", timeout=60)
    connected.create_bucket(Bucket="models")
    return connected


def test_one_object_is_imported(client: Any, tmp_path: Path) -> None:
    write_tiny_gguf(tmp_path / "m.gguf")
    client.upload_file(str(tmp_path / "m.gguf"), "models", "deep/m.gguf")
    store = ModelStore(tmp_path / "store")
    stored = store.import_model("s3://models/deep/m.gguf")
    assert stored.info.architecture == "llama"
    assert not list(store.root.glob("downloads/*"))


def test_a_folder_is_imported_without_what_is_no_model(client: Any, tmp_path: Path) -> None:
    for path in write_tiny_llama(tmp_path / "tiny").iterdir():
        client.upload_file(str(path), "models", f"org/tiny/{path.name}")
    client.put_object(Bucket="models", Key="org/tiny/pytorch_model.bin", Body=b"pickled")
    client.put_object(Bucket="models", Key="org/tiny/below/config.json", Body=b"{}")
    client.put_object(Bucket="models", Key="org/tiny-2/config.json", Body=b"{}")
    folder = fetch("s3://models/org/tiny", tmp_path, silent)
    names = {path.name for path in folder.iterdir()}
    assert names == {path.name for path in (tmp_path / "tiny").iterdir()}
    stored = ModelStore(tmp_path / "store").import_model("s3://models/org/tiny/")
    assert stored.info.architecture == "llama"


def test_an_openvino_ir_that_is_to_be_held_otherwise_is_not_fetched(
    client: Any, tmp_path: Path
) -> None:
    put(client, {"ir/openvino_model.xml": b"<net/>", "ir/openvino_model.bin": CONTENT})
    store = ModelStore(tmp_path / "store")
    phases = list[str]()

    def progress(phase: str, share: float) -> None:
        phases.append(phase)

    with pytest.raises(UnsupportedModel, match="s3://models/tiny/ir is an OpenVINO IR"):
        store.import_model("s3://models/tiny/ir", progress, weights=WeightPrecision.I4)
    assert phases == ["look at s3://models/tiny/ir"]


def test_named_chat_templates_are_fetched_with_their_folder(client: Any, tmp_path: Path) -> None:
    for path in write_tiny_llama(tmp_path / "tiny").iterdir():
        client.upload_file(str(path), "models", f"tiny/{path.name}")
    put(
        client,
        {"additional_chat_templates/": b"", "additional_chat_templates/tool_use.jinja": b"T"},
    )
    put(client, {"additional_chat_templates/README.md": b"", "other/rag.jinja": b"R"})
    folder = fetch("s3://models/tiny", tmp_path, silent)
    templates = folder / "additional_chat_templates"
    assert [path.name for path in templates.iterdir()] == ["tool_use.jinja"]
    assert not (folder / "other").exists()
    stored = ModelStore(tmp_path / "store").import_model("s3://models/tiny")
    assert read_assets(stored.path).tool_template == "T"
    put(client, {"additional_chat_templates/tool_use.jinja": b"another"})
    changed = ModelStore(tmp_path / "changed").import_model("s3://models/tiny")
    assert changed.info.model_id != stored.info.model_id


def test_configurations_of_modules_are_fetched(client: Any, tmp_path: Path) -> None:
    put(client, {"config.json": b"{}", "1_Pooling/config.json": b"P", "1_Pooling/README.md": b""})
    put(client, {"onnx/config.json": b"no module"})
    folder = fetch("s3://models/tiny", tmp_path, silent)
    assert (folder / "1_Pooling" / "config.json").read_bytes() == b"P"
    assert not (folder / "1_Pooling" / "README.md").exists()
    assert not (folder / "onnx").exists()
    put(client, {f"{n}_Dense{m}/config.json": b"" for n in range(10) for m in range(2)})
    with pytest.raises(UnsupportedModel, match="21 folders of modules"):
        fetch("s3://models/tiny", tmp_path, silent)


@pytest.mark.parametrize("changed", [False, True])
def test_a_download_goes_on_unless_it_changed(client: Any, tmp_path: Path, changed: bool) -> None:
    client.put_object(Bucket="models", Key="m.gguf", Body=CONTENT)
    shares = []

    def progress(phase: str, share: float) -> None:
        shares.append(share)
        if len(shares) < 99 and share > 0.5:
            raise Cancelled("stopped")

    with pytest.raises(Cancelled):
        fetch("s3://models/m.gguf", tmp_path, progress, UNBOUND)
    if changed:
        client.put_object(Bucket="models", Key="m.gguf", Body=OTHER)
    shares = [0.0] * 99
    found = fetch("s3://models/m.gguf", tmp_path, progress, UNBOUND)
    assert found.read_bytes() == (OTHER if changed else CONTENT)
    assert (min(shares[100:]) > 0.5) is not changed


def test_a_folder_that_became_another_model_is_not_mixed(client: Any, tmp_path: Path) -> None:
    """What is unchanged since a stop is kept; after a change nothing of the older folder is."""
    put(client, {"config.json": b"{}", "model-1-of-1.safetensors": CONTENT})
    stop_at_weights(tmp_path)
    (kept,) = tmp_path.glob("objects-*/config.json")
    asked: list[str] = []
    folder = fetch("s3://models/tiny", tmp_path, lambda phase, share: asked.append(phase))
    assert folder == kept.parent
    assert not any("config.json" in phase for phase in asked)
    client.delete_object(Bucket="models", Key="tiny/model-1-of-1.safetensors")
    put(client, {"config.json": b'{"a": 1}', "model.safetensors": OTHER})
    folder = fetch("s3://models/tiny", tmp_path, silent)
    found = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert found == {"config.json": b'{"a": 1}', "model.safetensors": OTHER}
    assert list(tmp_path.iterdir()) == [folder]


def test_a_folder_that_changes_while_it_is_fetched_is_torn(client: Any, tmp_path: Path) -> None:
    put(client, {"config.json": b"{}", "model.safetensors": CONTENT})

    def progress(phase: str, share: float) -> None:
        if phase.startswith("download config"):
            put(client, {"model.safetensors": OTHER})

    with pytest.raises(TornModel, match=r"model\.safetensors changed"):
        fetch("s3://models/tiny", tmp_path, progress)


def put(client: Any, contents: dict[str, bytes]) -> None:
    for name, content in contents.items():
        client.put_object(Bucket="models", Key=f"tiny/{name}", Body=content)


def stop_at_weights(folder: Path) -> None:
    def progress(phase: str, share: float) -> None:
        if "safetensors" in phase and share > 0.2:
            raise Cancelled("stopped")

    with pytest.raises(Cancelled):
        fetch("s3://models/tiny", folder, progress)


def test_an_object_whose_server_is_away_is_asked_for_again(
    client: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A connection that is refused, once boto's own tries are over, costs one of ours."""
    monkeypatch.setattr("mesh_loader.download.PAUSE_S", 0.01)
    client.put_object(Bucket="models", Key="m.gguf", Body=CONTENT)
    seen = s3_download._client(NOWHERE_PRIVATE)
    refused = [EndpointConnectionError(endpoint_url="http://models")] * 2
    get_object = seen.get_object

    def once_more(**asked: str) -> Any:
        if refused:
            raise refused.pop()
        return get_object(**asked)

    monkeypatch.setattr(seen, "get_object", once_more)
    monkeypatch.setattr(s3_download, "_client", lambda reach: seen)
    assert fetch("s3://models/m.gguf", tmp_path, silent).read_bytes() == CONTENT
    assert not refused


def test_what_is_not_there_is_named(client: Any, tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="no such object"):
        fetch("s3://models/none.gguf", tmp_path, silent)
    with pytest.raises(NotFound, match="no such bucket"):
        fetch("s3://no-bucket/folder", tmp_path, silent)
    with pytest.raises(NotFound, match="no file of a model"):
        fetch("s3://models/none", tmp_path, silent)
    client.put_object(Bucket="models", Key="several/a.gguf", Body=b"")
    with pytest.raises(UnsupportedModel) as caught:
        fetch("s3://models/several", tmp_path, silent)
    assert caught.value.hint.endswith("s3://models/several/a.gguf")


def test_without_credentials_it_says_where_they_go(
    client: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    for name in ("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"):
        monkeypatch.setenv(name, str(tmp_path / "none"))
    with pytest.raises(Unavailable, match="credentials") as caught:
        fetch("s3://models/m.gguf", tmp_path, silent)
    assert "AWS_PROFILE" in caught.value.hint


def test_an_endpoint_that_does_not_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_DEFAULT_REGION"):
        monkeypatch.setenv(name, "testing")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    with pytest.raises(Unavailable, match="cannot be reached"):
        fetch("s3://models/m.gguf", tmp_path, silent)


def test_a_host_that_is_no_endpoint_must_be_public(client: Any, tmp_path: Path) -> None:
    """What a bucket's name or an answer's region makes of the host is checked first."""
    seen = s3_download._client(NOWHERE_PRIVATE)
    request = type("Request", (), {"url": "https://localhost:1/m.gguf"})()
    with pytest.raises(InvalidInput, match="not public"):
        seen.meta.events.emit("before-send.s3.GetObject", request=request)
    request.url = f"{seen.meta.endpoint_url}/models/m.gguf"
    seen.meta.events.emit("before-send.s3.GetObject", request=request)
