"""A process that maps a file goes on with its content, whatever others do to the file.

The process under test is a child: what is proven is that it does not end by SIGBUS.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

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


def test_a_file_that_is_open_for_writing_is_not_mapped(tmp_path: Path) -> None:
    path = tmp_path / "weights.bin"
    path.write_bytes(b"half of it")
    with path.open("ab"):
        reader = subprocess.run(
            [sys.executable, "-c", READER, str(path)], capture_output=True, text=True, check=False
        )
    assert "it is open for writing in another process" in reader.stderr
