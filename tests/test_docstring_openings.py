"""The check of how docstrings begin rejects what it should, and looks at every docstring."""

import subprocess
import sys
from pathlib import Path

import pytest

from scripts.docstring_openings import ROOT, bare_openings, is_bare, wrong

REJECTED = [
    *("Of the weights.", "Of each.", "None: no limit.", "Both.", "Both as of the last heartbeat."),
    *("Made by the first call.", "Kept for requests to come.", "Given", "Given up, or gone again."),
    *("Measured: use it.", "Computed at once.", "\n    Told to clients that are refused.\n"),
]
ACCEPTED = [
    *("The bytes of the weights.", "`None` when there is no limit.", "Offers a place."),
    *("Both sides agree.", "Cached blocks are used first.", "Made-up models in torch alone."),
    *("Feed the engine.", "Speed over all.", ""),
]


@pytest.mark.parametrize("text", REJECTED)
def test_an_opening_without_its_noun_is_rejected(text: str) -> None:
    assert is_bare(text)


@pytest.mark.parametrize("text", ACCEPTED)
def test_an_opening_with_its_noun_passes(text: str) -> None:
    assert not is_bare(text)


def test_docstrings_of_all_kinds_are_looked_at_and_other_strings_are_not(tmp_path: Path) -> None:
    (tmp_path / "mesh" / "v1").mkdir(parents=True)
    (tmp_path / "mesh" / "made.py").write_text(
        '"""Of a module."""\n'
        "BOUND = 1\n"
        '"""Of a constant."""\n'
        'TEXT = "Of a value."\n'
        "# Of a comment.\n"
        "class One:\n"
        '    r"""Of a class."""\n'
        "    size: int\n"
        '    """Given when it is made,\n'
        '    in bytes."""\n'
        "    async def method(self) -> None:\n"
        '        """None: it is a coroutine."""\n'
        "        if self.size:\n"
        "            self.other = 2\n"
        '            """Both."""\n',
        encoding="utf-8",
    )
    (tmp_path / "mesh" / "v1" / "stub.py").write_text('"""Of a stub."""\n', encoding="utf-8")
    assert sorted(bare_openings(tmp_path)) == [
        *("mesh/made.py:12: None: it is a coroutine.", "mesh/made.py:15: Both."),
        *("mesh/made.py:1: Of a module.", "mesh/made.py:3: Of a constant."),
        *("mesh/made.py:7: Of a class.", "mesh/made.py:9: Given when it is made,"),
    ]


def test_counts_only_fall() -> None:
    left = {"mesh/core/": 2, "bench/": 1}
    found = ["bench/a.py:1: Of it.", "mesh/core/a.py:1: Of it.", "mesh/core/a.py:2: Of it."]
    more = ["mesh/core/b.py:1: Both.", "mesh/wire/a.py:1: Made."]
    assert wrong(found, left) == []
    assert wrong([*found, *more], left) == more
    assert wrong(found[:2], left) == ["mesh/core/: 1 are left and LEFT says 2: lower it"]


def test_this_repository_passes() -> None:
    script = ROOT / "scripts" / "docstring_openings.py"
    ended = subprocess.run([sys.executable, script], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (0, "")
