"""The page in a real browser, on a real cell with the demo model: what is shown, and what is done.

In every test no error may come to the console, which is where a breach of the page's policy would
be said, too, and no other host may be asked. MESH_PAGE_PICTURES names a folder for pictures of each
view, light, dark and narrow.
"""

import json
import os
import re
import shutil
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from subprocess import PIPE, Popen
from typing import Any
from urllib.parse import urlsplit

import pytest

from mesh.cli.cell import running_cell
from mesh.cli.cell_plan import CellPlan, plan_nodes
from mesh.cli.stopping import Stopping
from mesh.cli.waiting import Goal, wait_for
from mesh.controller.keys import KeyBook
from mesh.domain.access import NOBODY, Role, TenantName
from mesh.domain.deployment import DeploymentSpec, Scaling
from mesh.domain.errors import Cancelled, Unauthenticated
from mesh.domain.ids import DeploymentName
from mesh.domain.invocation import Invocation, TokenPrompt
from mesh.domain.limits import CellLimits
from mesh.domain.recent import CellGauges
from mesh.domain.slo import Slo
from mesh.domain.views import CellLine
from mesh.report.calls import CallEnd
from mesh.report.cell_page import page as page_of
from mesh.report.cell_report import cell_report
from mesh.runtime.journal import open_journal
from mesh.sim.cluster import VirtualCell
from mesh.sim.scenario import arrivals, plan
from mesh.wire.client import MeshClient
from mesh.wire.credentials import Credentials
from mesh.wire.credentials import show as show_credentials
from mesh_loader.store import StoredModel
from tests.cli.running import MESH
from tests.e2e.live_cell import free_port
from tests.sim.scenarios import SMALL, scenario

pytestmark = pytest.mark.timeout(300)
playwright: Any = pytest.importorskip("playwright.sync_api", reason="make test-page has it")
Axe: Any = pytest.importorskip("axe_playwright_python.sync_playwright").Axe
CHROMIUM = shutil.which("chromium")
if CHROMIUM is None and os.environ.get("CI"):
    raise RuntimeError("there is no chromium: apt-get install chromium")
if CHROMIUM is None:
    pytest.skip("there is no chromium: apt-get install chromium", allow_module_level=True)

ARGUMENTS = (
    *("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update"),
)
WAIT_MS_MAX = 30_000
READY_S_MAX = 100.0
REFUSABLE = re.compile("/api/v1/|/v1/chat/completions")
MARKUP = "<img src=x onerror=alert(1)> \u202egnp\x1b[31m"
VIEWS = {
    "cell": "#/cell",
    "deployments": "#/deployments",
    "deployment": "#/deployments/chat",
    "requests": "#/requests",
    "charts": "#/charts",
    "logs": "#/logs",
    "usage": "#/usage?by=both",
    "deploy": "#/deploy?from=chat",
    "playground": "#/try?a=chat&b=chat-too",
}


@dataclass(frozen=True, slots=True)
class Cell:
    address: str
    url: str
    model: Path


def spec_of(cell: Cell, name: str, replicas_min: int = 0) -> DeploymentSpec:
    return DeploymentSpec(
        name=DeploymentName(name),
        source=f"file://{cell.model}",
        slo=Slo(ttft_s=30.0, tpot_s=5.0),
        scaling=Scaling(replicas_min=replicas_min, replicas_max=1),
    )


@pytest.fixture(scope="module")
def cell(smollm2_model: StoredModel, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cell]:
    """A cell on one node with two deployments, one of them loaded."""
    plan = CellPlan(
        listen="127.0.0.1:0",
        http="127.0.0.1:0",
        home=tmp_path_factory.mktemp("page") / "cell",
        nodes=plan_nodes(["cpu"]),
        precision="f32",
        kv="f16",
    )
    with Stopping() as stopping, running_cell(plan, stopping) as running:
        made = Cell(running.address, f"http://{running.http_address}/", smollm2_model.path)
        with MeshClient(made.address) as client:
            client.deploy(spec_of(made, "chat", replicas_min=1))
            client.deploy(spec_of(made, "chat-too"))
            wait_for(client, DeploymentName("chat"), Goal.READY, READY_S_MAX)
        yield made


