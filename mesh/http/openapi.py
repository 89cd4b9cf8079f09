"""`/openapi.json`: what is served, from the schemas that bodies are read by and answers held to."""

import re
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from mesh import __version__
from mesh.http.answers import ChatChunk, ChatCompletion, Completion, ErrorBody
from mesh.http.batches import BatchBody
from mesh.http.bodies import ChatBody, CompletionBody
from mesh.http.embeddings import (
    EmbeddingList,
    EmbeddingsBody,
    OllamaEmbedBody,
    OllamaEmbeddings,
    Ranking,
    RerankBody,
)
from mesh.http.exchange import GRACE_HEADER
from mesh.http.files import LISTED_MAX, DeletedFile
from mesh.http.kept_files import KeptBatch, KeptFile, Page
from mesh.http.message_answers import MessageAnswer, MessageErrorBody, MessageEvent
from mesh.http.messages import Conversation, MessagesBody
from mesh.http.models import ModelCard, ModelList
from mesh.http.ollama import (
    GenerateBody,
    OllamaAnswer,
    OllamaChatBody,
    OllamaError,
    ShowBody,
    Shown,
)
from mesh.http.response_answers import DeletedResponse, InputTokens, ResponseAnswer, ResponseEvent
from mesh.http.responses import InputBody, ResponsesBody
from mesh.http.tokens import DetokenizeBody, Detokenized, TokenCount, TokenizeBody, Tokenized
from mesh.wire.own_slo import CLASS_HEADER, SLO_HEADERS

_REFUSED = {
    "400": "The request is wrong, or its prompt is too long.",
    "401": "A key is needed, and this one is none that is known, or not any more.",
    "403": "The key's role may not do this.",
    "404": "There is no such model, response, file or batch.",
    "408": "The body did not come in time.",
    "413": "The body is too large.",
    "415": "The body is of another type than it must be, or it is compressed.",
    "429": "It is refused; Retry-After and retry-after-ms say when to come again.",
    "499": "An operator has ended it.",
    "500": "A load or an engine failed, or mesh did.",
    "503": "No node, or the controller is stopping.",
}
_KEPT = ("400", "401", "403", "404")
_ALIVE = {"description": "The controller answers."}
_WHERE = "#/components/schemas/"


