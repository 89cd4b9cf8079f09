"""The page in a real browser, on a real cell with the demo model: what is shown, and what is done.

In every test no error may come to the console, which is where a breach of the page's policy would
be said, too, and no other host may be asked; in every view axe-core finds nothing, light and dark,
narrow and wide. MESH_PAGE_PICTURES names a folder for pictures of all of them.
"""

import ast
import json
import os
import re
import shutil
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Set
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import datetime
from itertools import count
from pathlib import Path
from subprocess import PIPE, Popen
from subprocess import run as run_command
from typing import Any
from urllib.parse import quote, urlsplit

import pytest
import requests
from prometheus_client.parser import text_string_to_metric_families

from mesh.cli.cell import running_cell
from mesh.cli.cell_plan import CellPlan, plan_nodes
from mesh.cli.stopping import Stopping
from mesh.cli.waiting import Goal, wait_for
from mesh.controller.keys import KeyBook
from mesh.domain.access import NOBODY, Role, TenantLimits, TenantName
from mesh.domain.deployment import DeploymentSpec, Scaling
from mesh.domain.errors import Cancelled, MeshError, Refused, Unauthenticated
from mesh.domain.events import NodeDisconnected
from mesh.domain.ids import DeploymentName, InstanceId
from mesh.domain.invocation import Invocation, TokenPrompt
from mesh.domain.limits import CellLimits
from mesh.domain.model import Task, WeightPrecision
from mesh.domain.recent import CellGauges
from mesh.domain.slo import Slo
from mesh.domain.steps import LoadTier
from mesh.domain.text import ToolFormat
from mesh.domain.views import CellLine
from mesh.http.feed import VIEWERS_MAX
from mesh.report.calls import TEXT_CHARS_MAX, CallEnd, Load
from mesh.report.cell_page import page as page_of
from mesh.report.cell_report import FAULTS_MAX, cell_report
from mesh.runtime.journal import open_journal
from mesh.sim.cluster import VirtualCell
from mesh.sim.scenario import arrivals, plan
from mesh.wire.client import MeshClient
from mesh.wire.credentials import KEY_VARIABLE, Credentials
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
SENDERS, SENT_MAX = 12, 20
TABS_MAX = 40
FAILED = re.compile("Failed to load resource: .*?(net::[A-Z_]+|[0-9]{3})")
BROKEN_OFF = {"net::ERR_CONNECTION_REFUSED", "net::ERR_INCOMPLETE_CHUNKED_ENCODING"}
REFUSABLE = re.compile("/api/v1/|/v1/chat/completions")
TAG = "<img src=x onerror=alert(1)>"
MARKUP = f"{TAG} \u202egnp\x1b[31m"
LONG = 1 << 20
COLOURED = """() => [...document.querySelectorAll("[class]")].flatMap(one => [...one.classList]
  .filter(name => /^(is|part|span)-|^late$/.test(name)).map(name => [name, one.textContent]))"""
SCHEMES = ("light", "dark")
NARROW, WIDE, WIDEST = 360, 1280, 2560
VIEWS = {
    "cell": "#/cell",
    "deployments": "#/deployments",
    "deployment": "#/deployments/chat",
    "no-deployment": "#/deployments/nobody",
    "requests": "#/requests",
    "charts": "#/charts",
    "logs": "#/logs",
    "usage": "#/usage?by=both",
    "deploy": "#/deploy?from=chat",
    "playground": "#/try?a=chat&b=chat-too",
    "no-view": "#/nowhere",
}


@dataclass(frozen=True, slots=True)
class Cell:
    address: str
    url: str
    model: Path
    node_pid: int


def spec_of(cell: Cell, name: str, replicas_min: int = 0) -> DeploymentSpec:
    return DeploymentSpec(
        name=DeploymentName(name),
        source=f"file://{cell.model}",
        slo=Slo(ttft_s=30.0, tpot_s=5.0),
        scaling=Scaling(replicas_min=replicas_min, replicas_max=1),
        tool_format=ToolFormat.HERMES,  # its own template knows of no tools
    )


def manifest_of(source: str, name: str) -> str:
    head = f"apiVersion: mesh/v1\nkind: Model\nmetadata: {{name: {name}}}\n"
    return f"{head}spec: {{source: '{source}', slo: {{ttft_s: 30, tpot_s: 5}}}}\n"


def asked(max_tokens: int, name: str = "chat", prompt: tuple[int, ...] = (1, 2, 3)) -> Invocation:
    return Invocation(
        deployment=DeploymentName(name),
        prompt=TokenPrompt(token_ids=prompt),
        max_tokens=max_tokens,
    )


def tokens_of(client: MeshClient, invocation: Invocation) -> None:
    for _ in client.invoke(invocation):
        pass


