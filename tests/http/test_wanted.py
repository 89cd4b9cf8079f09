"""How many nodes are wanted, as those who start them ask: KEDA's metrics-api scaler, Prometheus."""

import re
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import requests

from mesh.cli.tables import wanted_words
from mesh.controller.keys import KeyBook
from mesh.domain.access import NOBODY, Role, TenantName
from mesh.domain.limits import NodeRange
from mesh.domain.reasons import DeviceKind
from tests.controller.live import PATIENT, WAIT_S_MAX, live_cell
from tests.http.edge import Edge

RANGES = (NodeRange(device=DeviceKind.CPU, least=2, most=5),)
LIMITS = replace(PATIENT, node_ranges=RANGES, node_settle_s=0.0, lease_check_s=0.1)
ROUTE = "/api/v1/nodes/wanted"


def scaled(url: str, token: str, location: str) -> float:
    """As KEDA's scaler asks: the URL as it is, by GET, with its token; then the number at a place
    of the JSON. Raises what keeps it from knowing, where KEDA leaves things as they are.
    """
    asked = requests.get(url, headers={"Authorization": f"Bearer {token}"}, timeout=WAIT_S_MAX)
    asked.raise_for_status()
    value: Any = asked.json()
    for part in location.split("."):
        value = value[part]
    assert type(value) in (int, float), f"valueLocation must point to a number: {value!r}"
    return float(value)


async def test_kedas_scaler_reads_how_many_are_wanted_with_a_nodes_key(tmp_path: Path) -> None:
    book = KeyBook(tmp_path / "controller")
    keys = {role: book.create(role, NOBODY)[0] for role in (Role.ADMIN, Role.NODE)}
    tenant = book.create(Role.TENANT, TenantName("acme"))[0]
    book.close()
    async with live_cell(tmp_path, keys=True, http="127.0.0.1:0", limits=LIMITS) as cell:
        edge = Edge(cell)
        url, get = edge.url + ROUTE, partial(requests.get, timeout=WAIT_S_MAX)
        shown = {"Authorization": f"Bearer {keys[Role.NODE]}"}
        await cell.until(lambda: get(url, headers=shown).status_code == 200)
        codes: dict[str, int] = {}
        shown_keys = [*keys.items(), ("tenant", tenant), ("none", "mesh_none")]
        for name, key in shown_keys:
            headers = {"Authorization": f"Bearer {key}"}
            codes[name] = (await cell.ask(lambda h=headers: get(url, headers=h))).status_code
        assert codes == {Role.ADMIN: 200, Role.NODE: 200, "tenant": 403, "none": 401}
        assert await cell.ask(lambda: scaled(url, keys[Role.NODE], "cpu.wanted")) == 2.0
        scraped = await cell.ask(
            lambda: requests.get(
                f"{edge.url}/metrics",
                headers={"Authorization": f"Bearer {keys[Role.ADMIN]}"},
                timeout=WAIT_S_MAX,
            )
        )
        assert re.search(r'^mesh_nodes_wanted\{kind="cpu"\} 2\.0$', scraped.text, re.M)
        ready = await edge.get("/readyz")
        assert ready.status_code == 200, "a cell that wants nodes takes calls before it has any"


async def test_the_command_line_says_so_in_a_line(tmp_path: Path) -> None:
    async with live_cell(tmp_path, limits=LIMITS) as cell:
        await cell.until(lambda: bool(cell.client.status().wanted))
        (kind,) = (await cell.status()).wanted
        assert wanted_words([kind]).startswith("cpu 2 (from 2 to 5), 0 ready")


async def test_who_gave_no_range_is_told_so(http: Edge) -> None:
    asked = await http.get(ROUTE)
    assert asked.status_code == 503
    assert "--nodes-wanted" in asked.text
