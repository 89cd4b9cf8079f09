"""The page on a large cell in a browser, and what viewers cost those who are served.

First, a live cell with the demo model, ten viewers against none in turn: `ttft_added_share`,
`tpot_added_share` (of the medians) and `viewer_bytes_per_s`. Then cards and tables of 100 virtual
nodes with 4 instances each, 500 deployments and 1,000 running requests, in chromium: `page_bytes`
(all files); `first_paint_ms`, until the first card is on the screen, and `first_text_ms`, until
anything is (medians, from the request on, of loads into which no debugger looks before they are
done: it would take time of its own); `frame_ms_p95` (from one frame to the next, in the worst of
ten views); `heap_growth_mb` (of the page's JavaScript in 10 minutes, by the rate at which it grew
in the `heap_watched_s`); `stall_ms_max` (how long the loop that serves it did nothing else, without
the virtual cell's own work) and `stall_idle_ms_max` (the same before anybody viewed).
"""

import asyncio
import multiprocessing
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib.resources import files
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import linear_regression, median
from typing import Annotated, Any

import requests
from playwright.sync_api import Playwright, sync_playwright

from bench.cells import deployed, local_cell, wait_calm
from bench.demo_model import SOURCE
from bench.harness import Report, Table, in_turn, show_status
from bench.overhead import CONTEXT_TOKENS, NAME, SLO, Answer, ask
from mesh.controller.main import settle
from mesh.controller.metrics import Meter
from mesh.controller.viewed import Viewed
from mesh.controller.watch import CellLog
from mesh.domain.deployment import DeploymentSpec
from mesh.domain.errors import NotFound, Unavailable
from mesh.domain.outcome import Outcome
from mesh.domain.usage import Usage
from mesh.http.app import assembled
from mesh.http.feed import Feed
from mesh.http.journal import view_only
from mesh.http.server import HttpServer
from mesh.http.sessions import Sessions
from mesh.report.calls import CallBook
from mesh.report.distribution import Distribution
from mesh.report.narrate import Narrator
from mesh.sim.cluster import Arrival, VirtualCell
from mesh.sim.scenario import plan, read_scenario
from mesh.wire.access import Gate
from mesh.wire.work_threads import WorkThreads

NODES, DEPLOYMENTS, REQUESTS = 100, 500, 1_000
INSTANCES_EACH = 4
SCENARIO = """
[[nodes]]
name = "gpu"
count = {nodes}
device = "gpu"
memory_gib = 40

[[deployments]]
name = "chat"
count = {deployments}
model = "llama-3.2-3b"
context_tokens_max = 4096
slo = {{ ttft_s = 30.0, tpot_s = 0.25 }}
scaling = {{ replicas_max = 1, keep_alive_s = 3600.0 }}

[workload]
duration_s = 1
requests_per_s = 1.0
input_tokens = [64, 64]
output_tokens = [1, 1]
"""
LOAD_EACH_S, LOADED_S_MAX, ASK_EACH_S = 0.05, 120.0, 0.002
"""Virtual times. Requests come once all is loaded, for the cell computes while it waits."""
OUTPUT_TOKENS = 3_000
TURN_S, WORK_S = 0.02, 0.004
"""The virtual cell works for so long in each turn, and its clock is as fast as that allows."""
PROBE_S = 0.001
IDLE_S = 5.0
BEGIN_S_MAX = 300.0
END_S_MAX = 30.0
VIEWERS = 10
LOADS = 5
SETTLED_S = 2.0
FRAMES_S = 3.0
GROWTH_S = 600.0
LOOKS_MIN, WARM_UPS = 4, 2
"""The first looks at the heap are not counted: what is compiled and kept comes with these rounds.
"""
FLAGS = ("--no-sandbox", "--disable-gpu", "--js-flags=--expose-gc", "--window-size=1280,900")
KEEPS_NONE = "--disk-cache-size=1"
SHOWN = "chat-1"
VIEWS = {
    "cell": ".card",
    "deployments": "body:has(h1:text-is('Deployments')) tbody tr",
    f"deployments/{SHOWN}": "pre.code",
    "requests": ".timeline",
    "requests/": "svg.tokens",
    "charts": "canvas",
    "logs": ".log li",
    "usage": "select",
    f"deploy?from={SHOWN}": "h1:text-is('Deploy')",
    f"try?a={SHOWN}&b={SHOWN}": "h1:text-is('Playground')",
}
"""The views, and what each shows once it is drawn and the view before does not; the page of one
request is that of the first.
"""
PAINTED = """new Promise(resolve => new PerformanceObserver(list => {
  const card = list.getEntries().find(one => one.element?.closest(".card"));
  const text = performance.getEntriesByName("first-contentful-paint")[0];
  if (card) resolve([text.startTime, card.startTime]);
}).observe({ type: "largest-contentful-paint", buffered: true }))"""
"""The browser notes when it paints something that is larger than all before, as a card is."""
FRAMES = """seconds => new Promise(resolve => {
  const frames = [];
  let last = performance.now();
  const until = last + 1000 * seconds;
  const next = now => {
    frames.push(now - last);
    last = now;
    (document.querySelector(".tall") ?? window).scrollBy(0, Math.sin(now / 500) * 40);
    if (now < until) requestAnimationFrame(next); else resolve(frames.slice(1));
  };
  requestAnimationFrame(next);
})"""


