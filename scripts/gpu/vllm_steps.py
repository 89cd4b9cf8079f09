"""What iterations take: vLLM's where it is installed, and in torch alone those of 1B to 8B models.

With vLLM: mesh's engine contract suite, vLLM's own decode step with and without CUDA graphs, and
what stepping it from another process adds. Without: the same step of a 1B model in torch, choosing
tokens on the host and on the device, and prefill and decode tables of three models, each in the
format of `mesh profile -o json`.

    python -m scripts.gpu.vllm_steps [--dry]
"""

from scripts.gpu.sitting import ROOT, Sitting, main  # isort: skip  before all of mesh

import dataclasses
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import closing
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from statistics import median

import torch

from mesh.compute.shapes import survey_axes
from mesh.compute.tables import table
from mesh.domain.ids import ModelId
from mesh.domain.profile import Grid, Profile
from mesh.domain.reasons import DeviceKind
from scripts.gpu.stack import SHAPES, TINY, Shape, Stack

BATCH, CONTEXT_TOKENS = 8, 512
"""The batch and the context of the decode step whose ways are compared."""
STEPS = 64
CONTRACT_S_MAX = 200.0
DRAWN_ROWS, TOP_P, TEMPERATURE = 32, 0.95, 0.8
REPEATS = 3
SPARE_S = 10.0
"""After this much of the script's time, no further shape is measured."""


def contract(sitting: Sitting) -> None:
    """The dry run only collects it: `make test-vllm` runs it."""
    missing = [name for name in ("vllm", "pytest", "mesh.v1") if find_spec(name) is None]
    if missing:
        sitting.skip("contract", f"{', '.join(missing)} cannot be imported")
        return
    only = ["--collect-only"] if sitting.dry else []
    suite = [sys.executable, "-m", "pytest", *only, "-k", "vllm", "tests/contract"]
    limit_s = min(CONTRACT_S_MAX, sitting.left_s)
    try:
        done = subprocess.run(
            suite, cwd=ROOT, capture_output=True, text=True, timeout=limit_s, check=False
        )
    except subprocess.TimeoutExpired:
        sitting.skip("contract", f"it was not done after {limit_s:.0f} s")
        return
    words = (done.stdout.strip() or done.stderr.strip() or "it said nothing").splitlines()
    sitting.note("contract", words[-1].strip("= "))


def vllm_decode(sitting: Sitting) -> None:
    """A made-up 1B model in vLLM, each way in a process of its own: it keeps what it once took."""
    if find_spec("vllm") is None:
        sitting.skip("vllm_step", "vLLM cannot be imported")
        return
    shape = TINY if sitting.dry else SHAPES[0]
    # On a CPU there are no graphs, and what stands in for them takes minutes to compile.
    for way in ("eager",) if sitting.dry else ("eager", "graphs"):
        code = f"from scripts.gpu.vllm_loop import run; run({shape.name!r}, {way == 'eager'})"
        done = subprocess.run(
            [sys.executable, "-c", code],
            cwd=ROOT,
            env={**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "HF_HUB_OFFLINE": "1"},
            capture_output=True,
            text=True,
            timeout=max(sitting.left_s, 1.0),
            check=False,
        )
        if done.returncode:
            lines = (done.stderr.strip() or "it failed").splitlines()
            named = [line for line in lines if "Error: " in line]
            sitting.skip(f"vllm_{way}_ms", (named or lines)[-1])
            continue
        told = json.loads(done.stdout.splitlines()[-1])
        sitting.note(f"vllm_{way}_ms", told["step_ms"], f"ms, {shape.name}, batch {BATCH}")
        sitting.note(f"vllm_{way}_start_s", told["start_s"], "s until it could compute")