def terminal(cell: Cell, *arguments: str, stdin: str = "") -> str:
    """What a command writes."""
    done = run_command(
        [*MESH, *arguments],
        input=stdin,
        capture_output=True,
        text=True,
        timeout=READY_S_MAX,
        env={**os.environ, "MESH_CONTROLLER": cell.address},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


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
        url, node_pid = f"http://{running.http_address}/", running.children[1].process.pid
        made = Cell(running.address, url, smollm2_model.path, node_pid)
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
def page(browser: Any, cell: Cell, refused: set[str]) -> Iterator[Any]:
    """A tab, held to what holds of every one."""
    with watched(browser, cell.url, refused=refused) as page:
        yield page


@pytest.fixture
def refused() -> set[str]:
    """The statuses with which a scenario lets calls fail: it adds those that it makes happen."""
    return set()


def is_fine(told: Any, refused: Set[str]) -> bool:
    """Browsers note each call that is refused or finds nobody; where that is what a test makes
    happen, it is no error of the page's.
    """
    failed = FAILED.match(told.text)
    called = REFUSABLE.match(urlsplit(told.location["url"]).path)
    return told.type != "error" or bool(failed and called and failed[1] in refused)


@contextmanager
def watched(
    browser: Any, url: str, heading: str = "Cell", refused: Set[str] = frozenset(), **how: Any
) -> Iterator[Any]:
    context = browser.new_context(**how)
    page = context.new_page()
    page.set_default_timeout(WAIT_MS_MAX)
    said: list[str] = []
    asked: list[str] = []
    context.on("console", lambda told: None if is_fine(told, refused) else said.append(told.text))
    context.on("weberror", lambda told: said.append(str(told.error)))
    context.on("request", lambda request: asked.append(request.url))
    page.goto(url)
    page.get_by_role("heading", name=heading).wait_for()
    asks = 2 if heading == "Sign in" else 1
    assert sum(one.endswith("/api/v1/session") for one in asked) == asks, "once, if preloaded"
    with closing(context):
        yield page
        here = urlsplit(url).netloc
        assert page.locator("img").count() == 0, "markup is shown as text"
        assert said == []  # an image that was there before has asked for what is not found
        assert [url for url in asked if urlsplit(url).netloc != here] == []


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    named = os.environ.get("MESH_PAGE_PICTURES")
    folder = Path(named) if named else tmp_path_factory.mktemp("pictures")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def fits(page: Any, name: str, width: int) -> None:
    page.set_viewport_size({"width": width, "height": 900})
    for _ in range(20):  # charts follow within a few frames
        page.wait_for_timeout(100)
        wide = page.evaluate("document.documentElement.scrollWidth")
        if wide <= width:
            return
    raise AssertionError(f"{name} is {wide} wide, not {width}")


def looked_at(page: Any, name: str, pictures: Path) -> None:
    """The view as it is now, in each scheme, in a narrow and a wide window. Each colour of a state
    or a part has a word or letter of its own.
    """
    coloured = set(map(tuple, page.evaluate(COLOURED)))
    for each in zip(*coloured, strict=True):
        assert all(each), coloured
        assert len(set(each)) == len(coloured), coloured
    for scheme in SCHEMES:
        page.emulate_media(color_scheme=scheme)
        for width in (NARROW, WIDE):
            fits(page, name, width)
            found = Axe().run(page)
            assert found.violations_count == 0, found.generate_report()
            page.screenshot(path=pictures / f"{name}-{scheme}-{width}.png", full_page=True)


def show(page: Any, view: str) -> None:
    page.evaluate("address => { location.hash = address; }", view)


def play(page: Any, chosen: str, tokens: int) -> None:
    """The playground, with so many tokens in an answer at most."""
    show(page, f"#/try?{chosen}")
    page.get_by_text("System prompt, sampling").click()
    page.get_by_label("at most so many tokens").fill(f"{tokens}")


def test_a_deployment_appears_and_goes_without_a_reload(page: Any, cell: Cell) -> None:
    show(page, "#/deployments?filter=brief")
    page.get_by_text("0 of 2").wait_for()
    terminal(cell, "deploy", "-", stdin=manifest_of(f"file://{cell.model}", "brief"))
    page.get_by_role("link", name="brief", exact=True).wait_for(timeout=2_000)
    with MeshClient(cell.address) as client:
        page.get_by_role("link", name="brief", exact=True).click()
        for sure in ("keep it", "delete it"):
            tab_to(page, page.get_by_role("button", name="delete …"), press="Enter")
            tab_to(page, page.get_by_role("button", name=sure), press="Enter")
            assert len(client.list()) == 3 or sure == "delete it", "once is not enough"
        page.get_by_text("There is no deployment of this name.").wait_for()
        assert len(client.list()) == 2


def drawn_anew(page: Any) -> None:
    """Waits until the page was told something and has drawn it, which it is once a second."""
    page.evaluate(
        """async () => {
          const { onChange } = await import("./page/live.js");
          await new Promise(done => { const off = onChange(() => { off(); done(); }); }); }"""
    )


def test_a_deployment_is_scaled_loaded_and_refused_in_words(
    page: Any, cell: Cell, refused: set[str]
) -> None:
    refused.add("404")
    show(page, "#/deployments/chat-too")
    page.get_by_label("keep alive, s").fill("45")
    drawn_anew(page)  # it keeps what was typed
    page.get_by_role("button", name="scale").click()
    page.get_by_text("keep_alive_s: 45").wait_for()
    page.get_by_role("button", name="undo rollout").click()
    page.get_by_role("alert").wait_for()
    page.get_by_role("button", name="load", exact=True).click()
    page.get_by_role("cell", name="ready").wait_for()
    page.get_by_role("button", name="unload").click()
    page.get_by_text("None is loaded").wait_for()
    with MeshClient(cell.address) as client:
        (node,) = client.nodes()
    show(page, f"#/logs?kind=instance&node={node.node_id}&search=chat-too")
    page.locator(".log").get_by_text("gone", exact=True).wait_for()


def never_ends(route: Any) -> None:
    """The model does not end the answer by itself, as it may at any token."""
    route.continue_(post_data={**route.request.post_data_json, "ignore_eos": True})


def tab_to(page: Any, wanted: Any, press: str = "") -> None:
    """By the key that leads from each control to the next, until it is seen to be on this one."""
    for _ in range(TABS_MAX):
        page.keyboard.press("Tab")
        if wanted.evaluate("one => one.matches(':focus-visible')"):
            assert wanted.evaluate("one => getComputedStyle(one).outlineStyle") == "solid"
            if press:
                page.keyboard.press(press)
            return
    raise AssertionError(f"{TABS_MAX} times Tab do not lead to {wanted}")


def test_the_playground_is_used_by_keys_streams_stops_and_measures(page: Any, cell: Cell) -> None:
    """By keys alone until an answer is stopped, then by a pointer: the button stays where it was
    while text comes. Beside itself a deployment answers once.
    """
    prompt = page.get_by_label("Prompt", exact=True)
    stop = page.get_by_role("button", name="stop", exact=True)
    most = page.get_by_label("at most so many tokens")
    tab_to(page, page.get_by_role("link", name="Skip to the view"))
    tab_to(page, page.get_by_role("link", name="Playground"), press="Enter")
    page.get_by_role("heading", name="Playground").wait_for()
    tab_to(page, page.get_by_text("System prompt, sampling"), press="Enter")
    tab_to(page, most)
    page.keyboard.type("8")
    tab_to(page, prompt)
    page.keyboard.type("Tell me of the sea.")
    page.keyboard.press("Control+Enter")
    answer = page.get_by_label("Answers of chat", exact=True)
    answer.get_by_text(re.compile("TTFT .* s \\(SLO 30 s")).wait_for()
    answer.get_by_text("ended by").wait_for()
    playwright.expect(prompt).to_have_value("")
    page.route("**/v1/chat/completions", never_ends)
    most.fill("1500")
    prompt.fill("Count from one to a thousand.")
    page.keyboard.press("Control+Enter")
    answer.get_by_text("; answering").wait_for()
    tab_to(page, stop, press="Enter")
    answer.get_by_text("; stopped").wait_for()
    playwright.expect(prompt).to_have_value("")
    show(page, "#/try?a=chat&b=chat")
    page.set_viewport_size({"width": NARROW, "height": 900})
    send(page, "And back to one.")
    answer.get_by_text("; answering").wait_for()
    before = stop.bounding_box()
    said, lines_px = answer.locator(".said").last.element_handle(), 60
    page.wait_for_function("([said, px]) => said.offsetHeight > px", arg=[said, lines_px])
    assert stop.bounding_box() == pytest.approx(before, abs=1.0)
    stop.click()
    answer.get_by_text("; stopped").nth(1).wait_for()
    playwright.expect(prompt).to_have_value("")
    assert answer.locator(".said.user").count() == 3
    beside = page.get_by_label("Beside it").locator("option")
    assert beside.all_inner_texts() == ["none", "chat-too"]
    with MeshClient(cell.address) as client:
        wait_for_none(page, client)
    page.reload()
    answer.get_by_text("Tell me of the sea.").first.wait_for()


def test_a_long_prompt_has_a_later_limit_and_a_queue_and_a_load_are_told(
    page: Any, cell: Cell
) -> None:
    slo = Slo(ttft_s=10.0, ttft_tokens_per_s=0.5, tpot_s=5.0)
    with MeshClient(cell.address) as client:
        spec = replace(spec_of(cell, "slow"), slo=slo)
        client.deploy(spec)
        play(page, "a=slow", 4)
        os.killpg(cell.node_pid, signal.SIGSTOP)  # a load may take less than a view of it
        try:
            send(page, "Tell me of the sea.")
            answers = page.get_by_label("Answers of slow")
            loading = re.compile("waits, one of 1 queued: .* of about [0-9.]+ s")
            answers.get_by_text(loading).wait_for()
        finally:
            os.killpg(cell.node_pid, signal.SIGCONT)
        measured = answers.get_by_text("ended by")
        measured.wait_for(timeout=1e3 * READY_S_MAX)
        tokens = re.search(r"; ([0-9]+) \+ 4 tokens", measured.inner_text())
        assert tokens
        assert f"(SLO {2 * int(tokens[1])} s" in measured.inner_text()
        client.delete(spec.name)


def test_the_grace_of_a_call_that_a_load_makes_late_is_told(page: Any, cell: Cell) -> None:
    """In the playground, and of the request itself."""
    with MeshClient(cell.address) as client:
        slo, weights = Slo(ttft_s=1.0, tpot_s=5.0), WeightPrecision.I8  # others have none of it
        spec = replace(spec_of(cell, "cold"), slo=slo, weights=weights)
        client.deploy(spec)
        play(page, "a=cold", 4)
        send(page, "Tell me of the sea.")
        measured = page.get_by_label("Answers of cold").get_by_text("ended by")
        measured.wait_for(timeout=1e3 * READY_S_MAX)
        (grace_ms,) = map(int, re.findall("and ([0-9]+) ms of grace", measured.inner_text()))
        show(page, "#/requests?filter=cold")
        page.get_by_role("region", name="Ended requests").get_by_role("link").first.click()
        grace = page.get_by_text(re.compile("TTFT limit 1.00 s and [0-9.]+ s of grace"))
        (grace_s,) = map(float, re.findall(r"and ([0-9.]+) s of grace", grace.inner_text()))
        assert grace_s == pytest.approx(grace_ms / 1000, abs=0.01)
        client.delete(spec.name)


def test_a_call_as_code_is_the_call(page: Any, cell: Cell) -> None:
    """With all that is set, the earlier turns, and for both deployments."""
    show(page, "#/try?a=chat&b=chat-too")
    page.get_by_text("System prompt, sampling").click()
    given = {
        "system prompt": "It's brief.",
        "temperature": "0.5",
        "top p": "0.9",
        "at most so many tokens": "16",
        "seed": "7",
        "stop strings": "full stop\nx'y",
        "JSON schema": json.dumps({"const": "it's"}),
    }
    for label, value in given.items():
        page.get_by_label(label).fill(value)
    send(page, "Say it.")
    page.get_by_text("ended by").nth(1).wait_for(timeout=1e3 * READY_S_MAX)
    page.get_by_label("Prompt", exact=True).fill("-once 'more'")
    page.get_by_text("As code").click()
    texts = {}
    for form, mark in (("curl", "curl"), ("Python", "import"), ("mesh invoke", "mesh invoke")):
        page.get_by_role("button", name=form, exact=True).click()
        page.locator("pre.code", has_text=mark).wait_for()
        texts[form] = page.locator("pre.code").inner_text()
    sent: list[dict[str, Any]] = []
    page.on("request", lambda asked: sent.append(asked.post_data_json))
    page.get_by_role("button", name="send").click()
    page.get_by_text("ended by").nth(3).wait_for()
    bodies = [one for one in sent if one and "messages" in one]
    assert [one["model"] for one in bodies] == ["chat", "chat-too"]
    roles = [one["role"] for one in bodies[0]["messages"]]
    assert roles == ["system", "user", "assistant", "user"]
    for form in ("curl", "mesh invoke"):
        env = {
            **os.environ,
            "MESH_CONTROLLER": cell.address,
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        }
        done = run_command(["bash", "-c", texts[form]], capture_output=True, text=True, env=env)
        assert done.returncode == 0, done.stderr
        assert done.stdout.count("[DONE]" if form == "curl" else "it's") == 2
    read = [
        json.loads(str(node.value))
        for node in ast.walk(ast.parse(texts["Python"]))
        if isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and node.value.startswith("{")
    ]
    assert read == [{k: v for k, v in one.items() if k != "stream_options"} for one in bodies]


def test_an_answer_that_is_left_is_stopped(page: Any, cell: Cell) -> None:
    """By a reload, and for another view."""
    page.route("**/v1/chat/completions", never_ends)
    play(page, "a=chat", 1500)
    answers = page.get_by_label("Answers of chat")

    def look_elsewhere() -> None:
        show(page, "#/cell")
        page.get_by_role("heading", name="Cell").wait_for()
        show(page, "#/try?a=chat")

    with MeshClient(cell.address) as client:
        for number, left in enumerate((page.reload, look_elsewhere)):
            send(page, "Count from one to a thousand.")
            answers.get_by_text("answering").wait_for()
            left()
            answers.get_by_text("; stopped").nth(number).wait_for()
            assert answers.get_by_text("answering").count() == 0
            wait_for_none(page, client)


def wait_for_none(page: Any, client: MeshClient) -> None:
    """A stopped answer gives its place back."""
    for _ in range(int(READY_S_MAX / 0.05)):
        if not client.requests():
            return
        page.wait_for_timeout(50)
    raise AssertionError("a stopped request runs on")


def test_a_request_is_seen_told_whole_and_cancelled(
    page: Any, cell: Cell, pictures: Path, refused: set[str]
) -> None:
    show(page, "#/requests")
    with MeshClient(cell.address) as client, ThreadPoolExecutor(1) as beside:
        running = beside.submit(tokens_of, client, asked(6_000))
        page.get_by_role("button", name="cancel").first.wait_for()
        page.get_by_role("region", name="Timeline").get_by_text("d", exact=True).last.wait_for()
        link = page.get_by_role("region", name="Open requests").get_by_role("link").first
        name = link.inner_text()
        show(page, "#/requests?filter=nobody")
        page.get_by_text("Nobody waits for an answer of nobody.").wait_for()
        page.get_by_text("None within 5 minutes of nobody.").wait_for()
        show(page, "#/requests?filter=chat")
        link.click()
        page.get_by_text("first token after").wait_for()
        page.get_by_text("to chat-").first.wait_for()
        page.locator("svg.tokens circle").nth(3).wait_for()
        page.go_back()
        tab_to(page, page.get_by_role("button", name="cancel").first, press="Enter")
        page.get_by_text("was cancelled").first.wait_for()
        assert isinstance(running.exception(), Cancelled)
    page.get_by_role("region", name="Ended requests").get_by_text("cancelled").first.wait_for()
    page.get_by_role("region", name="Ended requests").get_by_role("link", name=name).click()
    page.locator("h1", has_text="cancelled").wait_for()
    page.locator("svg.tokens circle").first.wait_for()
    looked_at(page, "request", pictures)
    page.go_back()
    refused.add("429")
    said = {"error": {"message": "8 reports are made already", "hint": "try again in 1 s"}}
    page.route("**/api/v1/trace", lambda route: route.fulfill(status=429, json=said), times=1)
    page.get_by_role("link", name="Chrome trace").click()
    page.get_by_role("alert").get_by_text("8 reports are made already").wait_for()
    with page.expect_download() as kept:
        page.get_by_role("link", name="Chrome trace").click()
    page.get_by_role("alert").wait_for(state="detached")
    trace = json.loads(Path(kept.value.path()).read_text())
    assert {"wait", "decode"} <= {event["name"] for event in trace["traceEvents"]}


def test_an_embedding_has_no_tokens_and_no_tpot_and_a_button_measures_its_model(
    page: Any, cell: Cell, refused: set[str]
) -> None:
    """Whole, which takes seconds: its prompts have three tokens at most, and it decodes none."""
    refused |= {"404", "503"}
    with MeshClient(cell.address) as client:
        spec = replace(spec_of(cell, "vectors"), task=Task.EMBED, context_tokens_max=4)
        client.deploy(spec)
        try:
            asked = {"model": "vectors", "input": "hello"}
            requests.post(f"{cell.url}v1/embeddings", json=asked, timeout=60).raise_for_status()
            told = requests.get(f"{cell.url}api/v1/requests", timeout=10).json()
            (request,) = (one for one in told["ended"] if one["deployment"] == "vectors")
            show(page, f"#/requests/{request['request_id']}")
            page.get_by_text("TPOT limit –").wait_for()
            assert "okens against" not in page.locator("main").inner_text()
            assert "output tokens" not in page.locator("main").inner_text()
            show(page, "#/deployments/vectors")
            page.locator("svg.times").wait_for()  # one, since it decodes nothing
            page.get_by_role("button", name="profile").click()
            page.get_by_text("profiled", exact=True).wait_for(timeout=1e3 * READY_S_MAX)
            path = "api/v1/deployments/vectors/profiles"
            (known,) = requests.get(f"{cell.url}{path}", timeout=10).json()
            assert known["profile"]["source"] == "survey"
            times_s = [s for row in known["profile"]["prefill"]["seconds"] for s in row]
            said = "s => Number((1000 * s).toPrecision(3)).toLocaleString('en')"
            ends = " to ".join(page.evaluate(said, s) for s in (min(times_s), max(times_s)))
            drawn = f"prefill, one iteration: {len(times_s)} times from {ends} ms"
            page.get_by_role("img", name=drawn, exact=True).wait_for()
            page.locator(".lines").get_by_text("measured model").wait_for()
        finally:
            client.delete(DeploymentName("vectors"))


def test_lines_are_filtered_searched_and_paused_by_keys_and_shown_as_text(
    page: Any, cell: Cell
) -> None:
    show(page, "#/logs")
    tab_to(page, page.get_by_label("search"))
    page.keyboard.type("brief-log")
    with MeshClient(cell.address) as client:
        client.deploy(spec_of(cell, "brief-log"))
        page.get_by_text("deploy file://").first.wait_for()
        tab_to(page, page.get_by_label("kind"))
        page.keyboard.type("node")
        page.get_by_text("No line fits.").wait_for()
        for key in ("Home", "ArrowDown"):
            page.keyboard.press(key)
        playwright.expect(page.get_by_label("kind")).to_have_value("deployment")
        tab_to(page, page.get_by_role("button", name="pause"), press="Enter")
        client.delete(DeploymentName("brief-log"))
        page.get_by_text(re.compile("paused; [1-9][0-9]* newer")).wait_for()
        tab_to(page, page.get_by_role("button", name="go on"), press="Enter")
        page.locator(".log").get_by_text("delete").first.wait_for()
        with pytest.raises(MeshError):
            client.deploy(replace(spec_of(cell, "brief-log"), source=MARKUP))
        page.locator(".log").get_by_text(TAG).first.wait_for()
    page.reload()
    assert page.get_by_label("search").input_value() == "brief-log"


def test_lines_are_copied_where_a_browser_hides_its_clipboard_too(page: Any, cell: Cell) -> None:
    """As it does from a page over plain HTTP that is not of localhost."""
    hide = "Object.defineProperty(navigator, 'clipboard', { value: undefined })"
    for kind, first in (("node", "true"), ("deployment", hide)):
        page.evaluate(first)
        show(page, f"#/logs?kind={kind}")
        line = page.locator(".log li").filter(has_text=kind).first.locator("b").inner_text()
        page.get_by_role("button", name="copy").click()
        page.get_by_role("button", name="copied").wait_for()
        show(page, "#/try?a=chat")
        prompt = page.get_by_label("Prompt", exact=True)
        prompt.fill("")
        prompt.press("Control+V")
        assert f" {kind} {line} " in prompt.input_value()


def test_a_deployment_is_copied_asked_about_deployed_replayed_and_saved(
    page: Any, cell: Cell, pictures: Path
) -> None:
    show(page, "#/deployments/chat")
    page.locator("svg.times polyline").first.wait_for()
    page.get_by_role("link", name="Copy it").click()
    manifest = page.get_by_role("textbox", name="Manifests")
    playwright.expect(manifest).to_have_value(re.compile("chat-copy"))
    page.get_by_role("button", name="will it fit").click()
    told = page.get_by_role("region", name="Prospects of chat-copy")
    told.get_by_text(re.compile("fits (now|once idle instances go)")).wait_for()
    told.get_by_text("kept", exact=True).wait_for()
    looked_at(page, "prospect", pictures)
    page.get_by_role("button", name="deploy", exact=True).click()
    became = page.get_by_role("region", name="What became of chat-copy")
    became.get_by_role("link", name="chat-copy").click()
    with MeshClient(cell.address) as client:
        for _ in range(2):
            tokens_of(client, asked(4, "chat-copy"))
        page.get_by_role("button", name="replay").click()
        page.get_by_text("2 of 2 calls as of 'chat-copy' met the SLO of 'chat-copy'").wait_for()
        assert client.get(DeploymentName("chat-copy")).served == 4
        with page.expect_download() as kept:
            show(page, "#/deploy")
            page.get_by_label("save all deployments as").fill("all.yaml")
            page.get_by_role("link", name="save", exact=True).click()
        client.delete(DeploymentName("chat-copy"))
        page.get_by_label("load a file of manifests").set_input_files(kept.value.path())
        playwright.expect(manifest).to_have_value(re.compile("chat-copy"))
        page.get_by_role("button", name="deploy", exact=True).click()
        became.wait_for()
        assert len(client.list()) == 3
        client.delete(DeploymentName("chat-copy"))


def test_a_manifest_is_never_shown_under_another_name(page: Any, cell: Cell) -> None:
    held: list[Any] = []
    page.route(re.compile("/manifest.name=chat-too$"), lambda route: held.append(route))
    show(page, "#/deployments/chat")
    page.locator("pre.code", has_text="name: chat").wait_for()
    show(page, "#/deployments/chat-too")
    page.locator("h1", has_text="chat-too").wait_for()
    assert page.locator("pre.code").count() == 0
    page.wait_for_timeout(200)
    held[0].continue_()
    page.locator("pre.code", has_text="name: chat-too").wait_for()


def test_a_deployment_whose_name_yaml_quotes_is_copied_under_another(page: Any, cell: Cell) -> None:
    with MeshClient(cell.address) as client:
        for name in ("405", "on"):
            client.deploy(spec_of(cell, name))
            show(page, f"#/deploy?from={name}")
            manifest = page.get_by_role("textbox", name="Manifests")
            playwright.expect(manifest).to_have_value(re.compile(f"name: .?{name}-copy"))
            page.get_by_role("button", name="deploy", exact=True).click()
            became = page.get_by_role("region", name=f"What became of {name}-copy")
            became.get_by_role("link").wait_for()
            for each in (name, f"{name}-copy"):
                client.delete(DeploymentName(each))


def test_overload_is_refused_where_it_was_asked(page: Any, cell: Cell, refused: set[str]) -> None:
    refused.add("429")
    slo = Slo(ttft_s=1.0, ttft_tokens_per_s=1e6, tpot_s=1.0)
    enough, numbers = threading.Event(), count()

    def call(client: MeshClient) -> None:
        while not enough.is_set():
            prompt = (next(numbers) % 10_000, *range(500))
            with suppress(Refused):
                tokens_of(client, asked(50, "busy", prompt))
            enough.wait(0.05)

    with MeshClient(cell.address) as client, ThreadPoolExecutor(SENDERS) as senders:
        client.deploy(replace(spec_of(cell, "busy", replicas_min=1), slo=slo))
        wait_for(client, DeploymentName("busy"), Goal.READY, READY_S_MAX)
        calls = [senders.submit(call, client) for _ in range(SENDERS)]
        try:
            play(page, "a=busy", 4)
            answer = page.get_by_label("Answers of busy")
            for number in range(SENT_MAX):
                send(page, f"{number}" + 500 * " sea")
                answer.locator(".said.user").nth(number).wait_for()
                playwright.expect(page.get_by_role("button", name="send")).to_be_enabled()
                if answer.get_by_role("alert").count():
                    break
            answer.get_by_role("alert").get_by_text("hint: ").wait_for()
            assert page.get_by_label("Prompt", exact=True).input_value(), "it can be sent again"
            show(page, "#/cell")
            reasons = re.compile(r"^refused, by reason[a-z_]+\s[1-9]")
            page.locator(".totals > div", has_text=reasons).wait_for()
        finally:
            enough.set()
        for each in calls:
            each.result()
        client.delete(DeploymentName("busy"))


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
        page.get_by_text("context_tokens_max: 1024").wait_for(timeout=1e3 * READY_S_MAX)
        page.get_by_role("button", name="undo rollout").click()
        page.get_by_text("context_tokens_max: 1024").wait_for(
            state="detached", timeout=1e3 * READY_S_MAX
        )


def test_the_report_of_a_replay_says_what_the_command_line_says(
    browser: Any, cell: Cell, tmp_path: Path
) -> None:
    trace, report = tmp_path / "calls.csv", tmp_path / "report.html"
    rows = [f"{0.2 * n},{n % 2},{16 + n},{2 + n % 3}" for n in range(8)]
    trace.write_text("\n".join(["t_s,function,input_tokens,output_tokens", *rows]))
    names = ("--map", "popularity", "--deployments", "chat,chat-too")
    told = terminal(cell, "replay", str(trace), *names, "--report", str(report), "-o", "json")
    said = {
        one["deployment"]: [
            str(one["calls"]),
            str(one["finished"]),
            str(sum(one["refused"].values())),
            *(f"{100 * one[met] / one['judged']:.1f}" for met in ("met", "met_in_the_mean")),
            *(f"{one[f'ttft_s_{p}']:.3f}" for p in ("p50", "p95")),
            *(f"{1000 * one[f'tpot_s_{p}']:.3f}" for p in ("p50", "p95")),
        ]
        for one in json.loads(told)["numbers"]
    }
    assert set(said) == {"all", "chat", "chat-too"}
    context = browser.new_context(offline=True)
    shown = context.new_page()
    shown.goto(report.as_uri())
    of_page = {}
    for row in shown.locator("table").first.locator("tbody tr").all():
        name, *cells = row.locator("td, th").all_inner_texts()
        of_page[name] = cells
    differences = {name for name in (*said, *of_page) if said.get(name) != of_page.get(name)}
    assert differences == set()
    context.close()


def test_page_command_line_and_metrics_give_the_same_numbers(page: Any, cell: Cell) -> None:
    """At rest, while a request runs, and of calls of which one is late."""
    page.locator(".chart canvas").first.wait_for()
    page.locator(".card").get_by_role("link", name=re.compile("^chat-[0-9]")).wait_for()
    assert page.locator(".card .bar span").first.inner_text() == "B"
    with MeshClient(cell.address) as client:
        tokens_of(client, asked(4))
        wait_for_none(page, client)
        none_differ(page, lambda: {**of_cell(page, cell), **of_memory(page, cell)})
        with closing(client.invoke(asked(6_000))) as answer:
            next(iter(answer))
            none_differ(page, lambda: of_cell(page, cell))
            assert totals(page)["requests running"] == "1"
        wait_for_none(page, client)
        judged = replace(spec_of(cell, "judged", replicas_min=1), slo=Slo(ttft_s=2.0, tpot_s=5.0))
        client.deploy(judged)
        wait_for(client, judged.name, Goal.READY, READY_S_MAX)
        for _ in range(3):
            tokens_of(client, asked(4, "judged"))
        os.killpg(cell.node_pid, signal.SIGSTOP)
        threading.Timer(3.0, os.killpg, (cell.node_pid, signal.SIGCONT)).start()
        tokens_of(client, asked(4, "judged"))
        show(page, "#/deployments/judged")
        page.get_by_role("heading", name="Manifest").wait_for()
        none_differ(page, lambda: of_deployment(page, cell))
        assert totals(page)["SLO met, 5 min"] == "75 %"
        client.delete(judged.name)


def none_differ(page: Any, look: Callable[[], Mapping[str, set[str]]]) -> None:
    """A page is told once a second: it may be looked at amid a change."""
    differences: Mapping[str, set[str]] = {}
    for _ in range(5):
        differences = {name: said for name, said in look().items() if len(said) > 1}
        if not differences:
            return
        page.wait_for_timeout(500)
    assert differences == {}


def totals(page: Any) -> dict[str, str]:
    shown = page.locator(".totals")
    names, values = (shown.locator(part).all_inner_texts() for part in ("dt", "dd"))
    return {
        name: said.replace(",", "").replace("\u00a0", " ")
        for name, said in zip(names, values, strict=True)
    }


def of_cell(page: Any, cell: Cell) -> dict[str, set[str]]:
    """By name, what is said by the page, by `mesh status` and by `/metrics`."""
    shown, status = totals(page), json.loads(terminal(cell, "status", "-o", "json"))
    ready = measured(page, cell, "mesh_node", state="ready")
    refused = ", ".join(f"{reason} {n}" for reason, n in status["refused"].items())
    return {
        "ready": {shown["nodes ready"].split()[0], str(status["nodes_ready"]), ready},
        "running": {
            shown["requests running"],
            str(status["running"]),
            measured(page, cell, "vllm:num_requests_running"),
        },
        "queued": {
            shown["queued"],
            str(status["queued"]),
            measured(page, cell, "vllm:num_requests_waiting"),
        },
        "served": {shown["served"], str(status["served"])},
        "refused": {shown["refused, by reason"], (refused or "0").replace(",", "")},
    }


def of_memory(page: Any, cell: Cell) -> dict[str, set[str]]:
    """The same of the node's books, in MiB."""
    (node,) = json.loads(terminal(cell, "nodes", "-o", "json"))
    shown = page.locator(f"#node-{node['node_id']}").inner_text()
    names = {"limit": "memory_bytes", "promised": "promised_bytes", "tracked": "tracked_bytes"}
    said = {}
    for name, key in names.items():
        found = re.search(f"{name} ([0-9.]+)", shown)
        of = {"node": node["node_id"], "of": name}
        sizes = float(node[key]), float(measured(page, cell, "mesh_node_memory_bytes", **of))
        said[name] = {found[1] if found else shown, *map(mib, sizes)}
    return said


def of_deployment(page: Any, cell: Cell) -> dict[str, set[str]]:
    """The same of the calls of one deployment, of which none was cancelled or refused."""
    shown = {name.split(",")[0]: said for name, said in totals(page).items()}
    served = json.loads(terminal(cell, "get", "judged", "-o", "json"))["served"]
    report = json.loads(terminal(cell, "report", "--since", "5m", "-o", "json"))
    (told,) = (one for one in report["calls"] if one["deployment"] == "judged")
    ended, met = (
        int(measured(page, cell, name, model_name="judged"))
        for name in ("vllm:request_success_total", "mesh_requests_met_slo_total")
    )
    shares = told["attainment_in_the_mean"], met / ended
    ttft, tpot = ([told[of][p] for p in (50, 95)] for of in ("ttft_s", "tpot_s"))
    return {
        "served": {shown["served"], str(served), str(ended)},
        "SLO met": {shown["SLO met"], *(f"{round(100 * share, 1):g} %" for share in shares)},
        "TTFT": {shown["TTFT p50 / p95"], " / ".join(f"{s:.2f} s" for s in ttft)},
        "TPOT": {shown["TPOT p50 / p95"], " / ".join(f"{round(1e3 * s, 1):g} ms" for s in tpot)},
    }


def mib(size_bytes: float) -> str:
    return f"{size_bytes / 2**20:.{1 if size_bytes < 100 * 2**20 else 0}f}"


def measured(page: Any, cell: Cell, name: str, **labels: str) -> str:
    """The sum of a metric's series that have these labels."""
    told = page.request.get(f"{cell.url}metrics").text()
    found = [
        sample.value
        for family in text_string_to_metric_families(told)
        for sample in family.samples
        if sample.name == name and labels.items() <= sample.labels.items()
    ]
    return f"{sum(found):.0f}"


def test_charts_have_one_cursor_and_the_past_after_a_reload(page: Any, cell: Cell) -> None:
    show(page, "#/charts")
    page.locator(".chart canvas").nth(7).wait_for()
    page.locator(".chart .u-over").first.hover()
    for cursor in page.locator(".chart .u-cursor-x").all():
        playwright.expect(cursor).to_have_attribute("style", re.compile("transform"))
    before_s = past_s(page)
    page.reload()
    page.locator(".chart canvas").nth(7).wait_for()
    assert past_s(page) >= before_s - 2 > 2, "a reload shows what was before it"


def past_s(page: Any) -> int:
    """How long ago the first sample of a chart was taken."""
    page.locator(".chart .u-over").first.hover(position={"x": 1, "y": 1})
    first = page.locator(".chart .u-value").first.inner_text()
    now = page.evaluate("new Date().toLocaleTimeString('en-GB')")
    return (datetime.strptime(now, "%H:%M:%S") - datetime.strptime(first, "%H:%M:%S")).seconds


def test_what_cannot_be_asked_is_said_where_it_was_asked(
    page: Any, cell: Cell, refused: set[str]
) -> None:
    refused |= {"400", "404"}
    play(page, "a=chat", 4)
    answer, schema = page.get_by_label("Answers of chat"), page.get_by_label("JSON schema")
    prompt, alert = page.get_by_label("Prompt", exact=True), answer.get_by_role("alert")
    schema.fill("{")
    send(page, MARKUP)
    page.get_by_role("alert").get_by_text("JSON schema: this is no JSON").wait_for()
    for number, (given, said) in enumerate((('{"type": 5}', "schema"), ("[]", "schema"))):
        schema.fill(given)
        send(page, MARKUP)
        alert.nth(number).get_by_text(said).wait_for()
    schema.fill("")
    send(page, 5_000 * "far too long ")
    alert.get_by_text("maximum context length is").wait_for()
    page.evaluate(
        """() => { const prompt = document.querySelector("textarea[required]");
          prompt.value = "half a \\ud83d";
          prompt.dispatchEvent(new Event("input", { bubbles: true })); }"""
    )
    page.get_by_role("button", name="send").click()
    alert.nth(3).wait_for()
    send(page, MARKUP)
    answer.get_by_text("ended by").wait_for()
    playwright.expect(prompt).to_have_value("")
    show(page, "#/deploy")
    manifest = page.get_by_role("textbox", name="Manifests")
    for given, said in (
        (manifest_of("file://x", json.dumps(MARKUP)), TAG[:12]),
        (LONG * "x", "bytes"),
        ("kind: [", "manifest:"),
    ):
        manifest.fill(given)
        page.get_by_role("button", name="deploy", exact=True).click()
        page.get_by_role("alert").get_by_text(said).wait_for()
    for lost in ("..%2f..%2fetc", quote(TAG, safe=""), "%E0%A4%A"):
        show(page, f"#/requests/{lost}")
        page.get_by_role("alert").wait_for()
        show(page, f"#/deployments/{lost}")
        page.get_by_text("There is no deployment of this name.").wait_for()
    show(page, f"#/{TAG}")
    page.get_by_text("There is no view of this name.").wait_for()


def send(page: Any, prompt: str) -> None:
    page.get_by_label("Prompt", exact=True).fill(prompt)
    page.get_by_role("button", name="send").click()


def test_what_is_asked_and_answered_is_shown_as_text(page: Any, cell: Cell, pictures: Path) -> None:
    """An answer that a schema makes hold markup, a call whose arguments do; and a conversation as
    the tab keeps it.
    """
    show(page, "#/try?a=chat")
    page.get_by_text("System prompt, sampling").click()
    page.get_by_label("JSON schema").fill(json.dumps({"const": MARKUP}))
    send(page, MARKUP)
    answers = page.get_by_label("Answers of chat").locator(".said:not(.user)")
    answers.get_by_text(TAG).wait_for()
    page.get_by_text("ended by").wait_for()
    page.get_by_label("JSON schema").fill("")
    city = {"properties": {"city": {"const": MARKUP}}, "required": ["city"]}
    parameters = {"type": "object", **city, "additionalProperties": False}
    tools = [{"type": "function", "function": {"name": "weather", "parameters": parameters}}]
    page.get_by_label("tools, as JSON").fill(json.dumps(tools))
    must = {"tool_choice": "required", "parallel_tool_calls": False}  # it would call none by itself
    sent: list[dict[str, Any]] = []

    def pass_on(route: Any) -> None:
        sent.append(route.request.post_data_json)
        route.continue_(post_data=json.dumps({**sent[0], **must}))

    page.route("**/v1/chat/completions", pass_on, times=1)
    send(page, "Ask the weather.")
    page.get_by_text("ended by tool_calls").wait_for()
    assert sent[0]["tools"] == tools
    (called,) = page.get_by_label("Answers of chat").locator("pre").all_inner_texts()
    assert called.startswith("weather({")
    assert TAG in called
    page.get_by_text("As code").click()
    for form in ("curl", "Python", "mesh invoke"):
        page.get_by_role("button", name=form, exact=True).click()
        page.locator("pre.code", has_text="chat").wait_for()
    looked_at(page, "as-code", pictures)
    hostile = f"{MARKUP}\ud800\n" + LONG * "x"
    call = {"name": MARKUP, "arguments": hostile}
    said = {"text": hostile, "thought": MARKUP, "calls": [call], "finish": MARKUP}
    fault = {"message": hostile, "hint": MARKUP}
    turn = {"prompt": hostile, "waiting": False, "firstMs": 1, "lastMs": 2, "error": fault, **said}
    kept = json.dumps({"given": {"system": MARKUP}, "turns": {"chat": [turn]}})
    page.evaluate("kept => sessionStorage.setItem('mesh.playground', kept)", kept)
    page.reload()
    shown = page.get_by_label("Answers of chat")
    for part in (".user", ".thought", ".said:not(.user, .thought)", "pre", ".notice"):
        text = shown.locator(part).first.inner_text()
        assert TAG in text
        assert part == ".thought" or len(text) > LONG
    page.evaluate("sessionStorage.clear()")


def test_a_tab_too_many_is_told_so_and_comes_in_once_another_goes(
    browser: Any, cell: Cell, pictures: Path
) -> None:
    with ExitStack() as tabs:
        told = f"{cell.url}api/v1/events"
        asked = (requests.get(told, stream=True, timeout=20) for _ in range(VIEWERS_MAX + 1))
        others = [tabs.enter_context(one) for one in asked]
        assert [one.status_code for one in others[-2:]] == [200, 503]
        with watched(browser, cell.url, "Not shown", {"503"}) as page:
            page.get_by_role("alert").get_by_text(f"{VIEWERS_MAX} viewers are here").wait_for()
            looked_at(page, "too-many", pictures)
            others[0].close()
            page.get_by_role("heading", name="Cell").wait_for()


def hide(page: Any, hidden: bool) -> None:
    """As a browser says it to a tab behind others; a headless one shows all of them."""
    page.evaluate(
        """hidden => {
          Object.defineProperty(document, "hidden", { value: hidden, configurable: true });
          document.dispatchEvent(new Event("visibilitychange", { bubbles: true })); }""",
        hidden,
    )


def test_hidden_tabs_leave_room_for_others_and_go_on_where_they_were(page: Any, cell: Cell) -> None:
    """A browser opens six connections to a host, all tabs together."""
    asked: list[Any] = []
    page.on("request", lambda one: asked.append(one))
    show(page, "#/logs?kind=node")
    drains = page.locator(".log").get_by_text("drain", exact=True)
    with MeshClient(cell.address) as client:
        (node,) = client.nodes()
        client.drain(node.node_id)
        client.drain(node.node_id, undo=True)
        drains.first.wait_for()
        before = drains.count()
        hide(page, True)
        for _ in range(7):
            tab = page.context.new_page()
            tab.goto(cell.url)
            tab.locator(".card .is-ready").first.wait_for()
            hide(tab, True)
        hide(tab, False)
        client.drain(node.node_id)
        tab.get_by_text("draining", exact=True).wait_for()
        client.drain(node.node_id, undo=True)
    assert drains.count() == before, "it is not told"
    hide(page, False)
    drains.nth(before).wait_for()
    assert drains.count() == before + 1
    assert page.get_by_text("Shown anew").count() == 0
    assert [one.headers.get("last-event-id") for one in asked if "/events" in one.url][-1]


def test_more_windows_than_a_browser_opens_connections_are_all_told(
    page: Any, cell: Cell, pictures: Path
) -> None:
    others = [page.context.new_page() for _ in range(6)]
    for number, other in enumerate(others):
        other.goto(cell.url, wait_until="commit")
        other.locator(".card .is-ready").first.wait_for()
        for used in (page, *others[:3]) if number < 4 else ():
            used.evaluate("dispatchEvent(new Event('focus'))")
    said = "windows of this page are open in this browser"
    page.get_by_text(said).wait_for()
    looked_at(page, "crowded", pictures)
    with MeshClient(cell.address) as client:
        (node,) = client.nodes()
        for undo in (False, True):
            client.drain(node.node_id, undo=undo)
            for window in (page, *others):
                shown = window.locator(".card").get_by_text("draining", exact=True)
                shown.wait_for(state="detached" if undo else "visible")
                assert window.get_by_role("alert").count() == 0, "nobody is silent"
    assert others[-1].get_by_text(said).count() == 0
    page.evaluate("dispatchEvent(new Event('focus'))")
    page.get_by_text(said).wait_for(state="detached")
    others[1].get_by_text(said).wait_for()
    page.evaluate(
        """() => { window.began = 0;
          window.heard = new BroadcastChannel("mesh events /");
          heard.onmessage = ({ data }) => { began += data.follows; }; }"""
    )
    others[-1].close()
    page.wait_for_function("() => began")  # a string would be evaluated, which the page forbids
    page.wait_for_timeout(500)
    assert page.evaluate("began") < 3, "of three that wait not all take its place"
    for other in others[-3:-1]:
        other.close()
    others[0].get_by_text(said).wait_for(state="detached")
    assert page.get_by_text("Shown anew").count() == 0


def test_the_only_viewer_keeps_its_lines_while_it_is_hidden(page: Any, cell: Cell) -> None:
    """Nothing is kept for it meanwhile: it is told the whole, with lines that it has."""
    show(page, "#/logs")
    page.locator(".log li").first.wait_for()
    with MeshClient(cell.address) as client:
        wait_for(client, DeploymentName("chat"), Goal.READY, READY_S_MAX)  # after other tests
    shown = page.get_by_role("status").filter(has_text="lines")
    page.get_by_role("button", name="pause").click()
    before = int(re.findall("[0-9]+", shown.inner_text())[1])
    hide(page, True)
    page.wait_for_timeout(500)  # the controller sees that it is gone
    with MeshClient(cell.address) as client:
        (node,) = client.nodes()
        client.drain(node.node_id)
        client.drain(node.node_id, undo=True)
        page.wait_for_timeout(2_800)  # longer than a controller is silent unnoticed
        wait_for(client, DeploymentName("chat"), Goal.READY, READY_S_MAX)
    assert page.get_by_role("alert").count() == 0, "nobody was asked, so nobody is silent"
    with page.expect_response("**/api/v1/events") as answer:
        hide(page, False)
    assert answer.value.request.headers.get("last-event-id")
    page.get_by_text(re.compile("paused; [1-9][0-9]? newer")).wait_for()
    assert page.get_by_role("alert").count() == 0
    page.get_by_role("button", name="go on").click()
    page.locator(".log").get_by_text("take new work again").first.wait_for()
    after = int(re.findall("[0-9]+", shown.inner_text())[1])
    assert before < after < 2 * before, "lines that it has do not come again"
    assert page.get_by_text("Shown anew").count() == 0


def test_an_event_that_cannot_be_taken_is_made_good_by_the_whole(page: Any, cell: Cell) -> None:
    broken = "id: run-1\nevent: change\ndata: {\n\n"
    told = {"body": broken, "content_type": "text/event-stream"}
    page.route("**/api/v1/events", lambda route: route.fulfill(**told), times=1)
    asked: list[Any] = []
    page.on("request", lambda one: asked.append(one) if "/events" in one.url else None)
    page.reload()
    page.locator(".card .is-ready").first.wait_for()
    assert [one.headers.get("last-event-id", "") for one in asked] == ["", ""]


def test_a_viewer_that_was_dropped_is_told_so_until_it_goes_on(
    page: Any, cell: Cell, pictures: Path
) -> None:
    """As one that reads too slowly is: it had the whole, and what comes next is kept for it."""
    with closing(requests.get(f"{cell.url}api/v1/events", stream=True, timeout=20)) as other:
        pieces, whole = other.iter_content(None), b""
        while b"\n\n" not in whole:
            whole += next(pieces)
        whole, _, _ = whole.partition(b"\n\n")
        end = b'\n\nevent: end\ndata: {"why": "it reads too slowly"}\n\n'
        told = {"body": whole + end, "content_type": "text/event-stream"}
        page.route("**/api/v1/events", lambda route: route.fulfill(**told))
        page.reload()
        page.get_by_text("Nothing more was told: it reads too slowly").wait_for()
        looked_at(page, "dropped", pictures)
        page.unroute("**/api/v1/events")
        page.get_by_text("Nothing more was told").wait_for(state="detached")
        assert page.get_by_text("Shown anew").count() == 0, "it went on where it was"


def test_what_changes_out_of_sight_is_shown_when_it_is_scrolled_to(page: Any, cell: Cell) -> None:
    """And a card is drawn on while the end of its table is out of sight. Profiles are asked for
    again when one was measured.
    """
    whole = requests.get(f"{cell.url}api/v1/cell", timeout=20).json()
    chat, (node,), count = whole["deployments"]["chat"], whole["nodes"].values(), 100
    one = next(iter(whole["instances"].values()))
    ids = [f"n{n:02}" for n in range(count)]
    whole["deployments"] = {f"chat-{n:02}": chat for n in range(count)}
    whole["nodes"] = {n: {**node, "node_id": n} for n in ids}
    whole["instances"] = {n: {**one, "instance_id": n, "node_id": ids[0]} for n in ids}
    events: list[tuple[str, Any]] = [("cell", whole)]

    def tell(route: Any) -> None:
        told, events[:] = events[:] or [("lines", [])], []
        body = "".join(f"event: {name}\ndata: {json.dumps(data)}\n\n" for name, data in told)
        route.fulfill(body=body, content_type="text/event-stream")

    def change(patch: Mapping[str, Any]) -> None:
        """It is told when the page asks once more."""
        events.append(("change", {"patch": patch, "samples": []}))

    show(page, "#/deployments")
    page.route("**/api/v1/events", tell)
    page.reload()
    page.get_by_text(f"{count} of {count}").wait_for()
    change({"deployments": {"chat-00": {"served": 6666}, "chat-99": {"served": 7777}}})
    page.get_by_role("cell", name="6,666").wait_for()
    page.get_by_role("link", name="chat-99", exact=True).scroll_into_view_if_needed()
    page.get_by_role("cell", name="7,777").wait_for()
    heads, cells = (
        [one.bounding_box()["x"] for one in page.locator(f".long {row} > *").all()]
        for row in ("thead tr", "tbody:last-of-type tr:last-child")
    )
    assert heads, "the table is a long one"
    assert heads == cells, "rows have the columns of their headings"
    show(page, "#/cell")
    first, last = (page.locator(f"#node-{n}") for n in (ids[0], ids[-1]))
    first.locator(".long").wait_for()
    lost = {"hardware": "other", "state": "lost"}
    change({"nodes": {ids[0]: {"hardware": "renamed"}, ids[-1]: lost}})
    first.get_by_text("renamed").wait_for()
    page.locator(".totals").get_by_text(", 1 lost").wait_for()
    last.scroll_into_view_if_needed()
    last.get_by_text("other").wait_for()
    change({"deployments": {"chat": chat}})
    with page.expect_response("**/chat/profiles"):
        show(page, "#/deployments/chat")
    said = {"kind": "deployment", "subject": "chat", "text": "measured model m in 3 s, on x"}
    events.append(("lines", [{"line_id": "1-1", "time_unix_s": 0.0, "deployment": "chat", **said}]))
    with page.expect_response("**/chat/profiles"):
        page.locator(".lines").get_by_text("measured model m").wait_for()


def test_a_view_is_an_address_that_keys_reach(page: Any, cell: Cell) -> None:
    show(page, "#/deployments?sort=-served&filter=chat")
    page.get_by_role("columnheader", name="served").wait_for()
    assert page.locator("th[aria-sort=descending]").inner_text().startswith("served")
    page.reload()
    page.locator("th[aria-sort=descending]").wait_for()
    tab_to(page, page.get_by_role("link", name="chat-too", exact=True), press="Enter")
    page.get_by_role("heading", name="chat-too").wait_for()
    page.go_back()
    page.get_by_role("heading", name="Deployments").wait_for()
    assert page.get_by_label("Filter by name, state or source").input_value() == "chat"


@pytest.mark.parametrize("held", ["session", "events", "logs.js"])
def test_what_is_still_loading_is_said(page: Any, cell: Cell, pictures: Path, held: str) -> None:
    """Before it is known who views, before the cell is, and before the view has come."""
    waiting: list[Any] = []
    show(page, "#/logs")
    page.get_by_role("heading", name="Logs").wait_for()
    page.route(f"**/{held}", lambda route: waiting.append(route), times=1)
    page.reload(wait_until="commit")
    page.get_by_role("heading", name="Loading …").wait_for()
    looked_at(page, f"loading-{held}", pictures)
    waiting[0].continue_()
    page.get_by_role("heading", name="Logs").wait_for()


def test_each_view_fits_its_window(page: Any, cell: Cell, pictures: Path) -> None:
    for name, view in VIEWS.items():
        show(page, view)
        page.get_by_role("heading").filter(has_not_text="Loading").first.wait_for()
        if name == "playground":
            play(page, "a=chat&b=chat-too", 16)
            page.get_by_text("System prompt, sampling").click()
            send(page, "Tell me of the sea.")
            page.get_by_text("ended by").nth(1).wait_for()
        fits(page, name, WIDEST)
        looked_at(page, name, pictures)


@contextmanager
def journal_page(browser: Any, path: Path) -> Iterator[tuple[Any, "Popen[str]"]]:
    command = [*MESH, "page", "--journal", str(path), "--http", "127.0.0.1:0"]
    with Popen(command, stdout=PIPE, text=True) as shown, ExitStack() as opened:
        opened.callback(shown.kill)
        assert shown.stdout is not None
        with watched(browser, shown.stdout.readline().strip(), refused=BROKEN_OFF) as page:
            yield page, shown


def test_a_journal_is_stepped_to_its_end(browser: Any, tmp_path: Path) -> None:
    read = scenario(tmp_path, SMALL)
    made = plan(read)
    path = tmp_path / "journal"
    journal = open_journal(path, made.start())
    VirtualCell(made, recorders=(journal,)).run(arrivals(read))
    journal.close()
    decisions = path.read_text().splitlines()
    load = next(n for n, line in enumerate(decisions) if '"LoadInstance"' in line)
    with path.open("a") as torn:
        torn.write('{"now_s": 9')
    with journal_page(browser, path) as (page, shown):
        where = page.locator(".journal [role=status]")
        where.get_by_text("0 of ").wait_for()
        page.get_by_text("No node has joined").wait_for()
        page.get_by_role("slider").fill("2")
        where.get_by_text("2 of ").wait_for()
        page.get_by_role("button", name="step on").click()
        where.get_by_text(re.compile("^3 of .*: NodeConnected")).wait_for()
        page.locator(".card").nth(1).wait_for()
        page.get_by_role("button", name="step back").click()
        page.locator(".card").nth(1).wait_for(state="detached")
        slider = page.get_by_role("slider", name="decision")
        slider.fill(str(load))
        where.get_by_text(re.compile(f"^{load:,} of ")).wait_for()
        operation = page.get_by_role("region", name="Memory operations of").locator("tbody tr")
        row = re.compile(r"^load\s+chat\S+\s+[0-9.,]+\s+running\s+[0-9.]+ s$")
        playwright.expect(operation).to_have_text(row, use_inner_text=True)
        page.get_by_role("region", name="Instances of").get_by_text(" of about ").wait_for()
        slider.press("ArrowLeft")
        where.get_by_text(re.compile(f"^{load - 1:,} of ")).wait_for()
        operation.wait_for(state="detached")
        page.get_by_label("speed").select_option("1")
        with page.expect_response("**/api/v1/journal"):
            page.get_by_role("button", name="play").click()
        box = slider.bounding_box()
        page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
        page.mouse.down()
        dragged = slider.input_value()
        for _ in range(2):
            with page.expect_response("**/api/v1/journal"):
                pass
        assert slider.input_value() == dragged, "it stays where it is held"
        page.mouse.up()
        where.get_by_text(re.compile(f"^{int(dragged):,} of ")).wait_for()
        page.get_by_role("button", name="play").click()
        page.get_by_role("button", name="pause").click()
        slider.press("End")
        page.get_by_role("button", name="step on").and_(page.locator(":disabled")).wait_for()
        show(page, "#/requests")
        page.get_by_role("region", name="Timeline").wait_for()
        page.get_by_role("region", name="Ended requests").get_by_role("link").first.click()
        page.get_by_text("asked: ").wait_for()
        shown.send_signal(signal.SIGINT)
        assert shown.wait(20) == 0


def test_a_broken_journal_of_hostile_names_is_shown_as_text_until_there(
    browser: Any, tmp_path: Path, pictures: Path
) -> None:
    """A node, a deployment, its tenant and a line of 1 MB: each name is markup."""
    read = scenario(tmp_path, SMALL)
    made = plan(read)
    path = tmp_path / "journal"
    journal = open_journal(path, made.start())
    virtual = VirtualCell(made, recorders=(journal,))
    virtual.run(arrivals(read))
    reason = f"{MARKUP}\ud800" + LONG * "x"
    for link_id in (1, 999):
        journal.record(virtual.clock.now_s(), NodeDisconnected(link_id=link_id, reason=reason), [])
    journal.close()
    text = path.read_text().replace('"tenant":""', f'"tenant":{json.dumps(MARKUP)}')
    for name in ("gpu-1", "chat-1"):
        hostile = json.dumps(f"{TAG}\u202e\x1b[31m{name}")[:-1].replace("\\", r"\\")
        text = re.sub(f'"{re.escape(name)}(?=["-])', hostile, text)
    *lines, last = text.splitlines(keepends=True)
    path.write_text("".join([*lines, "no decision\n", last]))
    with journal_page(browser, path) as (page, _):
        page.get_by_role("button", name="to its end").click()
        where = page.get_by_role("region", name="Journal")
        where.get_by_role("alert").get_by_text(
            f"journal:{len(lines) + 1} is no decision"
        ).wait_for()
        for view, of in (
            ("cell", ".card"),
            ("deployments", "tbody"),
            ("requests", ".timeline"),
            ("charts", ".charts"),
            ("logs", ".log"),
        ):
            show(page, f"#/{view}")
            page.locator(f"main {of}").first.wait_for()
            assert view == "charts" or TAG in page.locator("main").inner_text()
            looked_at(page, f"journal-{view}", pictures)
            labels = page.locator(".lane p", has_text=TAG).all()
            assert bool(labels) is (view == "requests")
            assert all(each.locator("bdi").count() == 2 for each in labels), "each by itself"
        page.get_by_text("all of its").first.click()
        whole = page.locator(".log details").first.inner_text()
        assert TEXT_CHARS_MAX < len(whole) < LONG, "it was cut where it entered the log"
        show(page, "#/deployments")
        page.get_by_role("link", name=TAG).first.click()
        page.get_by_role("heading", name="Manifest").wait_for()
        assert TAG in page.locator("h1").inner_text()


def sign_in(page: Any, key: str) -> None:
    page.get_by_label("Key").fill(key)
    page.get_by_role("button", name="sign in").click()


def test_signing_in_takes_a_key(browser: Any, tmp_path: Path, pictures: Path) -> None:
    book = KeyBook(tmp_path / "controller")
    admin, _ = book.create(Role.ADMIN, NOBODY)
    tenant, kept = book.create(Role.TENANT, TenantName("acme"))
    show_credentials(Credentials(key=admin))
    plan = plan_of(tmp_path, keys=True)
    with (
        Stopping() as stopping,
        running_cell(plan, stopping),
        watched(browser, f"http://{plan.http}/", "Sign in", {"400", "401"}) as page,
    ):
        sign_in(page, "mesh_of_nobody")
        page.get_by_role("alert").get_by_text("the key is unknown").wait_for()
        looked_at(page, "sign-in", pictures)
        sign_in(page, tenant)
        page.get_by_text("No node has joined that this key may see.").wait_for()
        page.locator(".who").get_by_text("acme").wait_for()
        assert page.evaluate("document.cookie") == "", "no script can read it"
        page.reload()
        page.locator(".who").get_by_text("acme").wait_for()
        book.revoke(kept.key_id)
        page.get_by_role("heading", name="Sign in").wait_for()
        with page.expect_request("**/api/v1/events") as asked:
            sign_in(page, admin)
        assert not asked.value.headers.get("last-event-id"), "another may see other things"
        page.get_by_role("link", name="Keys").click()
        page.get_by_role("textbox", name="tenant").fill(MARKUP)
        page.get_by_role("button", name="make a key").click()
        page.get_by_role("alert").get_by_text(TAG).wait_for()
        page.get_by_role("textbox", name="tenant").fill("acme")
        page.get_by_role("button", name="make a key").click()
        fresh = page.get_by_role("status").locator("code").inner_text()
        mine = book.caller(fresh)
        assert mine.tenant == "acme"
        page.get_by_role("button", name="done").click()
        assert fresh not in page.content(), "it is shown once"
        looked_at(page, "keys", pictures)
        page.get_by_role("button", name=f"revoke {mine.key_id}").click()
        page.get_by_role("button", name="revoke it").click()
        page.get_by_role("button", name=f"revoke {mine.key_id}").wait_for(state="detached")
        with pytest.raises(Unauthenticated):
            book.caller(fresh)
        old = page.context.cookies()
        page.get_by_role("button", name="sign out").click()
        page.get_by_role("heading", name="Sign in").wait_for()
        page.context.add_cookies(old)
        page.reload()
        page.get_by_role("heading", name="Sign in").wait_for()
    book.close()


def test_tenants_do_not_see_each_other_and_an_operator_sees_a_killed_node(
    browser: Any,
    tmp_path: Path,
    smollm2_model: StoredModel,
    pictures: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    book = KeyBook(tmp_path / "controller")
    admin, _ = book.create(Role.ADMIN, NOBODY)
    acme, other = (book.create(Role.TENANT, TenantName(name))[0] for name in ("acme", "other"))
    book.limit(TenantName("acme"), TenantLimits(requests_per_s=0.01))
    book.close()
    (tmp_path / "store").symlink_to(smollm2_model.path.parents[1])
    plan = replace(plan_of(tmp_path, keys=True), nodes=plan_nodes(["cpu"]), precision="f32")
    url = f"http://{plan.http}/"
    monkeypatch.setenv(KEY_VARIABLE, admin)  # which the node shows
    show_credentials(Credentials(key=admin))
    with Stopping() as stopping, running_cell(plan, stopping) as cell:
        with watched(browser, url, "Sign in", {"429"}) as page:
            sign_in(page, acme)
            page.get_by_role("link", name="Deploy", exact=True).click()
            page.get_by_role("textbox", name="Manifests").fill(
                manifest_of(smollm2_model.info.source, "hers")
            )
            page.get_by_role("button", name="deploy", exact=True).click()
            page.get_by_role("region", name="What became of hers").get_by_role("link").click(
                timeout=1e3 * READY_S_MAX
            )
            page.get_by_role("link", name="Try it").click()
            send(page, "Tell me of the sea.")
            page.get_by_text("ended by").wait_for(timeout=1e3 * READY_S_MAX)
            send(page, "And of the wind.")
            answers = page.get_by_label("Answers of hers")
            answers.get_by_role("alert").get_by_text("its limit is 0.01").wait_for()
            answers.get_by_text(re.compile("hint: try again in [0-9]+")).wait_for()
            looked_at(page, "refused", pictures)
            show(page, "#/usage")
            page.get_by_role("region", name="Usage").get_by_text("hers").wait_for()
            show(page, "#/requests")
            page.get_by_role("region", name="Ended requests").get_by_role("link").wait_for()
            show(page, "#/logs")
            for said in ("deploy ", "imported", "loaded from", "prompt tokens"):
                page.locator(".log").get_by_text(said).first.wait_for()
            assert page.locator(".log").get_by_text("connected").count() == 0, "nodes are not hers"
            looked_at(page, "tenant-logs", pictures)
            show(page, "#/deployments/hers")
            page.locator(".lines").get_by_text("imported").wait_for()
        with watched(browser, url, "Sign in") as page:
            sign_in(page, other)
            show(page, "#/deployments")
            page.get_by_text("0 of 0").wait_for()
            show(page, "#/deployments/hers")
            page.get_by_text("There is no deployment of this name.").wait_for()
            show(page, "#/usage")
            page.get_by_text("Nothing was used in that time.").wait_for()
            show(page, "#/requests")
            page.get_by_text("No request within 5 min.").wait_for()
            looked_at(page, "tenant-requests", pictures)
            show(page, "#/logs")
            page.get_by_text("Nothing has happened to your deployments of late.").wait_for()
        with watched(browser, url, "Sign in") as page:
            sign_in(page, admin)
            show(page, "#/usage?by=tenant")
            page.get_by_role("region", name="Usage").get_by_text("acme").wait_for()
            assert "" not in page.locator("td").all_inner_texts(), "what is not known is a dash"
            show(page, "#/logs")
            connected = page.locator(".log").get_by_text("connected").first
            connected.wait_for()
            hide(page, True)
            with closing(page.context.new_page()) as tab:
                tab.goto(url)
                tab.get_by_role("button", name="sign out").click()
                sign_in(tab, other)
                tab.locator(".who").get_by_text("other").wait_for()
                page.locator(".who").get_by_text("other").wait_for()
                page.get_by_text("Nothing has happened to your deployments of late.").wait_for()
                tab.get_by_role("button", name="sign out").click()
                sign_in(tab, admin)
                connected.wait_for()
            show(page, "#/cell")
            page.locator(".card .is-ready").first.wait_for()
            os.killpg(cell.children[1].process.pid, signal.SIGKILL)
            gone = page.locator(".card").locator(".is-lost, .is-starting").first
            gone.wait_for(timeout=1e3 * (CellLimits().node_lease_s + 2.0))
            looked_at(page, "lost-node", pictures)


def hour_of(deployments: int, faults: int, path: Path) -> list[str]:
    """Write the report of an hour, beside the one before. The names of its deployments."""
    names = [f"deployment-with-a-long-name-{n}" for n in range(deployments)]
    ends = [
        CallEnd(
            at_s=n % 3600,
            deployment=names[n % deployments],
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
    one, first = InstanceId("i"), DeploymentName(names[0])
    loads = [
        Load(instance_id=one, deployment=first, node_id=None, begun_s=0.0, ended_s=2.0, tier=tier)
        for tier in (*LoadTier, "")
    ]
    text = (MARKUP + TEXT_CHARS_MAX * " word")[:TEXT_CHARS_MAX]
    lines = faults * [(9.0, CellLine(kind="node", subject="n1", text=text, fault=True))]
    parts = [name for name in CellGauges.__dataclass_fields__ if name.endswith("_bytes")]
    looks = [
        (15.0 * n, CellGauges(nodes_ready=4, nodes_used=n % 4, **dict.fromkeys(parts, n << 20)))
        for n in range(240)
    ]
    whole = cell_report(
        "An hour", ends, from_s=0.0, until_s=3600.0, loads=loads, looks=looks, lines=lines
    )
    path.write_text(page_of(whole, replace(whole, name="the hour before")), encoding="utf-8")
    return names


def test_a_report_of_an_hour_is_small_whole_and_printed_without_a_cut_table(
    browser: Any, tmp_path: Path, pictures: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    few, path = tmp_path / "few.html", tmp_path / "report.html"
    hour_of(4, 1, few)
    names = hour_of(128, FAULTS_MAX + 1, path)
    report_bytes = path.stat().st_size
    with capsys.disabled():
        sys.stdout.write(f"\n{report_bytes=}\n")
    assert report_bytes <= 2_000_000
    context = browser.new_context(viewport={"width": 720, "height": 1000}, offline=True)
    shown = context.new_page()
    said: list[str] = []
    shown.on("console", lambda told: said.append(told.text))
    shown.on("pageerror", lambda error: said.append(str(error)))
    shown.on("request", lambda asked: said.append(asked.url))
    shown.goto(few.as_uri())
    looked_at(shown, "report", pictures)  # axe-core takes minutes where there are 128
    shown.goto(path.as_uri())
    for what in (names[-1], "Loads by tier", "Memory, An hour", "earlier ones are left out"):
        assert shown.get_by_text(what).count(), what
    shown.emulate_media(media="print")
    cut = shown.evaluate(
        """[...document.querySelectorAll("table")].filter(
          one => one.getBoundingClientRect().right > document.documentElement.clientWidth).length"""
    )
    assert cut == 0
    assert shown.pdf(format="A4").startswith(b"%PDF")
    assert said == [few.as_uri(), path.as_uri()], "it asks for nothing but itself"
    context.close()


def test_the_page_comes_back_by_itself_after_the_controller_was_killed(
    browser: Any, tmp_path: Path, pictures: Path
) -> None:
    plan = plan_of(tmp_path)
    with (
        Stopping() as stopping,
        running_cell(plan, stopping) as cell,
        watched(browser, f"http://{plan.http}/", refused=BROKEN_OFF) as page,
    ):
        page.get_by_text("Nothing is deployed yet.").wait_for()
        looked_at(page, "empty", pictures)
        os.killpg(cell.children[0].process.pid, signal.SIGKILL)
        page.get_by_text(re.compile("controller silent for [0-9]+ s, trying")).wait_for()
        looked_at(page, "silent", pictures)
        with running_cell(plan, stopping):
            page.get_by_text("controller silent").wait_for(state="detached")
            page.get_by_text("Shown anew").wait_for()
            looked_at(page, "anew", pictures)
