"""The main loop of an engine process: takes the agent's calls one by one and answers them.

It is forked by `forkserver` with vLLM imported, serves one instance, and ends with the agent's end
of the socket. A failure in an iteration leaves vLLM in no known state, so it ends the process: the
agent then places the requests anew. Before: `remote`, in the agent. After: `instance`.
"""

import gc
import logging
import os
import time
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection
from typing import NoReturn, cast

import torch

from mesh.domain.errors import EngineError, MeshError, OutOfMemory
from mesh.domain.model import Footprint
from mesh.domain.steps import Decode, InstanceMemory, LoadOrder, Prefill, StepResult, repeated
from mesh.domain.values import replace
from mesh_nodes.engines.vllm.device import touch
from mesh_nodes.engines.vllm.instance import Instance
from mesh_nodes.engines.vllm.messages import (
    Answer,
    Call,
    Failure,
    Loaded,
    ProcessOptions,
    Progressed,
    Range,
    Verb,
)

_ENDING = (Verb.LOAD, Verb.SLEEP, Verb.WAKE)
"""What these refuse leaves nothing that could go on."""

SIGN_OF_LIFE_S = 0.5
"""Between two messages of a long turn: next to nothing of it."""

_LoadArguments = tuple[LoadOrder, Footprint, ProcessOptions, Range | None]

log = logging.getLogger(__name__)


def serve(connection: Connection, pool: int | None = None) -> NoReturn:
    """Until the agent says so or is gone. Never returns: what it was forked from must not go on.
    `pool`: the descriptor of the host's memory for weights.
    """
    server = _Server(connection, pool)
    try:
        while server.answer(connection.recv()):
            pass
    except (EOFError, OSError):
        pass
    finally:
        os._exit(0)


class _Server:
    def __init__(self, connection: Connection, pool: int | None) -> None:
        self._connection = connection
        self._pool = pool
        self._instance: Instance | None = None

    def answer(self, call: Call) -> bool:
        """Whether there is anything left to do."""
        if call.verb is Verb.END:
            return False
        try:
            value = self._perform(call)
            self._connection.send(Answer(value, self._books()))
        except BaseException as error:
            failure = _failure(call, error)
            self._connection.send(failure)
            return not failure.fatal
        return True

    def _perform(self, call: Call) -> object:
        if call.verb is Verb.LOAD:
            order, footprint, options, where = cast(_LoadArguments, call.arguments)
            return self._load(order, footprint, options, where)
        if call.verb is Verb.PREPARE:
            touch()
            return None
        instance = self._instance
        assert instance is not None, f"a {call.verb} before the load"
        performers: dict[Verb, Callable[..., object]] = {
            Verb.SUBMIT: instance.submit,
            Verb.ABORT: instance.abort,
            Verb.STEP: partial(self._turn, instance),
            Verb.MEASURE: instance.measure,
            Verb.COUNT: instance.count,
            Verb.RESIZE: instance.resize_kv,
            Verb.KEEP: instance.keep_beyond,
            Verb.TELL: instance.tell_prefixes,
            Verb.FILL: instance.begin_fill,
            Verb.SLEEP: instance.sleep,
            Verb.WAKE: instance.wake,
            Verb.SWAP: instance.begin_swap,
            Verb.MOVED: instance.has_moved,
        }
        return performers[call.verb](*call.arguments)

    def _turn(
        self, instance: Instance, prefill: Prefill, iterations: int, decode: Decode
    ) -> StepResult:
        """As many iterations. Between them it says now and then that it lives: the agent's bound on
        a call is for one of them.
        """
        said_s = time.monotonic()

        def step(prefill: Prefill, decode: Decode) -> StepResult:
            nonlocal said_s
            if time.monotonic() >= said_s + SIGN_OF_LIFE_S:
                said_s = time.monotonic()
                self._connection.send(Progressed("compute", 0.0))
            return instance.step(prefill, decode)

        result = repeated(step, prefill, iterations, decode)
        return replace(result, prefixes=instance.tell_prefixes())

    def _load(
        self, order: LoadOrder, footprint: Footprint, options: ProcessOptions, where: Range | None
    ) -> Loaded:
        self._connection.send(Progressed("load", 0.1))
        self._instance = Instance(order, footprint, options, where, self._pool)
        # Nothing of the model is garbage: no collection amid an iteration need look at it.
        gc.collect()
        gc.freeze()
        weights = self._instance.weights
        return Loaded(layout=weights.layout(), beside_bytes=weights.beside_bytes)

    def _books(self) -> InstanceMemory | None:
        return None if self._instance is None else self._instance.memory()


def _failure(call: Call, error: BaseException) -> Failure:
    """What was refused leaves the instance as it was; what broke does not."""
    if isinstance(error, MeshError):
        fatal = call.verb in _ENDING
        return Failure(type(error).__name__, error.message, error.hint, fatal)
    log.error("%s failed in an engine process", call.verb, exc_info=error)
    out_of_memory = isinstance(error, MemoryError | torch.OutOfMemoryError)
    kind = OutOfMemory if out_of_memory else EngineError
    words = " ".join(str(error).split()) or "no further words"
    return Failure(kind.__name__, f"vLLM failed: {type(error).__name__}: {words}", "", True)
