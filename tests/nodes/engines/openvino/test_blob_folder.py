"""The blobs' key, their folder's bounds, and the process that makes them when it fails."""

import logging
import os
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from mesh.domain.model import ComputePrecision, KvPrecision, WeightPrecision
from mesh_nodes.engines.openvino import blob_folder, blob_maker
from mesh_nodes.engines.openvino.architecture import parse_architecture
from mesh_nodes.engines.openvino.blob_folder import BlobFolder
from mesh_nodes.engines.openvino.blob_maker import TRIES_MAX, BlobJob, BlobMaker
from mesh_nodes.engines.openvino.precisions import Precisions
from mesh_nodes.engines.openvino.prepared import Layout
from mesh_nodes.engines.openvino.shape_blob import shape_key
from tests.support.waiting import until

CONFIG = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "vocab_size": 97,
}
LINEAR = {"rope_type": "linear", "factor": 2.0}
TENSOR = {"dtype": "int8", "shape": [4, 2], "offset": 0}
HERE: dict[str, Any] = {
    "architecture": parse_architecture(CONFIG),
    "context_tokens_max": 256,
    "layout": Layout(path=Path("a"), size_bytes=8, tensors={"norm": TENSOR}),
    "properties": {"INFERENCE_NUM_THREADS": 2, "KV_CACHE_PRECISION": "f16"},
    "platform": {"openvino": "2026.4.1", "flags": "avx2 avx512f"},
}


@pytest.mark.parametrize(
    "change",
    [
        *({"model_type": kind} for kind in ("qwen2", "qwen3")),
        *({name: int(value) * 2} for name, value in CONFIG.items() if isinstance(value, int)),
        *({"rms_norm_eps": 1e-6}, {"rope_theta": 5e5}, {"rope_scaling": LINEAR}),
        *({"tie_word_embeddings": True}, {"attention_bias": True}, {"head_dim": 32}),
        {"mlp_bias": True},
    ],
    ids=str,
)
def test_another_architecture_is_another_key(change: dict[str, Any]) -> None:
    other = parse_architecture({**CONFIG, **change})
    assert shape_key(**HERE) != shape_key(**{**HERE, "architecture": other})


@pytest.mark.parametrize(
    "change",
    [
        {"context_tokens_max": 257},
        {"layout": replace(HERE["layout"], size_bytes=9)},
        {"layout": replace(HERE["layout"], tensors={"norm": {**TENSOR, "offset": 64}})},
        {"layout": replace(HERE["layout"], tensors={"norm": {**TENSOR, "dtype": "uint8"}})},
        {"properties": {**HERE["properties"], "INFERENCE_NUM_THREADS": 1}},
        {"properties": {**HERE["properties"], "KV_CACHE_PRECISION": "u8"}},
        {"platform": {**HERE["platform"], "openvino": "2026.4.2"}},
        {"platform": {**HERE["platform"], "flags": "avx2"}},
    ],
    ids=str,
)
def test_another_context_layout_precision_version_or_cpu_is_another_key(
    change: dict[str, Any],
) -> None:
    assert shape_key(**HERE) != shape_key(**{**HERE, **change})


def test_another_model_of_the_shape_has_the_same_key() -> None:
    elsewhere = replace(HERE["layout"], path=Path("b"))
    assert shape_key(**HERE) == shape_key(**{**HERE, "layout": elsewhere})


def kept(folder: BlobFolder, key: str, size_bytes: int = 1000, used_s: float = 0.0) -> Path:
    with folder.scratch() as scratch:
        (scratch / key).write_bytes(b"\0" * size_bytes)
        folder.keep(key, scratch / key)
    path = folder.path / f"{key}.blob"
    os.utime(path, (used_s, used_s))
    return path


def names(folder: BlobFolder) -> set[str]:
    return {path.stem for path in folder.path.iterdir()}


def test_the_least_recently_used_make_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = BlobFolder(tmp_path / "blobs")
    monkeypatch.setattr(blob_folder, "BLOBS_MAX", 3)
    for used_s, key in enumerate("cab"):
        kept(folder, key, used_s=used_s)
    kept(folder, "new")
    assert names(folder) == {"a", "b", "new"}


def test_bytes_are_bounded_and_what_was_just_made_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = BlobFolder(tmp_path / "blobs")
    monkeypatch.setattr(blob_folder, "BLOBS_BYTES_MAX", 2500)
    kept(folder, "a", used_s=1)
    kept(folder, "b", used_s=2)
    kept(folder, "c", used_s=3)
    assert names(folder) == {"b", "c"}
    kept(folder, "large", 3000)
    assert names(folder) == {"large"}


def test_a_killed_makers_scratch_is_swept_and_a_running_ones_stays(tmp_path: Path) -> None:
    folder = BlobFolder(tmp_path)
    with folder.scratch() as running:
        dead = tmp_path / ".making-dead"
        (dead / "exports").mkdir(parents=True)
        os.utime(dead, (0, 0))
        with folder.scratch():
            assert not dead.exists()
            assert running.exists()
    assert names(folder) == set()


