"""OpenAI's `/v1/embeddings`, `/v1/rerank` as Jina and Cohere have it, Ollama's `/api/embed`.

Each text of a call is a request of its own, scheduled as any other, of which so many are asked at a
time. Before: the routes. After: the gateway.
"""

import asyncio
import math
import sys
from array import array
from base64 import b64encode
from collections.abc import Sequence
from dataclasses import dataclass, replace
from operator import mul
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Discriminator, Field, Tag

from mesh.domain.deployment import Deployment
from mesh.domain.errors import EngineError, InvalidInput, MeshError
from mesh.domain.ids import DeploymentName
from mesh.domain.invocation import (
    Accepted,
    Finished,
    Invocation,
    PairPrompt,
    Prompt,
    TextPrompt,
    TokenPrompt,
    Tokens,
    check_complete,
)
from mesh.domain.model import Task
from mesh.http.asking import with_slo
from mesh.http.bodies import T, prompt_shape
from mesh.http.exchange import Exchange
from mesh.http.tokens import Answered
from mesh.http.tools import Strict

INPUTS_MAX = 2048
"""The most texts of one call, as with OpenAI."""
DOCUMENTS_MAX = 1000
"""The most documents of one call, as Cohere advises."""
AT_ONCE_MAX = 32
"""So many texts of one call wait for their vectors at a time: the clock of a later one begins when
an earlier one has ended.
"""
_NS = 1_000_000_000

Input = Annotated[
    Annotated[str, Tag("text")]
    | Annotated[list[str], Tag("texts")]
    | Annotated[list[int], Tag("tokens")]
    | Annotated[list[list[int]], Tag("token_lists")],
    Discriminator(prompt_shape),
]


class EmbeddingsBody(Strict):
    """Embeds texts, by a deployment whose task that is."""

    model: str = Field(min_length=1, description="A deployment's name.")
    input: Input
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = Field(
        default=None, ge=1, description="Fewer than it has, of models that are made for that."
    )
    user: Any = Field(default=None, description="Ignored.")


class Embedding(BaseModel):
    object: Literal["embedding"] = "embedding"
    index: int
    embedding: list[float] | str
    """A list, or the bytes of its f32 numbers in base64, the least significant byte first."""


class EmbeddingUsage(BaseModel):
    prompt_tokens: int
    total_tokens: int


class EmbeddingList(BaseModel):
    object: Literal["list"] = "list"
    data: list[Embedding]
    model: str
    usage: EmbeddingUsage


class Document(Strict):
    text: str


class RerankBody(Strict):
    """Scores documents by a query, by a deployment whose task that is; by one that embeds, their
    score is the cosine of its and the query's embedding.
    """

    model: str = Field(min_length=1, description="A deployment's name.")
    query: str = Field(min_length=1)
    documents: list[
        Annotated[
            Annotated[str, Tag("text")] | Annotated[Document, Tag("document")],
            Discriminator(lambda value: "text" if isinstance(value, str) else "document"),
        ]
    ] = Field(min_length=1, max_length=DOCUMENTS_MAX)
    top_n: int | None = Field(default=None, ge=1, description="Only so many are told.")
    return_documents: bool | None = Field(default=None, description="With texts, unless false.")


class Ranked(BaseModel):
    index: int
    relevance_score: float
    document: dict[str, str] | None = None


class RerankUsage(BaseModel):
    total_tokens: int


class Ranking(BaseModel):
    id: str
    model: str
    results: list[Ranked]
    """The best first."""
    usage: RerankUsage


class OllamaEmbedBody(Strict):
    """Embeds texts, by Ollama's protocol. A text that is too long is refused, not cut."""

    model: str = Field(min_length=1, description="A deployment's name.")
    input: str | list[str]
    dimensions: int | None = Field(default=None, ge=1)
    truncate: bool | None = None
    options: Any = Field(default=None, description="Ignored, as is the next one.")
    keep_alive: Any = None


class OllamaEmbeddings(BaseModel):
    model: str
    embeddings: list[list[float]]
    total_duration: int
    load_duration: int
    prompt_eval_count: int


@dataclass(frozen=True, slots=True)
class _Vector:
    """What came of one text."""

    numbers: tuple[float, ...]
    end: Finished


class Vectors(Answered[T]):
    """What endpoints share whose answers are made of vectors."""

    async def _embedded(
        self, exchange: Exchange, model: str, prompts: Sequence[Prompt], dimensions: int | None
    ) -> list[_Vector]:
        """Raises InvalidInput, and what the gateway does."""
        if not 1 <= len(prompts) <= INPUTS_MAX:
            raise InvalidInput(
                f"input holds {len(prompts)} texts; it must hold 1 to {INPUTS_MAX}", field="input"
            )
        deployment = self._deployment(exchange, model)
        _check_dimensions(deployment, dimensions)
        found = await self._asked(exchange, deployment, prompts, Task.EMBED)
        return [replace(one, numbers=_cut(one.numbers, dimensions)) for one in found]

    def _deployment(self, exchange: Exchange, model: str) -> Deployment:
        deployment = self._gateway.deployment(DeploymentName(model))
        exchange.context_tokens = deployment.context_tokens_max
        return deployment

    async def _asked(
        self, exchange: Exchange, deployment: Deployment, prompts: Sequence[Prompt], task: Task
    ) -> list[_Vector]:
        """One of each prompt, in their order. The first that fails ends all."""
        asked = with_slo(
            tuple(
                Invocation(deployment=deployment.spec.name, prompt=prompt, task=task)
                for prompt in prompts
            ),
            exchange.header,
        )
        found: dict[int, _Vector] = {}
        waiting = iter(enumerate(asked))

        async def work() -> None:
            for number, one in waiting:
                found[number] = await self._vector(exchange, one)

        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(min(AT_ONCE_MAX, len(asked))):
                    group.create_task(work())
        except* MeshError as errors:
            raise _first(errors) from None
        return [found[number] for number in range(len(asked))]

    async def _vector(self, exchange: Exchange, asked: Invocation) -> _Vector:
        numbers: tuple[float, ...] = ()
        async with self._gateway.call(asked, exchange.headers) as call:
            exchange.named(call.request_id)
            async for event in call:
                match event:
                    case Accepted():
                        exchange.accepted(event)
                    case Tokens():
                        numbers = event.embedding
                    case Finished():
                        check_complete(event)
                        if numbers:
                            return _Vector(numbers, event)
        raise EngineError(f"no vector came for {call.request_id}", hint="update its node")


