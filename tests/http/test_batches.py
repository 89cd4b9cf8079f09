"""Files and batches over HTTP: calls of a file are answered, what is wrong is told by its line."""

import asyncio
import json
import resource
import sqlite3
import threading
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import requests

from mesh.cli.tables import batches_words
from mesh.controller.keys import KeyBook
from mesh.domain.access import NOBODY, Caller, Role, TenantName
from mesh.domain.errors import StorageError
from mesh.domain.messages import AbortRequest, SubmitRequest
from mesh.domain.views import OpenBatches
from mesh.http import batch_lines, batches, files, kept_files
from mesh.http.batch_lines import Answer, Answers, Checked, checked, lines_of
from mesh.http.kept_files import KeptBatch, KeptFile
from mesh.wire.access import act_as, caller
from mesh.wire.client import MeshClient
from mesh.wire.credentials import Credentials, show
from tests.controller.live import CLASSES, PATIENT, SPEC, WAIT_S_MAX, FakeNode
from tests.http.edge import HELLO, Edge, edge

pytestmark = pytest.mark.own_cell
CHAT = "/v1/chat/completions"


def line(custom_id: str, url: str = CHAT, **body: Any) -> dict[str, Any]:
    asked = {"model": "chat", "messages": HELLO, "max_tokens": 2, **body}
    if url == "/v1/completions":
        asked = {"model": "chat", "prompt": "x", "max_tokens": 2, **body}
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": asked}


def written(lines: list[dict[str, Any]]) -> bytes:
    return b"".join(json.dumps(one).encode() + b"\n" for one in lines)


async def sent(http: Edge, content: bytes, *, key: str = "", **form: str) -> requests.Response:
    given = {"purpose": "batch", **form}
    named = {"file": ("calls.jsonl", content)}
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    return await asyncio.to_thread(
        lambda: requests.post(
            f"{http.url}/v1/files", data=given, files=named, headers=headers, timeout=WAIT_S_MAX
        )
    )


async def begun(http: Edge, content: bytes, endpoint: str = CHAT, **how: Any) -> dict[str, Any]:
    file = await sent(http, content)
    assert file.status_code == 200, file.text
    asked = {"input_file_id": file.json()["id"], "endpoint": endpoint, "completion_window": "24h"}
    told = await http.post("/v1/batches", {**asked, **how})
    assert told.status_code == 200, told.text
    found: dict[str, Any] = told.json()
    return found


FORM = "multipart/form-data; boundary=b"


def form_of(parts: list[tuple[bytes, bytes]]) -> bytes:
    head = b"--b\r\nContent-Disposition: form-data; "
    return (
        b"".join(head + said + b"\r\n\r\n" + data + b"\r\n" for said, data in parts) + b"--b--\r\n"
    )


