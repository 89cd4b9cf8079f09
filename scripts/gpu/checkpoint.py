"""Whole processes off the device and back, by the driver's own `cuCheckpointProcess*`.

A child takes a context and 16 GB; this process, which takes neither, has the driver lock it,
checkpoint it, restore it and unlock it. What is left on the device meanwhile is what a sleeping
process would cost: with mesh's own sleep a context of some hundred MB stays. It needs driver 570
or later; an earlier one lacks the calls, which is said.

    python -m scripts.gpu.checkpoint [--dry]
"""

from scripts.gpu.sitting import Sitting, main  # isort: skip  before all of mesh

import multiprocessing
import os
import time
from multiprocessing.connection import Connection
from types import SimpleNamespace
from typing import Any

import torch

CHILD_GB = 16
LOCK_MS_MAX = 10_000
ROUNDS = 2


def child(end: Connection, size_bytes: int, dry: bool) -> None:
    """Holds so much of the device, and answers with what a kernel makes of it."""
    device = torch.device("cpu" if dry else "cuda:0")
    held = torch.full((size_bytes // 4,), 1.0, device=device)
    end.send(float(held[::4096].sum()))
    while end.recv():
        end.send(float(held[::4096].sum()))


def library(sitting: Sitting) -> Any:
    """The dry one answers alone."""
    if not sitting.dry:
        return sitting.library
    codes = SimpleNamespace(CUDA_SUCCESS=0)
    verbs = ("Lock", "Checkpoint", "Restore", "Unlock")
    calls = {f"cuCheckpointProcess{verb}": lambda pid, arguments: (0,) for verb in verbs}
    return SimpleNamespace(
        CUresult=codes, CUcheckpointLockArgs=SimpleNamespace, cuInit=lambda flags: (0,), **calls
    )


def ask(driver: Any, function: str, *arguments: object) -> float:
    """Seconds that the call took. Raises RuntimeError where it is not there, or refused."""
    if not hasattr(driver, function):
        raise RuntimeError(f"this cuda.bindings has no {function}")
    start_s = time.perf_counter()
    code = getattr(driver, function)(*arguments)[0]
    if code != driver.CUresult.CUDA_SUCCESS:
        raise RuntimeError(f"{function}: {getattr(code, 'name', code)}")
    return time.perf_counter() - start_s


def one_round(sitting: Sitting, driver: Any, pid: int, number: int, before: int) -> None:
    patience = driver.CUcheckpointLockArgs()
    patience.timeoutMs = LOCK_MS_MAX
    lock_s = ask(driver, "cuCheckpointProcessLock", pid, patience)
    away_s = ask(driver, "cuCheckpointProcessCheckpoint", pid, None)
    left = sitting.used_bytes() - before
    back_s = ask(driver, "cuCheckpointProcessRestore", pid, None)
    unlock_s = ask(driver, "cuCheckpointProcessUnlock", pid, None)
    key = f"round{number}"
    sitting.note(f"{key}_lock_s", lock_s, "s")
    sitting.note(f"{key}_checkpoint_s", away_s, f"s, {CHILD_GB} GB")
    sitting.note(f"{key}_left_mib", left / 2**20, "MiB of the device meanwhile, by NVML")
    sitting.note(f"{key}_restore_s", back_s, "s")
    sitting.note(f"{key}_unlock_s", unlock_s, "s")


def measure(sitting: Sitting) -> None:
    before = sitting.used_bytes()
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(
        target=child, args=(theirs, CHILD_GB * sitting.gb, sitting.dry), daemon=True
    )
    process.start()
    theirs.close()
    try:
        answer = ours.recv()
        sitting.note(
            "held_mib", (sitting.used_bytes() - before) / 2**20, "MiB by the child, by NVML"
        )
        driver = library(sitting)
        ask(driver, "cuInit", 0)
        for number in range(1, ROUNDS + 1):
            one_round(sitting, driver, process.pid or os.getpid(), number, before)
            ours.send(True)
            sitting.note(f"round{number}_same", ours.recv() == answer)
    except RuntimeError as error:
        sitting.skip("checkpoint_s", str(error))
    finally:
        process.kill()
        process.join()


if __name__ == "__main__":
    main("checkpoint", lambda sitting: sitting.part("checkpoint", measure))
