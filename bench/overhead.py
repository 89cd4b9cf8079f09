"""Measures a cell and the bare engine in turn, A B A B …, and prints what the cell adds, and where.

Twice: with one core left to the controller, the client and the loops, as where these have a machine
of their own; and with the engine on all cores, where whatever they compute it computes later. The
last line is one JSON object: `ttft_added_ms_p50`, `token_added_ms_p50` (medians over rounds of the
difference of the round's medians) for the first, the same with `_all_cores` for the second, and
`hops_ms`, the way of a first token.
"""

import os
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median

from bench.cells import deployed, local_cell
from bench.demo_model import SOURCE, stored_model
from bench.driving import LoadedModel
from bench.harness import Report, Table, in_turn
from bench.peer import Peer
from mesh.domain.deployment import DeploymentSpec
from mesh.domain.errors import Unavailable
from mesh.domain.events import InvokeRequested, NodeReported
from mesh.domain.ids import DeploymentName, RequestId
from mesh.domain.limits import CellLimits, NodeLimits
from mesh.domain.messages import SubmitRequest, TokensReport
from mesh.domain.node_events import CommandReceived, StepFinished
from mesh.domain.slo import Slo
from mesh.evaluation import load_client
from mesh.evaluation.load_client import Call, offer
from mesh.runtime.journal import Decision, read_journal
from mesh_nodes.engines.openvino.engine import OpenVinoEngine

PROMPT_TOKENS = tuple(range(100, 116))
"""Short, so that what is added is not lost in the noise of a long prefill."""
BATCH = 8
BATCH_TOKENS = 64
TTFT_REPEATS = 8
LONE_EVERY_S = 0.5
"""Several times what a request of one token takes. Of the bare engine, too: one that has rested
finds its caches cold.
"""
KV_TOKENS = 16384
SLO = Slo(ttft_s=60.0, tpot_s=5.0)
"""None is refused: what is measured is what the cell adds."""
CONTEXT_TOKENS = 2048


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """Milliseconds: first tokens of lone requests, means per token of eight streams at once."""

    ttft_ms: tuple[float, ...]
    token_ms: tuple[float, ...]


def steady(times_s: list[list[float]]) -> tuple[float, ...]:
    """Milliseconds per token of each stream, while every stream of the batch is decoding.

    `times_s` holds the arrival times of each stream's tokens. A mean over the window, since several
    tokens may arrive in one message. The first gap of a stream may hold another's prefill, and
    streams that ended early leave a smaller batch: both are outside the window.
    """
    start_s = max(stream[1] for stream in times_s)
    end_s = min(stream[-1] for stream in times_s)
    windows = [[at for at in stream if start_s <= at <= end_s] for stream in times_s]
    return tuple(1e3 * (w[-1] - w[0]) / (len(w) - 1) for w in windows if len(w) > 1)


PREFILL_TOKENS = NodeLimits().prefill_tokens_max


def first_tokens(model: LoadedModel) -> tuple[float, ...]:
    """Milliseconds to the first token of a lone request."""
    taken = []
    for _ in range(TTFT_REPEATS):
        time.sleep(LONE_EVERY_S)
        start_s = time.perf_counter()
        model.submit(PROMPT_TOKENS, 1)
        while not model.step(PREFILL_TOKENS).outputs:
            pass
        taken.append(1e3 * (time.perf_counter() - start_s))
    return tuple(taken)


def batch(model: LoadedModel) -> tuple[float, ...]:
    """Milliseconds per token of eight requests at once."""
    times_s: dict[RequestId, list[float]] = {
        model.submit(PROMPT_TOKENS, BATCH_TOKENS): [] for _ in range(BATCH)
    }
    while outputs := model.step(PREFILL_TOKENS).outputs:
        now_s = time.perf_counter()
        for output in outputs:
            times_s[output.request_id].append(now_s)
    return steady(list(times_s.values()))


