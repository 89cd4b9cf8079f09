"""The registry keeps what it acknowledged, through kill -9, and says what ails its file."""

import asyncio
import os
import signal
import sqlite3
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from cattrs.preconf.json import make_converter

from mesh.controller.registry import (
    CLOSE_S_MAX,
    FILE_NAME,
    SCHEMA,
    RegistryWrites,
    SqliteRegistry,
    Statements,
    history_stored,
    profile_stored,
    removed,
    stored,
)
from mesh.domain.deployment import Deployment, DeploymentSpec, Scaling
from mesh.domain.errors import StorageError
from mesh.domain.history import BINS_MAX, CallGaps, OutputHistory
from mesh.domain.ids import DeploymentName, ModelId
from mesh.domain.revision import Revision, RevisionState
from mesh.domain.text import SamplingDefaults, TextAssets
from tests.controller.live import FOOTPRINT, MODEL
from tests.support.profiles import PROFILE, profile

TEXT = TextAssets(
    tokenizer_json=b"\x00{}",
    chat_template="x",
    bos_token="<s>",
    add_bos=True,
    tool_template="t",
    special_tokens='{"pad_token": "<p>"}',
    sampling=SamplingDefaults(temperature=0.6, top_k=20),
)
OLD_TEXT = replace(TEXT, sampling=SamplingDefaults(), tool_template=None, special_tokens="")


def deployment(name: str = "chat", *, model: str = "sha256-1") -> Deployment:
    return Deployment(
        spec=DeploymentSpec(
            name=DeploymentName(name), source="file:///m", scaling=Scaling(keep_alive_s=2.5)
        ),
        model=replace(MODEL, model_id=ModelId(model)),
        context_tokens_max=256,
        footprints=(("openvino", FOOTPRINT),),
    )


@contextmanager
def opened(folder: Path) -> Iterator[SqliteRegistry]:
    registry = SqliteRegistry(folder)
    try:
        yield registry
    finally:
        registry.close()


def test_what_was_stored_is_there_at_the_next_start_and_starts_are_counted(tmp_path: Path) -> None:
    two = (deployment("a"), deployment("b", model="sha256-2"))
    with opened(tmp_path / "new" / "folder") as registry:
        assert (registry.epoch, registry.deployments()) == (1, ())
        for one in reversed(two):
            registry.apply(stored(one, TEXT))
    with opened(tmp_path / "new" / "folder") as registry:
        assert (registry.epoch, registry.deployments()) == (2, two)
        assert registry.text(two[1].model.model_id) == TEXT
        assert registry.text(ModelId("sha256-3")) is None


def test_revisions_are_kept_with_their_texts_until_the_deployment_goes(tmp_path: Path) -> None:
    old, chat = deployment("chat"), DeploymentName("chat")
    made = deployment("chat@2", model="sha256-2")
    new = replace(made, revision=2)
    starts = (Revision(deployment=new, state=RevisionState.STARTING),)
    past = (Revision(deployment=old, state=RevisionState.PAST),)
    with opened(tmp_path) as registry:
        registry.apply(stored(old, TEXT))
        registry.apply(stored(old, OLD_TEXT, starts))
    with opened(tmp_path) as registry:
        assert registry.deployments() == (old,)
        assert registry.revisions() == {chat: starts}
        assert registry.text(new.model.model_id) == OLD_TEXT
        registry.apply(stored(new, None, past))
        assert (registry.deployments(), registry.revisions()) == ((new,), {chat: past})
        registry.apply(stored(new, None))
        assert registry.revisions() == {chat: past}
        assert registry.text(old.model.model_id) == TEXT
        registry.apply(removed(chat))
        assert (registry.deployments(), registry.revisions()) == ((), {})
        assert registry.text(old.model.model_id) is None


def test_a_text_stays_as_long_as_a_deployment_uses_its_model(tmp_path: Path) -> None:
    with opened(tmp_path) as registry:
        registry.apply(stored(deployment("a"), TEXT))
        registry.apply(stored(deployment("b"), TEXT))
        registry.apply(stored(replace(deployment("b"), context_tokens_max=128), None))
        registry.apply(removed(DeploymentName("a")))
        assert registry.text(ModelId("sha256-1")) == TEXT
        assert [d.context_tokens_max for d in registry.deployments()] == [128]
        registry.apply(removed(DeploymentName("b")))
        assert registry.text(ModelId("sha256-1")) is None


def test_a_deployment_is_never_stored_without_the_text_of_its_model(tmp_path: Path) -> None:
    with opened(tmp_path) as registry:
        with pytest.raises(StorageError):
            registry.apply(stored(deployment(), None))
        assert registry.deployments() == ()