def stepping(sitting: Sitting) -> None:
    """mesh's own engine over a tiny model: a load, what asking from another process adds to an
    iteration, whatever the model, and a resize.
    """
    missing = [name for name in ("vllm", "mesh.v1", "hypothesis") if find_spec(name) is None]
    if missing:
        sitting.skip("agent_ms", f"{', '.join(missing)} cannot be imported")
        return
    from mesh.domain.request import SamplingParams
    from mesh_nodes.engines.vllm import VllmEngine
    from tests.contract.engine_contract import write_tiny_model
    from tests.nodes.engines.serving import INSTANCE, load, request

    wish, agent_s = SamplingParams(max_tokens=STEPS), []
    engine = VllmEngine(gpu_index=None if sitting.dry else 0)
    with tempfile.TemporaryDirectory() as folder, closing(engine):
        path = Path(folder, "model")
        engine.await_ready()
        loaded = load(engine, write_tiny_model(path, head_size=32), path)
        for number in range(BATCH):
            engine.submit(INSTANCE, request(str(number), [1 + number] * 32, wish))
        for _ in range(STEPS):
            start_s = time.perf_counter()
            result = engine.step(INSTANCE, CONTEXT_TOKENS)
            agent_s.append(time.perf_counter() - start_s - result.elapsed_s)
        grown = engine.resize_kv(INSTANCE, 1024)
        held_mib = engine.memory()[0].kv_held_bytes / 2**20
    sitting.note("engine_load_s", loaded.elapsed_s, "s, mesh's engine, a tiny model")
    sitting.note("agent_ms", 1e3 * median(agent_s), "ms of an iteration outside its process")
    sitting.note("engine_grow_ms", 1e3 * grown.elapsed_s, "ms, 64 to 1,024 KV blocks")
    sitting.note("engine_held_mib", held_mib, "MiB of KV cache then")


def torch_decode(sitting: Sitting) -> None:
    stack = Stack(TINY if sitting.dry else SHAPES[0], BATCH * CONTEXT_TOKENS, *where(sitting))
    hidden = stack.hidden(BATCH, 1)
    step = partial(stack.iterate, hidden, CONTEXT_TOKENS - 1)
    eager_s = sitting.timed_s(step, STEPS)
    graph_s = sitting.timed_s(sitting.captured(step), STEPS)
    sitting.note("torch_eager_ms", 1e3 * eager_s, f"ms, {stack.shape.name}, batch {BATCH}")
    sitting.note("torch_graph_ms", 1e3 * graph_s, "ms, the same as a CUDA graph")


def sampling(sitting: Sitting) -> None:
    """Top-p at a temperature: mesh's own on the host, and sorted on the device."""
    logits = torch.randn(DRAWN_ROWS, SHAPES[0].vocabulary, device=sitting.device) * 3

    def on_device() -> torch.Tensor:
        shares, order = torch.softmax(logits / TEMPERATURE, dim=-1).sort(dim=-1, descending=True)
        shares[shares.cumsum(dim=-1) - shares >= TOP_P] = 0.0
        noise = torch.empty_like(shares).exponential_()
        return order.gather(1, (shares / noise).argmax(dim=-1, keepdim=True))

    unit = f"ms, {DRAWN_ROWS} rows of {SHAPES[0].vocabulary}, top-p {TOP_P}"
    sitting.note("drawn_on_device_ms", 1e3 * sitting.timed_s(on_device, REPEATS), unit)
    try:
        from mesh.domain.request import SamplingParams
        from mesh_nodes.engines.sampling import Draw, choose
    except ModuleNotFoundError as error:
        sitting.skip("drawn_on_host_ms", f"mesh's own needs {error.name}")
        return
    wish = SamplingParams(temperature=TEMPERATURE, top_p=TOP_P)
    draws = [Draw(sampling=wish, seed=row, index=0, past=None) for row in range(DRAWN_ROWS)]
    host_s = sitting.timed_s(lambda: choose(logits.float().cpu().numpy(), draws), REPEATS)
    sitting.note("drawn_on_host_ms", 1e3 * host_s, f"{unit}, the copy with it")


def where(sitting: Sitting) -> tuple[torch.device, torch.dtype]:
    return sitting.device, torch.float32 if sitting.dry else torch.bfloat16