def plan_of(home: Path, *, keys: bool = False) -> CellPlan:
    """A cell without nodes, which starts within a second."""
    address = f"127.0.0.1:{free_port()}"
    return CellPlan(listen="127.0.0.1:0", http=address, home=home, nodes=(), keys=keys)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as started:
        opened = started.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        yield opened
        opened.close()


@pytest.fixture
def page(browser: Any, cell: Cell) -> Iterator[Any]:
    """A tab, held to what holds of every one."""
    with watched(browser, cell.url) as page:
        yield page


def is_fine(told: Any) -> bool:
    """Browsers note each call that is refused or finds nobody; where that is what a test makes
    happen, it is no error of the page's.
    """
    refused = told.text.startswith("Failed to load resource: ")
    return told.type != "error" or (
        refused and bool(REFUSABLE.match(urlsplit(told.location["url"]).path))
    )


@contextmanager
def watched(browser: Any, url: str, heading: str = "Cell", **how: Any) -> Iterator[Any]:
    context = browser.new_context(**how)
    page = context.new_page()
    page.set_default_timeout(WAIT_MS_MAX)
    said: list[str] = []
    asked: list[str] = []
    page.on("console", lambda told: None if is_fine(told) else said.append(told.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.on("request", lambda request: asked.append(request.url))
    page.goto(url)
    page.get_by_role("heading", name=heading).wait_for()
    yield page
    here = urlsplit(url).netloc
    assert said == []
    assert [url for url in asked if urlsplit(url).netloc != here] == []
    context.close()


def show(page: Any, view: str) -> None:
    page.evaluate("address => { location.hash = address; }", view)


def test_the_cell_is_shown_in_the_words_and_numbers_of_the_command_line(
    page: Any, cell: Cell
) -> None:
    with MeshClient(cell.address) as client:
        (node,) = client.nodes()
        status = client.status()
    card = page.locator(f"#node-{node.node_id}")
    card.get_by_role("link", name=re.compile("^chat-1$|^chat$|chat")).first.wait_for()
    assert f"limit {node.memory_bytes / 2**20:.0f}" in card.inner_text()
    assert f"{status.nodes_ready} of {status.nodes}" in page.locator(".totals").inner_text()
    assert card.locator(".bar span").first.inner_text() == "B"
    page.locator(".chart canvas").first.wait_for()


def test_a_deployment_appears_and_goes_without_a_reload(page: Any, cell: Cell) -> None:
    show(page, "#/deployments?filter=brief")
    page.get_by_text("0 of 2").wait_for()
    with MeshClient(cell.address) as client:
        client.deploy(spec_of(cell, "brief"))
        page.get_by_role("link", name="brief", exact=True).wait_for(timeout=2_000)
        page.get_by_role("link", name="brief", exact=True).click()
        page.get_by_role("button", name="delete …").click()
        page.get_by_role("button", name="keep it").click()
        assert len(client.list()) == 3, "once is not enough"
        page.get_by_role("button", name="delete …").click()
        page.get_by_role("button", name="delete it").click()
        page.get_by_text("There is no deployment of this name.").wait_for()
        assert len(client.list()) == 2


def test_a_deployment_is_scaled_loaded_and_refused_in_words(page: Any, cell: Cell) -> None:
    show(page, "#/deployments/chat-too")
    page.get_by_label("keep alive, s").fill("45")
    page.get_by_role("button", name="scale").click()
    page.get_by_text('"keep_alive_s": 45').wait_for()
    page.get_by_role("button", name="undo rollout").click()
    page.get_by_role("alert").wait_for()
    page.get_by_role("button", name="load", exact=True).click()
    page.get_by_role("cell", name="ready").wait_for()
    page.get_by_role("button", name="unload").click()
    page.get_by_text("None is loaded").wait_for()


def test_the_playground_streams_stops_and_measures(page: Any, cell: Cell) -> None:
    show(page, "#/try?a=chat")
    page.get_by_text("System prompt, sampling").click()
    page.get_by_label("at most so many tokens").fill("24")
    page.get_by_label("Prompt", exact=True).fill("Tell me of the sea.")
    page.get_by_role("button", name="send").click()
    answer = page.get_by_label("Answers of chat")
    answer.get_by_text(re.compile("TTFT .* s \\(SLO 30 s")).wait_for()
    answer.get_by_text("ended by").wait_for()
    page.get_by_label("at most so many tokens").fill("1500")
    page.get_by_label("Prompt", exact=True).fill("Count from one to a thousand.")
    page.get_by_role("button", name="send").click()
    page.get_by_role("button", name="stop", exact=True).click()
    answer.get_by_text("stopped").first.wait_for()
    with MeshClient(cell.address) as client:
        wait_for_none(page, client)
    page.reload()
    page.get_by_text("Tell me of the sea.").first.wait_for()


def wait_for_none(page: Any, client: MeshClient) -> None:
    """A stopped answer gives its place back."""
    for _ in range(100):
        if not client.requests():
            return
        page.wait_for_timeout(50)
    raise AssertionError("a stopped request runs on")


def test_a_request_is_seen_told_whole_and_cancelled(page: Any, cell: Cell) -> None:
    show(page, "#/requests")
    with MeshClient(cell.address) as client, ThreadPoolExecutor(1) as beside:
        asked = beside.submit(asked_in_full, client)
        page.get_by_role("button", name="cancel").first.wait_for()
        page.get_by_role("region", name="Timeline").get_by_text("d", exact=True).last.wait_for()
        page.get_by_role("region", name="Open requests").get_by_role("link").first.click()
        page.get_by_text("first token after").wait_for()
        page.get_by_text("to chat-").first.wait_for()
        page.locator("svg.tokens circle").nth(3).wait_for()
        page.go_back()
        page.get_by_role("button", name="cancel").first.click()
        page.get_by_text("was cancelled").first.wait_for()
        assert isinstance(asked.exception(), Cancelled)
    page.get_by_role("region", name="Ended requests").get_by_text("cancelled").first.wait_for()
    with page.expect_download() as kept:
        page.get_by_role("link", name="Chrome trace").click()
    trace = json.loads(Path(kept.value.path()).read_text())
    assert {"wait", "decode"} <= {event["name"] for event in trace["traceEvents"]}


def asked_in_full(client: MeshClient) -> None:
    for _ in client.invoke(
        Invocation(
            deployment=DeploymentName("chat"),
            prompt=TokenPrompt(token_ids=(1, 2, 3)),
            max_tokens=6_000,
        )
    ):
        pass


def test_lines_are_filtered_searched_paused_and_shown_as_text(page: Any, cell: Cell) -> None:
    show(page, "#/logs?search=brief-log")
    with MeshClient(cell.address) as client:
        client.deploy(spec_of(cell, "brief-log"))
        page.get_by_text("deploy file://").first.wait_for()
        page.get_by_label("kind").select_option("node")
        page.get_by_text("No line fits.").wait_for()
        page.get_by_label("kind").select_option("deployment")
        page.get_by_role("button", name="pause").click()
        client.delete(DeploymentName("brief-log"))
        page.get_by_text(re.compile("paused; [1-9][0-9]* newer")).wait_for()
        page.get_by_role("button", name="go on").click()
        page.locator(".log").get_by_text("delete").first.wait_for()
    page.reload()
    assert page.get_by_label("search").input_value() == "brief-log"


def asked(max_tokens: int, name: str = "chat") -> Invocation:
    return Invocation(
        deployment=DeploymentName(name),
        prompt=TokenPrompt(token_ids=(1, 2, 3)),
        max_tokens=max_tokens,
    )


def test_a_drain_and_a_rollout_are_shown_as_they_happen(page: Any, cell: Cell) -> None:
    with MeshClient(cell.address) as client:
        (node,) = client.nodes()
        card = page.locator(f"#node-{node.node_id}")
        client.drain(node.node_id)
        card.get_by_text("draining", exact=True).wait_for(timeout=2_000)
        client.drain(node.node_id, undo=True)
        card.get_by_text("draining", exact=True).wait_for(state="detached")
        show(page, "#/deployments/chat-too")
        client.deploy(replace(spec_of(cell, "chat-too"), context_tokens_max=1024))
        page.get_by_role("region", name="Revisions").get_by_role("cell", name="2").wait_for()


def test_page_and_command_line_give_the_same_numbers(page: Any, cell: Cell) -> None:
    with MeshClient(cell.address) as client:
        for _ in client.invoke(asked(4)):
            pass
        page.wait_for_timeout(1_500)
        status = client.status()
    shown = {
        name: page.locator(".totals div", has=page.get_by_text(name, exact=True)).locator("dd")
        for name in ("nodes ready", "requests running", "queued", "served")
    }
    texts = {name: one.inner_text().replace(",", "") for name, one in shown.items()}
    assert texts == {
        "nodes ready": f"{status.nodes_ready} of {status.nodes}",
        "requests running": str(status.running),
        "queued": str(status.queued),
        "served": str(status.served),
    }


def test_charts_have_one_cursor(page: Any, cell: Cell) -> None:
    show(page, "#/charts")
    page.locator(".chart canvas").nth(7).wait_for()
    page.locator(".chart .u-over").first.hover()
    for cursor in page.locator(".chart .u-cursor-x").all():
        playwright.expect(cursor).to_have_attribute("style", re.compile("transform"))


def test_what_cannot_be_asked_is_said_where_it_was_asked(page: Any, cell: Cell) -> None:
    show(page, "#/try?a=chat")
    page.get_by_text("System prompt, sampling").click()
    page.get_by_label("JSON schema of the answer").fill("{")
    page.get_by_label("Prompt", exact=True).fill(MARKUP)
    page.get_by_role("button", name="send").click()
    page.get_by_role("alert").get_by_text("JSON schema: this is no JSON").wait_for()
    page.get_by_label("JSON schema of the answer").fill("")
    page.get_by_label("Prompt", exact=True).fill(5_000 * "far too long ")
    page.get_by_role("button", name="send").click()
    page.get_by_role("alert").get_by_text("maximum context length is").wait_for()
    page.get_by_label("at most so many tokens").fill("4")
    page.get_by_label("Prompt", exact=True).fill(MARKUP)
    page.get_by_role("button", name="send").click()
    page.get_by_text("<img src=x onerror=alert(1)>").first.wait_for()
    assert page.locator("main img").count() == 0


def test_a_view_is_an_address_that_keys_reach(page: Any, cell: Cell) -> None:
    show(page, "#/deployments?sort=-served&filter=chat")
    page.get_by_role("columnheader", name="served").wait_for()
    assert page.locator("th[aria-sort=descending]").inner_text().startswith("served")
    page.reload()
    page.locator("th[aria-sort=descending]").wait_for()
    page.get_by_role("link", name="chat-too", exact=True).focus()
    page.keyboard.press("Enter")
    page.get_by_role("heading", name="chat-too").wait_for()
    page.go_back()
    page.get_by_role("heading", name="Deployments").wait_for()
    assert page.get_by_label("Filter by name, state or source").input_value() == "chat"


@pytest.mark.parametrize("width", [360, 1280])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_each_view_fits_its_window(
    browser: Any, cell: Cell, scheme: str, width: int, tmp_path: Path
) -> None:
    pictures = Path(os.environ.get("MESH_PAGE_PICTURES") or tmp_path)
    window = {"width": width, "height": 900}
    with watched(browser, cell.url, color_scheme=scheme, viewport=window) as page:
        for name, view in VIEWS.items():
            show(page, view)
            page.get_by_role("heading").first.wait_for()
            if name == "playground":
                page.get_by_label("Prompt", exact=True).fill("Tell me of the sea.")
                page.get_by_text("System prompt, sampling").click()
                page.get_by_label("at most so many tokens").fill("16")
                page.get_by_text("System prompt, sampling").click()
                page.get_by_role("button", name="send").click()
                page.get_by_text("ended by").nth(1).wait_for()
            page.wait_for_timeout(300)
            found = Axe().run(page)
            assert found.violations_count == 0, found.generate_report()
            page.screenshot(path=pictures / f"{name}-{scheme}-{width}.png", full_page=True)
            wide = page.evaluate("document.documentElement.scrollWidth")
            assert wide <= width, f"{name} is {wide} wide"


def test_a_journal_is_stepped_to_its_end(browser: Any, tmp_path: Path) -> None:
    read = scenario(tmp_path, SMALL)
    made = plan(read)
    path = tmp_path / "journal"
    journal = open_journal(path, made.start())
    VirtualCell(made, recorders=(journal,)).run(arrivals(read))
    journal.close()
    with path.open("a") as torn:
        torn.write('{"now_s": 9')
    command = [*MESH, "page", "--journal", str(path), "--http", "127.0.0.1:0"]
    with Popen(command, stdout=PIPE, text=True) as shown:
        assert shown.stdout is not None
        opened = ExitStack()
        opened.callback(shown.kill)
        with opened, watched(browser, shown.stdout.readline().strip()) as page:
            where = page.locator(".journal [role=status]")
            where.get_by_text("0 of ").wait_for()
            page.get_by_text("No node has joined").wait_for()
            for _ in range(3):
                page.get_by_role("button", name="step on").click()
            where.get_by_text(re.compile("^3 of .*: NodeConnected")).wait_for()
            page.locator(".card").nth(1).wait_for()
            page.get_by_role("button", name="step back").click()
            page.locator(".card").nth(1).wait_for(state="detached")
            page.get_by_label("speed").select_option("10")
            page.get_by_role("button", name="play").click()
            page.get_by_role("button", name="pause").click()
            page.get_by_role("button", name="to its end").click()
            page.get_by_role("button", name="step on").and_(page.locator(":disabled")).wait_for()
            show(page, "#/requests")
            page.get_by_role("region", name="Timeline").wait_for()
            page.get_by_role("region", name="Ended requests").get_by_role("link").first.click()
            page.get_by_text("asked: ").wait_for()
            shown.send_signal(signal.SIGINT)
            assert shown.wait(20) == 0


def test_signing_in_takes_a_key_and_a_tenant_sees_its_own(browser: Any, tmp_path: Path) -> None:
    book = KeyBook(tmp_path / "controller")
    admin, _ = book.create(Role.ADMIN, NOBODY)
    tenant, kept = book.create(Role.TENANT, TenantName("acme"))
    show_credentials(Credentials(key=admin))
    plan = plan_of(tmp_path, keys=True)
    with (
        Stopping() as stopping,
        running_cell(plan, stopping),
        watched(browser, f"http://{plan.http}/", "Sign in") as page,
    ):
        page.get_by_label("Key").fill("mesh_of_nobody")
        page.get_by_role("button", name="sign in").click()
        page.get_by_role("alert").get_by_text("the key is unknown").wait_for()
        page.get_by_label("Key").fill(tenant)
        page.get_by_role("button", name="sign in").click()
        page.get_by_text("No node has joined that this key may see.").wait_for()
        page.locator(".who").get_by_text("acme").wait_for()
        assert page.evaluate("document.cookie") == "", "no script can read it"
        page.reload()
        page.locator(".who").get_by_text("acme").wait_for()
        book.revoke(kept.key_id)
        page.get_by_role("heading", name="Sign in").wait_for()
        page.get_by_label("Key").fill(admin)
        page.get_by_role("button", name="sign in").click()
        page.get_by_role("link", name="Keys").click()
        page.get_by_role("textbox", name="tenant").fill("acme")
        page.get_by_role("button", name="make a key").click()
        fresh = page.get_by_role("status").locator("code").inner_text()
        mine = book.caller(fresh)
        assert mine.tenant == "acme"
        page.get_by_role("button", name="done").click()
        assert fresh not in page.content(), "it is shown once"
        page.get_by_role("button", name=f"revoke {mine.key_id}").click()
        page.get_by_role("button", name="revoke it").click()
        page.get_by_role("button", name=f"revoke {mine.key_id}").wait_for(state="detached")
        with pytest.raises(Unauthenticated):
            book.caller(fresh)
        page.get_by_role("button", name="sign out").click()
        page.get_by_role("heading", name="Sign in").wait_for()
    book.close()


def test_a_killed_nodes_card_says_so(browser: Any, tmp_path: Path) -> None:
    plan = replace(plan_of(tmp_path), nodes=plan_nodes(["cpu"]), precision="f32")
    with (
        Stopping() as stopping,
        running_cell(plan, stopping) as cell,
        watched(browser, f"http://{plan.http}/") as page,
    ):
        page.locator(".card .is-ready").first.wait_for()
        os.killpg(cell.children[1].process.pid, signal.SIGKILL)
        gone = page.locator(".card").locator(".is-lost, .is-starting").first
        gone.wait_for(timeout=1e3 * (CellLimits().node_lease_s + 2.0))


def test_a_report_of_an_hour_is_small_whole_and_printed_without_a_cut_table(
    browser: Any, tmp_path: Path
) -> None:
    names = [f"deployment-with-a-long-name-{n}" for n in range(128)]
    ends = [
        CallEnd(
            at_s=n % 3600,
            deployment=names[n % 128],
            end="stop" if n % 7 else "queue_full",
            refused=n % 7 == 0,
            finished=n % 7 != 0,
            met=n % 3 == 0,
            met_in_the_mean=n % 3 == 0,
            prompt_tokens=100,
            output_tokens=50,
            ttft_s=0.1 + n % 17 / 10,
            tpot_s=0.01 + n % 13 / 100,
        )
        for n in range(20_000)
    ]
    fault = CellLine(kind="node", subject="n1", text=MARKUP + 300 * " word", fault=True)
    looks = [(15.0 * n, CellGauges(nodes_ready=4, nodes_used=n % 4)) for n in range(240)]
    whole = cell_report(
        "An hour", ends, from_s=0.0, until_s=3600.0, looks=looks, lines=[(9.0, fault)]
    )
    path = tmp_path / "report.html"
    path.write_text(page_of(whole, replace(whole, name="the hour before")), encoding="utf-8")
    assert path.stat().st_size <= 2_000_000
    context = browser.new_context(viewport={"width": 720, "height": 1000}, offline=True)
    shown = context.new_page()
    said: list[str] = []
    shown.on("console", lambda told: said.append(told.text))
    shown.on("pageerror", lambda error: said.append(str(error)))
    shown.on("request", lambda asked: said.append(asked.url))
    shown.goto(path.as_uri())
    assert said == [path.as_uri()], "it asks for nothing but itself"
    assert shown.locator("img").count() == 0
    assert shown.get_by_text(names[127]).count()
    shown.emulate_media(media="print")
    cut = shown.evaluate(
        """[...document.querySelectorAll("table")].filter(
          one => one.getBoundingClientRect().right > document.documentElement.clientWidth).length"""
    )
    assert cut == 0
    assert shown.pdf(format="A4").startswith(b"%PDF")
    context.close()


def test_the_page_comes_back_by_itself_after_the_controller_was_killed(
    browser: Any, tmp_path: Path
) -> None:
    plan = plan_of(tmp_path)
    with (
        Stopping() as stopping,
        running_cell(plan, stopping) as cell,
        watched(browser, f"http://{plan.http}/") as page,
    ):
        page.get_by_text("Nothing is deployed yet.").wait_for()
        os.killpg(cell.children[0].process.pid, signal.SIGKILL)
        page.get_by_text(re.compile("controller silent for [0-9]+ s, trying")).wait_for()
        with running_cell(plan, stopping):
            page.get_by_text("controller silent").wait_for(state="detached")
            page.get_by_text("Shown anew").wait_for()