async def _no_usage(*_: object) -> tuple[Usage, ...]:
    return ()


class PacedCell:
    """A virtual cell with its requests running, whose clock goes on as the loop has time."""

    def __init__(self, nodes: int, deployments: int, requests_open: int) -> None:
        self.stall_s = self._worked_s = self._computed_s = 0.0
        self._asked = 0
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "page.toml"
            path.write_text(SCENARIO.format(nodes=nodes, deployments=deployments))
            made = plan(read_scenario(path))
        self._names = [str(one.spec.name) for one in made.deployments][: INSTANCES_EACH * nodes]
        look = {one.spec.name: one.spec for one in made.deployments}.get
        meter, book = Meter(known=lambda name: True), CallBook(look)
        log = CellLog(narrate=Narrator(look), now_s=lambda: self.cell.clock.now_s())
        recorders = (log, meter, book)
        self._filled = False
        self.cell = VirtualCell(made, recorders=recorders, ended=self._ended)
        self._fill(requests_open)
        self.viewed = Viewed(
            cell=self.cell.core,
            clock=self.cell.clock,
            log=log,
            recent=meter.recent,
            book=book,
            cancel=lambda _: None,
            used_since=_no_usage,
            threads=WorkThreads(),
        )

    def _fill(self, requests_open: int) -> None:
        """Raises Unavailable where the cell has not come to hold what is to be shown."""
        clock, core = self.cell.clock, self.cell.core
        for _ in self._names:
            self._ask(output_tokens=1)
            clock.advance(LOAD_EACH_S)
        clock.advance(LOADED_S_MAX)
        self._filled = True
        for _ in range(requests_open):
            self._ask(OUTPUT_TOKENS)
            clock.advance(ASK_EACH_S)
        nodes, (running, queued) = core.snapshot(clock.now_s()).nodes, core.load()
        loaded = sum(len(node.instances) for node in nodes)
        if (loaded, running) != (len(self._names), requests_open):
            raise Unavailable(
                f"{loaded} instances are loaded, {running} requests run and {queued} are queued; "
                f"the cell was to have {len(self._names)} and {requests_open}"
            )

    def _ask(self, output_tokens: int) -> None:
        name = self._names[self._asked % len(self._names)]
        self._asked += 1
        arrival = Arrival(at_s=0.0, deployment=name, input_tokens=64, output_tokens=output_tokens)
        self.cell.invoke(arrival)

    def _ended(self, outcome: Outcome) -> None:
        """As many run all along."""
        if self._filled:
            self.cell.clock.call_at(self.cell.clock.now_s() + 1.0, lambda: self._ask(OUTPUT_TOKENS))

    async def go_on(self) -> None:
        while True:
            begun_s, computed_s = time.perf_counter(), time.process_time()
            while time.perf_counter() - begun_s < WORK_S:
                self.cell.clock.step()
            self._worked_s += time.perf_counter() - begun_s
            self._computed_s += time.process_time() - computed_s
            await asyncio.sleep(TURN_S - WORK_S)

    async def probe(self) -> None:
        """Note the longest time that the loop was kept, without the virtual cell's own turns and
        without what the process waited for a core, of which the browser beside it has one or two.
        """
        while True:
            begun_s = time.perf_counter() - self._worked_s
            computed_s = time.process_time() - self._computed_s
            await asyncio.sleep(PROBE_S)
            kept_s = time.perf_counter() - self._worked_s - begun_s - PROBE_S
            computed_s = time.process_time() - self._computed_s - computed_s
            self.stall_s = max(self.stall_s, min(kept_s, computed_s))


def _serve(told: Connection, nodes: int, deployments: int, requests_open: int) -> None:
    """The process that serves the virtual cell, until it is told to end."""
    asyncio.run(_served(told, PacedCell(nodes, deployments, requests_open)))