def contender(threads: int) -> Callable[[None], Answer]:
    """With one instance, as large as the cell's."""
    model = LoadedModel(
        OpenVinoEngine(threads=threads),
        stored_model(),
        kv_tokens=KV_TOKENS,
        context_tokens_max=CONTEXT_TOKENS,
        batch_max=CellLimits().batch_max,
    )
    return lambda _: Answer(ttft_ms=first_tokens(model), token_ms=batch(model))


CALL_S_MAX = 120.0


def ask(address: str, name: DeploymentName) -> Answer:
    """One round of both questions. Raises Unavailable when a request is not answered in full, or a
    lone one was not alone.
    """
    lone = _lone(name)
    together = [_call(name, LONE_EVERY_S * len(lone), BATCH_TOKENS)] * BATCH
    answers = answered(address, [*lone, *together])
    alone = _alone(answers[: len(lone)])
    streams = [[a.sent_s + at_s for at_s in a.tokens_s] for a in answers[len(lone) :]]
    ttft_ms = tuple(1e3 * answer.tokens_s[0] for answer in alone)
    return Answer(ttft_ms=ttft_ms, token_ms=steady(streams))


def ask_alone(address: str, name: DeploymentName) -> list[load_client.Answer]:
    """The first question, and what came of each call. Raises as `ask`."""
    return _alone(answered(address, _lone(name)))


def _lone(name: DeploymentName) -> list[Call]:
    """The first opens the connection."""
    return [_call(name, LONE_EVERY_S * number, 1) for number in range(TTFT_REPEATS + 1)]


def _alone(answers: list[load_client.Answer]) -> list[load_client.Answer]:
    """All but the first."""
    if (took_s := max(answer.ended_s for answer in answers[1:])) > LONE_EVERY_S:
        raise Unavailable(
            f"a lone request took {took_s:.2f} s, and the next came after {LONE_EVERY_S:g} s",
            hint="measure on a machine that has nothing else to do",
        )
    return answers[1:]


def answered(address: str, calls: list[Call]) -> list[load_client.Answer]:
    answers = offer(address, calls, call_s_max=CALL_S_MAX)
    if odd := [a for c, a in zip(calls, answers, strict=True) if not a.whole(c)]:
        why = odd[0].refused or odd[0].failed or "torn"
        raise Unavailable(f"{len(odd)} of {len(calls)} requests were not answered in full: {why}")
    return answers


def _call(name: DeploymentName, at_s: float, output_tokens: int) -> Call:
    return Call(
        at_s=at_s,
        deployment=name,
        slo=SLO,
        prompt_tokens=PROMPT_TOKENS,
        output_tokens=output_tokens,
    )


HOPS = (
    "client to the controller's core",
    "controller's core to the node's",
    "node's core to the iteration",
    "the iteration",
    "iteration to the controller's core",
    "controller's core to the client",
)


def hops_ms(
    controller: Path, node: Path, answers: Sequence[load_client.Answer]
) -> Mapping[str, float]:
    """Medians over the answers, each of one token to a request that was alone, in the order of the
    way. Raises InvalidInput for what is no journal, KeyError where one lacks an answer's request.
    """
    asked, came, _ = _moments(read_journal(controller)[1])
    given, computed, took_s = _moments(read_journal(node)[1])
    ways = []
    for answer in answers:
        assert answer.request_id is not None
        request_id = answer.request_id
        begun_s = computed[request_id] - took_s[request_id]
        moments = (
            *(answer.sent_s, asked[request_id], given[request_id], begun_s),
            *(computed[request_id], came[request_id], answer.sent_s + answer.tokens_s[0]),
        )
        ways.append([1e3 * (b - a) for a, b in pairwise(moments)])
    return dict(zip(HOPS, map(median, zip(*ways, strict=True)), strict=True))


_Moments = dict[RequestId, float]


def _moments(decisions: Iterable[Decision]) -> tuple[_Moments, _Moments, _Moments]:
    """When a core was told of each request, when of its first token, and how long that was computed
    where the core is a node's.
    """
    asked: _Moments = {}
    came: _Moments = {}
    took_s: _Moments = {}
    for decision in decisions:
        match decision.event:
            case InvokeRequested(request=request):
                asked[request.request_id] = decision.now_s
            case CommandReceived(command=SubmitRequest(order=order)):
                asked[order.request.request_id] = decision.now_s
            case NodeReported(report=TokensReport(outputs=outputs)):
                for output in outputs:
                    came.setdefault(output.request_id, decision.now_s)
            case StepFinished(result=result):
                for output in result.outputs:
                    came.setdefault(output.request_id, decision.now_s)
                    took_s.setdefault(output.request_id, result.elapsed_s)
    return asked, came, took_s


