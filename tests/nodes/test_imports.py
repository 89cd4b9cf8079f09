"""Imports on a node are shared and bounded, and can be stopped."""

import threading
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from mesh.domain.errors import Cancelled, ModelError, TornModel, Unavailable, UnsupportedModel
from mesh.domain.ids import ModelId
from mesh.domain.model import ModelInfo, WeightPrecision
from mesh.runtime.engine import Progress
from mesh_nodes import imports as imports_module
from mesh_nodes.imports import IMPORTS_AT_ONCE_MAX, Imports, TriedImports
from tests.support.profiles import MODEL
from tests.text.conftest import tiny_assets

WAIT_S = 60.0
LOOP = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"


def model_info(model_id: str = "sha256-0123456789abcdef", source: str = "file:///m") -> ModelInfo:
    return replace(MODEL, model_id=ModelId(model_id), source=source)


@dataclass(frozen=True)
class StoredHere:
    path: Path
    info: ModelInfo


@dataclass
class Importer:
    """Imports at the test's word: each call waits for `release`, unless it is stopped."""

    release: threading.Event = field(default_factory=threading.Event)
    begun: list[str] = field(default_factory=list)
    at_once: int = 0
    at_once_max: int = 0
    changed: threading.Condition = field(default_factory=threading.Condition)
    error: Exception | None = None
    model_id: str = "sha256-0123456789abcdef"

    def __call__(
        self,
        source: str,
        progress: Progress,
        stop: threading.Event,
        weights: WeightPrecision | None = None,
    ) -> StoredHere:
        with self.changed:
            self.begun.append(source)
            self.at_once += 1
            self.at_once_max = max(self.at_once_max, self.at_once)
            self.changed.notify_all()
        try:
            while not self.release.wait(0.002):
                if stop.is_set():
                    raise Cancelled(f"the import of {source} was stopped")
            if self.error is not None:
                raise self.error
            progress("write", 1.0)
            return StoredHere(Path("/store") / source, model_info(self.model_id, source))
        finally:
            with self.changed:
                self.at_once -= 1
                self.changed.notify_all()

    def wait_begun(self, count: int) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: len(self.begun) >= count, WAIT_S)


@pytest.fixture
def importer() -> Iterator[Importer]:
    importer = Importer()
    yield importer
    importer.release.set()


@pytest.fixture
def imports(importer: Importer) -> Iterator[Imports]:
    imports = Imports(importer)
    yield imports
    assert imports.close(timeout_s=WAIT_S), "an import thread did not end"


def silent(phase: str, share: float) -> None:
    """Progress that nobody reads."""


def test_two_of_one_source_share_one_import(imports: Imports, importer: Importer) -> None:
    heard: list[tuple[int, str]] = []
    first = imports.join("a", lambda phase, _: heard.append((1, phase)))
    second = imports.join("a", lambda phase, _: heard.append((2, phase)))
    importer.release.set()
    assert first.outcome.result(WAIT_S) is second.outcome.result(WAIT_S)
    assert importer.begun == ["a"]
    assert sorted(heard) == [(1, "write"), (2, "write")]


def test_a_source_that_ended_is_imported_anew(imports: Imports, importer: Importer) -> None:
    importer.release.set()
    imports.join("a", silent).outcome.result(WAIT_S)
    imports.join("a", silent).outcome.result(WAIT_S)
    assert importer.begun == ["a", "a"]


def test_few_run_at_once_and_the_others_follow(imports: Imports, importer: Importer) -> None:
    tickets = [imports.join(source, silent) for source in "abcdef"]
    importer.wait_begun(IMPORTS_AT_ONCE_MAX)
    importer.release.set()
    for ticket in tickets:
        ticket.outcome.result(WAIT_S)
    assert sorted(importer.begun) == list("abcdef")
    assert importer.at_once_max == IMPORTS_AT_ONCE_MAX


