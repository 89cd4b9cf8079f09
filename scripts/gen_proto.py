"""Generates mesh/v1 from proto/ (`python scripts/gen_proto.py`); with `--check` it only says
whether the stubs in the tree are current.
"""

import filecmp
import shutil
import sys
import tempfile
from importlib.resources import files
from pathlib import Path

from grpc_tools import protoc

ROOT = Path(__file__).resolve().parent.parent
STUBS = ROOT / "mesh" / "v1"


def generate(into: Path) -> None:
    """Write the stubs of every proto file under `into`."""
    sources = sorted((ROOT / "proto").rglob("*.proto"))
    include = str(files("grpc_tools") / "_proto")
    arguments = ["protoc", f"-I{ROOT / 'proto'}", f"-I{include}"]
    arguments += [f"--{kind}_out={into}" for kind in ("python", "grpc_python", "mypy", "mypy_grpc")]
    if protoc.main([*arguments, *(str(source) for source in sources)]) != 0:
        raise SystemExit("protoc failed")


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        generate(Path(folder))
        fresh = Path(folder) / "mesh" / "v1"
        (fresh / "__init__.py").write_text('"""Generated from proto/mesh/v1. Do not edit."""\n')
        names = sorted(path.name for path in fresh.iterdir())
        if "--check" in sys.argv:
            old = sorted(p.name for p in STUBS.iterdir() if p.is_file())
            same = old == names and not filecmp.cmpfiles(STUBS, fresh, names, shallow=False)[1]
            if not same:
                raise SystemExit("mesh/v1 is not current: run python scripts/gen_proto.py")
            return
        shutil.rmtree(STUBS, ignore_errors=True)
        shutil.copytree(fresh, STUBS)


if __name__ == "__main__":
    main()
