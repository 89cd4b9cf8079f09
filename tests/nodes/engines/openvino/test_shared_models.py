"""Instances of one model have its weights once, and are let in by what is their own."""

import threading
import time
from typing import Any

import pytest

from mesh.domain.errors import OutOfMemory
from mesh.domain.ids import InstanceId
from mesh_nodes.engines.openvino.compilation import CompiledGraph, Compiler
from mesh_nodes.engines.openvino.engine import OpenVinoEngine
from tests.nodes.engines.openvino.tiny import TinyModel
from tests.nodes.engines.serving import load

A, B = InstanceId("a"), InstanceId("b")


def test_two_loads_of_a_model_at_once_bring_it_up_once(
    engine: OpenVinoEngine, tiny: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second has looked for weights before the first had them."""
    bring_up, brought_up, begun = Compiler._bring_up, list[CompiledGraph](), threading.Event()
    begins: dict[str, Any] = {"progress": lambda *_: begun.set(), "instance_id": B}
    second = threading.Thread(target=load, args=(engine, tiny.info, tiny.path), kwargs=begins)

    def slowly(self: Compiler, *arguments: Any) -> CompiledGraph:
        if not brought_up:
            second.start()
            assert begun.wait(10.0)
            time.sleep(0.1)
        brought_up.append(bring_up(self, *arguments))
        return brought_up[-1]

    monkeypatch.setattr(Compiler, "_bring_up", slowly)
    load(engine, tiny.info, tiny.path, instance_id=A)
    second.join()
    assert len(brought_up) == 1
    a, b = engine.memory()
    stated = engine.footprint(tiny.info).at_context(256)
    assert a.weights_bytes - b.weights_bytes == stated.shared_bytes > 0


def test_the_first_that_stays_has_the_weights(engine: OpenVinoEngine, tiny: TinyModel) -> None:
    for name in (A, B):
        load(engine, tiny.info, tiny.path, instance_id=name)
    engine.unload(A)
    (left,) = engine.memory()
    assert left.weights_bytes == engine.footprint(tiny.info).at_context(256).weights_bytes


def test_a_load_waits_for_the_pages_of_what_has_gone_for_it() -> None:
    free_bytes = [4, 9, 10]
    engine = OpenVinoEngine(threads=1, available_bytes=lambda: free_bytes.pop(0))
    engine._await_memory(A, 10, gone_bytes=6)
    free_bytes = [4, 10]
    with pytest.raises(OutOfMemory):
        engine._await_memory(A, 10, gone_bytes=0)
    engine.close()


def test_a_load_that_shares_needs_available_what_is_its_own(tiny: TinyModel) -> None:
    available_bytes = 1 << 40
    engine = OpenVinoEngine(threads=1, available_bytes=lambda: available_bytes)
    engine.prepare(tiny.info, tiny.path, lambda *_: None)
    taken = engine.footprint(tiny.info)
    load(engine, tiny.info, tiny.path, instance_id=A, kv_blocks=8)
    available_bytes = taken.instance_bytes(8) - taken.shared_bytes
    load(engine, tiny.info, tiny.path, instance_id=B, kv_blocks=8)
    with pytest.raises(OutOfMemory):
        load(engine, tiny.info, tiny.path, kv_blocks=9)
    engine.close()