async def until(http: Edge, id_: str, what: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    async with asyncio.timeout(WAIT_S_MAX):
        while True:
            batch: dict[str, Any] = (await http.get(f"/v1/batches/{id_}")).json()
            if what(batch):
                return batch
            await asyncio.sleep(0.02)


async def ended(http: Edge, id_: str) -> dict[str, Any]:
    final = {"completed", "failed", "expired", "cancelled"}
    return await until(http, id_, lambda batch: batch["status"] in final)


async def lines(http: Edge, file_id: str | None) -> dict[str, Any]:
    """By `custom_id`, each of which is there once."""
    if file_id is None:
        return {}
    told = await http.get(f"/v1/files/{file_id}/content")
    found = [json.loads(one) for one in told.content.splitlines()]
    assert len({one["custom_id"] for one in found}) == len(found)
    return {one["custom_id"]: one for one in found}


async def test_each_line_is_answered_as_a_call_would_be(http: Edge) -> None:
    await http.cell.deployed()
    calls = [line(f"c{n}", max_tokens=n + 1) for n in range(40)]
    calls.append(line("long", messages=[{"role": "user", "content": "x" * 600}]))
    batch = await begun(http, written(calls), metadata={"a": "b"})
    assert batch["status"] in ("validating", "in_progress")
    batch = await ended(http, batch["id"])
    assert (batch["status"], batch["metadata"]) == ("completed", {"a": "b"})
    assert batch["request_counts"] == {"total": 41, "completed": 40, "failed": 1}
    assert batch["created_at"] <= batch["in_progress_at"] <= batch["completed_at"]
    answers = await lines(http, batch["output_file_id"])
    for n in range(40):
        one = answers[f"c{n}"]
        assert one["error"] is None
        assert one["response"]["status_code"] == 200
        body = one["response"]["body"]
        assert body["choices"][0]["message"]["content"] == "a" * (n + 1)
        assert one["response"]["request_id"] == body["id"].removeprefix("chatcmpl-")
    (wrong,) = (await lines(http, batch["error_file_id"])).values()
    assert wrong["custom_id"] == "long"
    assert wrong["response"]["status_code"] == 400
    assert wrong["response"]["body"]["error"]["code"] == "context_length_exceeded"
    listed = (await http.get("/v1/files?purpose=batch_output")).json()["data"]
    assert {one["id"] for one in listed} == {batch["output_file_id"], batch["error_file_id"]}


async def test_other_endpoints_answer_lines_too(http: Edge) -> None:
    await http.cell.deployed()
    response = {"model": "chat", "input": "hi", "max_output_tokens": 2}
    told = []
    for one in (line("x", "/v1/completions"), {**line("x", "/v1/responses"), "body": response}):
        batch = await ended(http, (await begun(http, written([one]), one["url"]))["id"])
        told.append((await lines(http, batch["output_file_id"]))["x"]["response"]["body"])
    assert told[0]["choices"][0]["text"] == "aa"
    assert told[1]["status"] == "incomplete"
    kept = await http.get(f"/v1/responses/{told[1]['id']}")
    assert kept.status_code == 404, "it would drive out what others have kept"


@pytest.mark.parametrize(("spec", "name"), [(SPEC, "best_effort"), (CLASSES, "batch")])
async def test_lines_are_best_effort_few_of_them_wait_and_they_are_cancelled(
    tmp_path: Path, spec: Any, name: str
) -> None:
    async with edge(tmp_path, limits=replace(PATIENT, batch_max=8)) as http:
        node = await http.cell.deployed(spec, held=True)
        asked = [line(f"c{n}", service_tier="chat") for n in range(200)]
        batch = await begun(http, written(asked))
        order = (await node.told(SubmitRequest)).order
        assert (order.slo.best_effort, order.slo.name) == (True, name)
        await http.cell.until(lambda: http.cell.client.status().queued == 16)
        assert (await http.cell.status()).running == 8
        told = (await http.get(f"/v1/batches/{batch['id']}")).json()
        assert (told["status"], told["output_file_id"]) == ("in_progress", None)
        file_id = batch["input_file_id"]
        kept = await http.delete(f"/v1/files/{file_id}")
        assert (kept.status_code, batch["id"] in kept.text) == (400, True)
        first = next(c.order for c in node.commands if isinstance(c, SubmitRequest))
        await node.answer(first, 0, 2, last=True)
        await until(http, batch["id"], lambda one: bool(one["request_counts"]["completed"]))
        status = await http.cell.status()
        assert status.batches == (OpenBatches(tenant="", batches=1, lines=200, done=1),)
        assert batches_words(status.batches) == "1, 1 of 200 lines done"

        told = (await http.post(f"/v1/batches/{batch['id']}/cancel", {})).json()
        assert (told["status"], told["output_file_id"]) == ("cancelling", None)
        await node.told(AbortRequest)
        batch = await ended(http, batch["id"])
        assert batch["status"] == "cancelled"
        assert batch["request_counts"] == {"total": 200, "completed": 1, "failed": 199}
        left = await lines(http, batch["error_file_id"])
        assert {one["error"]["code"] for one in left.values()} == {"batch_cancelled"}
        assert left.keys() | (await lines(http, batch["output_file_id"])).keys() == {
            f"c{n}" for n in range(200)
        }
        await http.cell.idle()
        assert (await http.cell.status()).batches == ()
        again = await http.post(f"/v1/batches/{batch['id']}/cancel", {})
        assert (again.status_code, "nothing to cancel" in again.text) == (400, True)
        assert (await http.delete(f"/v1/files/{file_id}")).json()["deleted"]
        assert (await http.get(f"/v1/files/{file_id}/content")).status_code == 404


@pytest.mark.parametrize("spec", [SPEC, CLASSES])
async def test_a_call_with_limits_takes_the_place_of_a_line(tmp_path: Path, spec: Any) -> None:
    async with edge(tmp_path, limits=replace(PATIENT, batch_max=8)) as http:
        node = await http.cell.deployed(spec, held=True)
        await http.cell.ask(http.cell.client.profile, spec.name)
        await begun(http, written([line(f"c{n}") for n in range(30)]))
        await http.cell.until(lambda: http.cell.client.status().queued == 16)
        chat = asyncio.create_task(http.chat(max_tokens=1))
        left = (await node.told(AbortRequest)).request_id

        def orders() -> list[Any]:
            return [c.order for c in node.commands if isinstance(c, SubmitRequest)]

        await http.cell.until(lambda: not orders()[-1].slo.best_effort)
        assert left in [order.request.request_id for order in orders()[:8]]
        await node.answer(orders()[-1], 0, 1, last=True)
        assert (await chat).json()["choices"][0]["message"]["content"] == "a"


async def test_a_batch_goes_on_after_a_restart_and_ends_in_time(tmp_path: Path) -> None:
    calls = written([line(f"c{n}") for n in range(60)])
    async with edge(tmp_path) as http:
        node = await http.cell.deployed(held=True)
        batch, late = await begun(http, calls), await begun(http, calls)
        await node.told(SubmitRequest)
        orders = [c.order for c in node.commands if isinstance(c, SubmitRequest)]
        for order in orders[:5]:
            await node.answer(order, 0, 2, last=True)
        await until(http, batch["id"], lambda one: one["request_counts"]["completed"] > 0)
        await until(http, late["id"], lambda one: one["status"] == "in_progress")
    with closing(sqlite3.connect(tmp_path / "controller" / kept_files.FILE_NAME)) as index:
        sql = "UPDATE kept SET body = json_set(body, '$.expires_at', 1) WHERE id = ?"
        index.execute(sql, (late["id"],))
        index.commit()
    for path in (tmp_path / "controller" / "files").iterdir():
        if path.read_bytes().startswith(b'{"id":"batch_req_'):
            path.write_bytes(path.read_bytes() + b'{"id":"batch_req_torn","custom_id":"c59"')
    async with edge(tmp_path) as http:
        http.cell.nodes.append(await FakeNode(http.cell.address).join())
        batch, late = await ended(http, batch["id"]), await ended(http, late["id"])
        assert batch["request_counts"] == {"total": 60, "completed": 60, "failed": 0}
        assert len(await lines(http, batch["output_file_id"])) == 60
        assert late["status"] == "expired"
        left = await lines(http, late["error_file_id"])
        assert {one["error"]["code"] for one in left.values()} == {"batch_expired"}
        assert late["request_counts"]["completed"] + len(left) == 60


WRONG = [
    (b'{"custom_id": "x", "method"', "invalid_json_line", 3, None),
    (b"[]", "invalid_json_line", 3, None),
    (json.dumps(line("c0")).encode(), "duplicate_custom_id", 3, "custom_id"),
    (json.dumps(line("x", "/v1/completions")).encode(), "mismatched_url", 3, "url"),
    (json.dumps(line("x", model="chta")).encode(), "model_not_found", 3, "body.model"),
    (json.dumps(line("x", stream=True)).encode(), "invalid_request", 3, "body.stream"),
    (json.dumps(line("x", messages=[{}])).encode(), "invalid_request", 3, "body.messages[0].role"),
    (json.dumps({**line("x"), "method": "GET"}).encode(), "invalid_request", 3, "method"),
    (json.dumps(line("x" * 300)).encode(), "invalid_request", 3, "custom_id"),
    (b"x" * (batch_lines.LINE_BYTES_MAX + 9), "line_too_long", 3, None),
]


async def test_a_wrong_line_fails_its_batch_by_its_number(http: Edge) -> None:
    await http.cell.deployed()
    for wrong, code, number, param in WRONG:
        begins = await begun(http, written([line("c0")]) + b"\n" + wrong)
        batch = await ended(http, begins["id"])
        assert (batch["status"], batch["output_file_id"]) == ("failed", None)
        (error,) = batch["errors"]["data"]
        assert (error["code"], error["line"], error["param"]) == (code, number, param)
        assert error["message"]
        answer = await http.chat(max_tokens=1)
        assert answer.status_code == 200, "the cell serves on"


def test_errors_and_lines_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "calls"
    path.write_bytes(b"{}\n" * 300)
    assert len(checked(lines_of(path), CHAT).errors) == batch_lines.ERRORS_MAX
    path.write_bytes(b"\n \n")
    assert [one.code for one in checked(lines_of(path), CHAT).errors] == ["empty_file"]
    monkeypatch.setattr(batch_lines, "LINES_MAX", 3)
    path.write_bytes(written([line(f"c{n}") for n in range(9)]))
    (error,) = checked(lines_of(path), CHAT).errors
    assert (error.code, error.line) == ("too_many_lines", 4)


def test_answers_are_kept_up_to_what_is_torn_and_have_a_bound(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = tmp_path / "answers", tmp_path / "errors"
    answers = Answers(*paths)
    for n in range(3):
        answers.add(f"c{n}", Answer(status=200, body=b'{"n":1}', request_id="r1"))
    answers.add_unanswered("c3", "batch_expired", "late")
    answers.sync()
    whole = paths[0].read_bytes()
    for cut in range(1, len(whole.splitlines()[-1])):
        paths[0].write_bytes(whole[:-cut])
        answers = Answers(*paths)
        assert (answers.ids, answers.completed) == ({"c0", "c1", "c3"}, 2)
    monkeypatch.setattr(batch_lines, "ANSWERS_BYTES_MAX", len(whole) + 10)
    answers = Answers(*paths)
    with pytest.raises(StorageError, match="more than"):
        answers.add("d", Answer(status=200, body=b"x" * 200))


async def test_a_file_that_is_not_taken_says_why(
    http: Edge, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "FILE_BYTES_MAX", 1000)
    monkeypatch.setattr(files, "FORM_BYTES_MAX", 1000)
    refused: tuple[tuple[dict[str, str], bytes, int, str | None], ...] = (
        ({"purpose": "fine-tune"}, b"x", 400, "purpose"),
        ({"expires_after[seconds]": "9"}, b"x", 400, "expires_after[seconds]"),
        ({}, b"", 400, "file"),
        ({}, b"x" * 5000, 413, None),
    )
    for form, content, status, param in refused:
        told = await sent(http, content, **form)
        assert (told.status_code, told.json()["error"]["param"]) == (status, param), told.text
    other = await http.post("/v1/files", b"x", headers={"Content-Type": "text/plain"})
    assert other.status_code == 415
    torn = {"Content-Type": "multipart/form-data; boundary=b"}
    for body in (b"", b"--b\r\nx", b"--c"):
        assert (await http.post("/v1/files", body, headers=torn)).status_code == 400
    folder = tmp_path / "controller" / "files"
    assert (await http.get("/v1/files")).json()["data"] == list(folder.iterdir()) == []
    assert (await sent(http, b"x" * 1700)).status_code == 200
    (kept,) = (await http.get("/v1/files")).json()["data"]
    assert [path.name for path in folder.iterdir()] == [kept["id"]]


PURPOSE = (b'name="purpose"', b"batch")
FILE = (b'name="file"; filename="x"', b"{}")


FORMS: tuple[tuple[list[tuple[bytes, bytes]], str, str], ...] = (
    ([PURPOSE, FILE], "; charset=undefined", "undefined"),
    ([PURPOSE, FILE], "; charset=punycode", "punycode"),
    ([(b'name="purpose"; filename="x"', b"batch"), FILE], "", "Too many files"),
    ([(b'name="purpose"; filename="x"', b"batch")], "", "purpose is a file"),
    ([PURPOSE, (b'name="file"', b"{}")], "", "file is missing"),
    ([PURPOSE, *[FILE] * 2], "", "Too many files"),
    ([*[PURPOSE] * 3, FILE], "", "Too many fields"),
    ([(b"", b"batch"), FILE], "", "must be provided"),
    ([PURPOSE, (FILE[0] + b"x" * 9000, b"{}")], "", "Invalid multipart data"),
    ([PURPOSE, (FILE[0] + b"\r\nx: y" * 20, b"{}")], "", "Invalid multipart data"),
)


async def test_a_form_that_no_client_makes_is_the_callers_error(http: Edge) -> None:
    for parts, kind, said in FORMS:
        told = await http.post("/v1/files", form_of(parts), headers={"Content-Type": FORM + kind})
        error = told.json()["error"]["message"]
        assert (told.status_code, said in error) == (400, True), told.text
    assert (await http.get("/v1/files")).json()["data"] == []


async def test_a_file_is_kept_by_the_last_part_of_its_name(http: Edge) -> None:
    for given, kept in (
        (b"../../etc/passwd", "passwd"),
        (b"C:\\calls\\a.jsonl", "a.jsonl"),
        (b"a/", "file"),
        (b"x" * 300 + b".jsonl", "x" * 249 + ".jsonl"),
        ("名.jsonl".encode(), "名.jsonl"),
    ):
        parts = [PURPOSE, (b'name="file"; filename="%b"' % given, b"{}")]
        told = await http.post("/v1/files", form_of(parts), headers={"Content-Type": FORM})
        assert told.json()["filename"] == kept


async def test_what_was_cancelled_unchecked_has_no_answers(
    http: Edge, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file of millions of lines would become as many errors."""
    await http.cell.deployed()
    release = threading.Event()

    def slowly(lines: Any, endpoint: str) -> Checked:
        release.wait(WAIT_S_MAX)
        return checked(lines, endpoint)

    monkeypatch.setattr(batches, "checked", slowly)
    many = [await begun(http, written([line("c")])) for _ in range(3)]
    for one in many[:2]:
        told = await http.post(f"/v1/batches/{one['id']}/cancel", {})
        assert told.json()["status"] == "cancelling"
        batch = await ended(http, one["id"])
        assert (batch["status"], batch["output_file_id"]) == ("cancelled", None)
        assert (batch["error_file_id"], batch["request_counts"]["total"]) == (None, 0)
    release.set()
    assert (await ended(http, many[2]["id"]))["status"] == "completed"


async def test_tenants_take_turns_in_having_files_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, order = kept_files.KeptFiles(tmp_path), list[str]()
    made, all_checked = batches.Batches(store), asyncio.Event()

    def content(of: kept_files.KeptFiles, file_id: str) -> Path:
        order.append(file_id)
        if len(order) == 5:
            all_checked.set()
        return tmp_path / "missing"

    monkeypatch.setattr(kept_files.KeptFiles, "content", content)
    made.serve({}, lambda name: None)  # type: ignore[arg-type, return-value]
    for tenant, count in (("a", 4), ("b", 1)):
        act_as(Caller(role=Role.TENANT, tenant=TenantName(tenant)))
        for n in range(count):
            file = KeptFile(
                id=f"{tenant}{n}", bytes=1, created_at=1, expires_at=1, filename="", purpose="batch"
            )
            store.add(file, caller())
            body = {"input_file_id": file.id, "endpoint": CHAT, "completion_window": "24h"}
            await made.create(batches.BatchBody.model_validate(body))
    async with asyncio.timeout(WAIT_S_MAX):
        await all_checked.wait()
    made.stop()
    store.close()
    assert order.index("b0") == 1


async def test_the_file_of_a_batch_that_is_gone_ends_it(tmp_path: Path) -> None:
    async with edge(tmp_path, limits=replace(PATIENT, batch_max=2)) as http:
        node = await http.cell.deployed(held=True)
        running = await begun(http, written([line(f"c{n}") for n in range(9)]))
        await node.told(SubmitRequest)
        file = await sent(http, b"{}")
        for path in (tmp_path / "controller" / "files").iterdir():
            path.unlink()
        asked = {"input_file_id": file.json()["id"], "endpoint": CHAT, "completion_window": "24h"}
        late = (await http.post("/v1/batches", asked)).json()
        (error,) = (await ended(http, late["id"]))["errors"]["data"]
        assert error["message"] == f"the content of {asked['input_file_id']} is there no more"
        await http.post(f"/v1/batches/{running['id']}/cancel", {})
        assert (await ended(http, running["id"]))["status"] == "cancelled"


def test_what_a_full_disk_takes_of_an_answer_is_not_left_in_its_file(tmp_path: Path) -> None:
    """A bound on the sizes of this process's files stands for the disk."""
    paths = tmp_path / "answers", tmp_path / "errors"
    answers, answer = Answers(*paths), Answer(status=200, body=b"x" * 200)
    answers.add("c0", answer)
    whole, before = paths[0].read_bytes(), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(whole) + 100, before[1]))
    try:
        with pytest.raises(StorageError, match=r"100 bytes of .* the disk is full"):
            answers.add("c1", answer)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert (paths[0].read_bytes(), answers.ids) == (whole, {"c0"})


async def test_a_batch_ends_once_the_disk_takes_its_end(
    http: Edge, monkeypatch: pytest.MonkeyPatch
) -> None:
    add, outcomes = kept_files.KeptFiles.add, [StorageError("full"), OSError("full")]

    def kept(store: kept_files.KeptFiles, one: KeptFile | KeptBatch, owner: Caller) -> None:
        if isinstance(one, KeptFile) and one.purpose == "batch_output" and outcomes:
            raise outcomes.pop()
        add(store, one, owner)

    monkeypatch.setattr(kept_files.KeptFiles, "add", kept)
    monkeypatch.setattr(batches, "END_AGAIN_S", 0.0)
    await http.cell.deployed()
    batch = await ended(http, (await begun(http, written([line("c0")])))["id"])
    assert (batch["status"], outcomes) == ("completed", [])
    assert list(await lines(http, batch["output_file_id"])) == ["c0"]


async def test_old_files_are_forgotten_though_the_disk_has_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    outcomes, forgotten = [PermissionError("x"), StorageError("x"), None], asyncio.Event()

    def forget(store: Any) -> None:
        error = outcomes.pop(0) if outcomes else None
        if error is not None:
            raise error
        forgotten.set()

    monkeypatch.setattr(kept_files.KeptFiles, "forget_old", forget)
    monkeypatch.setattr(batches, "FORGET_S", 0.0)
    async with edge(tmp_path), asyncio.timeout(WAIT_S_MAX):
        await forgotten.wait()


async def test_the_files_of_a_tenant_have_a_bound(
    http: Edge, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kept_files, "TENANT_BYTES_MAX", 2000)
    kept = await sent(http, b"x" * 900)
    told = await sent(http, b"x" * 1500)
    assert (told.status_code, told.json()["error"]["code"]) == (429, "rate_limit_exceeded")
    assert told.headers["x-should-retry"] == "false"
    await http.delete(f"/v1/files/{kept.json()['id']}")
    assert (await sent(http, b"x" * 1500)).status_code == 200


async def test_a_batch_that_is_not_begun_says_why(http: Edge) -> None:
    file = (await sent(http, b"{}")).json()
    good = {"input_file_id": file["id"], "endpoint": CHAT, "completion_window": "24h"}
    wrong: tuple[tuple[dict[str, Any], str], ...] = (
        ({"input_file_id": "file-x"}, "input_file_id"),
        ({"endpoint": "/v1/rerank"}, "endpoint"),
        ({"completion_window": "1d"}, "completion_window"),
        ({"surprise": 1}, "surprise"),
        ({"metadata": {"a": "x" * 513}}, "metadata.a"),
        ({"metadata": {"x" * 65: ""}}, f"metadata.{'x' * 65}"),
    )
    for body, param in wrong:
        told = await http.post("/v1/batches", {**good, **body})
        assert (told.status_code, told.json()["error"]["param"]) == (400, param), told.text


async def test_lists_come_in_pages(http: Edge, monkeypatch: pytest.MonkeyPatch) -> None:
    ids = [(await sent(http, b"x")).json()["id"] for _ in range(5)]
    first = (await http.get("/v1/files?limit=2")).json()
    assert [one["id"] for one in first["data"]] == ids[:2:-1]
    assert (first["first_id"], first["last_id"], first["has_more"]) == (ids[4], ids[3], True)
    rest = (await http.get(f"/v1/files?after={ids[3]}")).json()
    assert ([one["id"] for one in rest["data"]], rest["has_more"]) == (ids[2::-1], False)
    monkeypatch.setattr(files, "PAGE_MAX", 4)
    bounded = (await http.get("/v1/files?limit=10000")).json()
    assert (len(bounded["data"]), bounded["has_more"]) == (4, True)
    monkeypatch.undo()
    oldest = (await http.get(f"/v1/files?order=asc&after={ids[3]}")).json()
    assert [one["id"] for one in oldest["data"]] == ids[4:]
    for wrong in ("limit=0", "limit=x", "after=file-x", "order=up"):
        assert (await http.get(f"/v1/batches?{wrong}")).status_code == 400
    told = (await http.get("/v1/batches")).json()
    assert (told["data"], told["first_id"], told["has_more"]) == ([], None, False)


async def test_a_tenant_has_its_own_alone_and_a_revoked_key_ends_its_batches(
    tmp_path: Path,
) -> None:
    book = KeyBook(tmp_path / "controller")
    node_key, admin = (book.create(role, NOBODY)[0] for role in (Role.NODE, Role.ADMIN))
    a, kept = book.create(Role.TENANT, TenantName("a"))
    b, _ = book.create(Role.TENANT, TenantName("b"))
    async with edge(tmp_path, keys=True) as http:
        show(Credentials(key=node_key))
        node = await FakeNode(http.cell.address).join()
        show(Credentials())
        http.cell.nodes.append(node)
        node.held = True

        async def asked(key: str, verb: str, path: str, **how: Any) -> requests.Response:
            headers = {"Authorization": f"Bearer {key}"}
            url = http.url + path
            return await asyncio.to_thread(
                lambda: requests.request(verb, url, headers=headers, timeout=WAIT_S_MAX, **how)
            )

        show(Credentials(key=admin))
        client = MeshClient(http.cell.address)
        show(Credentials())
        await http.cell.ask(client.deploy, replace(SPEC, tenant="a"))
        ids = [(await sent(http, written([line("c")]), key=key)).json()["id"] for key in (a, b)]
        given = {"input_file_id": ids[0], "endpoint": CHAT, "completion_window": "24h"}
        assert (await asked(b, "POST", "/v1/batches", json=given)).status_code == 400
        batch = (await asked(a, "POST", "/v1/batches", json=given)).json()
        for path in (f"/v1/batches/{batch['id']}", f"/v1/files/{ids[0]}"):
            assert (await asked(b, "GET", path)).status_code == 404
            assert (await asked(a, "GET", path)).status_code == 200
        assert (await asked(b, "GET", f"/v1/files/{ids[0]}/content")).status_code == 404
        assert (await asked(b, "DELETE", f"/v1/files/{ids[0]}")).status_code == 404
        assert (await asked(b, "POST", f"/v1/batches/{batch['id']}/cancel")).status_code == 404
        assert (await asked(b, "GET", "/v1/batches")).json()["data"] == []
        theirs = {**given, "input_file_id": ids[1]}
        other = (await asked(b, "POST", "/v1/batches", json=theirs)).json()

        async def end(key: str, id_: str) -> Any:
            async with asyncio.timeout(WAIT_S_MAX):
                while True:
                    one = (await asked(key, "GET", f"/v1/batches/{id_}")).json()
                    if one["status"] == "failed":
                        return one["errors"]["data"][0]
                    await asyncio.sleep(0.02)

        assert (await end(b, other["id"]))["code"] == "model_not_found"
        await node.told(SubmitRequest)
        client.close()
    book.revoke(kept.key_id)
    again, _ = book.create(Role.TENANT, TenantName("a"))
    async with edge(tmp_path, keys=True) as http:
        message = (await end(again, batch["id"]))["message"]
        assert "was revoked" in message
    book.close()