NAME = DeploymentName("overhead")
HEADINGS = ("", "engine on", "bare engine", "cell", "added", "limit")


def way(rounds: int, threads: int) -> Mapping[str, float]:
    """Milliseconds of each hop to a lone first token, in a cell that keeps journals."""
    spec = DeploymentSpec(name=NAME, source=SOURCE, context_tokens_max=CONTEXT_TOKENS, slo=SLO)
    with tempfile.TemporaryDirectory() as folder:
        controller, node = Path(folder) / "controller.journal", Path(folder) / "cpu0.journal"
        with local_cell(threads=threads, journal=controller, node_journals=node.parent) as local:
            deployed(local.address, [spec])
            answers = [one for _ in range(rounds) for one in ask_alone(local.address, NAME)]
        return hops_ms(controller, node, answers)


def compare(key: str, bares: list[Answer], cells: list[Answer]) -> tuple[float, float, float]:
    """Medians in ms: the bare engine, the cell, and what the cell adds."""
    alone = [median(getattr(a, f"{key}_ms")) for a in bares]
    whole = [median(getattr(a, f"{key}_ms")) for a in cells]
    return median(alone), median(whole), median(w - a for w, a in zip(whole, alone, strict=True))


def measure(rounds: int, threads: int, join_ms: float) -> tuple[list[Answer], list[Answer]]:
    """Answers of the bare engine and of the cell, round by round; one warm-up round first."""
    spec = DeploymentSpec(name=NAME, source=SOURCE, context_tokens_max=CONTEXT_TOKENS, slo=SLO)
    with (
        Peer("the bare engine", contender, threads) as plain,
        local_cell(threads=threads, join_ms=join_ms) as local,
    ):
        plain.wait_ready()
        deployed(local.address, [spec])
        asks: dict[str, Callable[[], Answer]]
        asks = {"bare": plain.ask, "cell": lambda: ask(local.address, NAME)}
        found: dict[str, list[Answer]] = {"bare": [], "cell": []}
        for number, name, asked in in_turn(asks, rounds, warm_ups=1):
            answer = asked()
            found[name] += [answer] if number > 0 else []
    return found["bare"], found["cell"]


def run(*, rounds: int = 10, join_ms: float = 0.0) -> Report:
    stored_model()
    cores = len(os.sched_getaffinity(0))
    rows = []
    figures: dict[str, object] = {}
    for threads, suffix in ((max(1, cores - 1), ""), (cores, "_all_cores")):
        bares, cells = measure(rounds, threads, join_ms)
        for label, key, limit in (
            ("first token, one request", "ttft", 3.0),
            ("each token, batch of 8", "token", 0.5),
        ):
            alone, whole, added = compare(key, bares, cells)
            numbers = (f"{alone:.2f}", f"{whole:.2f}", f"{added:.2f}")
            limits = "" if suffix else f"{limit:.1f}"
            rows.append((label, f"{threads} of {cores}", *numbers, limits))
            figures |= {
                f"{key}_added_ms_p50{suffix}": round(added, 3),
                f"{key}_bare_ms_p50{suffix}": round(alone, 3),
            }
    found_ms = way(rounds, max(1, cores - 1))
    ways = [(hop, f"{ms:.2f}") for hop, ms in found_ms.items()]
    return Report(
        figures={**figures, "hops_ms": {hop: round(ms, 3) for hop, ms in found_ms.items()}},
        shown=(
            Table(headings=HEADINGS, rows=rows, title=f"medians over {rounds} rounds, ms"),
            Table(
                headings=("first token, one request", "ms"),
                rows=ways,
                title="medians, with journals kept",
            ),
        ),
    )
