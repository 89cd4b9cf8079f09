"""`/tokenize` and `/detokenize` as vLLM has them, `/v1/messages/count_tokens` as Anthropic has it.

Before: the routes. After: the gateway, which counts such a call like any other and tokenises it as
it does a prompt that is to be answered.
"""

from abc import abstractmethod
from typing import Any, Generic

from pydantic import BaseModel, Field
from starlette.requests import Request

from mesh.domain.errors import InvalidInput
from mesh.domain.ids import DeploymentName
from mesh.domain.invocation import Invocation, Prompt, TextPrompt
from mesh.http.asking import chat_prompt, check_built, invocations
from mesh.http.bodies import ChatBody, Message, T, read
from mesh.http.exchange import Bodies, Endpoint, Exchange
from mesh.http.logprobs import token_name
from mesh.http.messages import Conversation, chat_of
from mesh.http.refusals import encoded
from mesh.http.together import Gateway
from mesh.http.tools import Strict, Tools, check_tools, offers_tools, with_tools


class TokenizeBody(Strict):
    """Turns a text into tokens, or a conversation by the model's chat template."""

    model: str = Field(min_length=1, description="A deployment's name.")
    prompt: str | None = None
    messages: list[Message] | None = Field(default=None, description="In place of a prompt.")
    tools: Tools | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_special_tokens: bool | None = Field(
        default=None, description="Of a prompt: with the model's own beginning, unless false."
    )
    return_token_strs: bool | None = None
    add_generation_prompt: Any = None
    continue_final_message: Any = None


class Tokenized(BaseModel):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None
    """What each adds to the text; parts of a character are told by their bytes."""


class DetokenizeBody(Strict):
    """Turns tokens into text, special ones into their names."""

    model: str = Field(min_length=1, description="A deployment's name.")
    tokens: list[int]


class Detokenized(BaseModel):
    prompt: str


class Answered(Endpoint, Generic[T]):
    """Reads a body of one kind, and answers with one JSON object."""

    kind: type[T]

    def __init__(self, gateway: Gateway, bodies: Bodies) -> None:
        self._gateway = gateway
        self._bodies = bodies

    async def answer(self, exchange: Exchange, request: Request) -> None:
        async with exchange.body(self._bodies) as raw:
            body = read(self.kind, raw)
        with exchange.watched(lambda request_id: None):
            answer = await self.answered(body, exchange)
            if isinstance(answer, BaseModel):
                answer = [encoded(answer.model_dump())]
            await exchange.json(*answer)

    @abstractmethod
    async def answered(self, body: T, exchange: Exchange) -> BaseModel | list[bytes]:
        """The answer, or its JSON in pieces. Raises errors of the tree."""

    async def count(self, chat: ChatBody) -> int:
        """The tokens of a conversation's prompt."""
        (asked,) = invocations(chat)
        deployment = self._gateway.deployment(asked.deployment)
        if offers_tools(chat.tools, chat.tool_choice):
            form = await self._gateway.tool_format(deployment)
            asked = with_tools(asked, chat.tools or (), None, form, several=True, by_tokens=False)
        return len(await self._gateway.tokens(asked))


class Tokenize(Answered[TokenizeBody]):
    kind = TokenizeBody

    async def answered(self, body: TokenizeBody, exchange: Exchange) -> Tokenized:
        check_built(body)
        asked = Invocation(deployment=DeploymentName(body.model), prompt=_prompt(body))
        deployment = self._gateway.deployment(asked.deployment)
        if body.tools:
            form = await self._gateway.tool_format(deployment)
            asked = with_tools(asked, body.tools, None, form, several=True, by_tokens=False)
        is_part = body.add_special_tokens is False
        tokens = await self._gateway.tokens(asked, is_part=is_part)
        strs = None
        if body.return_token_strs:
            bytes_of = await self._gateway.token_bytes(deployment)
            strs = [token_name(bytes_of(token)) for token in tokens]
        return Tokenized(
            count=len(tokens),
            max_model_len=deployment.context_tokens_max,
            tokens=list(tokens),
            token_strs=strs,
        )


class Detokenize(Answered[DetokenizeBody]):
    kind = DetokenizeBody

    async def answered(self, body: DetokenizeBody, exchange: Exchange) -> Detokenized:
        deployment = self._gateway.deployment(DeploymentName(body.model))
        return Detokenized(prompt=await self._gateway.text(deployment, tuple(body.tokens)))


class TokenCount(BaseModel):
    input_tokens: int


class CountTokens(Answered[Conversation]):
    kind = Conversation

    async def answered(self, body: Conversation, exchange: Exchange) -> TokenCount:
        return TokenCount(input_tokens=await self.count(chat_of(body, {})))


def _prompt(body: TokenizeBody) -> Prompt:
    """Raises InvalidInput."""
    if (body.prompt is None) == (body.messages is None):
        raise InvalidInput("the body must have either prompt or messages", field="prompt")
    if body.messages is None:
        if body.tools:
            raise InvalidInput("tools are of a conversation: send messages", field="tools")
        return TextPrompt(text=body.prompt or "")
    if body.add_special_tokens:
        raise InvalidInput(
            "add_special_tokens: a conversation begins as its chat template says",
            hint="leave it out",
            field="add_special_tokens",
        )
    check_tools(body.tools, None)
    return chat_prompt(body.messages, body.chat_template_kwargs)
