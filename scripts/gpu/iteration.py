"""What an iteration and a first token are made of: the engine process, the node, the cell.

Parts of `beside_vllm`. mesh's engine steps in a process of its own, without a node, with the time
of each of vLLM's calls and of the GPU's kernels; vLLM's own loop does the same with the same model;
and a cell keeps the journals of its decisions, whose times are told apart for one client.
"""

import json
import os
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import psutil

from mesh.domain.actions import StartStep
from mesh.domain.events import InvokeRequested, NodeReported
from mesh.domain.messages import SubmitRequest, TokensReport
from mesh.domain.node_events import CommandReceived, StepFinished
from mesh.domain.steps import LoadOrder
from mesh.runtime.journal import Decision, read_journal
from mesh_loader.store import StoredModel
from scripts.gpu.sitting import ROOT, Sitting

BATCHES = (1, 8, 32)
PREFILLS, PREFILL_TOKENS = 5, (32, 256, 960)
STEPS, PROFILED, SPARE = 48, 8, 24
"""Tokens of a row; spare ones for the iterations in which others begin."""
PROMPT_TOKENS, OUTPUT_TOKENS, CONTEXT_TOKENS, ITERATION_TOKENS = 448, 64, 1024, 2048
WAYS = ("mesh", "sync", "async", "v2")
"""Who steps: mesh's engine; vLLM's own loop with the runner that mesh has, and while the GPU works
on the last iteration; the runner that vLLM takes by itself.
"""
STEPPED_S_MAX = 90.0

Row = dict[str, float]
Heard = tuple[float, list[float]]
"""When a call was sent, and when each of its tokens came: monotonic seconds."""


def prompt(length: int) -> list[int]:
    return [(7 + 5 * place) % 250 + 2 for place in range(length)]


def steps(sitting: Sitting, model: StoredModel) -> None:
    """Each way in a process of its own."""
    for way in WAYS[:-1] if sitting.dry else WAYS:
        told = {"path": str(model.path), "dry": sitting.dry, "way": way}
        command = [sys.executable, "-c", "from scripts.gpu.iteration import run; run()"]
        limit_s = min(STEPPED_S_MAX, max(sitting.left_s, 1.0))
        try:
            done = subprocess.run(
                [*command, json.dumps(told)],
                cwd=ROOT,
                env={**os.environ, **_environment(sitting, way)},
                capture_output=True,
                text=True,
                timeout=limit_s,
                check=True,
            )
        except subprocess.SubprocessError as error:
            said = getattr(error, "stderr", None) or str(error)
            sys.stderr.write(str(said)[-3000:])
            sitting.skip(f"step_{way}", (str(said).strip() or "it failed").splitlines()[-1])
            continue
        for batch, row in json.loads(done.stdout.splitlines()[-1]).items():
            words = ", ".join(f"{key} {1e3 * s:.2f}" for key, s in row.items() if key != "wall")
            sitting.note(f"step_{way}_{batch}_ms", 1e3 * row["wall"], f"ms: {words}")
            sitting.keep(f"step_{way}_{batch}", row)


def _environment(sitting: Sitting, way: str) -> dict[str, str]:
    from mesh_nodes.engines.vllm.environment import ENVIRONMENT, gpu_environment

    told = {**ENVIRONMENT, "PYTHONPATH": os.pathsep.join(sys.path)}
    if not sitting.dry:
        from mesh_nodes.gpus import Gpus

        told |= gpu_environment(Gpus().gpu(0))
    else:
        told["OMP_NUM_THREADS"] = "1"
    if way == "v2":
        told["VLLM_USE_V2_MODEL_RUNNER"] = "1"
    return told


def run() -> None:
    """In that process: prints one JSON object, seconds of the parts of a step by batches."""
    told = json.loads(sys.argv[1])
    from mesh_nodes.engines.vllm.told_gpu import answer_for_nvml

    answer_for_nvml()
    made = _mesh(told) if told["way"] == "mesh" else _own(told)
    print("\n" + json.dumps({batch: _stepped(made, batch, told["dry"]) for batch in BATCHES}))


class _Loop:
    """`submit` takes a request's name, its tokens and those of its answer; `step` computes an
    iteration and says how many have had a token; `core` is vLLM's.
    """

    def __init__(
        self, submit: Callable[[str, int, int], object], step: Callable[[], int], core: Any
    ) -> None:
        self.submit, self.step, self.core = submit, step, core