def test_profiles_outlive_their_deployments_and_a_later_one_takes_the_place(tmp_path: Path) -> None:
    elsewhere = profile(fingerprint="other/4", scaled_from="a larger model")
    with opened(tmp_path) as registry:
        assert registry.profiles() == ()
        registry.apply(stored(deployment(model=PROFILE.model_id), TEXT))
        for one in (profile(measured_s=9.0), PROFILE, elsewhere):
            registry.apply(profile_stored(one))
        registry.apply(removed(DeploymentName("chat")))
    with opened(tmp_path) as registry:
        assert (registry.deployments(), registry.profiles()) == ((), (elsewhere, PROFILE))


def test_a_history_is_kept_as_long_as_its_deployment(tmp_path: Path) -> None:
    a, b, gone = DeploymentName("a"), DeploymentName("b"), DeploymentName("gone")
    early = OutputHistory(mean_tokens=12.5, count=5)
    late = OutputHistory(mean_tokens=31.0, count=6).called(30.0).called(1e9)
    with opened(tmp_path) as registry:
        assert registry.histories() == {}
        for name in (a, b):
            registry.apply(stored(deployment(name), TEXT))
            registry.apply(history_stored(name, early))
        registry.apply(history_stored(b, late))
        registry.apply(history_stored(gone, late))
        registry.apply(stored(replace(deployment("b"), context_tokens_max=128), None))
    with opened(tmp_path) as registry:
        assert registry.histories() == {a: early, b: late}
        registry.apply(removed(b))
        registry.apply(stored(deployment("b"), TEXT))
    with opened(tmp_path) as registry:
        assert registry.histories() == {a: early}


@pytest.mark.parametrize("gaps", ["{", '{"ended": "x"}', '{"ended": [1, null]}'])
def test_a_damaged_histogram_is_told_as_such(tmp_path: Path, gaps: str) -> None:
    name = DeploymentName("chat")
    with opened(tmp_path) as registry:
        registry.apply(stored(deployment("chat"), TEXT))
        registry.apply(history_stored(name, OutputHistory()))
        registry._connection.execute("UPDATE histories SET gaps = ?", (gaps,))
        with pytest.raises(StorageError, match="times between calls"):
            registry.histories()
        counts = str([1.0] * (BINS_MAX + 9))
        longer = f'{{"ended": {counts}, "reached": {counts}}}'
        registry._connection.execute("UPDATE histories SET gaps = ?", (longer,))
        assert registry.histories()[name].gaps.ended == (1.0,) * BINS_MAX
        earlier = f'{{"weights": {counts}}}'
        registry._connection.execute("UPDATE histories SET gaps = ?", (earlier,))
        assert registry.histories()[name].gaps == CallGaps()


OF_SCHEMA_1 = """
CREATE TABLE starts (epoch INTEGER NOT NULL);
INSERT INTO starts VALUES (7);
CREATE TABLE texts (
    model_id TEXT PRIMARY KEY,
    tokenizer_json BLOB NOT NULL,
    chat_template TEXT,
    bos_token TEXT,
    eos_token TEXT,
    add_bos INTEGER NOT NULL
) STRICT;
CREATE TABLE deployments (
    name TEXT PRIMARY KEY,
    model_id TEXT NOT NULL REFERENCES texts (model_id),
    body TEXT NOT NULL
) STRICT;
INSERT INTO texts VALUES ('sha256-1', x'007b7d', 'x', '<s>', NULL, 1);
PRAGMA user_version = 1;
"""
TO_SCHEMA_2 = """
CREATE TABLE profiles (
    model_id TEXT NOT NULL,
    fingerprint TEXT NOT NULL,
    body TEXT NOT NULL,
    PRIMARY KEY (model_id, fingerprint)
) STRICT;
PRAGMA user_version = 2;
"""


@pytest.mark.parametrize("earlier", [1, 2])
def test_a_file_of_an_earlier_schema_loses_nothing(earlier: int, tmp_path: Path) -> None:
    """1 has no profiles, 1 and 2 have no histories, texts no recommended sampling; deployments were
    on one device and knew nothing of cold starts.
    """
    body = make_converter().dumps(deployment())
    for later in (', "tensor_parallel": 1', ', "cold_start": "late"'):
        assert later in body
        body = body.replace(later, "")
    plain = sqlite3.connect(tmp_path / FILE_NAME)
    plain.executescript(OF_SCHEMA_1 if earlier == 1 else OF_SCHEMA_1 + TO_SCHEMA_2)
    with plain:
        plain.execute("INSERT INTO deployments VALUES ('chat', 'sha256-1', ?)", (body,))
    plain.close()
    with opened(tmp_path) as registry:
        assert (registry.epoch, registry.deployments()) == (8, (deployment(),))
        assert (registry.text(ModelId("sha256-1")), registry.profiles()) == (OLD_TEXT, ())
        assert registry.histories() == {}
        registry.apply(profile_stored(PROFILE))
        registry.apply(history_stored(DeploymentName("chat"), OutputHistory()))
    with opened(tmp_path) as registry:
        assert (registry.epoch, registry.profiles()) == (9, (PROFILE,))
        assert registry.histories() == {DeploymentName("chat"): OutputHistory()}