def job(tmp_path: Path, key: str = "key") -> BlobJob:
    """For a model that is not there."""
    return BlobJob(
        key=key,
        folder=str(tmp_path / "blobs"),
        model_path=str(tmp_path / "nothing"),
        context_tokens_max=256,
        threads=1,
        weights=WeightPrecision.I8,
        precisions=Precisions(compute=ComputePrecision.F32, kv=KvPrecision.F16),
    )


def test_a_wish_arrives_as_it_was_sent(tmp_path: Path) -> None:
    assert BlobJob.from_json(job(tmp_path).to_json()) == job(tmp_path)


def test_a_failure_is_logged_and_tried_again_a_few_times(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blob_maker, "NICE", 0)  # no test waits until others leave a core
    maker = BlobMaker(available_bytes=lambda: 2**40)
    for _ in range(TRIES_MAX + 1):
        maker.ask(job(tmp_path), 0, 1.0)
        assert maker.wait(60.0)
    assert [record.levelno for record in caplog.records] == [logging.WARNING] * TRIES_MAX
    assert "config.json cannot be read" in caplog.text


def test_none_is_made_without_memory(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    maker = BlobMaker(available_bytes=lambda: blob_maker.CHILD_BYTES + 9)
    with caplog.at_level(logging.INFO):
        maker.ask(job(tmp_path), 10, 1.0)
        assert maker.wait(10.0)
    assert "for now" in caplog.text


def test_none_is_made_without_the_disk(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """OpenVINO exports a whole model before its weights are taken out."""
    maker = BlobMaker(available_bytes=lambda: 2**62)
    maker.ask(job(tmp_path), 2**60, 1.0)
    assert maker.wait(10.0)
    assert "the disk has" in caplog.text
    assert list((tmp_path / "blobs").iterdir()) == []


def test_a_node_that_stops_waits_for_no_blob(tmp_path: Path) -> None:
    maker = BlobMaker(available_bytes=lambda: 2**40)
    for number in range(blob_maker.WISHES_MAX + 3):
        maker.ask(job(tmp_path, str(number)), 0, 1.0)
    maker.close()
    assert maker.wait(5.0)
    assert list((tmp_path / "blobs").glob("*")) == []
    maker.ask(job(tmp_path), 0, 1.0)
    assert maker.wait(0.0)


class _Slow:
    """The job of a blob whose child sleeps, and the load that it was asked for by."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, compile_s: float) -> None:
        (folder / "sleeping.py").write_text("import time\ntime.sleep(60)\n", encoding="utf-8")
        monkeypatch.setattr(blob_maker, "_CHILD", "sleeping")
        monkeypatch.setenv("PYTHONPATH", str(folder))
        self.maker = BlobMaker(available_bytes=lambda: 2**40)
        self.maker.ask(job(folder), 0, compile_s)
        self.key = job(folder).key

    def nices(self) -> set[int]:
        """The niceness of the threads of this process's child, over this process's own."""
        own = os.getpriority(os.PRIO_PROCESS, os.getpid())
        return {
            os.getpriority(os.PRIO_PROCESS, thread.id) - own
            for child in psutil.Process().children()
            if "sleeping" in child.cmdline()
            for thread in child.threads()
        }


def test_a_load_waits_as_long_as_is_worth_it_and_no_other_after_it_in_vain(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(blob_maker, "CHILD_START_S", 0.0)
    slow = _Slow(tmp_path, monkeypatch, compile_s=0.3)
    assert not slow.maker.wait_for("another", _fail)
    said: list[None] = []
    begun_s = time.monotonic()
    assert not slow.maker.wait_for(slow.key, lambda: said.append(None))
    assert 0.9 <= time.monotonic() - begun_s < 30.0
    assert "was not made within 0.9 s" in caplog.text
    assert len(said) == 1
    assert not slow.maker.wait_for(slow.key, _fail)
    slow.maker.close()


def test_what_compiles_sooner_than_its_blob_is_made_does_not_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = _Slow(tmp_path, monkeypatch, compile_s=0.1)
    assert not slow.maker.wait_for(slow.key, _fail)
    slow.maker.close()


def test_a_blob_is_made_below_all_who_serve_and_like_a_load_while_one_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other way round the system may forbid it, which leaves the child where it was."""
    slow = _Slow(tmp_path, monkeypatch, compile_s=20.0)
    least = 19 - max(0, os.getpriority(os.PRIO_PROCESS, os.getpid()))
    until(lambda: slow.nices() == {least})
    waiting = threading.Thread(target=slow.maker.wait_for, args=(slow.key, lambda: None))
    waiting.start()
    until(lambda: slow.maker.awaited() == {slow.key})
    if os.geteuid() == 0:
        until(lambda: slow.nices() == {blob_maker.WAITED_NICE})
    slow.maker.close()
    waiting.join(10.0)
    assert not waiting.is_alive()
    assert slow.maker.awaited() == frozenset()


def _fail() -> None:
    pytest.fail("it waits")