async def _served(told: Connection, paced: PacedCell) -> None:
    settle()  # as a controller does
    feed = Feed(paced.viewed, run="b", unix_s=time.time)
    server = HttpServer("127.0.0.1:0")
    routes = view_only(feed, lambda: paced.viewed, journal=False)
    server.start(assembled(routes, Gate(), Sessions(time.monotonic)))
    running = [asyncio.create_task(each()) for each in (paced.go_on, paced.viewed.sampling)]
    running.append(asyncio.create_task(paced.probe()))
    await asyncio.sleep(IDLE_S)
    idle_s, paced.stall_s = paced.stall_s, 0.0
    told.send(f"http://{server.address}/")
    await asyncio.to_thread(told.recv)
    for task in running:
        task.cancel()
    feed.close()
    await server.stop(1.0)
    told.send((idle_s, paced.stall_s))


@contextmanager
def large_cell(*size: int) -> Iterator[tuple[str, Callable[[], tuple[float, float]]]]:
    """The address, and what ends it and gives its longest stalls, before there were viewers and
    since, in seconds.
    """
    spawned = multiprocessing.get_context("spawn")
    here, there = spawned.Pipe()
    process = spawned.Process(target=_serve, args=(there, *size), daemon=True)
    process.start()
    there.close()

    def end() -> tuple[float, float]:
        here.send("end")
        if not here.poll(END_S_MAX):
            raise Unavailable(f"the virtual cell did not end within {END_S_MAX:.0f} s")
        stalls_s: tuple[float, float] = here.recv()
        return stalls_s

    try:
        try:
            begun = here.poll(BEGIN_S_MAX) and here.recv()
        except EOFError:
            begun = None
        if not begun:
            raise Unavailable(f"the virtual cell did not begin within {BEGIN_S_MAX:.0f} s")
        yield begun, end
    finally:
        process.kill()
        process.join()


@contextmanager
def unwatched(chromium: str) -> Iterator[str]:
    """The address at which a browser opens pages, and lets them be looked into. Each load is the
    first one of its files.
    """
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        own = f"--user-data-dir={folder}", "--remote-debugging-port=0", "--headless", KEEPS_NONE
        command = [chromium, *FLAGS, *own, "about:blank"]
        process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
        try:
            told, until_s = Path(folder) / "DevToolsActivePort", time.monotonic() + END_S_MAX
            while not told.exists():
                if process.poll() is not None or time.monotonic() > until_s:
                    raise Unavailable(f"{chromium} did not begin within {END_S_MAX:.0f} s")
                time.sleep(0.1)
            time.sleep(SETTLED_S)
            yield f"http://127.0.0.1:{told.read_text().split()[0]}"
        finally:
            process.kill()
            process.wait()


def first_pictures(playwright: Playwright, chromium: str, url: str) -> Mapping[str, float]:
    """When there was something to read, and the first card."""
    painted = []
    with unwatched(chromium) as address:
        for number in range(LOADS):
            show_status(f"load {number + 1} of {LOADS}")
            requests.put(f"{address}/json/new?{url}", timeout=END_S_MAX).raise_for_status()
            time.sleep(SETTLED_S)
            browser = playwright.chromium.connect_over_cdp(address)
            (page,) = (p for c in browser.contexts for p in c.pages if p.url.startswith(url))
            page.locator(".card").first.wait_for()
            painted.append(page.evaluate(PAINTED))
            page.close()
            browser.close()
    texts, cards = zip(*painted, strict=True)
    return {"first_paint_ms": median(cards), "first_text_ms": median(texts)}


def browse(url: str, minutes: float) -> Mapping[str, float]:
    """What a browser shows and how quickly. Raises NotFound where there is no chromium."""
    chromium = shutil.which("chromium")
    if chromium is None:
        raise NotFound("there is no chromium", hint="apt-get install chromium")
    frames: dict[str, list[float]] = {view: [] for view in VIEWS}
    looks: list[tuple[float, float]] = []
    with sync_playwright() as started:
        pictures = first_pictures(started, chromium, url)
        browser = started.chromium.launch(executable_path=chromium, args=FLAGS)
        page = browser.new_page(viewport={"width": 1280, "height": 900})
        page.goto(url)
        page.locator(".card").first.wait_for()
        session = page.context.new_cdp_session(page)
        until_s = time.monotonic() + 60 * minutes
        while len(looks) < LOOKS_MIN or time.monotonic() < until_s:
            for view, sign in VIEWS.items():
                show_status(f"round {len(looks) + 1}: {view}")
                if view == "requests/":
                    page.locator("[aria-label='Open requests'] a").first.click()
                else:
                    page.evaluate("view => { location.hash = view; }", f"#/{view}")
                page.locator(sign).first.wait_for()
                frames[view] += page.evaluate(FRAMES, FRAMES_S)
            session.send("HeapProfiler.collectGarbage")
            used_mb = session.send("Runtime.getHeapUsage")["usedSize"] / 1e6
            looks.append((time.monotonic(), used_mb))
        browser.close()
    at_s, used = zip(*looks[WARM_UPS:], strict=True)
    p95_ms = {view: Distribution.of(each).seconds[95] for view, each in frames.items()}
    return {
        **pictures,
        "frame_ms_p95": max(p95_ms.values()),
        **{f"frame_ms_p95 #/{view}": each for view, each in p95_ms.items()},
        "heap_growth_mb": GROWTH_S * linear_regression(at_s, used).slope,
        "heap_watched_s": at_s[-1] - at_s[0],
    }


