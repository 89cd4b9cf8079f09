"""A node reads the energy counters of its packages or its GPU, and says what it cannot read."""

from functools import partial
from pathlib import Path

import pytest

from mesh.domain.energy import EnergySource
from mesh_nodes import energy
from mesh_nodes.energy import Rapl, energy_counter
from mesh_nodes.gpus import Gpus
from mesh_nodes.topology import packages_of
from tests.support.nvml import FakeNvml

RANGE_UJ = 262_143_328_850


def zone(folder: Path, number: str, name: str, uj: int) -> Path:
    made = folder / f"intel-rapl:{number}"
    made.mkdir(exist_ok=True)
    for file, text in (("name", name), ("energy_uj", uj), ("max_energy_range_uj", RANGE_UJ)):
        (made / file).write_text(f"{text}\n")
    return made


@pytest.fixture
def powercap(tmp_path: Path) -> Path:
    """Two packages with their memory, the cores of one, and the whole platform."""
    named = [("0", "package-0"), ("0:0", "core"), ("0:1", "dram"), ("1", "package-1")]
    for number, name in (*named, ("1:0", "dram"), ("2", "psys")):
        zone(tmp_path, number, name, 5)
    return tmp_path


def test_packages_and_their_memory_are_counted_and_nothing_twice(powercap: Path) -> None:
    both, second = Rapl(frozenset(), powercap), Rapl(frozenset({1}), powercap)
    assert (both().joules, second().joules) == (0.0, 0.0)
    for path in powercap.iterdir():
        (path / "energy_uj").write_text("3000005\n")
    assert (both().joules, second().joules) == (12.0, 6.0)
    assert both().source is EnergySource.RAPL


def test_a_counter_that_wraps_goes_on(powercap: Path) -> None:
    rapl = Rapl(frozenset({0}), powercap)
    zone(powercap, "0", "package-0", RANGE_UJ - 1_000_000)
    rapl()
    zone(powercap, "0", "package-0", 500_000)
    assert rapl().joules == pytest.approx(1.5)


def test_what_cannot_be_read_is_none_with_the_reason_and_not_0(powercap: Path) -> None:
    (powercap / "intel-rapl:0" / "energy_uj").unlink()
    reading = Rapl(frozenset(), powercap)()
    assert (reading.source, reading.joules) == (None, None)
    assert "intel-rapl:0: the RAPL counter cannot be read: No such file" in reading.reason
    empty = powercap / "none"
    assert Rapl(frozenset(), empty)().reason == f"there is no RAPL counter in {empty}"


def test_packages_are_those_of_the_usable_cpus(tmp_path: Path) -> None:
    for cpu, package in ((0, 0), (1, 1), (2, 1)):
        folder = tmp_path / "cpu" / f"cpu{cpu}" / "topology"
        folder.mkdir(parents=True)
        (folder / "physical_package_id").write_text(f"{package}\n")
    assert packages_of({1, 2}, tmp_path) == {1}
    assert packages_of({7}, tmp_path) == frozenset()


def test_a_gpus_counter_is_its_drivers(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = FakeNvml(("A100", 80 << 30, 0, (8, 0)))
    gpus = Gpus(lambda: nvml)
    monkeypatch.setattr(energy, "Gpus", lambda: gpus)
    read = energy_counter(gpus.gpu(0))
    assert "nvmlDeviceGetTotalEnergyConsumption gave error 3" in read().reason
    nvml.energy_mj = 1500
    assert (read().source, read().joules) == (EnergySource.NVML, 1.5)
    monkeypatch.setattr(energy, "Gpus", partial(Gpus, lambda: FakeNvml(init_code=9)))
    assert "does not answer" in energy_counter(gpus.gpu(0))().reason
