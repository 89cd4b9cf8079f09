"""The page's files: who gets them, under which policy, and that what is vendored is what it was."""

import asyncio
import json
import re
from hashlib import sha256
from pathlib import Path
from threading import get_ident
from typing import Any

import pytest
import requests
from starlette.requests import Request

from mesh.http import operating
from mesh.http.page import HEADERS, Page
from mesh.manifest.specs import read_manifests
from tests.http.edge import Edge, edge

PAGE = Path(__file__).resolve().parents[2] / "mesh" / "page"
VENDORED: list[dict[str, Any]] = json.loads((PAGE / "vendor" / "vendored.json").read_text())
BROWSER = {"accept": "text/html,application/xhtml+xml,*/*;q=0.8"}
PAGE_BYTES_MAX = 200_000


def got(http: Edge, path: str, **headers: str) -> requests.Response:
    return requests.get(http.url + path, headers=headers, timeout=20)


@pytest.mark.parametrize("one", VENDORED, ids=lambda one: str(one["file"]))
def test_what_is_vendored_has_its_hash_version_and_licence(one: dict[str, Any]) -> None:
    body = (PAGE / "vendor" / one["file"]).read_bytes()
    assert sha256(body).hexdigest() == one["sha256"]
    assert one["version"] in one["from"]
    assert all((PAGE / "vendor" / text).stat().st_size > 500 for text in one["licence_files"])


def test_the_page_is_small_and_names_nothing_elsewhere() -> None:
    served = [p for p in PAGE.rglob("*") if p.suffix in (".html", ".js", ".css", ".svg")]
    assert sum(path.stat().st_size for path in served) <= PAGE_BYTES_MAX
    listed = {one["file"] for one in VENDORED}
    kept = {p.name for p in (PAGE / "vendor").iterdir() if p.suffix in (".js", ".css")}
    assert listed == kept
    index = (PAGE / "index.html").read_text()
    assert "//" not in index.replace("<!doctype", "")
    assert "<style" not in index
    assert index.count("<script") == index.count("<script src=")


async def test_browsers_get_the_page_and_others_what_this_is(http: Edge) -> None:
    html = await http.cell.ask(lambda: got(http, "/", **BROWSER))
    assert html.text == (PAGE / "index.html").read_text()
    assert {name: html.headers[name] for name in HEADERS} == HEADERS
    assert html.headers["vary"] == "accept"
    named = re.findall(r"<(page/[\w./-]+)>; rel=modulepreload", html.headers["link"])
    imported = {
        (path.parent / name).resolve()
        for path in (PAGE.parent / name for name in named)
        for name in re.findall(r'^import .*"(.+)";$', path.read_text(), re.MULTILINE)
    }
    assert imported | {PAGE / "main.js"} == {PAGE.parent / name for name in named}
    for accept in ("*/*", "application/json"):
        told = await http.cell.ask(lambda accept=accept: got(http, "/", accept=accept))
        assert told.json()["documentation"] == "/openapi.json"


async def test_a_file_is_sent_once_and_none_leads_out(http: Edge) -> None:
    first = await http.cell.ask(lambda: got(http, "/page/main.js"))
    assert first.headers["content-type"].startswith("text/javascript")
    again = {"if-none-match": f'"other", W/{first.headers["etag"]}'}
    same = await http.cell.ask(lambda: got(http, "/page/main.js", **again))
    assert (same.status_code, same.content) == (304, b"")
    for path in (
        *("/page/..%2fhttp%2fpage.py", "/page/%2e%2e/http/page.py", "/page/vendor/vendored.json"),
        *("/page/", "/page//main.js"),
        "/page/" + 3_000 * "a",
    ):
        lost = await http.cell.ask(lambda path=path: got(http, path))
        assert (lost.status_code, lost.json()["error"]["code"]) == (404, "not_found")


async def test_of_files_that_are_asked_for_together_one_is_answered_in_a_turn_of_the_loop() -> None:
    page, answered = Page(b"", shown=True), 0
    request = Request({"type": "http", "headers": [], "path_params": {"file": "main.js"}})
    asked = [asyncio.create_task(page.file(request)) for _ in range(6)]
    while answered < len(asked):
        await asyncio.sleep(0)
        before, answered = answered, sum(one.done() for one in asked)
        assert answered - before <= 1


async def test_no_name_of_elsewhere_leads_to_the_page(http: Edge) -> None:
    for path in ("/", "/page/main.js", "/api/v1/cell", "/api/v1/events", "/api/v1/session"):
        for foreign in ({"host": "evil.example"}, {"origin": "http://evil.example"}):
            told = await http.cell.ask(
                lambda path=path, foreign=foreign: got(http, path, **BROWSER, **foreign)
            )
            assert told.status_code == 403, (path, foreign)
            assert "evil.example" in told.json()["error"]["message"]