@contextmanager
def viewers(url: str, count: int) -> Iterator[list[int]]:
    """So many read the events of a cell; what each of them has read, in bytes."""
    read, left = [0] * count, threading.Event()

    def view(number: int) -> None:
        with (
            suppress(requests.RequestException),
            requests.get(f"{url}/api/v1/events", stream=True, timeout=30) as events,
        ):
            for part in events.iter_content(1 << 14):
                read[number] += len(part)
                if left.is_set():
                    return

    threads = [threading.Thread(target=view, args=(n,), daemon=True) for n in range(count)]
    for thread in threads:
        thread.start()
    try:
        yield read
    finally:
        left.set()
        for thread in threads:
            thread.join(5.0)


def beside_viewers(rounds: int) -> Mapping[str, float]:
    """What calls of a live cell take beside viewers and beside none, and what a viewer reads."""
    spec = DeploymentSpec(name=NAME, source=SOURCE, context_tokens_max=CONTEXT_TOKENS, slo=SLO)
    answers: dict[str, list[Answer]] = {"none": [], "ten": []}
    rates = []
    with local_cell(http="127.0.0.1:0") as cell:
        deployed(cell.address, [spec])
        wait_calm(cell)
        for number, name, count in in_turn({"none": 0, "ten": VIEWERS}, rounds, warm_ups=1):
            with viewers(f"http://{cell.http_address}", count) as read:
                begun_s = time.monotonic()
                answer = ask(cell.address, NAME)
                seconds = time.monotonic() - begun_s
                if count:
                    rates.append(max(read) / seconds)
            answers[name] += [answer] if number > 0 else []

    def share(times: Callable[[Answer], Any]) -> float:
        none, ten = (median(median(times(a)) for a in answers[n]) for n in ("none", "ten"))
        return float(ten / none - 1.0)

    return {
        "ttft_added_share": share(lambda answer: answer.ttft_ms),
        "tpot_added_share": share(lambda answer: answer.token_ms),
        "viewer_bytes_per_s": max(rates),
    }


def run(
    *,
    minutes: Annotated[float, "for how long the page is watched"] = 1.5,
    rounds: int = 5,
    quick: bool = False,
) -> Report:
    size = (10, 50, 100) if quick else (NODES, DEPLOYMENTS, REQUESTS)
    page = files("mesh") / "page"
    beside = beside_viewers(1 if quick else rounds)  # first: it ends where the machine is busy
    with large_cell(*size) as (url, end):
        seen = browse(url, 0.0 if quick else minutes)
        idle_s, stall_s = end()
    figures = {
        "page_bytes": sum(
            one.stat().st_size
            for one in Path(str(page)).rglob("*")
            if one.suffix in (".html", ".js", ".css", ".svg")
        ),
        **seen,
        "stall_ms_max": 1e3 * stall_s,
        "stall_idle_ms_max": 1e3 * idle_s,
        **beside,
    }
    targets = {
        "page_bytes": "<= 200000",
        "first_paint_ms": "<= 500",
        "frame_ms_p95": "<= 33",
        "heap_growth_mb": "<= 10",
        "stall_ms_max": "<= 5",
        "ttft_added_share": "<= 0.01",
        "tpot_added_share": "<= 0.01",
        "viewer_bytes_per_s": "<= 50000",
    }
    rows = [(name, f"{value:.4g}", targets.get(name, "")) for name, value in figures.items()]
    return Report(
        figures={name: round(value, 4) for name, value in figures.items()},
        shown=(Table(headings=("", "measured", "limit"), rows=rows),),
        targets={} if quick else targets,
    )
