"""A live controller in the test's own loop, and a node that speaks the wire without an engine."""

import asyncio
import hashlib
import math
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, closing
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import grpc
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from mesh.controller.server import ControllerConfig, serve
from mesh.domain.deployment import DeploymentSpec, Scaling
from mesh.domain.ids import DeploymentName, InstanceId, ModelId, NodeId
from mesh.domain.invocation import Accepted, Invocation, InvocationEvent, TokenPrompt
from mesh.domain.limits import CellLimits
from mesh.domain.messages import (
    AbortRequest,
    ImportDone,
    ImportModel,
    ImportProgress,
    InstanceGone,
    InstanceLoaded,
    KvResized,
    LoadInstance,
    LoadProgress,
    NodeCommand,
    NodeHello,
    NodeReport,
    ProfileDone,
    ProfileInstance,
    ProfileProgress,
    ResizeKv,
    SubmitRequest,
    TokensReport,
    UnloadInstance,
)
from mesh.domain.model import Footprint
from mesh.domain.reasons import DeviceKind, FinishReason
from mesh.domain.request import RequestOrder, RequestTokens, TokenLogprobs
from mesh.domain.slo import Slo, best_effort
from mesh.domain.text import TextAssets
from mesh.domain.views import CellStatus
from mesh.runtime.link_life import NO_EPOCH, CellEpoch
from mesh.v1.node_link_pb2_grpc import NodeLinkStub
from mesh.wire.channel import dial
from mesh.wire.client import MeshClient
from mesh.wire.codec import command_from_wire, report_to_wire
from mesh.wire.credentials import credentials
from tests.support import profiles
from tests.support.profiles import FINGERPRINT, PROFILE

T = TypeVar("T")
MIB = 1 << 20
WAIT_S_MAX = 60.0
"""For anything that should come at once, on a machine that may be busy with other things."""
FLOOD_TOKENS_MAX = 400
QUICK = CellLimits(queue_wait_s_max=0.5, node_lease_s=0.6, lease_check_s=0.1)
"""Limits whose passing a test can wait for."""
PATIENT = CellLimits(node_lease_s=600.0)
"""A fake node has no heartbeat: it would be lost in a test that takes longer than the lease."""
TOP = ((97, -0.5), (64, -math.inf))
"""The likeliest tokens that a fake node tells of: a part of a character, and an "a"."""
CHAT_TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"