def tables(sitting: Sitting, shape: Shape) -> None:
    device, dtype = where(sitting)
    kv_tokens = 512 if sitting.dry else 32768
    element_bytes = torch.empty(0, dtype=dtype).element_size()
    wanted = (shape.parameters + shape.kv_elements_per_token * kv_tokens) * element_bytes
    if not sitting.fits(f"profile_{shape.name}", wanted, seconds=60):
        return
    start_s = time.monotonic()
    prefill, decode = survey(sitting, Stack(shape, kv_tokens, device, dtype), kv_tokens)
    if prefill is None or decode is None:
        sitting.skip(f"profile_{shape.name}", "no time was left")
        return
    name = "a CPU" if sitting.dry else torch.cuda.get_device_name(0)
    profile = Profile(
        model_id=ModelId(f"made-up-{shape.name}"),
        device=DeviceKind.CPU if sitting.dry else DeviceKind.GPU,
        fingerprint=f"scripts-gpu/{name}/torch-{torch.__version__}",
        hardware=name,
        cores=os.cpu_count() or 1,
        parameters=shape.parameters,
        weights_bytes=shape.parameters * element_bytes,
        kv_bytes_per_token=shape.kv_elements_per_token * element_bytes,
        prefill=prefill,
        decode=decode,
        measured_s=time.monotonic() - start_s,
    )
    for batch in (1, decode.rows[-1]):
        took_s = decode.at(batch, CONTEXT_TOKENS)
        unit = f"ms an iteration, context {CONTEXT_TOKENS}, eager"
        sitting.note(f"decode_{shape.name}_{batch}_ms", 1e3 * took_s, unit)
    tokens = prefill.rows[-1]
    sitting.note(f"prefill_{shape.name}_{tokens}_ms", 1e3 * prefill.at(tokens, 0), "ms, no past")
    sitting.keep(f"profile_{shape.name}", dataclasses.asdict(profile))


def survey(sitting: Sitting, stack: Stack, kv_tokens: int) -> tuple[Grid | None, Grid | None]:
    """Prefill and decode, at the sizes that `mesh profile` measures, as far as there is time."""
    axes = survey_axes(
        context_tokens_max=128 if sitting.dry else 4096,
        batch_max=4 if sitting.dry else 64,
        kv_tokens=kv_tokens,
        prefill_tokens_max=64 if sitting.dry else 2048,
    )

    def seconds(batch: int, tokens: int, past: int) -> float | None:
        if sitting.left_s < SPARE_S:
            return None
        work = partial(stack.iterate, stack.hidden(batch, tokens), past)
        work()
        return sitting.timed_s(work, REPEATS)

    prefill = _empty(axes.prefill_rows, axes.prefill_columns)
    for i, j, cell in axes.prefill_shapes():
        prefill[i][j] = seconds(1, cell.prefill_tokens, cell.prefill_past_tokens)
    decode = _empty(axes.decode_rows, axes.decode_columns)
    for i, j, cell in axes.decode_shapes():
        decode[i][j] = seconds(cell.decode_batch, 1, cell.decode_context_tokens - 1)
    return (
        table(axes.prefill_rows, axes.prefill_columns, prefill),
        table(axes.decode_rows, axes.decode_columns, decode),
    )


def _empty(rows: Sequence[int], columns: Sequence[int]) -> list[list[float | None]]:
    return [[None for _ in columns] for _ in rows]


def measure(sitting: Sitting) -> None:
    with torch.inference_mode():
        sitting.part("torch_decode", torch_decode)
        sitting.part("sampling", sampling)
        for shape in (TINY,) if sitting.dry else SHAPES:
            sitting.part(f"profile_{shape.name}", partial(tables, shape=shape))
    if not sitting.dry:
        # The next ones are other processes' work.
        torch.cuda.empty_cache()
    sitting.part("vllm_step", vllm_decode)
    sitting.part("agent", stepping)
    sitting.part("contract", contract)


if __name__ == "__main__":
    main("vllm_steps", measure)