def _mesh(told: dict[str, Any]) -> _Loop:
    from mesh.domain.ids import DeploymentName, InstanceId, RequestId
    from mesh.domain.request import SamplingParams
    from mesh.domain.steps import EngineRequest
    from mesh_loader.store import ModelStore
    from mesh_nodes.engines.vllm.footprint import estimate
    from mesh_nodes.engines.vllm.instance import Instance
    from mesh_nodes.engines.vllm.internals import register_kernels
    from mesh_nodes.engines.vllm.messages import ProcessOptions

    register_kernels()
    path, dry = Path(told["path"]), told["dry"]
    stored = ModelStore(path.parent.parent).get(path.name)
    assert stored is not None
    info = stored.info
    dtype, block_tokens = ("float32", 32) if dry else ("auto", 16)
    footprint = estimate(info, dtype=dtype, block_tokens=block_tokens, on_cpu=dry)
    order = LoadOrder(
        instance_id=InstanceId("i"),
        deployment=DeploymentName("m"),
        model=info,
        model_path=path,
        kv_blocks=footprint.blocks_for(BATCHES[-1] * CONTEXT_TOKENS),
        context_tokens_max=CONTEXT_TOKENS,
        batch_max=BATCHES[-1],
    )
    options = ProcessOptions(dtype=dtype, block_tokens=block_tokens, elastic=True, movable=False)
    instance = Instance(order, footprint, options)

    def submit(name: str, length: int, tokens: int) -> None:
        wish = SamplingParams(max_tokens=tokens, ignore_eos=True)
        instance.submit(
            EngineRequest(
                request_id=RequestId(name),
                prompt_tokens=tuple(prompt(length)),
                output_tokens=(),
                sampling=wish,
                stop_token_ids=(),
            )
        )

    def step() -> int:
        result = instance.step(ITERATION_TOKENS)
        instance.tell_prefixes()
        return len(result.outputs)

    return _Loop(submit, step, instance._core._core)


def _own(told: dict[str, Any]) -> _Loop:
    from vllm import SamplingParams
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.engine.llm_engine import LLMEngine

    dry, way = told["dry"], told["way"]
    graphs = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}
    engine = LLMEngine.from_engine_args(
        EngineArgs(
            model=told["path"],
            skip_tokenizer_init=True,
            dtype="float32" if dry else "auto",
            enforce_eager=dry,
            compilation_config={} if dry else graphs,
            max_model_len=CONTEXT_TOKENS,
            max_num_seqs=BATCHES[-1],
            max_num_batched_tokens=ITERATION_TOKENS,
            kv_cache_memory_bytes=1 << 31,
            gpu_memory_utilization=0.01,
            disable_log_stats=True,
            use_tqdm_on_load=False,
            enable_prefix_caching=False,
            async_scheduling=way != "sync",
        )
    )

    def submit(name: str, length: int, tokens: int) -> None:
        wish = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        engine.add_request(name, {"prompt_token_ids": prompt(length)}, wish)

    return _Loop(submit, lambda: len(engine.step()), engine.engine_core.engine_core)


def _stepped(loop: _Loop, batch: int, dry: bool) -> Row:
    """Medians over steps in which the whole batch decodes; `gpu`: of its kernels, in the mean;
    `prefill`: of one prompt alone, by its tokens.
    """
    prefill = {f"prefill {n}": _prefill_s(loop, n) for n in PREFILL_TOKENS if batch == 1}
    for row in range(batch):
        loop.submit(f"{batch}-{row}", PROMPT_TOKENS, STEPS + PROFILED + SPARE)
    while loop.step() < batch:
        pass
    wall, cpu, parts = [], [], list[Row]()
    for _ in range(STEPS):
        with _timed(loop.core) as spent:
            start_s, start_cpu_s = time.perf_counter(), time.process_time()
            came = loop.step()
            wall.append(time.perf_counter() - start_s)
            cpu.append(time.process_time() - start_cpu_s)
        if came == batch:
            parts.append(spent)
    told = {"wall": median(wall), "cpu": median(cpu), **prefill}
    told |= {key: median(spent[key] for spent in parts) for key in parts[0]}
    if not dry:
        told["gpu"] = _kernels_s(loop.step)
    while loop.core.scheduler.get_num_unfinished_requests():
        loop.step()
    return told


def _prefill_s(loop: _Loop, tokens: int) -> float:
    """The median of some prompts of so many tokens, each alone."""
    taken_s = []
    for number in range(PREFILLS):
        loop.submit(f"{tokens}-{number}", tokens, 1)
        start_s = time.perf_counter()
        while not loop.step():
            pass
        taken_s.append(time.perf_counter() - start_s)
    return median(taken_s)