KILLED = """
import os, signal, sys
from pathlib import Path
from mesh.controller.registry import SqliteRegistry, removed, stored
from mesh.domain.ids import DeploymentName
from tests.controller.test_registry import TEXT, deployment
registry = SqliteRegistry(Path(sys.argv[1]))
for n in range(3):
    registry.apply(stored(deployment(f"d{n}"), TEXT))
registry.apply(removed(DeploymentName("d1")))
os.write(1, b"acknowledged")
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_what_was_acknowledged_survives_kill_9(tmp_path: Path) -> None:
    """The child dies right after the acknowledgement: everything is still in the WAL then."""
    child = subprocess.run(
        [sys.executable, "-c", KILLED, str(tmp_path)], capture_output=True, check=False
    )
    assert (child.stdout, child.returncode) == (b"acknowledged", -signal.SIGKILL), child.stderr
    assert (tmp_path / f"{FILE_NAME}-wal").stat().st_size > 0
    with opened(tmp_path) as registry:
        assert registry.deployments() == (deployment("d0"), deployment("d2"))
        assert registry.epoch == 2


def test_a_torn_end_of_the_wal_takes_back_only_what_it_held(tmp_path: Path) -> None:
    """As a power cut within a write leaves it."""
    child = subprocess.run(
        [sys.executable, "-c", KILLED, str(tmp_path)], capture_output=True, check=False
    )
    assert child.returncode == -signal.SIGKILL
    wal = tmp_path / f"{FILE_NAME}-wal"
    os.truncate(wal, wal.stat().st_size - 100)
    with opened(tmp_path) as registry:
        names = [str(d.spec.name) for d in registry.deployments()]
    assert names in (["d0", "d1", "d2"], ["d0", "d2"])


def test_two_controllers_cannot_share_a_folder(tmp_path: Path) -> None:
    with opened(tmp_path), pytest.raises(StorageError, match="in use by another controller") as it:
        SqliteRegistry(tmp_path)
    assert "--home" in it.value.hint
    with opened(tmp_path) as registry:
        assert registry.epoch == 2, "the one that was turned away did not count"


def test_a_full_disk_refuses_the_write_and_keeps_the_rest(tmp_path: Path) -> None:
    with opened(tmp_path) as registry:
        registry.apply(stored(deployment("a"), TEXT))
        (pages,) = registry._connection.execute("PRAGMA page_count").fetchone()
        registry._connection.execute(f"PRAGMA max_page_count = {pages}")
        large = replace(TEXT, tokenizer_json=bytes(1 << 20))
        with pytest.raises(StorageError, match="full") as caught:
            registry.apply(stored(deployment("b", model="sha256-2"), large))
        assert "free space" in caught.value.hint
        registry.apply(removed(DeploymentName("a")))
    with opened(tmp_path) as registry:
        assert registry.deployments() == ()


@pytest.mark.parametrize("damage", [b"not a database at all", b""])
def test_a_file_that_is_no_database_is_left_alone(tmp_path: Path, damage: bytes) -> None:
    """An empty one is as good as none."""
    path = tmp_path / FILE_NAME
    path.write_bytes(damage * 100)
    if not damage:
        with opened(tmp_path) as registry:
            assert registry.epoch == 1
        return
    with pytest.raises(StorageError, match="not a database") as caught:
        SqliteRegistry(tmp_path)
    assert "move it away" in caught.value.hint
    assert path.read_bytes() == damage * 100


def test_damage_inside_the_file_is_found_at_the_start(tmp_path: Path) -> None:
    with opened(tmp_path) as registry:
        for n in range(50):
            registry.apply(stored(deployment(f"d{n}", model=f"sha256-{n}"), TEXT))
    path = tmp_path / FILE_NAME
    raw = bytearray(path.read_bytes())
    for page in range(4096, len(raw), 4096):
        raw[page : page + 64] = bytes(64)
    path.write_bytes(raw)
    with pytest.raises(StorageError) as caught:
        SqliteRegistry(tmp_path)
    assert "move it away" in caught.value.hint


def test_a_newer_schema_and_a_strange_body_are_told(tmp_path: Path) -> None:
    with opened(tmp_path) as registry:
        registry.apply(stored(deployment(), TEXT))
    path = tmp_path / FILE_NAME
    with sqlite3.connect(path) as plain:
        plain.execute("UPDATE deployments SET body = '{}'")
    plain.close()
    with (
        opened(tmp_path) as registry,
        pytest.raises(StorageError, match="no valid deployment under 'chat'") as it,
    ):
        registry.deployments()
    assert str(path) in it.value.message
    assert "move it away" in it.value.hint
    with sqlite3.connect(path) as plain:
        plain.execute(f"PRAGMA user_version = {SCHEMA + 1}")
    plain.close()
    with pytest.raises(StorageError, match=f"has schema {SCHEMA + 1}; this mesh knows up to"):
        SqliteRegistry(tmp_path)


@pytest.mark.parametrize(
    "damage",
    [
        "body = '{}'",
        "body = substr(body, 1, 40)",
        "body = replace(body, '\"survey\"', '\"of a later version\"')",
        "body = json_set(body, '$.prefill.rows', json('[]'))",
        "body = json_set(body, '$.prefill.rows', json('[256, 1]'))",
        "body = json_set(body, '$.decode.seconds', json('[[1.0]]'))",
        "body = json_set(body, '$.decode.seconds[0][0]', -1.0)",
        "body = replace(body, '0.0', 'NaN')",
        "body = json_set(body, '$.cores', 1e30)",
    ],
)
def test_a_profile_that_cannot_be_read_is_left_out_and_told(
    tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    other = replace(PROFILE, fingerprint="other")
    with opened(tmp_path) as registry:
        registry.apply((*profile_stored(PROFILE), *profile_stored(other)))
    path = tmp_path / FILE_NAME
    with sqlite3.connect(path) as plain:
        changed = plain.execute(f"UPDATE profiles SET {damage} WHERE fingerprint = 'test/2'")
        assert changed.rowcount == 1
    plain.close()
    with opened(tmp_path) as registry:
        assert registry.profiles() == (other,)
    (record,) = caplog.records
    assert f"on 'test/2' in {path} is left out" in record.message


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match=r"cannot make the state folder .*file/home") as caught:
        SqliteRegistry(tmp_path / "file" / "home")
    assert "MESH_HOME" in caught.value.hint


@contextmanager
def as_nobody() -> Iterator[None]:
    """Root may write anywhere: be somebody else, where we are root."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


