"""Contract: load, unload, prepare, the footprint, the books, and failures that leave others be."""

import threading
from dataclasses import replace
from pathlib import Path

import pytest

from mesh.domain.errors import EngineError, ModelError
from mesh.domain.ids import InstanceId, RequestId
from mesh.domain.request import SamplingParams
from mesh.runtime.engine import Engine, EngineRequest
from tests.contract.conftest import LoadInstance
from tests.contract.driving import Driver, greedy, no_progress
from tests.contract.engine_contract import EngineUnderTest, StoredModel

PROMPT = tuple(range(5, 45))


def files_of(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def test_capabilities_name_the_engine(engine: Engine) -> None:
    assert engine.capabilities.name
    assert engine.capabilities.version


def test_a_loaded_instance_is_ready_and_in_the_books(engine: Engine, load: LoadInstance) -> None:
    assert engine.memory() == ()
    driver = load(kv_blocks=24)
    assert driver.loaded.kv_blocks == driver.books.kv_blocks == 24
    assert driver.loaded.elapsed_s >= 0
    assert driver.books.kv_blocks_used == 0
    assert len(driver.run("r", PROMPT, greedy(4))) == 4


def test_of_what_the_caller_does_no_end_is_told(engine: Engine, load: LoadInstance) -> None:
    ends: list[InstanceId] = []
    engine.watch(lambda instance_id, error: ends.append(instance_id))
    driver = load()
    driver.run("r", PROMPT, greedy(2))
    engine.unload(driver.instance_id)
    load()
    engine.close()
    assert ends == []


def test_the_footprint_before_a_load_is_that_of_the_load(
    engine: Engine, model: StoredModel, load: LoadInstance
) -> None:
    before = engine.footprint(model.info)
    assert min(before.weights_bytes, before.kv_block_bytes, before.block_tokens) > 0
    loaded = load().loaded.footprint
    assert (loaded.block_tokens, loaded.kv_block_bytes) == (
        before.block_tokens,
        before.kv_block_bytes,
    )


def test_a_load_reports_progress_that_only_grows(engine: Engine, model: StoredModel) -> None:
    reports: list[tuple[str, float]] = []
    engine.load(model.order(InstanceId("i")), lambda phase, share: reports.append((phase, share)))
    shares = [share for _, share in reports]
    assert all(phase for phase, _ in reports)
    assert shares == sorted(shares)
    assert shares[0] >= 0
    assert shares[-1] == 1.0


def test_unload_is_idempotent_and_takes_requests(engine: Engine, load: LoadInstance) -> None:
    driver = load()
    driver.submit("r", PROMPT)
    driver.step()
    engine.unload(driver.instance_id)
    engine.unload(driver.instance_id)
    engine.unload(InstanceId("never-loaded"))
    assert engine.memory() == ()
    engine.abort(driver.instance_id, RequestId("r"))
    with pytest.raises(EngineError):
        engine.step(driver.instance_id, 64)


def test_after_an_unload_the_same_id_loads_afresh(engine: Engine, load: LoadInstance) -> None:
    first = load()
    tokens = first.run("r", PROMPT)
    first.submit("left-behind", PROMPT)
    first.step()
    engine.unload(first.instance_id)
    second = load()
    assert second.books.kv_blocks_used == 0
    assert second.run("r", PROMPT) == tokens
    assert not second.step().outputs


def test_an_id_is_not_loaded_twice(engine: Engine, model: StoredModel, driver: Driver) -> None:
    driver.submit("r", PROMPT)
    with pytest.raises(EngineError):
        engine.load(model.order(driver.instance_id, kv_blocks=8), no_progress)
    assert driver.books.kv_blocks == 64
    driver.finish()


def test_two_instances_of_a_model_keep_apart(engine: Engine, load: LoadInstance) -> None:
    """Even where their requests bear the same ids; and one goes without the other's noticing."""
    left, right = load("left", kv_blocks=16), load("right", kv_blocks=20)
    assert [books.instance_id for books in engine.memory()] == ["left", "right"]
    alone = left.run("alone", PROMPT, greedy(16))
    first = left.submit("r", PROMPT, greedy(16))
    second = right.submit("r", PROMPT[:9], greedy(16))
    while right.running:
        left.step(16)
        right.step(16)
    assert len(second.tokens) == 16
    right.submit("unfinished", PROMPT)
    engine.unload(right.instance_id)
    assert [books.instance_id for books in engine.memory()] == ["left"]
    left.finish()
    assert first.tokens == alone


def test_books_go_by_id_and_have_once_what_is_shared(engine: Engine, load: LoadInstance) -> None:
    stated = load("c", kv_blocks=4).loaded.footprint
    for name in ("a", "b"):
        load(name, kv_blocks=4)
    assert [books.instance_id for books in engine.memory()] == ["a", "b", "c"]
    held_bytes = sum(books.weights_bytes for books in engine.memory())
    assert held_bytes == 3 * stated.instance_bytes(0) - 2 * stated.shared_bytes
    assert engine.capabilities.shares_weights is (stated.shared_bytes > 0)


def test_a_missing_folder_is_a_mesh_error_and_the_engine_goes_on(
    under_test: EngineUnderTest,
    engine: Engine,
    model: StoredModel,
    load: LoadInstance,
    tmp_path: Path,
) -> None:
    if not under_test.reads_folders:
        pytest.skip("it has no use for folders")
    driver = load()
    running = driver.submit("r", PROMPT)
    driver.step()
    missing = replace(model.order(InstanceId("i-2")), model_path=tmp_path / "absent")
    with pytest.raises((ModelError, EngineError)):
        engine.load(missing, no_progress)
    assert [books.instance_id for books in engine.memory()] == [driver.instance_id]
    driver.finish()
    assert len(running.tokens) == 12
    assert len(load("i-2").run("r", PROMPT, greedy(3))) == 3


def test_prepare_changes_no_token(engine: Engine, model: StoredModel, load: LoadInstance) -> None:
    """And writes nowhere but under `prepared/`: the rest of the folder is immutable."""
    before = files_of(model.path)
    tokens = load("unprepared").run("r", PROMPT)
    engine.prepare(model.info, model.path, no_progress)
    prepared = files_of(model.path)
    engine.prepare(model.info, model.path, no_progress)
    assert files_of(model.path) == prepared
    assert {p: b for p, b in prepared.items() if not p.startswith("prepared/")} == {
        p: b for p, b in before.items() if not p.startswith("prepared/")
    }
    assert load("prepared").run("r", PROMPT) == tokens


def test_a_load_disturbs_no_step(engine: Engine, model: StoredModel, driver: Driver) -> None:
    alone = driver.run("alone", PROMPT, greedy(40))
    running = driver.submit("r", PROMPT, greedy(40))
    loader = threading.Thread(
        target=engine.load, args=(model.order(InstanceId("beside")), no_progress)
    )
    loader.start()
    driver.finish()
    loader.join()
    assert running.tokens == alone
    assert [books.instance_id for books in engine.memory()] == ["beside", driver.instance_id]


def test_calls_for_an_instance_that_is_not_there_are_refused(engine: Engine) -> None:
    nobody = InstanceId("nobody")
    request = EngineRequest(
        request_id=RequestId("r"),
        prompt_tokens=PROMPT,
        sampling=SamplingParams(),
    )
    with pytest.raises(EngineError):
        engine.submit(nobody, request)
    with pytest.raises(EngineError):
        engine.step(nobody, 64)
    with pytest.raises(EngineError):
        engine.resize_kv(nobody, 8)
    engine.abort(nobody, RequestId("r"))


def test_close_unloads_everything(engine: Engine, load: LoadInstance) -> None:
    load("a").submit("r", PROMPT)
    load("b")
    engine.close()
    assert engine.memory() == ()
    engine.close()