@contextmanager
def _timed(core: Any) -> Iterator[Row]:
    """The seconds of vLLM's own calls in a step. `sample` waits for the GPU where nothing did."""
    spent: Row = defaultdict(float)
    places = (
        ("schedule", core.scheduler, "schedule"),
        ("launch", core.model_executor, "execute_model"),
        ("sample", core.model_executor, "sample_tokens"),
        ("update", core.scheduler, "update_from_output"),
    )

    def timing(key: str, call: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(call)
        def timed(*given: Any, **named: Any) -> Any:
            start_s = time.perf_counter()
            try:
                return call(*given, **named)
            finally:
                spent[key] += time.perf_counter() - start_s

        return timed

    for key, owner, name in places:
        setattr(owner, name, timing(key, getattr(owner, name)))
    try:
        yield spent
    finally:
        for _, owner, name in places:
            delattr(owner, name)


def _kernels_s(step: Callable[[], object]) -> float:
    import torch

    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(PROFILED):
            step()
        torch.cuda.synchronize()
    taken_us = sum(float(event.self_device_time_total) for event in profile.key_averages())
    return taken_us / PROFILED / 1e6


class Watched:
    """What a cell's processes do while it is asked, in the journals of its decisions."""

    def __init__(self, run: Any, home: Path) -> None:
        """`home` has the journals `controller.journal` and, of its only node, `node.journal`."""
        self._home = home
        agent = psutil.Process(run.children[1].process.pid)
        self._processes = {"controller": psutil.Process(run.children[0].process.pid)}
        self._processes |= {"node": agent}
        engines = agent.children(recursive=True)
        self._processes |= {f"engine {n}": process for n, process in enumerate(engines)}
        self._spans: list[tuple[int, float, float, Sequence[Heard], dict[str, float]]] = []

    def ask(self, callers: int, ask: Callable[[], Sequence[Heard]]) -> None:
        before = {name: _cpu_s(process) for name, process in self._processes.items()}
        begin_s = time.monotonic()
        heard = ask()
        end_s = time.monotonic()
        used = {name: _cpu_s(p) - before[name] for name, p in self._processes.items()}
        self._spans.append((callers, begin_s, end_s, heard, used))

    def tell(self, sitting: Sitting) -> None:
        decided = list(read_journal(self._home / "controller.journal")[1])
        done = list(read_journal(self._home / "node.journal")[1])
        for callers, begin_s, end_s, heard, used in self._spans:
            there = list(_between(done, begin_s, end_s))
            _tell_iterations(sitting, callers, there, used)
            first_s = median(came_s[0] - sent_s for sent_s, came_s in heard)
            mean_s = median((came_s[-1] - came_s[0]) / (OUTPUT_TOKENS - 1) for _, came_s in heard)
            unit = f"ms TPOT of clients p50, {callers} at once; TTFT {1e3 * first_s:.1f}"
            sitting.note(f"way_{callers}_tpot_ms", 1e3 * mean_s, unit)
            if callers == 1:
                _tell_first(sitting, heard, decided, done)


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def _between(decisions: Sequence[Decision], begin_s: float, end_s: float) -> Iterator[Decision]:
    return (decision for decision in decisions if begin_s <= decision.now_s <= end_s)


def _tell_iterations(
    sitting: Sitting, callers: int, done: list[Decision], used: dict[str, float]
) -> None:
    """From the end of an iteration to the end of the next, which follows at once."""
    ended = [
        (
            d.now_s,
            d.event.result,
            any(isinstance(action, StartStep) for action in d.actions),
        )
        for d in done
        if isinstance(d.event, StepFinished)
    ]
    period_s, engine_s = [], []
    for (begun_s, _, follows), (ended_s, result, _) in pairwise(ended):
        if follows and result.decode_batch == callers and not result.prefill_tokens:
            period_s.append(ended_s - begun_s)
            engine_s.append(result.elapsed_s)
    if not period_s:
        sitting.skip(f"way_{callers}", "no iteration had all of them")
        return
    each = [f"{name} {1e3 * s / len(ended):.2f}" for name, s in used.items() if s > 0.0]
    rest_s = median(p - e for p, e in zip(period_s, engine_s, strict=True))
    words = f"engine process {1e3 * median(engine_s):.2f}, outside of it {1e3 * rest_s:.2f}"
    mean_s = sum(period_s) / len(period_s)
    words += f"; mean {1e3 * mean_s:.2f}; CPU of an iteration: {', '.join(each)}"
    sitting.note(f"way_{callers}_ms", 1e3 * median(period_s), f"ms an iteration: {words}")


def _tell_first(
    sitting: Sitting, heard: Sequence[Heard], decided: list[Decision], done: list[Decision]
) -> None:
    """Each moment of the last call, ms after it was sent, until its second token."""
    sent_s, came_s = heard[-1]
    moments = []
    for who, decisions in (("controller", decided), ("node", done)):
        moments += [
            (decision.now_s, f"{who} {_named(decision)}")
            for decision in _between(decisions, sent_s, came_s[1])
        ]
    moments += [(at_s, f"client token {n}") for n, at_s in enumerate(came_s[:2])]
    words = "; ".join(f"{1e3 * (at_s - sent_s):.1f} {what}" for at_s, what in sorted(moments))
    sitting.note("way_first_ms", 1e3 * (came_s[0] - sent_s), f"ms: {words}")


def _named(decision: Decision) -> str:
    match decision.event:
        case InvokeRequested():
            return "asked"
        case NodeReported(report=TokensReport()):
            return "tokens"
        case CommandReceived(command=SubmitRequest()):
            return "submit"
        case StepFinished(result=result):
            shape = f"{result.prefill_tokens}+{result.decode_batch}"
            return f"step {shape} in {1e3 * result.elapsed_s:.1f}"
        case event:
            return type(event).__name__