def test_a_folder_that_is_not_writable_is_named() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o555)
        with as_nobody(), pytest.raises(StorageError, match=r"registry\.sqlite3") as caught:
            SqliteRegistry(folder)
        assert "writable" in caught.value.hint
        folder.chmod(0o755)


async def test_a_write_that_cannot_be_made_holds_up_none_after_it(tmp_path: Path) -> None:
    registry = SqliteRegistry(tmp_path)
    writes, chat = RegistryWrites(registry), DeploymentName("chat")
    told: list[StorageError | None] = []
    writes.store(deployment(), TEXT, None, told.append)
    writes.store_history(chat, OutputHistory(mean_tokens=1.0, count=1 << 70))
    writes.store_profile(PROFILE)
    writes.store(deployment("b"), TEXT, None, told.append)
    writes.store(deployment("c", model="\ud800"), TEXT, None, told.append)
    writes.remove(DeploymentName("b"), told.append)
    async with asyncio.timeout(30):
        await writes.close()
    assert [None if error is None else type(error) for error in told] == [
        *(None, None, StorageError, None)
    ]
    assert "UnicodeEncodeError" in str(told[2])
    assert (registry.profiles(), registry.histories()) == ((PROFILE,), {})
    await registry.end()


class _OnASlowDisk(SqliteRegistry):
    async def commit(self, statements: Statements) -> None:
        await asyncio.sleep(CLOSE_S_MAX / 5)
        await super().commit(statements)


async def test_a_slow_disk_keeps_all_that_waits_when_the_controller_ends(tmp_path: Path) -> None:
    registry = _OnASlowDisk(tmp_path)
    names = [f"chat-{n}" for n in range(20)]
    for name in names:
        registry.apply(stored(deployment(name), TEXT))
    writes, history = RegistryWrites(registry), OutputHistory(mean_tokens=1.0, count=1)
    for name in names:
        writes.store_history(DeploymentName(name), history)
    await writes.close()
    assert list(registry.histories()) == sorted(names)
    await registry.end()
