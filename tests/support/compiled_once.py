"""A model of many tests is compiled once in this process: that takes longer than most of them."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from mesh_nodes.engines.openvino.compilation import CompiledGraph, Compiler

_GRAPHS: dict[object, CompiledGraph] = {}


@contextmanager
def compiled_once(path: Path) -> Iterator[None]:
    """Loads of the model in this folder, by whichever engine, find what an earlier one compiled."""
    bring_up = Compiler._bring_up

    def known(compiler: Compiler, model: Any, model_path: Path, *how: Any) -> CompiledGraph:
        if model_path != path:
            return bring_up(compiler, model, model_path, *how)
        key = (compiler._place(model, model_path, how[0]), compiler._threads, compiler.precisions)
        if key not in _GRAPHS:
            _GRAPHS[key] = bring_up(compiler, model, model_path, *how)
        return _GRAPHS[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Compiler, "_bring_up", known)
        yield
