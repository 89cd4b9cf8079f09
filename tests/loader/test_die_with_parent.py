"""A process tied to its parent does not outlive it."""

import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from mesh.domain.errors import InvalidInput, Unavailable
from mesh_loader.bounded_child import die_with_parent
from mesh_loader.protocol import parse_line

CHILD = (
    "import os, sys, time; from mesh_loader.bounded_child import die_with_parent;"
    "die_with_parent(os.getppid()); print('tied', flush=True); time.sleep(60)"
)
PARENT = (
    "import subprocess, sys; child = subprocess.Popen([sys.executable, '-c', sys.argv[1]]);"
    "child.wait()"
)


def test_the_kernel_ends_the_child_when_its_parent_is_killed() -> None:
    """The child holds the pipe's writing end: end of file means that it has gone."""
    reading, writing = os.pipe()
    with open(reading, "rb") as pipe:
        parent = subprocess.Popen([sys.executable, "-c", PARENT, CHILD], stdout=writing)
        os.close(writing)
        try:
            assert pipe.readline() == b"tied\n"
            parent.send_signal(signal.SIGKILL)
            ready, _, _ = select.select([pipe], [], [], 10)
            assert ready, "the child outlived its parent"
            assert pipe.read(1) == b""
        finally:
            parent.kill()
            parent.wait()


def test_a_parent_that_is_not_ours_is_refused() -> None:
    """As when the parent ended before the child could tie itself to it."""
    code = (
        "import sys; from mesh_loader.bounded_child import die_with_parent;"
        "from mesh.domain.errors import Unavailable\n"
        "try: die_with_parent(int(sys.argv[1]))\n"
        "except Unavailable as e: sys.exit(7 if 'is not the parent' in e.message else 1)"
    )
    child = subprocess.run([sys.executable, "-c", code, str(2**22 - 1)], timeout=30)
    assert child.returncode == 7


def test_a_number_that_is_no_process_is_refused() -> None:
    with pytest.raises(InvalidInput):
        die_with_parent(0)


def test_an_import_whose_parent_has_ended_says_so(tmp_path: Path) -> None:
    """In a line of protocol, as whatever else stops it."""
    arguments = ["import", "pkg://a/b", "--store", str(tmp_path), "--parent", str(2**22 - 1)]
    child = subprocess.run(
        [sys.executable, "-m", "mesh_loader", *arguments], timeout=30, capture_output=True
    )
    error = parse_line(child.stdout.strip())
    assert isinstance(error, Unavailable)
    assert "is not the parent" in error.message
    assert (child.returncode, child.stderr) == (1, b"")