async def test_there_may_be_no_page(tmp_path: Path) -> None:
    async with edge(tmp_path, page=False) as http:
        told = await http.cell.ask(lambda: got(http, "/", **BROWSER))
        assert told.json()["name"] == "mesh"
        assert (await http.get("/page/main.js")).status_code == 404
        assert (await http.get("/api/v1/cell")).status_code == 200


async def test_a_deployment_is_operated_by_clients_and_this_page_and_no_other(http: Edge) -> None:
    await http.cell.deployed()
    path = "/api/v1/deployments/chat/"
    ours, other = {"Origin": http.url}, {"Origin": "http://localhost:1"}
    assert (await http.post(path + "load", {})).json()["message"]
    scaled = await http.post(path + "scale", {"replicas_max": 3}, headers=ours)
    assert scaled.status_code == 200
    spec = (await http.get("/api/v1/cell")).json()["deployments"]["chat"]["spec"]
    assert spec["scaling"]["replicas_max"] == 3
    for verb, body, headers, status in (
        ("delete", {}, other, 403),
        ("delete", b"", {"Content-Type": "text/plain"}, 415),
        ("scale", {}, ours, 400),
        ("scale", {"replicas_max": "many"}, ours, 400),
        ("scale", {"replicas_min": 9}, ours, 400),
        ("unload", {"more": 1}, ours, 400),
        ("undo", {}, ours, 404),
        ("explode", {}, ours, 404),
    ):
        refused = await http.post(path + verb, body, headers=headers)
        assert refused.status_code == status, (verb, refused.text)
        assert refused.json()["error"]["message"]
    assert (await http.post("/api/v1/deployments/nobody/load", {})).status_code == 404
    assert (await http.get(path + "load")).status_code == 405
    assert (await http.post(path + "delete", {})).json()["message"] == "deleted"


async def test_deployments_are_saved_asked_about_and_deployed_as_a_file(
    http: Edge, monkeypatch: pytest.MonkeyPatch
) -> None:
    await http.cell.deployed()
    saved = await http.get("/api/v1/manifest")
    told = (await http.get("/api/v1/cell")).json()["deployments"]
    (spec,) = read_manifests([("saved", saved.content)])
    assert (spec.name, spec.source) == ("chat", told["chat"]["spec"]["source"])
    assert (await http.get("/api/v1/manifest?name=nobody")).status_code == 404
    (known,) = (await http.get("/api/v1/deployments/chat/profiles")).json()
    assert known["profile"]["decode"]["seconds"]
    copy = saved.text.replace("name: chat", "name: chat-too")
    copies = f"{copy}---\n{copy.replace('chat-too', 'odd').replace('file://', 'odd://')}"
    (asked, unknown) = (await http.post("/api/v1/prospect", {"manifest": copies})).json()[
        "deployments"
    ]
    assert asked["done"]["like"] == "chat"
    assert asked["done"]["nodes"][0]["fit"] == "now"
    assert "is not known yet" in unknown["error"]["message"]
    assert (await http.get("/api/v1/cell")).json()["status"]["deployments"] == 1, "a question"
    (done,) = (await http.post("/api/v1/deploy", {"manifest": copy})).json()["deployments"]
    assert done == {"name": "chat-too", "done": "deployed"}
    threads = []
    monkeypatch.setattr(operating, "read_manifests", lambda files: threads.append(get_ident()))
    assert (await http.post("/api/v1/prospect", {"manifest": copy})).status_code == 500
    assert threads != [get_ident()], "the loop goes on while a file is read"
    silent = await http.post("/api/v1/deployments/chat/replay", {})
    assert (silent.status_code, silent.json()["error"]["code"]) == (404, "model_not_found")


@pytest.mark.parametrize(
    ("body", "status", "said"),
    [
        ({"manifest": "a: ["}, 400, "m.yaml:1"),
        ({"manifest": "kind: Model\nspec: {source: 'x", "extra": 1}, 400, "extra"),
        ({"manifest": "\ud800"}, 400, "no valid JSON"),
        ({"manifest": 300_000 * "a"}, 400, "bytes"),
        ({}, 400, "manifest"),
        (b"{", 400, "JSON"),
    ],
)
async def test_what_is_no_manifest_is_said_so_and_nothing_is_deployed(
    http: Edge, body: Any, status: int, said: str
) -> None:
    given = {**body, "file": "m.yaml"} if isinstance(body, dict) else body
    refused = await http.post("/api/v1/deploy", given)
    assert refused.status_code == status, refused.text
    assert said in refused.json()["error"]["message"]
