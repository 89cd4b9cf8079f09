"""Imports a Hugging Face folder of a foreign architecture by exporting it to OpenVINO IR.

The export is optimum-intel's, from the `convert` extra, in a child process with a bounded time;
without the extra such a model is refused with the name of the extra. Weights become int8:
of f16 the CPU plugin holds 9 bytes a parameter. ir_import checks and takes the result.
"""

import importlib.metadata
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mesh.domain.errors import ModelError, TornModel, UnsupportedModel
from mesh.domain.model import ModelFormat
from mesh.domain.values import dataclass
from mesh.runtime.engine import Progress
from mesh_loader.architectures import NATIVE_ARCHITECTURES
from mesh_loader.bounded_child import run_bounded
from mesh_loader.ir_import import plan_ir

EXPORT_TIMEOUT_S = 3600.0
EXPORTER_MODULE = "optimum.commands.optimum_cli"
EXTRA_HINT = "pip install 'mesh-serve[convert]'"


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvertPlan:
    """A Hugging Face folder that optimum-intel may be able to export."""

    path: Path
    architecture: str
    form: ModelFormat = ModelFormat.OPENVINO_IR

    def write(self, folder: Path, progress: Progress) -> int:
        """Exports the model and writes the result; returns the number of its parameters.

        Raises UnsupportedModel where the exporter refuses it, ModelError where its time is up.
        """
        exported = folder.with_name("export")
        argv = [
            sys.executable, "-m", EXPORTER_MODULE, "export", "openvino",
            "--model", str(self.path), "--task", "text-generation-with-past",
            "--weight-format", "int8", str(exported),
        ]  # fmt: skip
        phase = f"export {self.architecture} to OpenVINO"
        finished = run_bounded(
            argv,
            timeout_s=EXPORT_TIMEOUT_S,
            environment={"HF_HUB_OFFLINE": "1", "TMPDIR": str(folder.parent)},
            on_wait=lambda: progress(phase, 0.0),
        )
        if finished.exit_code is None:
            raise ModelError(
                f"the export of {self.path.name} was stopped after {EXPORT_TIMEOUT_S:.0f} s"
            )
        if finished.exit_code != 0:
            lines = [line.strip() for line in finished.output.splitlines() if line.strip()]
            raise UnsupportedModel(
                f"architecture {self.architecture} could not be exported to OpenVINO: "
                f"{lines[-1] if lines else f'exit code {finished.exit_code}'}",
                hint=f"mesh runs {', '.join(NATIVE_ARCHITECTURES)} without an export",
            )
        progress(phase, 1.0)
        parameters = plan_ir(exported, own_files=True).write(folder, progress)
        shutil.rmtree(exported)
        return parameters


def plan_convert(path: Path, config: Mapping[str, Any]) -> ConvertPlan:
    """The plan for a folder that mesh does not run itself.

    Raises UnsupportedModel where the `convert` extra is not installed, TornModel where it does not
    say what it is.
    """
    if config.get("model_type") is None:
        raise TornModel(f"{path.name}/config.json names no model_type", hint="fetch the file again")
    architecture = str(config["model_type"])
    if not _exporter_installed():
        pickled = architecture in NATIVE_ARCHITECTURES
        what = (
            f"{path.name} has no safetensors weights"
            if pickled
            else f"{path.name}: architecture {architecture} is not one that mesh runs itself "
            f"({', '.join(NATIVE_ARCHITECTURES)})"
        )
        raise UnsupportedModel(f"{what}; it needs an export to OpenVINO", hint=EXTRA_HINT)
    return ConvertPlan(path=path, architecture=architecture)


def _exporter_installed() -> bool:
    try:
        importlib.metadata.distribution("optimum-intel")
    except importlib.metadata.PackageNotFoundError:
        return False
    return True
