"""The energy counter of a node's device: RAPL's of its CPU packages, NVML's of its GPU.

A package's counter, with that of its memory, is of all that runs there: nodes that share a package
count it each. Reading one never fails a node: what it cannot read it says. Before: the kernel's
powercap folder, or the driver. After: the agent's heartbeats.
"""

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path

from mesh.domain.energy import EnergyReading, EnergySource
from mesh.domain.errors import MeshError
from mesh_nodes.gpus import Gpu, Gpus
from mesh_nodes.kernel_files import read
from mesh_nodes.topology import packages_of, usable_cpus

POWERCAP = Path("/sys/class/powercap")


def energy_counter(gpu: Gpu | None) -> Callable[[], EnergyReading]:
    """What reads the counter of this GPU, or of the CPU packages that the process may use."""
    if gpu is None:
        return Rapl(packages_of(usable_cpus()))
    try:
        return partial(_of_gpu, Gpus(), gpu)
    except MeshError as error:
        return partial(EnergyReading, reason=error.message)


def _of_gpu(gpus: Gpus, gpu: Gpu) -> EnergyReading:
    try:
        return EnergyReading(source=EnergySource.NVML, joules=gpus.energy_j(gpu))
    except MeshError as error:
        return EnergyReading(reason=error.message)


class Rapl:
    """The counters of these packages, or of all where the kernel does not tell which it uses."""

    def __init__(self, packages: frozenset[int], folder: Path = POWERCAP) -> None:
        self._folder = folder
        self._zones = [zone for zone in sorted(folder.glob("intel-rapl:*")) if _of(zone, packages)]
        self._last_uj: dict[Path, int] = {}
        self._taken_uj = 0

    def __call__(self) -> EnergyReading:
        if not self._zones:
            return EnergyReading(reason=f"there is no RAPL counter in {self._folder}")
        zone = self._zones[0]
        try:
            for zone in self._zones:
                now_uj = int((zone / "energy_uj").read_text())
                wraps_at_uj = int((zone / "max_energy_range_uj").read_text())
                self._taken_uj += (now_uj - self._last_uj.get(zone, now_uj)) % max(wraps_at_uj, 1)
                self._last_uj[zone] = now_uj
        except (OSError, ValueError) as error:
            why = error.strerror if isinstance(error, OSError) else error
            return EnergyReading(reason=f"{zone}: the RAPL counter cannot be read: {why}")
        return EnergyReading(source=EnergySource.RAPL, joules=self._taken_uj / 1e6)


def _of(zone: Path, packages: frozenset[int]) -> bool:
    """Whether it is a package or the memory of one: the cores' counter is part of the package's,
    and the platform's holds both.
    """
    package = zone.with_name(":".join(zone.name.split(":")[:2]))
    found = re.match(r"package-(\d+)", read(package / "name"))
    if found is None or (packages and int(found[1]) not in packages):
        return False
    return zone == package or read(zone / "name").strip() == "dram"