def assets() -> TextAssets:
    """One token a byte, so that a prompt has as many tokens as ASCII characters."""
    alphabet = {char: n for n, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=alphabet, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    raw = tokenizer.to_str().encode()
    return TextAssets(tokenizer_json=raw, chat_template=CHAT_TEMPLATE)


ASSETS = assets()
FOOTPRINT = Footprint(weights_bytes=10 * MIB, kv_block_bytes=MIB // 32, block_tokens=32)
MODEL = replace(profiles.MODEL, vocabulary_tokens=256)
SPEC = DeploymentSpec(
    name=DeploymentName("chat"), source=MODEL.source, scaling=Scaling(keep_alive_s=60.0)
)
CLASSES = replace(
    SPEC,
    slo=Slo(name="chat", ttft_s=30.0, tpot_s=3.0),
    classes=(Slo(name="chat", ttft_s=30.0, tpot_s=3.0), best_effort("batch", 60.0)),
    class_default="chat",
)
"""The same with SLO classes."""
EMBEDS = DeploymentName("embeds")
VECTOR = (0.6, 0.8)
"""The embedding that a fake node has of every text for the deployment of this name."""
HELLO = NodeHello(
    node_id=NodeId("n1"),
    run_id="run-1",
    device=DeviceKind.CPU,
    hardware="none",
    cores=2,
    engine="fake",
    memory_bytes=256 * MIB,
    fingerprint=FINGERPRINT,
)


def asking(*token_ids: int, max_tokens: int = 4) -> Invocation:
    return Invocation(
        deployment=SPEC.name,
        prompt=TokenPrompt(token_ids=token_ids or (1, 2, 3)),
        max_tokens=max_tokens,
    )


class FakeNode:
    """Imports, loads, resizes and measures at once, and answers a request with 'a's: as many as it
    asks for, or none while `held`; or `says` something, a token a character. What it is told is in
    `commands`.
    """

    def __init__(
        self, address: str, hello: NodeHello = HELLO, metadata: tuple[tuple[str, str], ...] = ()
    ) -> None:
        self.hello = hello
        self.epoch = NO_EPOCH
        """That of the controller that leads, as its lease says."""
        self.adopted: Any = ()
        """The requests of its hello that the controller has taken over."""
        self.commands: list[NodeCommand] = []
        self.held = False
        self.says = ""
        self.message_tokens = 1
        """So many tokens of an answer come in a message, but for the last of them."""
        self.text = ASSETS
        self.loading = True
        self.importing = True
        self.measuring = True
        self._channel = dial(address)
        connect: Any = NodeLinkStub(self._channel).Connect
        self.call: Any = connect(metadata=(*(credentials().metadata or ()), *metadata))
        self._told = asyncio.Condition()
        self._sending = asyncio.Lock()
        self.listening: asyncio.Task[None] | None = None

    async def join(self) -> "FakeNode":
        """Say hello and wait for the welcome. Raises what the controller answers instead."""
        await self.send(self.hello)
        first = await self.call.read()
        assert first.WhichOneof("command") == "welcome"
        self.epoch = CellEpoch(first.welcome.epoch, first.welcome.cell)
        self.adopted = first.welcome.adopted
        self.listening = asyncio.create_task(self._listen())
        return self

    async def leave(self) -> None:
        """Go without a word, as a machine that is switched off."""
        if self.listening is not None:
            self.listening.cancel()
            await asyncio.gather(self.listening, return_exceptions=True)
        self.call.cancel()
        await self._channel.close(None)

    async def send(self, report: NodeReport) -> None:
        async with self._sending:  # a call takes one message at a time
            await self.call.write(report_to_wire(report))

    async def told(self, kind: type[T]) -> T:
        """The first command of a kind that came, or comes."""
        async with asyncio.timeout(WAIT_S_MAX), self._told:
            while True:
                for command in self.commands:
                    if isinstance(command, kind):
                        return command
                await self._told.wait()

    async def answer(
        self,
        order: RequestOrder,
        first: int,
        count: int,
        *,
        last: bool,
        instance_id: InstanceId | None = None,
    ) -> None:
        """Tokens for a request; from the instance that it was told to load unless another one is
        given.
        """
        for index in range(first, first + count, self.message_tokens):
            tokens = min(self.message_tokens, first + count - index)
            ends = last and index + tokens == first + count
            end = FinishReason.STOP if self.says else FinishReason.LENGTH
            asked = order.request.sampling.logprobs
            told = TokenLogprobs(logprob=-0.5, top=TOP[: asked or 0])
            top, before = order.request.sampling.prompt_logprobs, len(order.request.prompt_tokens)
            prompt = TokenLogprobs(logprob=-0.25, top=TOP[: top or 0])
            output = RequestTokens(
                request_id=order.request.request_id,
                attempt=order.attempt,
                first_index=index,
                token_ids=(97,) * tokens,
                text=self.says[index : index + tokens] if self.says else "a" * tokens,
                logprobs=() if asked is None else (told,) * tokens,
                finish=end if ends else None,
                prompt_logprobs=() if top is None or index else (prompt,) * (before - 1),
                embedding=VECTOR if order.request.deployment == EMBEDS else (),
            )
            await self.send(
                TokensReport(instance_id=instance_id or self.instance_id, outputs=(output,))
            )

    @property
    def model_id(self) -> ModelId:
        """Another one for another text, as a model store has it."""
        if self.text == ASSETS:
            return MODEL.model_id
        return ModelId(f"sha256-{hashlib.sha256(repr(self.text).encode()).hexdigest()[:16]}")

    @property
    def instance_id(self) -> Any:
        return next(c.instance_id for c in self.commands if isinstance(c, LoadInstance))

    async def _listen(self) -> None:
        while (message := await self.call.read()) is not grpc.aio.EOF:  # type: ignore[attr-defined]
            command = command_from_wire(message)
            async with self._told:
                self.commands.append(command)
                self._told.notify_all()
            await self._obey(command)

    async def _obey(self, command: NodeCommand) -> None:
        match command:
            case ImportModel() if self.importing:
                await self.send(
                    ImportProgress(operation_id=command.operation_id, phase="read", share=0.5)
                )
                model = replace(MODEL, model_id=self.model_id, source=command.source)
                await self.send(
                    ImportDone(
                        operation_id=command.operation_id,
                        model=model,
                        footprint=FOOTPRINT,
                        text=self.text,
                    )
                )
            case LoadInstance():
                instance_id = command.instance_id
                await self.send(LoadProgress(instance_id=instance_id, phase="weights", share=0.5))
                if self.loading:
                    await self.loaded(command)
            case ProfileInstance(operation_id=operation_id) if self.measuring:
                await self.send(
                    ProfileProgress(operation_id=operation_id, phase="measure", share=0.5)
                )
                profile = replace(PROFILE, model_id=self.model_id)
                await self.send(ProfileDone(operation_id=operation_id, profile=profile))
            case ResizeKv(instance_id=instance_id, kv_blocks=kv_blocks):
                await self.send(
                    KvResized(instance_id=instance_id, kv_blocks=kv_blocks, elapsed_s=0.01)
                )
            case UnloadInstance():
                await self.send(InstanceGone(instance_id=command.instance_id))
            case SubmitRequest(order=order) if not self.held:
                first = len(order.output_tokens)
                most = order.request.sampling.max_tokens
                count = min(most, len(self.says) or most) - first
                await self.answer(order, first, count, last=True)

    async def flood(self, order: RequestOrder, text: str) -> None:
        """Tokens of this text, until the request is aborted for them."""
        for index in range(FLOOD_TOKENS_MAX):
            await self.send(output_of(order, index, text))
            if any(isinstance(command, AbortRequest) for command in self.commands):
                break
        await self.told(AbortRequest)

    async def loaded(self, command: LoadInstance) -> None:
        await self.send(
            InstanceLoaded(
                instance_id=command.instance_id,
                footprint=FOOTPRINT,
                kv_blocks=command.kv_blocks,
                elapsed_s=0.01,
            )
        )


def output_of(order: RequestOrder, index: int, text: str) -> TokensReport:
    return TokensReport(
        instance_id=InstanceId("i"),
        outputs=(
            RequestTokens(
                request_id=order.request.request_id,
                attempt=order.attempt,
                first_index=index,
                token_ids=(97,),
                text=text,
            ),
        ),
    )


class LiveCell:
    """A controller that serves, and a client of it."""

    def __init__(
        self, address: str, stop: asyncio.Event, serving: "asyncio.Task[bool]", http: str | None
    ) -> None:
        self.address = address
        self.http = http
        self.stop = stop
        self.serving = serving
        self.client = MeshClient(address)
        self.nodes: list[FakeNode] = []

    async def node(self, **changes: Any) -> FakeNode:
        node = FakeNode(self.address, replace(HELLO, **changes))
        self.nodes.append(node)
        return await node.join()

    async def deployed(
        self, spec: DeploymentSpec = SPEC, *, held: bool = False, **changes: Any
    ) -> FakeNode:
        """A node, and a deployment on it. `held`: the node answers when it is told to."""
        node = await self.node(**changes)
        node.held = held
        assert (await asyncio.to_thread(self.client.deploy, spec)).text == "deployed"
        return node

    async def ask(self, call: Callable[..., T], *arguments: Any) -> T:
        """A blocking call of the client, beside this loop, which has to answer it."""
        return await asyncio.to_thread(call, *arguments)

    async def answer(self, asked: Invocation | None = None) -> list[InvocationEvent]:
        """All that a client is told of an invocation."""
        return await self.ask(lambda: list(self.client.invoke(asked or asking())))

    async def accepted(self, asked: Invocation) -> Accepted:
        """Ask, wait until it has a place, and go away."""

        def first() -> Accepted:
            with closing(self.client.invoke(asked)) as events:
                return next(event for event in events if isinstance(event, Accepted))

        return await self.ask(first)

    async def status(self) -> CellStatus:
        return await self.ask(self.client.status)

    async def until(self, what: Callable[[], bool]) -> None:
        """Poll, beside this loop, until it holds."""

        def wait() -> None:
            until_s, pause_s = time.monotonic() + WAIT_S_MAX, 0.01
            while not what():
                assert time.monotonic() < until_s, "waited in vain"
                time.sleep(pause_s)
                pause_s = min(1.3 * pause_s, 0.1)

        await self.ask(wait)

    async def emptied(self) -> None:
        """Take all deployments away, and then the nodes."""
        for deployment in await self.ask(self.client.list):
            await self.ask(self.client.delete, deployment.spec.name)
        while self.nodes:
            await self.nodes.pop().leave()
        await self.until(lambda: not self.client.nodes())

    async def idle(self) -> None:
        await self.until(lambda: self.client.status().running == 0)


@asynccontextmanager
async def live_cell(home: Path, **config: Any) -> AsyncIterator[LiveCell]:
    """A controller from `ready` to its end; all nodes leave first."""
    address: asyncio.Future[tuple[str, str | None]] = asyncio.get_running_loop().create_future()
    stop = asyncio.Event()
    config = {"listen": "127.0.0.1:0", "limits": PATIENT, **config}
    wanted = ControllerConfig(home=home, **config)
    serving = asyncio.create_task(serve(wanted, lambda *at: address.set_result(at), stop))
    first: list[asyncio.Future[Any]] = [serving, address]
    await asyncio.wait(first, return_when=asyncio.FIRST_COMPLETED)
    if serving.done():
        await serving
    at, http = await address
    cell = LiveCell(at, stop, serving, http)
    try:
        yield cell
    finally:
        for node in cell.nodes:
            await node.leave()
        stop.set()
        await serving
        cell.client.close()
