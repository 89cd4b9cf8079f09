"""What the scripts share: the device, their time, and what they print.

With `--dry` all of it runs on a CPU: torch computes there, and a gigabyte is a megabyte. Modules of
mesh are taken as they are from the clone. Each measurement is a row of the table and a key of the
JSON object that is the last line; what could not be measured says why in both.
"""

import argparse
import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "nodes")]

import torch  # noqa: E402

SECONDS_MAX = 480.0


class Sitting:
    """One script's run. Shapes are given for a GPU of 80 GB and scaled by `gb`."""

    def __init__(
        self, script: str, *, dry: bool, seconds: float = SECONDS_MAX, parts: str = ""
    ) -> None:
        """`parts`: the only ones that are measured, where a script asks `wants`."""
        self.dry = dry
        self._parts = parts.split(",") if parts else None
        self.gb = 1 << 20 if dry else 10**9
        self.device = torch.device("cpu" if dry else "cuda:0")
        self._end_s = time.monotonic() + seconds
        self._rows: list[tuple[str, str, str]] = []
        self._figures: dict[str, object] = {"script": script, "dry": dry}
        self.broken = False

    @property
    def left_s(self) -> float:
        return self._end_s - time.monotonic()

    def used_bytes(self) -> int:
        """The memory of the device that anybody uses, as NVML says."""
        if self.dry:
            return 0
        from mesh_nodes.gpus import Gpus

        gpus = Gpus()
        return gpus.used_bytes(gpus.gpu(0))

    def energy_j(self) -> float:
        """What the device has taken so far, by NVML; without one, as if it took 100 W."""
        if self.dry:
            return 100 * time.monotonic()
        from mesh_nodes.gpus import Gpus

        gpus = Gpus()
        return gpus.energy_j(gpus.gpu(0))

    def wait(self) -> None:
        """Until the device has done all that it was given."""
        if not self.dry:
            torch.cuda.synchronize()

    def timed_s(self, work: Callable[[], object], repeats: int = 1) -> float:
        """Seconds from an idle device to an idle device; the median."""
        taken = []
        for _ in range(repeats):
            self.wait()
            start_s = time.perf_counter()
            work()
            self.wait()
            taken.append(time.perf_counter() - start_s)
        return median(taken)

    def captured(
        self, work: Callable[[], object], stream: torch.cuda.Stream | None = None
    ) -> Callable[[], object]:
        """A CUDA graph of it, from this stream where one is given; without CUDA, itself."""
        if self.dry:
            return work
        self.wait()
        with torch.cuda.stream(stream or torch.cuda.Stream()):
            work()
        self.wait()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            work()
        replay: Callable[[], object] = graph.replay
        return replay

    def replayed_s(self, work: Callable[[], object], repeats: int = 5) -> float:
        """Seconds of it on the device, the host's launch hidden behind a pause; the median."""
        if self.dry:
            return self.timed_s(work)
        taken = []
        work()
        for _ in range(repeats):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda._sleep(1_000_000)
            start.record()
            work()
            end.record()
            taken.append((start, end))
        self.wait()
        return float(median(start.elapsed_time(end) for start, end in taken)) / 1e3

    def green_stream(self, processors: int) -> torch.cuda.Stream:
        """A stream whose kernels run on so many processors, rounded up to what it can divide."""
        from cuda.bindings import driver

        def told(answer: tuple[Any, ...]) -> Any:
            if answer[0] != driver.CUresult.CUDA_SUCCESS:
                raise RuntimeError(f"the driver says {answer[0]}")
            return answer[1]

        device = told(driver.cuDeviceGet(0))
        kind = driver.CUdevResourceType.CU_DEV_RESOURCE_TYPE_SM
        all_of_it = told(driver.cuDeviceGetDevResource(device, kind))
        groups = told(driver.cuDevSmResourceSplitByCount(1, all_of_it, 0, processors))
        described = told(driver.cuDevResourceGenerateDesc(groups, 1))
        default = driver.CUgreenCtxCreate_flags.CU_GREEN_CTX_DEFAULT_STREAM
        context = told(driver.cuGreenCtxCreate(described, device, default))
        aside = driver.CUstream_flags.CU_STREAM_NON_BLOCKING
        self.keep(f"green_{processors}", int(groups[0].sm.smCount))
        made = told(driver.cuGreenCtxStreamCreate(context, aside, 0))
        return torch.cuda.ExternalStream(int(made))

    def note(self, key: str, value: object, unit: str = "") -> None:
        told = f"{value:.4g}" if isinstance(value, float) else str(value)
        self._rows.append((key, told, unit))
        self._figures[key] = round(value, 6) if isinstance(value, float) else value

    def keep(self, key: str, value: object) -> None:
        """For programs alone."""
        self._figures[key] = value

    def skip(self, key: str, why: str) -> None:
        self._rows.append((key, "-", why))
        self._figures[key] = {"skipped": why}

    def in_time(self, key: str, seconds: float = 30.0) -> bool:
        """Whether there are so many seconds for it. If not, that is noted."""
        if self.left_s < seconds:
            self.skip(key, f"{self.left_s:.0f} s are left")
            return False
        return True

    def wants(self, key: str) -> bool:
        return self._parts is None or key in self._parts

    def part(self, key: str, measure: Callable[["Sitting"], None]) -> None:
        """What breaks in one leaves the others to be measured."""
        try:
            measure(self)
        except Exception as error:
            traceback.print_exc()
            words = " ".join(str(error).split()) or "no further words"
            self.skip(key, f"broke: {type(error).__name__}: {words}")
            self.broken = True

    def end(self) -> None:
        """The table, and the JSON line."""
        name = "a CPU that stands in" if self.dry else torch.cuda.get_device_name(0)
        self._figures |= {"device": name, "torch": torch.__version__}
        print(f"{self._figures['script']} on {name}, torch {torch.__version__}")
        widths = [max(len(row[i]) for row in self._rows) for i in range(2)]
        for key, told, unit in self._rows:
            print(f"{key:{widths[0]}}  {told:>{widths[1]}}  {unit}".rstrip())
        print(json.dumps(self._figures))


def main(script: str, measure: Callable[[Sitting], None]) -> None:
    """`python -m scripts.gpu.SCRIPT [--dry]`, at the root of the clone. Code 1 if a part broke."""
    parser = argparse.ArgumentParser(prog=f"scripts.gpu.{script}")
    parser.add_argument("--dry", action="store_true", help="on a CPU, CUDA stood in for")
    parser.add_argument("--seconds", type=float, default=SECONDS_MAX, help="at most, about")
    parser.add_argument("--parts", default="", help="these alone, with commas between them")
    arguments = parser.parse_args()
    # Else the question alone would keep processes that are forked from here off the device.
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    if not arguments.dry and not torch.cuda.is_available():
        sys.exit("error: torch sees no GPU\nhint: --dry runs on a CPU")
    sitting = Sitting(script, dry=arguments.dry, seconds=arguments.seconds, parts=arguments.parts)
    measure(sitting)
    sitting.end()
    sys.exit(int(sitting.broken))
