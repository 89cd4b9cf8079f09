"""OpenAI's `/v1/embeddings`, `/v1/rerank` as Jina and Cohere have it, Ollama's `/api/embed`.

Each text of a call is a request of its own, scheduled as any other; at most `AT_ONCE_MAX` of them
are asked at a time. Each vector is encoded when it comes, and the answer is written in pieces, so
that no step holds the event loop for long. Before: the routes. After: the gateway.
"""

import asyncio
import math
import sys
from array import array
from base64 import b64encode
from collections import deque
from collections.abc import Callable, Sequence
from operator import mul
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, Discriminator, Field, Tag

from mesh.domain.deployment import Deployment
from mesh.domain.errors import EngineError, InvalidInput, MeshError, Refused
from mesh.domain.ids import DeploymentName
from mesh.domain.invocation import (
    Accepted,
    Finished,
    Invocation,
    PairPrompt,
    Prompt,
    TextPrompt,
    Tokens,
    check_complete,
)
from mesh.domain.model import Task
from mesh.domain.reasons import RefusalReason
from mesh.http.asking import prompts_of, with_slo
from mesh.http.bodies import Prompts, T, prompt_shape
from mesh.http.exchange import Exchange
from mesh.http.refusals import encoded
from mesh.http.tokens import Answered
from mesh.http.tools import Strict

INPUTS_MAX = 2048
"""The most texts of one call, as with OpenAI."""
DOCUMENTS_MAX = 1000
"""The most documents of one call, as Cohere advises."""
NUMBERS_MAX = 1 << 20
"""The most numbers that the vectors of one call have together: 20 MB as JSON."""
AT_ONCE_MAX = 32
"""So many texts of one call wait for their vectors at a time: the clock of a later one begins when
an earlier one has ended.
"""
_NS = 1_000_000_000
_CROWDED = (
    RefusalReason.TENANT_LIMIT,
    RefusalReason.QUEUE_FULL,
    RefusalReason.QUEUE_TIMEOUT,
    RefusalReason.FIRST_TOKEN_LATE,
    RefusalReason.DELAYS_RUNNING,
    RefusalReason.TPOT_EXCEEDED,
)
"""A text that is refused so may be served when fewer others of its call are open."""
R = TypeVar("R")