def test_more_than_may_wait_are_refused(
    imports: Imports, importer: Importer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(imports_module, "IMPORTS_WAITING_MAX", 1)
    for n in range(IMPORTS_AT_ONCE_MAX + 1):
        imports.join(f"m{n}", silent)
    with pytest.raises(Unavailable, match="1 imports wait already"):
        imports.join("one-more", silent)
    imports.join("m0", silent)  # joins what runs: takes no place


def test_it_stops_only_when_the_last_has_left(imports: Imports, importer: Importer) -> None:
    first, second = imports.join("a", silent), imports.join("a", silent)
    importer.wait_begun(1)
    imports.cancel(first)
    imports.cancel(first)
    assert not first.job.stop.is_set()
    imports.cancel(second)
    with pytest.raises(Cancelled):
        second.outcome.result(WAIT_S)


def test_one_that_waits_can_be_stopped_at_once(imports: Imports, importer: Importer) -> None:
    running = [imports.join(f"m{n}", silent) for n in range(IMPORTS_AT_ONCE_MAX)]
    importer.wait_begun(IMPORTS_AT_ONCE_MAX)
    waiting = imports.join("waits", silent)
    imports.cancel(waiting)
    with pytest.raises(Cancelled):
        waiting.outcome.result(WAIT_S)
    importer.release.set()
    for ticket in running:
        ticket.outcome.result(WAIT_S)
    assert "waits" not in importer.begun


def test_errors_reach_every_party_and_unexpected_ones_are_model_errors(
    imports: Imports, importer: Importer, caplog: pytest.LogCaptureFixture
) -> None:
    importer.release.set()
    importer.error = TornModel("model.gguf ends early")
    with pytest.raises(TornModel, match="ends early"):
        imports.join("a", silent).outcome.result(WAIT_S)
    importer.error = KeyError("general.architecture")
    with pytest.raises(ModelError, match="import of a failed: KeyError"):
        imports.join("a", silent).outcome.result(WAIT_S)
    assert "Traceback" in caplog.text


def test_close_ends_what_runs_and_what_waits(importer: Importer) -> None:
    imports = Imports(importer)
    tickets = [imports.join(f"m{n}", silent) for n in range(IMPORTS_AT_ONCE_MAX + 2)]
    importer.wait_begun(IMPORTS_AT_ONCE_MAX)
    assert imports.close(timeout_s=WAIT_S)
    for ticket in tickets:
        with pytest.raises(Cancelled):
            ticket.outcome.result(WAIT_S)
    with pytest.raises(Unavailable, match="stopping"):
        imports.join("late", silent)


def test_what_is_to_be_held_otherwise_is_an_import_of_its_own() -> None:
    """Which one of them may refuse."""
    seen: list[WeightPrecision | None] = []

    def import_source(
        source: str, progress: Progress, stop: threading.Event, weights: WeightPrecision | None
    ) -> StoredHere:
        seen.append(weights)
        return StoredHere(Path("/store"), model_info())

    imports = Imports(import_source)
    for weights in (None, WeightPrecision.I4):
        imports.join("s3://models/ir", silent, weights).outcome.result(WAIT_S)
    assert seen == [None, WeightPrecision.I4]
    assert imports.close(timeout_s=WAIT_S)


def test_a_model_whose_texts_fail_their_trial_is_not_imported(tmp_path: Path) -> None:
    """The reason says which limit; a trial that is stopped ends soon."""
    (tmp_path / "tokenizer.json").write_bytes(tiny_assets().tokenizer_json)
    calls: list[str] = []

    def import_source(source: str, progress: Progress, *_: object) -> StoredHere:
        calls.append(source)
        return StoredHere(tmp_path, model_info())

    tried, go_on = TriedImports(import_source), threading.Event()
    (tmp_path / "chat_template.jinja").write_text(LOOP)
    with pytest.raises(UnsupportedModel, match=r"took more than .*, which is the limit"):
        tried("file:///m", lambda phase, share: None, go_on)
    stop = threading.Event()
    with pytest.raises(Cancelled):
        tried("file:///m", lambda phase, share: stop.set(), stop)
    (tmp_path / "chat_template.jinja").write_text("{% set x = 1 %}{{ messages[0].content }}")
    phases: list[str] = []
    for _ in range(2):
        tried("file:///m", lambda phase, share: phases.append(phase), go_on)
    assert phases == ["trying its texts"], "what has passed is not tried again"
    assert calls == ["file:///m"] * 4
