"""What holds of a registry in SQLite holds of one in PostgreSQL."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mesh.cli.verbs.state import copied
from mesh.controller.registry import (
    TABLES,
    RegistryWrites,
    SqliteRegistry,
    history_stored,
    profile_stored,
    stored,
)
from mesh.domain.errors import AlreadyExists, InvalidInput, StorageError, Unavailable
from mesh.domain.history import OutputHistory
from mesh.domain.ids import DeploymentName, ModelId
from mesh.domain.revision import Revision, RevisionState
from tests.cluster.conftest import Opened, leading, postgres, settled, written
from tests.controller.test_registry import OLD_TEXT, TEXT, deployment
from tests.support.postgres_server import PASSWORD, PostgresServer
from tests.support.profiles import PROFILE, profile

A, B, CHAT = DeploymentName("a"), DeploymentName("b"), DeploymentName("chat")


@pytest.mark.parametrize(
    ("environ", "outcome"), [({}, pytest.skip.Exception), ({"CI": "true"}, pytest.fail.Exception)]
)
def test_ci_fails_without_postgresql(
    environ: dict[str, str], outcome: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others skip what needs it."""
    monkeypatch.setattr("tests.cluster.conftest.binaries", lambda: None)
    monkeypatch.delenv("CI", raising=False)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(outcome, match="apt-get install postgresql"):
        postgres()


async def store(writes: RegistryWrites, *what: Any) -> None:
    await written(writes.store, *(*what, None)[:3])


async def test_what_was_stored_is_there_at_the_next_start_and_epochs_rise(opened: Opened) -> None:
    two = (deployment("a"), deployment("b", model="sha256-2"))
    async with opened() as database:
        first = database.epoch
        assert database.tables.deployments() == ()
        for one in reversed(two):
            await store(RegistryWrites(database), one, TEXT)
        assert database.tables.deployments() == two
    async with opened() as database:
        assert database.epoch > first
        assert database.tables.deployments() == two
        assert database.tables.text(two[1].model.model_id) == TEXT
        assert database.tables.text(ModelId("sha256-3")) is None


async def test_revisions_are_kept_with_their_texts_until_the_deployment_goes(
    opened: Opened,
) -> None:
    old, new = deployment(), replace(deployment("chat@2", model="sha256-2"), revision=2)
    starts = (Revision(deployment=new, state=RevisionState.STARTING),)
    past = (Revision(deployment=old, state=RevisionState.PAST),)
    async with opened() as database:
        writes = RegistryWrites(database)
        await store(writes, old, TEXT)
        await store(writes, old, OLD_TEXT, starts)
    async with opened() as database:
        writes, tables = RegistryWrites(database), database.tables
        assert (tables.deployments(), tables.revisions()) == ((old,), {CHAT: starts})
        assert tables.text(new.model.model_id) == OLD_TEXT
        await store(writes, new, None, past)
        await store(writes, new, None)
        assert (tables.deployments(), tables.revisions()) == ((new,), {CHAT: past})
        assert tables.text(old.model.model_id) == TEXT
        await written(writes.remove, CHAT)
    async with opened() as database:
        tables = database.tables
        assert (tables.deployments(), tables.revisions()) == ((), {})
        assert tables.text(old.model.model_id) is None


async def test_a_name_that_begins_another_one_is_not_touched_with_it(opened: Opened) -> None:
    async with opened() as database:
        writes = RegistryWrites(database)
        for name in ("chat", "chat-2", "chat_"):
            await store(writes, deployment(name), TEXT)
        await store(writes, deployment("chat@2"), TEXT)
        names = [one.spec.name for one in database.tables.deployments()]
        assert names == ["chat-2", "chat@2", "chat_"]
        await written(writes.remove, CHAT)
        names = [one.spec.name for one in database.tables.deployments()]
        assert names == ["chat-2", "chat_"]


async def test_a_deployment_is_never_stored_without_the_text_of_its_model(opened: Opened) -> None:
    async with opened() as database:
        with pytest.raises(StorageError):
            await store(RegistryWrites(database), deployment(), None)
        assert database.tables.deployments() == ()
        await store(RegistryWrites(database), deployment(), TEXT)


async def test_profiles_outlive_their_deployments_and_a_later_one_takes_the_place(
    opened: Opened,
) -> None:
    elsewhere = profile(fingerprint="other/4", scaled_from="a larger model")
    async with opened() as database:
        writes = RegistryWrites(database)
        await store(writes, deployment(model=PROFILE.model_id), TEXT)
        for one in (profile(measured_s=9.0), PROFILE, elsewhere):
            await written(writes.store_profile, one)
        await written(writes.remove, CHAT)
    async with opened() as database:
        assert database.tables.deployments() == ()
        assert database.tables.profiles() == (elsewhere, PROFILE)


async def test_a_history_is_kept_as_long_as_its_deployment(opened: Opened) -> None:
    early = OutputHistory(mean_tokens=12.5, count=5)
    late = OutputHistory(mean_tokens=31.0, count=6).called(30.0).called(1e9)
    async with opened() as database:
        writes = RegistryWrites(database)
        for name in (A, B):
            await store(writes, deployment(name), TEXT)
            writes.store_history(name, early)
        writes.store_history(B, late)
        writes.store_history(DeploymentName("gone"), late)
        await store(writes, replace(deployment("b"), context_tokens_max=128), None)
        writes.store_profile(PROFILE)
        await settled(writes)
    async with opened() as database:
        assert database.tables.histories() == {A: early, B: late}
        assert database.tables.profiles() == (PROFILE,)
        writes = RegistryWrites(database)
        await written(writes.remove, B)
        await store(writes, deployment("b"), TEXT)
    async with opened() as database:
        assert database.tables.histories() == {A: early}


async def test_a_registry_that_is_copied_there_and_back_is_the_same(
    server: PostgresServer, cell: str, tmp_path: Path
) -> None:
    here, back, url = tmp_path / "here", tmp_path / "back", server.url(cell)
    old, new = deployment(), replace(deployment("chat@2", model="sha256-2"), revision=2)
    started = (Revision(deployment=new, state=RevisionState.STARTING),)
    registry = SqliteRegistry(here / "controller")
    for write in (
        *(stored(old, TEXT), stored(old, OLD_TEXT, started)),
        stored(deployment("b", model="sha256-3"), replace(TEXT, tokenizer_json=bytes(1 << 20))),
        profile_stored(PROFILE),
        history_stored(CHAT, OutputHistory(mean_tokens=0.1, count=5).called(30.0)),
    ):
        registry.apply(write)
    held = {table: registry.rows(table) for table in TABLES}
    registry.close()
    told = await copied(str(here), url)
    counts = "3 texts, 2 deployments, 1 profiles, 1 histories, 1 revisions"
    assert told.startswith(f"copied      {counts}, from {here}")
    assert PASSWORD not in told
    with pytest.raises(AlreadyExists, match="holds 3 texts"):
        await copied(str(here), url)
    await copied(url, str(back))
    registry = SqliteRegistry(back / "controller")
    assert {table: registry.rows(table) for table in TABLES} == held
    assert registry.epoch > 3, "each of the three that opened it counts"
    registry.close()
    async with leading(url, "there:7070"):
        with pytest.raises(Unavailable, match="there:7070 leads the cell"):
            await copied(url, str(tmp_path / "late"))
    with pytest.raises(InvalidInput, match="is no state folder"):
        await copied(str(tmp_path / "nothing"), url)