class EmbeddingsBody(Strict):
    """Embeds texts, by a deployment whose task that is."""

    model: str = Field(min_length=1, description="A deployment's name.")
    input: Prompts
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = Field(
        default=None,
        ge=1,
        description="The vectors hold only their first N dimensions, normalised again; "
        "the model must be trained for that.",
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
    top_n: int | None = Field(
        default=None, ge=1, description="The answer holds at most so many results."
    )
    return_documents: bool | None = Field(
        default=None, description="Results contain their documents unless this is false."
    )


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
    truncate: bool | None = Field(
        default=None, description="Ignored: a text that is too long is refused, never cut."
    )
    options: Any = Field(default=None, description="Ignored.")
    keep_alive: Any = Field(default=None, description="Ignored.")


class OllamaEmbeddings(BaseModel):
    embeddings: list[list[float]]
    model: str
    total_duration: int
    load_duration: int
    prompt_eval_count: int


Names = Callable[[int], str]
"""What a caller calls the text of this number."""


class Vectors(Answered[T]):
    """What endpoints share whose answers are made of vectors."""

    async def _embedded(
        self,
        exchange: Exchange,
        model: str,
        prompts: Sequence[Prompt],
        dimensions: int | None,
        read: Callable[[Sequence[float]], bytes],
        names: Names,
    ) -> list[tuple[bytes, Finished]]:
        """The vectors as `read` has them. Raises InvalidInput, and what the gateway does."""
        if not 1 <= len(prompts) <= INPUTS_MAX:
            raise InvalidInput(
                f"input holds {len(prompts)} texts; it must hold 1 to {INPUTS_MAX}", field="input"
            )
        deployment = self._deployment(exchange, model)
        _check_dimensions(deployment, dimensions)
        width = dimensions or deployment.model.hidden_size
        if len(prompts) * width > NUMBERS_MAX:
            raise InvalidInput(
                f"input holds {len(prompts)} texts, whose vectors have {width} numbers each; "
                f"{NUMBERS_MAX} numbers are the limit of one call",
                hint=f"send at most {NUMBERS_MAX // width} texts in one call",
                field="input",
            )
        asked = _invocations(exchange, deployment, prompts, Task.EMBED)
        return await self._asked(exchange, asked, lambda one: read(_cut(one, dimensions)), names)

    def _deployment(self, exchange: Exchange, model: str) -> Deployment:
        deployment = self._gateway.deployment(DeploymentName(model))
        exchange.context_tokens = deployment.context_tokens_max
        return deployment

    async def _asked(
        self,
        exchange: Exchange,
        asked: Sequence[Invocation],
        read: Callable[[Sequence[float]], R],
        names: Names,
    ) -> list[tuple[R, Finished]]:
        """What `read` makes of each vector when it comes, in the order of the texts. One that is
        refused for what else is open comes again once another one has ended. Any other refusal,
        and that of a text which was asked alone, ends all.
        """
        found: dict[int, tuple[R, Finished]] = {}
        waiting = deque(range(len(asked)))
        open_ = begun = 0

        async def work() -> None:
            nonlocal open_, begun
            while waiting:
                number = waiting.popleft()
                open_, begun = open_ + 1, begun + 1
                others, mine = open_ > 1, begun
                try:
                    numbers, end = await self._vector(exchange, asked[number])
                    found[number] = read(numbers), end
                except MeshError as error:
                    alone = not others and begun == mine
                    if alone or not isinstance(error, Refused) or error.reason not in _CROWDED:
                        raise _named(error, names(number)) from error
                    waiting.appendleft(number)
                    if open_ > 1:
                        return  # Fewer are asked at a time from now on.
                finally:
                    open_ -= 1

        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(min(AT_ONCE_MAX, len(asked))):
                    group.create_task(work())
        except* MeshError as errors:
            raise _first(errors) from None
        return [found[number] for number in range(len(asked))]

    async def _vector(
        self, exchange: Exchange, asked: Invocation
    ) -> tuple[Sequence[float], Finished]:
        numbers: Sequence[float] = ()
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
                            return numbers, event
        raise EngineError(f"no vector came for {call.request_id}", hint="update its node")


class Embeddings(Vectors[EmbeddingsBody]):
    kind = EmbeddingsBody

    async def answered(self, body: EmbeddingsBody, exchange: Exchange) -> list[bytes]:
        prompts = prompts_of(body.input)
        read = _base64 if body.encoding_format == "base64" else _json
        several = isinstance(body.input, list) and prompt_shape(body.input) != "tokens"
        found = await self._embedded(
            exchange, body.model, prompts, body.dimensions, read, _names("input", several)
        )
        used = sum(end.prompt_tokens for _, end in found)
        usage = EmbeddingUsage(prompt_tokens=used, total_tokens=used)
        one = encoded(Embedding(index=0, embedding=[]).model_dump())
        one = one.replace(b"0", b"%d").replace(b"[]", b"%b")
        told = [one % (number, vector) for number, (vector, _) in enumerate(found)]
        return _pieces(EmbeddingList(data=[], model=body.model, usage=usage), told)


class Rerank(Vectors[RerankBody]):
    kind = RerankBody

    async def answered(self, body: RerankBody, exchange: Exchange) -> Ranking:
        texts = [one if isinstance(one, str) else one.text for one in body.documents]
        deployment = self._deployment(exchange, body.model)
        used = 0
        if deployment.spec.task is Task.EMBED:
            prompts: list[Prompt] = [TextPrompt(text=text) for text in (body.query, *texts)]
            asked, *others = _invocations(exchange, deployment, prompts, Task.EMBED)
            ((query, end),) = await self._asked(
                exchange, [asked], _normalised, lambda number: "query"
            )
            used += end.prompt_tokens

            def score(numbers: Sequence[float]) -> float:
                return _product(query, _normalised(numbers))
        else:
            prompts = [PairPrompt(query=body.query, document=text) for text in texts]
            others = list(_invocations(exchange, deployment, prompts, Task.RERANK))

            def score(numbers: Sequence[float]) -> float:
                return numbers[0]

        found = await self._asked(exchange, others, score, _names("documents", True))
        scores = [one for one, _ in found]
        used += sum(end.prompt_tokens for _, end in found)
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
            usage=RerankUsage(total_tokens=used),
        )


