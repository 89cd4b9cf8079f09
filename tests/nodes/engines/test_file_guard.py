"""A process that maps a file goes on with its content, whatever others do to the file.

The process under test is a child: what is proven is that it does not end by SIGBUS.
"""

import fcntl
import os
import subprocess
import sys
from pathlib import Path

import pytest

from mesh_nodes.engines.file_guard import FileGuard
from tests.support.waiting import until

SIZE_BYTES = 3 * 2**20 + 100
READER = """
import sys
from pathlib import Path
import numpy as np
from mesh_nodes.engines.openvino.mapped_file import MappedFile
file = MappedFile(Path(sys.argv[1]))
other = MappedFile(Path(sys.argv[1]))
values = file.array(np.dtype(np.uint8), (file.size_bytes,), 0)
print("mapped", flush=True)
sys.stdin.readline()
for mapped in (file, other):
    mapped.release_pages()
    print(mapped.array(np.dtype(np.uint8), (file.size_bytes,), 0).tobytes().hex(), flush=True)
"""
AGAIN = """
import sys
from pathlib import Path
import numpy as np
from mesh_nodes.engines.openvino.mapped_file import MappedFile
files = []
for _ in range(3):
    files.append(MappedFile(Path(sys.argv[1])))
    print("mapped", flush=True)
    sys.stdin.readline()
for mapped in files:
    mapped.release_pages()
    print(mapped.bytes_at(0, 4).decode(), flush=True)
"""
ANONYMOUS = """
import sys
from pathlib import Path
from mesh_nodes.engines.openvino.mapped_file import MappedFile
def anonymous_kib():
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith("Anonymous:")))
file = MappedFile(Path(sys.argv[1]))
before = anonymous_kib()
print("mapped", flush=True)
sys.stdin.readline()
assert file.bytes_at(0, file.size_bytes).strip(b"x") == b""
print(anonymous_kib() - before, flush=True)
"""
CUT = "import os, sys; os.truncate(sys.argv[1], 0)"
OVERWRITE = "import sys; file = open(sys.argv[1], 'r+b'); file.write(b'0' * 4096)"
REPLACE = "import os, sys; open(sys.argv[1] + 'x', 'w'); os.replace(sys.argv[1] + 'x', sys.argv[1])"
REMOVE = "import os, sys; os.unlink(sys.argv[1])"


@pytest.mark.parametrize("harm", [CUT, OVERWRITE, REPLACE, REMOVE])
def test_what_is_mapped_stays_as_it_was(tmp_path: Path, harm: str) -> None:
    path, content = tmp_path / "weights.bin", os.urandom(SIZE_BYTES)
    path.write_bytes(content)
    with subprocess.Popen(
        [sys.executable, "-c", READER, str(path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as reader:
        assert reader.stdout is not None
        assert reader.stdout.readline() == "mapped\n"
        subprocess.run([sys.executable, "-c", harm, str(path)], check=True, timeout=40)
        assert not path.exists() or path.read_bytes() != content, "the harm was done"
        said, _ = reader.communicate("go on\n")
    assert reader.returncode == 0
    assert said.split() == [content.hex()] * 2


def test_each_map_of_a_file_that_is_often_written_stays_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "weights.bin"
    path.write_bytes(b"old0" * 4096)
    with subprocess.Popen(
        [sys.executable, "-c", AGAIN, str(path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as reader:
        assert reader.stdin is not None
        assert reader.stdout is not None
        for turn in (1, 2, 3):
            assert reader.stdout.readline() == "mapped\n"
            harm = f"import sys; open(sys.argv[1], 'r+b').write(b'old{turn}' * 4096)"
            subprocess.run([sys.executable, "-c", harm, str(path)], check=True, timeout=20)
            reader.stdin.write("go on\n")
            reader.stdin.flush()
        said, _ = reader.communicate()
    assert (reader.returncode, said.split()) == (0, ["old0", "old1", "old2"])


def test_a_file_that_is_open_for_writing_is_not_mapped(tmp_path: Path) -> None:
    path = tmp_path / "weights.bin"
    path.write_bytes(b"half of it")
    with path.open("ab"):
        reader = subprocess.run(
            [sys.executable, "-c", READER, str(path)], capture_output=True, text=True, check=False
        )
    assert "it is open for writing in another process" in reader.stderr


def test_a_copy_lies_on_the_disk_and_not_in_the_process(tmp_path: Path) -> None:
    path = tmp_path / "weights.bin"
    path.write_bytes(b"x" * (64 << 20))
    with subprocess.Popen(
        [sys.executable, "-c", ANONYMOUS, str(path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as reader:
        assert reader.stdout is not None
        assert reader.stdout.readline() == "mapped\n"
        subprocess.run([sys.executable, "-c", CUT, str(path)], check=True, timeout=40)
        said, _ = reader.communicate("go on\n")
    assert reader.returncode == 0
    # What is read is freed again; some of it the allocator keeps.
    assert int(said) < 48 << 10
    assert [found.name for found in tmp_path.iterdir()] == ["weights.bin"]


def test_a_lease_that_the_kernel_took_away_is_met_after_the_read(tmp_path: Path) -> None:
    """As it does with a process that was stopped for longer than it lets a writer wait."""
    path = tmp_path / "weights.bin"
    path.write_bytes(b"whole")
    file, other = FileGuard(path), FileGuard(path)
    file.settle()
    fcntl.fcntl(file.descriptor, fcntl.F_SETLEASE, fcntl.F_UNLCK)
    with pytest.raises(BlockingIOError, match=r"weights\.bin"):
        file.settle()
    assert other.lost or not other.holds, "a copy of the other's pages is no better"


def test_a_rescue_that_came_in_time_is_as_good_as_the_file(tmp_path: Path) -> None:
    path = tmp_path / "weights.bin"
    path.write_bytes(b"whole")
    file = FileGuard(path)
    subprocess.run([sys.executable, "-c", OVERWRITE, str(path)], check=True, timeout=40)
    until(lambda: not file.holds)
    file.settle()
