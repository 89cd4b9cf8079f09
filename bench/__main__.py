"""`python -m bench` lists the benchmarks, `python -m bench NAME` runs one.

A benchmark's last line is one JSON object, and its exit code is 1 when a target was missed.
`python -m bench NAME --help` shows its options and what its figures mean.
"""

import ast
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

from bench.cells import MESH
from bench.harness import all_of, performed

COMMANDS = {
    "fidelity": "How true the simulator is: a live cell beside a simulation of it.",
    "paper": "The evaluation of the LLM-Mesh paper on virtual nodes.",
}
"""Benchmarks that are commands of `mesh bench`, since they need no clone."""


def sentences() -> dict[str, str]:
    """What each benchmark measures, by its name: the first sentence of its module's docstring."""
    found = {
        name: _about(path).splitlines()[0] for name, path in all_of(Path(__file__).parent).items()
    }
    return dict(sorted((found | COMMANDS).items()))


def _about(path: Path) -> str:
    if path.suffix == ".toml":
        return str(tomllib.loads(path.read_text())["about"])
    return ast.get_docstring(ast.parse(path.read_text())) or ""


def main(arguments: Sequence[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help"):
        told = sentences()
        width = max(map(len, told))
        print("\n".join(f"{name:{width}}  {sentence}" for name, sentence in told.items()))
        return 0
    name, *rest = arguments
    if name in COMMANDS:
        return subprocess.run([*MESH, "bench", name, *rest], check=False).returncode
    path = all_of(Path(__file__).parent).get(name)
    if path is None:
        print(f"error: there is no benchmark {name}", file=sys.stderr)
        print("hint: python -m bench lists them", file=sys.stderr)
        return 2
    scenario = path.suffix == ".toml"
    try:
        module = import_module("bench.live" if scenario else f"bench.{path.stem}")
    except ModuleNotFoundError as error:
        print(f"error: {error.name} is not installed here", file=sys.stderr)
        print(f"hint: make bench-{name} installs what the benchmark needs", file=sys.stderr)
        return 2
    about = _about(path)
    if scenario:
        asked = module.Asked
        return performed(name, lambda **of: module.perform(path, asked(**of)), about, rest, asked)
    return performed(name, module.run, about, rest)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
