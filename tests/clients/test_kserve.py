"""KServe's own client for Python: what is there, and answers by tensors of both kinds."""

from pathlib import Path

import pytest

from tests.clients.conftest import ROOT, Served, run

FOLDER = ROOT / ".venv-clients-kserve"
pytestmark = pytest.mark.skipif(
    not (FOLDER / ".installed").exists(), reason="make test-clients has it"
)


async def test_what_it_calls(served: Served) -> None:
    calls = Path(__file__).with_name("kserve_calls.py")
    found = await run([str(FOLDER / "bin" / "python"), str(calls), served.cell.address])
    assert found["server"] == [True, True]
    assert found["models"] == [True, False]
    for kind in ("typed", "raw"):
        assert found[kind] == ["7", "chat", "text_output", "aaaa"]
    assert "there is no deployment 'chta'" in found["missing"]