class Embeddings(Vectors[EmbeddingsBody]):
    kind = EmbeddingsBody

    async def answered(self, body: EmbeddingsBody, exchange: Exchange) -> EmbeddingList:
        prompts = _prompts(body.input)
        found = await self._embedded(exchange, body.model, prompts, body.dimensions)
        used = sum(one.end.prompt_tokens for one in found)
        told = _base64 if body.encoding_format == "base64" else list
        return EmbeddingList(
            data=[Embedding(index=n, embedding=told(one.numbers)) for n, one in enumerate(found)],
            model=body.model,
            usage=EmbeddingUsage(prompt_tokens=used, total_tokens=used),
        )


class Rerank(Vectors[RerankBody]):
    kind = RerankBody

    async def answered(self, body: RerankBody, exchange: Exchange) -> Ranking:
        texts = [one if isinstance(one, str) else one.text for one in body.documents]
        deployment = self._deployment(exchange, body.model)
        prompts: list[Prompt]
        if deployment.spec.task is Task.EMBED:
            prompts = [TextPrompt(text=text) for text in (body.query, *texts)]
            found = await self._asked(exchange, deployment, prompts, Task.EMBED)
            query = _normalised(found[0].numbers)
            vectors = (_normalised(one.numbers) for one in found[1:])
            scores = [_product(query, vector) for vector in vectors]
        else:
            prompts = [PairPrompt(query=body.query, document=text) for text in texts]
            found = await self._asked(exchange, deployment, prompts, Task.RERANK)
            scores = [one.numbers[0] for one in found]
        best = sorted(range(len(texts)), key=lambda n: (-scores[n], n))
        tells = body.return_documents is not False
        return Ranking(
            id=exchange.request_id,
            model=body.model,
            results=[
                Ranked(
                    index=n,
                    relevance_score=scores[n],
                    document={"text": texts[n]} if tells else None,
                )
                for n in best[: body.top_n]
            ],
            usage=RerankUsage(total_tokens=sum(one.end.prompt_tokens for one in found)),
        )


class OllamaEmbed(Vectors[OllamaEmbedBody]):
    kind = OllamaEmbedBody

    async def answered(self, body: OllamaEmbedBody, exchange: Exchange) -> OllamaEmbeddings:
        texts = [body.input] if isinstance(body.input, str) else body.input
        prompts = [TextPrompt(text=text) for text in texts]
        model = body.model.removesuffix(":latest")
        found = await self._embedded(exchange, model, prompts, body.dimensions)
        return OllamaEmbeddings(
            model=body.model,
            embeddings=[list(one.numbers) for one in found],
            total_duration=int(max(one.end.ttft_s for one in found) * _NS),
            load_duration=int(max(one.end.grace_s for one in found) * _NS),
            prompt_eval_count=sum(one.end.prompt_tokens for one in found),
        )


def _first(errors: BaseExceptionGroup[MeshError]) -> BaseException:
    """One of those that happened, of however many groups within groups."""
    one: BaseException = errors
    while isinstance(one, BaseExceptionGroup):
        one = one.exceptions[0]
    return one


def _prompts(given: str | list[str] | list[int] | list[list[int]]) -> list[Prompt]:
    several: list[Any] = [given] if isinstance(given, str) else given
    if several and isinstance(several[0], int):
        several = [several]
    return [
        TextPrompt(text=one) if isinstance(one, str) else TokenPrompt(token_ids=tuple(one))
        for one in several
    ]


def _check_dimensions(deployment: Deployment, dimensions: int | None) -> None:
    model = deployment.model
    if dimensions is None or dimensions == model.hidden_size:
        return
    if dimensions > model.hidden_size or not model.matryoshka:
        most = f"1 to {model.hidden_size}" if model.matryoshka else f"{model.hidden_size}, or none"
        raise InvalidInput(
            f"dimensions is {dimensions}; for {deployment.spec.name!r} it must be {most}",
            hint="" if model.matryoshka else "its config.json states no matryoshka_dimensions",
            field="dimensions",
        )


def _cut(numbers: tuple[float, ...], dimensions: int | None) -> tuple[float, ...]:
    if dimensions is None or dimensions == len(numbers):
        return numbers
    return _normalised(numbers[:dimensions])


def _normalised(numbers: tuple[float, ...]) -> tuple[float, ...]:
    length = math.sqrt(_product(numbers, numbers)) or 1.0
    return tuple([number / length for number in numbers])


def _product(one: tuple[float, ...], other: tuple[float, ...]) -> float:
    return sum(map(mul, one, other), 0.0)


def _base64(numbers: Sequence[float]) -> str:
    held = array("f", numbers)
    if sys.byteorder != "little":
        held.byteswap()
    return b64encode(held.tobytes()).decode()