def document() -> dict[str, Any]:
    """OpenAPI 3.1. Its schemas take a tenth of a second, which a standby that begins to lead does
    not have: it is made when somebody asks for it.
    """
    bodies = (
        *(ChatBody, CompletionBody, MessagesBody, Conversation),
        *(TokenizeBody, DetokenizeBody, ResponsesBody, InputBody),
        *(OllamaChatBody, GenerateBody, ShowBody, OllamaEmbedBody),
        *(EmbeddingsBody, RerankBody, BatchBody),
    )
    answers = (
        *(ChatCompletion, ChatChunk, Completion, ErrorBody, ModelCard, ModelList),
        *(MessageAnswer, MessageEvent, MessageErrorBody, TokenCount, Tokenized, Detokenized),
        *(OllamaAnswer, OllamaError, Shown, OllamaEmbeddings),
        *(EmbeddingList, Ranking),
        *(ResponseAnswer, ResponseEvent, InputTokens, DeletedResponse),
        *(KeptFile, Page[KeptFile], DeletedFile, KeptBatch, Page[KeptBatch]),
    )
    asked = [(model, "validation") for model in bodies]
    answered = [(model, "serialization") for model in answers]
    _, schemas = models_json_schema([*asked, *answered], ref_template=_WHERE + "{model}")  # type: ignore[list-item]
    name, id_ = (
        {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
        for name in ("model", "id")
    )
    return {
        "openapi": "3.1.0",
        "info": {"title": "mesh", "version": __version__},
        "paths": {
            "/": {"get": _plain("What this is, and where its documentation is.")},
            "/v1": {"get": _plain("The same.")},
            "/v1/chat/completions": {"post": _generation(ChatBody, ChatCompletion, ChatChunk)},
            "/v1/completions": {"post": _generation(CompletionBody, Completion, Completion)},
            "/v1/messages": {"post": _messages()},
            "/v1/messages/count_tokens": {
                "post": _in_messages(_posted(Conversation, TokenCount)),
            },
            "/v1/responses": {"post": _generation(ResponsesBody, ResponseAnswer, ResponseEvent)},
            "/v1/responses/input_tokens": {"post": _posted(InputBody, InputTokens)},
            "/v1/responses/{id}": {
                "get": {**_read("A kept response.", ResponseAnswer, *_KEPT), "parameters": [id_]},
                "delete": {**_read("Forgets it.", DeletedResponse, *_KEPT), "parameters": [id_]},
            },
            "/v1/responses/{id}/cancel": {
                "post": {
                    **_read("Says that it has ended.", ResponseAnswer, *_KEPT),
                    "parameters": [id_],
                }
            },
            "/v1/files": {"post": _uploaded(), "get": _listed("The files.", Page[KeptFile])},
            "/v1/files/{id}": {
                "get": {**_read("A file.", KeptFile, *_KEPT), "parameters": [id_]},
                "delete": {**_read("Forgets it.", DeletedFile, *_KEPT), "parameters": [id_]},
            },
            "/v1/files/{id}/content": {
                "get": {**_plain("Its lines.", *_KEPT), "parameters": [id_]}
            },
            "/v1/batches": {
                "post": _posted(BatchBody, KeptBatch),
                "get": _listed("The batches, the last one first.", Page[KeptBatch]),
            },
            "/v1/batches/{id}": {
                "get": {**_read("A batch.", KeptBatch, *_KEPT), "parameters": [id_]}
            },
            "/v1/batches/{id}/cancel": {
                "post": {**_read("Makes no more calls.", KeptBatch, *_KEPT), "parameters": [id_]}
            },
            "/v1/embeddings": {"post": _posted(EmbeddingsBody, EmbeddingList)},
            **{f"{at}/rerank": {"post": _posted(RerankBody, Ranking)} for at in ("", "/v1", "/v2")},
            "/v1/models": {"get": _read("The deployments.", ModelList, "401", "403")},
            "/v1/models/{model}": {
                "get": {
                    **_read("One deployment.", ModelCard, "401", "403", "404"),
                    "parameters": [name],
                }
            },
            "/tokenize": {"post": _posted(TokenizeBody, Tokenized)},
            "/detokenize": {"post": _posted(DetokenizeBody, Detokenized)},
            "/api/chat": {"post": _in_ollama(_posted(OllamaChatBody, OllamaAnswer))},
            "/api/generate": {"post": _in_ollama(_posted(GenerateBody, OllamaAnswer))},
            "/api/embed": {"post": _in_ollama(_posted(OllamaEmbedBody, OllamaEmbeddings))},
            "/api/show": {"post": _in_ollama(_posted(ShowBody, Shown))},
            "/api/tags": {"get": _plain("The deployments, as Ollama lists models.")},
            "/api/ps": {"get": _plain("Those that are loaded.")},
            "/api/version": {"get": _plain("The version of mesh.")},
            "/ping": {verb: {"responses": {"200": _ALIVE}} for verb in ("get", "post")},
            "/version": {"get": _plain("The version of mesh.")},
            "/healthz": {"get": _plain("The controller answers.")},
            "/readyz": {"get": _plain("Calls are taken.", "503")},
            "/metrics": {"get": _metrics()},
            "/openapi.json": {"get": _plain("This document.")},
        },
        "security": [{}, {"key": []}, {"x-api-key": []}],
        "components": {
            "schemas": schemas["$defs"],
            "securitySchemes": {
                "key": {"type": "http", "scheme": "bearer"},
                "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
        },
    }


def _generation(
    asked: type[BaseModel], whole: type[BaseModel], chunk: type[BaseModel]
) -> dict[str, Any]:
    streamed = {"text/event-stream": {"schema": _ref(chunk), "description": "If `stream` is set."}}
    told = {
        "description": "The answer, whole or as server-sent events.",
        "content": {**_json(whole), **streamed},
        "headers": {
            GRACE_HEADER.decode(): {
                "schema": {"type": "integer", "minimum": 1},
                "description": "By how much a load makes the first token late, if it does.",
            }
        },
    }
    return {
        "summary": (asked.__doc__ or "").partition("\n")[0],
        "parameters": [
            {
                "name": name,
                "in": "header",
                "schema": {"type": "number", "exclusiveMinimum": 0},
                "description": "Of this request, in place of its deployment's SLO.",
            }
            for name in SLO_HEADERS
        ]
        + [
            {
                "name": CLASS_HEADER,
                "in": "header",
                "schema": {"type": "string"},
                "description": "Of its deployment's SLO classes; none: the default one.",
            }
        ],
        "requestBody": {"required": True, "content": _json(asked)},
        "responses": {"200": told, **_errors(*_REFUSED)},
    }


def _messages() -> dict[str, Any]:
    return _in_messages(_generation(MessagesBody, MessageAnswer, MessageEvent))


def _in_messages(operation: dict[str, Any]) -> dict[str, Any]:
    """The same with Anthropic's errors: 529 where OpenAI's protocol has 503."""
    told = {"200": operation["responses"]["200"]}
    for status, said in _REFUSED.items():
        answer = {"description": said, "content": _json(MessageErrorBody)}
        told["529" if status == "503" else status] = answer
    return {**operation, "responses": told}


def _in_ollama(operation: dict[str, Any]) -> dict[str, Any]:
    """The same with Ollama's errors."""
    told = {"200": operation["responses"]["200"]}
    for status, said in _REFUSED.items():
        told[status] = {"description": said, "content": _json(OllamaError)}
    return {**operation, "responses": told}


def _posted(asked: type[BaseModel], answer: type[BaseModel]) -> dict[str, Any]:
    summary = (asked.__doc__ or "").partition("\n")[0]
    body = {"required": True, "content": _json(asked)}
    return {**_read(summary, answer, *_REFUSED), "requestBody": body}


def _uploaded() -> dict[str, Any]:
    form = {
        "type": "object",
        "required": ["purpose", "file"],
        "properties": {
            "purpose": {"const": "batch"},
            "file": {"type": "string", "contentMediaType": "application/jsonl"},
        },
    }
    body = {"required": True, "content": {"multipart/form-data": {"schema": form}}}
    told = _read("Keeps a file of calls for 30 days.", KeptFile, *_REFUSED)
    return {**told, "requestBody": body}


def _listed(summary: str, page: type[BaseModel]) -> dict[str, Any]:
    names: dict[str, dict[str, Any]] = {
        "after": {"type": "string"},
        "limit": {"type": "integer", "minimum": 1, "maximum": LISTED_MAX},
        "order": {"enum": ["asc", "desc"]},
    }
    asked = [{"name": name, "in": "query", "schema": schema} for name, schema in names.items()]
    return {**_read(summary, page, *_KEPT), "parameters": asked}


def _read(summary: str, answer: type[BaseModel], *errors: str) -> dict[str, Any]:
    told = {"description": summary, "content": _json(answer)}
    return {"summary": summary, "responses": {"200": told, **_errors(*errors)}}


def _plain(summary: str, *errors: str) -> dict[str, Any]:
    told = {"description": summary, "content": {"application/json": {"schema": {"type": "object"}}}}
    return {"summary": summary, "responses": {"200": told, **_errors(*errors)}}


def _metrics() -> dict[str, Any]:
    told = {"description": "In Prometheus' text format.", "content": {"text/plain": {}}}
    return {"summary": "The cell in numbers.", "responses": {"200": told}}


def _errors(*statuses: str) -> dict[str, Any]:
    return {
        status: {"description": _REFUSED[status], "content": _json(ErrorBody)}
        for status in statuses
    }


def _json(model: type[BaseModel]) -> dict[str, Any]:
    return {"application/json": {"schema": _ref(model)}}


def _ref(model: type[BaseModel]) -> dict[str, str]:
    return {"$ref": _WHERE + re.sub(r"[^A-Za-z0-9.-]", "_", model.__name__)}
