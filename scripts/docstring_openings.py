"""Checks how docstrings begin, for `make lint`: a reader has to see at once what they speak of.

`python scripts/docstring_openings.py` prints every docstring of a module, class, function or
attribute that begins with "Of", "None:", "Both" without its noun, or a participle without one
("Made by …"), and fails if there is any. A sentence that names its subject takes their place:
"The bytes of …", "`None` when …".
"""

import ast
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("mesh", "nodes", "loader", "workloads", "load", "bench", "scripts", "tests")
GENERATED = "mesh/v1/"
"""The folder of protobuf's stubs."""
LEFT: Mapping[str, int] = {}
"""How many such docstrings a folder such as "mesh/core/" still has. The numbers only ever fall."""

_IRREGULAR = (
    "Begun|Bought|Brought|Built|Caught|Chosen|Done|Drawn|Driven|Fed|Given|Gone|Grown|Held|Kept"
    "|Known|Laid|Led|Lent|Lost|Made|Meant|Met|Overtaken|Paid|Rewritten|Said|Seen|Sent|Shown|Sold"
    "|Spent|Spoken|Taken|Thrown|Told|Torn|Understood|Undone|Withdrawn|Woken|Written"
)
_NO_PARTICIPLE = "Bed|Embed|Exceed|Feed|Hundred|Indeed|Need|Proceed|Red|Seed|Shed|Speed"
_NO_NOUN = (
    "a|again|against|alone|amid|among|an|and|as|at|away|back|because|before|below|beside|between"
    "|but|by|during|each|early|every|first|for|from|here|if|in|into|late|later|like|not|now|of|off"
    "|on|once|one|only|or|out|over|per|since|so|than|that|the|through|to|too|under|until|up|when"
    "|whenever|where|whether|while|whole|with|without"
)
_BARE = re.compile(
    rf"Of\b|None:|(?:Both|(?!(?:{_NO_PARTICIPLE})\b)[A-Z][a-z]*ed|{_IRREGULAR})"
    rf"(?:$|[^\w\s-]|\s+(?:{_NO_NOUN})\b)"
)
_MAYBE_BARE = re.compile(rf'"\s*(?:{_BARE.pattern})')
"""Most files have no such text at all: they need not be parsed, which would take seconds."""


def is_bare(docstring: str) -> bool:
    """Whether the text begins without naming what it speaks of."""
    return _BARE.match(docstring.strip()) is not None


def bare_docstrings(source: str) -> Iterator[tuple[int, str]]:
    """The line and the text of every such docstring of a module, those of attributes included."""
    if not _MAYBE_BARE.search(source):
        return
    for node in ast.walk(ast.parse(source)):
        body = getattr(node, "body", None)
        for statement in body if isinstance(body, list) else ():
            match statement:
                case ast.Expr(value=ast.Constant(value=str(text))) if is_bare(text):
                    yield statement.lineno, text


def bare_openings(root: Path = ROOT) -> Iterator[str]:
    """Each such docstring of a repository as `path:line: first line`."""
    for folder in FOLDERS:
        for path in sorted((root / folder).rglob("*.py")):
            name = path.relative_to(root).as_posix()
            if not name.startswith(GENERATED):
                for line, text in bare_docstrings(path.read_text(encoding="utf-8")):
                    yield f"{name}:{line}: {text.strip().splitlines()[0]}"


def wrong(found: Iterable[str], left: Mapping[str, int] = LEFT) -> list[str]:
    """What is wrong with these findings: those that `left` does not count, and each folder for
    which it counts more than there are.
    """
    lines, counts = [], dict.fromkeys(left, 0)
    for each in found:
        folder = next((folder for folder in left if each.startswith(folder)), "")
        if folder:
            counts[folder] += 1
        if not folder or counts[folder] > left[folder]:
            lines.append(each)
    for folder, count in counts.items():
        if count < left[folder]:
            lines.append(f"{folder}: {count} are left and LEFT says {left[folder]}: lower it")
    return lines


if __name__ == "__main__":
    lines = wrong(bare_openings())
    for line in lines:
        print(line, file=sys.stderr)
    if lines:
        print("error: docstrings begin without naming what they speak of", file=sys.stderr)
        print("hint: begin with what it is or does, in a sentence with a verb", file=sys.stderr)
    sys.exit(bool(lines))
