"""Style as a test: long files are on a ratchet, modules say what they do, printing has one place.

`RATCHET` lists the files that are longer than FILE_LINES_MAX, with their length when they were
listed. It may only shrink: a listed file may not grow, and one that no longer needs its place must
leave the list.
"""

import ast
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SOURCE_FOLDERS = ("mesh", "nodes", "loader", "workloads", "load", "bench", "scripts", "tests")
FILE_LINES_MAX = 450
FUNCTION_LINES_MAX = 60
RATCHET: dict[str, int] = {}
FUNCTION_RATCHET: dict[str, int] = {}
FORBIDDEN_NAMES = {"utils", "util", "common", "manager", "base", "helper", "helpers", "misc"}
PRINTERS = ("mesh/cli/output.py", "bench/", "scripts/", "tests/")


def sources() -> list[Path]:
    """Our Python files, generated stubs left out."""
    return [
        path
        for folder in SOURCE_FOLDERS
        for path in sorted((ROOT / folder).rglob("*.py"))
        if "mesh/v1/" not in path.as_posix()
    ]


def name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@pytest.fixture(scope="module")
def trees() -> dict[str, ast.Module]:
    return {name(path): ast.parse(path.read_text(encoding="utf-8")) for path in sources()}


def is_test(path: str) -> bool:
    return path.startswith("tests/")


def test_files_are_short_and_the_ratchet_only_shrinks() -> None:
    long = {}
    for path in sources():
        lines = path.read_text(encoding="utf-8").count("\n")
        if lines > FILE_LINES_MAX and not is_test(name(path)):
            long[name(path)] = lines
    grown = {p: n for p, n in long.items() if n > RATCHET.get(p, FILE_LINES_MAX)}
    assert not grown, f"longer than allowed, split them: {grown}"
    assert not set(RATCHET) - set(long), "these need their place in RATCHET no more"


def test_functions_fit_on_a_screen(trees: dict[str, ast.Module]) -> None:
    long = {}
    for path, tree in trees.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno:
                lines = node.end_lineno - node.lineno + 1
                if lines > FUNCTION_LINES_MAX and not is_test(path):
                    long[f"{path}:{node.name}"] = lines
    grown = {f: n for f, n in long.items() if n > FUNCTION_RATCHET.get(f, FUNCTION_LINES_MAX)}
    assert not grown, f"longer than a screen, split them: {grown}"
    assert not set(FUNCTION_RATCHET) - set(long), "these need their place no more"


def test_every_module_says_what_it_does(trees: dict[str, ast.Module]) -> None:
    silent = [p for p, tree in trees.items() if tree.body and not ast.get_docstring(tree)]
    assert not silent


def test_no_module_has_a_name_that_says_nothing() -> None:
    assert not [name(p) for p in sources() if p.stem in FORBIDDEN_NAMES]


def test_only_the_output_module_prints(trees: dict[str, ast.Module]) -> None:
    printing = [
        path
        for path, tree in trees.items()
        if not path.startswith(PRINTERS)
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id == "print"
    ]
    assert not printing


def test_domain_values_are_frozen(trees: dict[str, ast.Module]) -> None:
    """Events, actions and views are frozen, slotted, keyword-only dataclasses."""
    loose = []
    for path, tree in trees.items():
        if not path.startswith("mesh/domain/"):
            continue
        for node in ast.walk(tree):
            for decorator in node.decorator_list if isinstance(node, ast.ClassDef) else ():
                if isinstance(decorator, ast.Call) and ast.unparse(decorator.func) == "dataclass":
                    given = {k.arg for k in decorator.keywords}
                    if not {"frozen", "slots", "kw_only"} <= given:
                        loose.append(f"{path}:{getattr(node, 'name', '')}")
                elif ast.unparse(decorator) == "dataclass":
                    loose.append(path)
    assert not loose


def test_no_path_of_a_machine_and_no_large_file_is_tracked() -> None:
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=False
    ).stdout.decode()
    tracked = [ROOT / p for p in listed.split("\0") if p and (ROOT / p).is_file()]
    if not tracked:
        pytest.skip("not in a git checkout")
    machine = re.compile(r"/(?:home|root|work|Users)/[A-Za-z.]")
    named = []
    for path in tracked:
        assert path.stat().st_size < 2_000_000, f"{name(path)} is too large for the repository"
        if path.suffix in {".py", ".md", ".toml", ".proto", ".yaml"} or path.name == "Makefile":
            text = path.read_text(encoding="utf-8")
            if path != Path(__file__).resolve() and machine.search(text):
                named.append(name(path))
    assert not named
