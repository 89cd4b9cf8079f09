"""A server that streams tokens at times that are known, in a process of its own.

It speaks as a controller with one deployment does, and computes nothing: token `n` of a call goes
out FIRST_S + n × the token time after the call came. Calls are told apart by the lengths of their
prompts. It tells when each call came and each token went, on the machine's monotonic clock.
"""

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future
from typing import Any

import grpc.aio
from tokenizers import Tokenizer, models, pre_tokenizers

from mesh.domain.deployment import DeploymentSpec
from mesh.domain.ids import DeploymentName, ModelId
from mesh.domain.lifecycle import DeploymentState
from mesh.domain.model import ModelFormat, ModelInfo
from mesh.domain.slo import Slo
from mesh.domain.text import TextAssets
from mesh.domain.views import CellStatus, DeploymentSnapshot
from mesh.v1 import control_pb2, model_pb2
from mesh.v1 import inference_pb2 as pb
from mesh.v1.control_pb2_grpc import ControlServicer, add_ControlServicer_to_server
from mesh.wire.codec import to_wire

NAME = DeploymentName("scripted")
FIRST_S = 0.2
CONTEXT_TOKENS = 8192
SERVES_S_MAX = 60.0
SLO = Slo(ttft_s=1.0, tpot_s=0.2)


class Log:
    """By the length of a call's prompt."""

    def __init__(self) -> None:
        self.came_s: dict[int, float] = {}
        self.went_s: dict[int, list[float]] = {}


class Scripted:
    """The Inference service. Messages are made once: the server is to cost little."""

    def __init__(self, log: Log, token_s: float) -> None:
        self._log = log
        self._token_s = token_s

    async def invoke(self, raw: bytes, context: Any) -> AsyncIterator[bytes]:
        came_s = time.monotonic()
        request = pb.InvokeRequest.FromString(raw)
        prompt_tokens = len(request.tokens.ids)
        went_s: list[float] = []
        self._log.came_s[prompt_tokens], self._log.went_s[prompt_tokens] = came_s, went_s
        accepted = pb.Accepted(request_id=f"r{prompt_tokens}", prompt_tokens=prompt_tokens)
        yield pb.InvokeResponse(accepted=accepted).SerializeToString()
        for n in range(request.max_tokens):
            tokens = pb.Tokens(first_index=n, token_ids=[7], text="a")
            message = pb.InvokeResponse(tokens=tokens).SerializeToString()
            await asyncio.sleep(came_s + FIRST_S + n * self._token_s - time.monotonic())
            went_s.append(time.monotonic())
            yield message
        finished = pb.Finished(
            reason="length", prompt_tokens=prompt_tokens, output_tokens=request.max_tokens
        )
        yield pb.InvokeResponse(finished=finished).SerializeToString()


class Control(ControlServicer):
    """What a client asks for before and after a replay."""

    def __init__(self, log: Log) -> None:
        self._log = log
        self._begun_s = time.monotonic()

    async def ListDeployments(  # noqa: N802 - the service's name for it
        self, request: control_pb2.ListDeploymentsRequest, context: Any
    ) -> control_pb2.ListDeploymentsResponse:
        snapshot = DeploymentSnapshot(
            spec=DeploymentSpec(name=NAME, source="file:///scripted", slo=SLO),
            model=_model(),
            state=DeploymentState.READY,
            context_tokens_max=CONTEXT_TOKENS,
            queued=0,
            running=0,
            served=len(self._log.came_s),
            refused=0,
            instances=(),
        )
        return control_pb2.ListDeploymentsResponse(
            deployments=[to_wire(snapshot, control_pb2.Deployment)]
        )

    async def GetTokenizer(  # noqa: N802
        self, request: control_pb2.GetTokenizerRequest, context: Any
    ) -> model_pb2.TextAssets:
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        vocabulary = {char: n for n, char in enumerate(alphabet)}
        tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        return to_wire(TextAssets(tokenizer_json=tokenizer.to_str().encode()), model_pb2.TextAssets)

    async def GetStatus(  # noqa: N802
        self, request: control_pb2.GetStatusRequest, context: Any
    ) -> control_pb2.Status:
        return to_wire(
            CellStatus(
                version="scripted",
                uptime_s=time.monotonic() - self._begun_s,
                nodes_ready=0,
                nodes=0,
                deployments=1,
                instances=0,
                queued=0,
                running=0,
                served=len(self._log.came_s),
                refused=(),
                state_path="",
            ),
            control_pb2.Status,
        )


def _model() -> ModelInfo:
    return ModelInfo(
        model_id=ModelId("scripted"),
        source="file:///scripted",
        format=ModelFormat.SAFETENSORS,
        architecture="llama",
        context_tokens_max=CONTEXT_TOKENS,
        vocabulary_tokens=256,
        layers=1,
        hidden_size=1,
        attention_heads=1,
        kv_heads=1,
        head_size=1,
        parameters=1,
        disk_bytes=1,
        stop_token_ids=(),
    )


async def serve(log: Log, token_s: float, told: "Future[str]") -> None:
    """For as long as its process runs; `told` gets its address."""
    server = grpc.aio.server()
    handler = grpc.unary_stream_rpc_method_handler(Scripted(log, token_s).invoke)
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler("mesh.v1.Inference", {"Invoke": handler}),)
    )
    control = Control(log)  # type: ignore[abstract] # nobody asks for the rest
    add_ControlServicer_to_server(control, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    told.set_result(f"127.0.0.1:{port}")
    await server.wait_for_termination()


def scripted(token_s: float) -> Callable[[object], tuple[str, Log]]:
    """As a `Peer` has it: it serves from now on; asked, it tells its address, and its log."""
    log, told = Log(), Future[str]()
    serving = serve(log, token_s, told)
    threading.Thread(target=asyncio.run, args=(serving,), daemon=True).start()
    address = told.result(SERVES_S_MAX)
    return lambda _: (address, log)