class OllamaEmbed(Vectors[OllamaEmbedBody]):
    kind = OllamaEmbedBody

    async def answered(self, body: OllamaEmbedBody, exchange: Exchange) -> list[bytes]:
        start_s = self._gateway.now_s()
        texts = [body.input] if isinstance(body.input, str) else body.input
        prompts = [TextPrompt(text=text) for text in texts]
        model = body.model.removesuffix(":latest")
        names = _names("input", isinstance(body.input, list))
        found = await self._embedded(exchange, model, prompts, body.dimensions, _json, names)
        answer = OllamaEmbeddings(
            embeddings=[],
            model=body.model,
            total_duration=int((self._gateway.now_s() - start_s) * _NS),
            load_duration=int(max(end.grace_s for _, end in found) * _NS),
            prompt_eval_count=sum(end.prompt_tokens for _, end in found),
        )
        return _pieces(answer, [vector for vector, _ in found])


def _invocations(
    exchange: Exchange, deployment: Deployment, prompts: Sequence[Prompt], task: Task
) -> tuple[Invocation, ...]:
    return with_slo(
        tuple(
            Invocation(deployment=deployment.spec.name, prompt=prompt, task=task)
            for prompt in prompts
        ),
        exchange.header,
    )


def _names(member: str, several: bool) -> Names:
    return lambda number: f"{member}[{number}]" if several else member


def _named(error: MeshError, name: str) -> MeshError:
    """The same error, by the caller's own name where it is about a text."""
    if isinstance(error, InvalidInput) and error.field == "prompt":
        return InvalidInput(f"{name}: {error.message}", hint=error.hint, field=name)
    if isinstance(error, Refused) and error.reason is RefusalReason.PROMPT_TOO_LONG:
        return Refused(f"{name}: {error.message}", reason=error.reason, hint=error.hint)
    return error


def _pieces(answer: BaseModel, items: Sequence[bytes]) -> list[bytes]:
    """The JSON of an answer whose one list is empty, with these items in it: none of the pieces is
    as long as all.
    """
    before, _, after = encoded(answer.model_dump()).partition(b"[]")
    separated = [item if number == 0 else b"," + item for number, item in enumerate(items)]
    return [before + b"[", *separated, b"]" + after]


def _first(errors: BaseExceptionGroup[MeshError]) -> BaseException:
    """One of those that happened, of however many groups within groups."""
    one: BaseException = errors
    while isinstance(one, BaseExceptionGroup):
        one = one.exceptions[0]
    return one


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


def _cut(numbers: Sequence[float], dimensions: int | None) -> Sequence[float]:
    if dimensions is None or dimensions == len(numbers):
        return numbers
    return _normalised(numbers[:dimensions])


def _normalised(numbers: Sequence[float]) -> Sequence[float]:
    length = math.sqrt(_product(numbers, numbers)) or 1.0
    return array("f", [number / length for number in numbers])


def _product(one: Sequence[float], other: Sequence[float]) -> float:
    return sum(map(mul, one, other), 0.0)


def _json(numbers: Sequence[float]) -> bytes:
    return encoded(list(numbers))


def _base64(numbers: Sequence[float]) -> bytes:
    """A JSON text."""
    held = array("f", numbers)
    if sys.byteorder != "little":
        held.byteswap()
    return b'"' + b64encode(held.tobytes()) + b'"'
