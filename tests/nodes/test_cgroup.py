"""The limits of control groups, read from a made-up /proc and /sys."""

from pathlib import Path

import pytest

from mesh_nodes.hardware import CgroupLimits, cgroup_limits

V2_OPTIONS = "cgroup2 cgroup2 rw,nsdelegate"


def _proc(root: Path, *, group: str, mounts: list[tuple[str, Path, str]]) -> Path:
    """A /proc/self: membership lines, and mounts as (root of the mount, mount point, options)."""
    folder = root / "proc"
    folder.mkdir()
    (folder / "cgroup").write_text(group)
    lines = []
    for n, (top, point, options) in enumerate(mounts):
        escaped = str(point).replace(" ", r"\040")
        lines.append(f"{40 + n} 30 0:{n} {top} {escaped} rw,nosuid - {options}\n")
    (folder / "mountinfo").write_text("29 1 8:1 / / rw - ext4 /dev/sda1 rw\n" + "".join(lines))
    return folder


def _write(folder: Path, **files: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text + "\n")


def test_version_2_takes_the_tightest_limit_on_the_way_up(tmp_path: Path) -> None:
    mount = tmp_path / "cgroup"
    _write(mount / "a", cpu__max="350000 100000", memory__max="4294967296")
    _write(mount / "a" / "b", cpu__max="max 100000", memory__max="8589934592")
    proc = _proc(tmp_path, group="0::/a/b\n", mounts=[("/", mount, V2_OPTIONS)])
    assert cgroup_limits(proc) == CgroupLimits(cpus=3.5, memory_bytes=4 << 30)


def test_version_2_in_a_container_reads_the_mounted_root(tmp_path: Path) -> None:
    """The group's path names folders of the host that the container's mount does not show."""
    mount = tmp_path / "cgroup with a space"
    _write(mount, cpu__max="200000 100000", memory__max="1073741824")
    proc = _proc(tmp_path, group="0::/docker/0123\n", mounts=[("/docker/0123", mount, V2_OPTIONS)])
    assert cgroup_limits(proc) == CgroupLimits(cpus=2.0, memory_bytes=1 << 30)


def test_version_1_reads_each_controller_where_it_is_mounted(tmp_path: Path) -> None:
    cpu, memory = tmp_path / "cpu", tmp_path / "memory"
    _write(cpu / "job", cpu__cfs_quota_us="150000", cpu__cfs_period_us="100000")
    _write(cpu, cpu__cfs_quota_us="-1", cpu__cfs_period_us="100000")
    _write(memory / "job", memory__limit_in_bytes="2147483648")
    proc = _proc(
        tmp_path,
        group="4:memory:/job\n3:cpu,cpuacct:/job\n1:name=systemd:/job\n",
        mounts=[
            ("/", cpu, "cgroup cgroup rw,cpu,cpuacct"),
            ("/", memory, "cgroup cgroup rw,memory"),
        ],
    )
    assert cgroup_limits(proc) == CgroupLimits(cpus=1.5, memory_bytes=2 << 30)


@pytest.mark.parametrize("unlimited", ["9223372036854771712", "-1"])
def test_no_limit_is_none(tmp_path: Path, unlimited: str) -> None:
    mount = tmp_path / "memory"
    _write(mount, memory__limit_in_bytes=unlimited)
    proc = _proc(tmp_path, group="4:memory:/\n", mounts=[("/", mount, "cgroup cgroup rw,memory")])
    assert cgroup_limits(proc) == CgroupLimits(cpus=None, memory_bytes=None)


def test_a_machine_without_control_groups_has_no_limits(tmp_path: Path) -> None:
    assert cgroup_limits(tmp_path / "nothing") == CgroupLimits(cpus=None, memory_bytes=None)
