"""Load times that outlive their node: what it states when it starts again."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from mesh.compute.load_times import LOADS_KEPT
from mesh.domain.ids import InstanceId
from mesh.domain.messages import InstanceLoaded
from mesh.domain.model import Footprint
from mesh.domain.steps import LoadRate, LoadTier
from mesh_nodes.kept_loads import FOLDER, KeptLoads

FINGERPRINT = "cpu/some-cpu/2-threads/avx2/engine-1"
MIB = 1 << 20
RATE = LoadRate(fixed_s=0.75, bytes_per_s=0.25e9)


def loaded(
    mebibytes: int, seconds: float, tier: LoadTier = LoadTier.DISK, computed_s: float = 0.0
) -> InstanceLoaded:
    return InstanceLoaded(
        instance_id=InstanceId("i"),
        footprint=Footprint(weights_bytes=mebibytes * MIB, kv_block_bytes=MIB, block_tokens=32),
        kv_blocks=1,
        elapsed_s=seconds,
        tier=tier,
        computed_s=computed_s,
    )


def test_the_next_node_of_its_kind_states_what_loads_took(tmp_path: Path) -> None:
    first = KeptLoads(tmp_path, FINGERPRINT)
    assert not first
    assert first.rates() == ()
    for size in (100, 1000, 2000):
        first.note(loaded(size, 1.0 + size / 1000))
    first.note(loaded(1000, 0.25, LoadTier.HOST))
    first.note(replace(loaded(1000, 0.01), swapped=True))
    again = KeptLoads(tmp_path, FINGERPRINT)
    assert again
    assert again.rates() == first.rates()
    (_, from_disk), (tier, woken) = again.rates()
    assert from_disk.fixed_s == pytest.approx(1.0)
    assert from_disk.bytes_per_s == pytest.approx(1000 * MIB)
    assert tier is LoadTier.HOST
    assert woken.load_s(1000 * MIB) == pytest.approx(0.25)
    other = KeptLoads(tmp_path, FINGERPRINT.replace("engine-1", "engine-2"))
    assert not other, "another version of the engine"
    other.note(loaded(1000, 0.25, LoadTier.HOST))
    assert not other, "it says nothing of what the store has"
    other.note(loaded(1000, 0.5, LoadTier.CACHED))
    assert other


def test_what_was_measured_is_stated_until_a_load_has_shown(tmp_path: Path) -> None:
    KeptLoads(tmp_path, FINGERPRINT).note_measured({LoadTier.DISK: RATE})
    kept = KeptLoads(tmp_path, FINGERPRINT)
    assert not kept, "it would be measured again"
    assert kept.rates() == ((LoadTier.DISK, RATE),)
    kept.note(loaded(100, 2.0 * RATE.load_s(100 * MIB)))
    ((_, rate),) = KeptLoads(tmp_path, FINGERPRINT).rates()
    assert rate.fixed_s == pytest.approx(2.0 * RATE.fixed_s)


@pytest.mark.parametrize("slowdown", [0.5, 1.5])
def test_what_ran_beside_a_load_is_no_part_of_it(tmp_path: Path, slowdown: float) -> None:
    """Whatever the node states of it: loads of one tier tell, and those of others go by them."""
    kept = KeptLoads(tmp_path, FINGERPRINT, busy_load_factor=1.5)
    for size in (100, 1000, 2000):
        alone_s = 1.0 + size / 1000
        for share in (0.0, 0.5, 1.0):
            seconds = alone_s * (1.0 + slowdown * share)
            kept.note(loaded(size, seconds, computed_s=share * seconds))
    beside_s = 0.25 * (1.0 + slowdown)
    kept.note(loaded(1000, beside_s, LoadTier.HOST, computed_s=beside_s))
    (_, from_disk), (_, woken) = KeptLoads(tmp_path, FINGERPRINT, busy_load_factor=1.5).rates()
    for size in (100, 2000):
        assert from_disk.load_s(size * MIB) == pytest.approx(1.0 + size / 1000, rel=0.1)
    assert woken.load_s(1000 * MIB) == pytest.approx(0.25, rel=0.1)


def test_loads_with_nothing_known_beside_are_taken_as_they_are(tmp_path: Path) -> None:
    KeptLoads(tmp_path, FINGERPRINT).note(loaded(100, 1.0))
    (file,) = (tmp_path / FOLDER).iterdir()
    file.write_text(f'{{"measured": {{}}, "loads": {{"disk": [[{MIB}, 2.0]]}}}}')
    ((_, rate),) = KeptLoads(tmp_path, FINGERPRINT, busy_load_factor=1.5).rates()
    assert rate.load_s(MIB) == pytest.approx(2.0)


def test_no_more_than_the_last_loads_are_kept(tmp_path: Path) -> None:
    kept = KeptLoads(tmp_path, FINGERPRINT)
    for seconds in [9.0] * 3 + [1.0] * LOADS_KEPT:
        kept.note(loaded(100, seconds))
    (file,) = (tmp_path / FOLDER).iterdir()
    assert [s for _, s, _ in json.loads(file.read_text())["loads"]["disk"]] == [1.0] * LOADS_KEPT


@pytest.mark.parametrize(
    "torn",
    [
        *("", '{"loads": {"disk": [[1', "[]", "{}", '{"loads": {"tape": [[1, 1.0]]}}'),
        '{"measured": {}, "loads": {"disk": [[1048576, -1.0]]}}',
        '{"measured": {}, "loads": {"disk": [[1048576, 1.0, 1.5]]}}',
        '{"measured": {"disk": [0.5]}, "loads": {}}',
        '{"measured": {"disk": [0.5, 0.0]}, "loads": {}}',
    ],
)
def test_a_torn_file_is_as_none_and_the_next_load_mends_it(tmp_path: Path, torn: str) -> None:
    KeptLoads(tmp_path, FINGERPRINT).note(loaded(100, 1.0))
    (file,) = (tmp_path / FOLDER).iterdir()
    file.write_text(torn)
    kept = KeptLoads(tmp_path, FINGERPRINT)
    assert (bool(kept), kept.rates()) == (False, ())
    kept.note(loaded(100, 2.0))
    assert KeptLoads(tmp_path, FINGERPRINT)


def test_a_home_that_cannot_be_written_makes_it_forget_and_nothing_else(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / FOLDER).write_text("in the way")
    kept = KeptLoads(tmp_path, FINGERPRINT)
    kept.note(loaded(100, 1.0))
    assert kept
    assert "load times are not kept" in caplog.text


def test_a_write_that_fails_leaves_nothing_behind(tmp_path: Path) -> None:
    kept = KeptLoads(tmp_path, FINGERPRINT)
    kept.note(loaded(100, 1.0))
    (file,) = (tmp_path / FOLDER).iterdir()
    file.unlink()
    (file / "in the way").mkdir(parents=True)
    kept.note(loaded(100, 1.0))
    assert list((tmp_path / FOLDER).iterdir()) == [file]
