"""Style as a test, where no linter checks it: no name is meaningless, values are frozen."""

import ast
import os
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SOURCE_FOLDERS = (
    "mesh",
    "nodes",
    "loader",
    "workloads",
    "load",
    "fleet",
    "bench",
    "scripts",
    "tests",
)
FORBIDDEN_NAMES = {"utils", "util", "common", "manager", "base", "helper", "helpers", "misc"}


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


def test_no_module_has_a_name_that_says_nothing() -> None:
    assert not [name(p) for p in sources() if p.stem in FORBIDDEN_NAMES]


def test_domain_values_are_frozen() -> None:
    """Events, actions and views are frozen, slotted, keyword-only dataclasses."""
    loose = []
    for path in sorted((ROOT / "mesh/domain").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            for decorator in node.decorator_list if isinstance(node, ast.ClassDef) else ():
                if isinstance(decorator, ast.Call) and ast.unparse(decorator.func) == "dataclass":
                    given = {k.arg for k in decorator.keywords}
                    if not {"frozen", "slots", "kw_only"} <= given:
                        loose.append(f"{name(path)}:{getattr(node, 'name', '')}")
                elif ast.unparse(decorator) == "dataclass":
                    loose.append(name(path))
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


@pytest.mark.parametrize(("environ", "code"), [({}, 0), ({"CI": "true"}, 2)])
def test_ci_fails_where_the_tests_of_ray_cannot_run(
    environ: dict[str, str], code: int, tmp_path: Path
) -> None:
    """Others are told that they are left out."""
    (tmp_path / "unshare").symlink_to("/bin/false")
    here = {name: value for name, value in os.environ.items() if name != "CI"}
    ran = subprocess.run(
        ["make", "--assume-old", ".venv-ray/.installed", "test-ray"],
        cwd=ROOT,
        env={**here, **environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (ran.returncode, "are left out" in ran.stderr) == (code, True)
