"""Writes docs/members.md from the table of members (`python scripts/gen_members.py`)."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel

from mesh.http.asking import NOT_BUILT
from mesh.http.bodies import ChatBody, CompletionBody
from mesh.http.members import ROWS, Protocol
from mesh.http.messages import MessagesBody
from mesh.http.ollama import GenerateBody, OllamaChatBody, Options
from mesh.http.responses import ResponsesBody

TARGET = Path(__file__).resolve().parent.parent / "docs" / "members.md"
BODIES: Mapping[Protocol, tuple[type[BaseModel], ...]] = {
    "chat": (ChatBody,),
    "completions": (CompletionBody,),
    "responses": (ResponsesBody,),
    "messages": (MessagesBody,),
    "ollama": (OllamaChatBody, GenerateBody),
}
HEAD = """# Members of all protocols

Generated from `mesh/http/members.py` and the schemas of bodies by `python scripts/gen_members.py`;
a test fails when this page is not current. Members in a row mean the same. What they may be is in
[openai.md](openai.md) and [anthropic.md](anthropic.md).

"""
COLUMNS = ("Chat Completions", "Completions", "Responses", "Messages", "Ollama")


def untold(protocol: Protocol) -> tuple[list[str], list[str], list[str]]:
    """The members that no row has: those that are ignored, those that are refused unless they ask
    for nothing, and others, of which there must be none.
    """
    told = {name for row in ROWS for name in row.of(protocol)}
    ignored, refused, others = list[str](), list[str](), list[str]()
    for name, annotation, description in members(protocol):
        if name in told or name == "options":
            continue
        values = {
            of for one in get_args(annotation) or (annotation,) for of in get_args(one) or (one,)
        }
        if name in NOT_BUILT or values <= {None, type(None), "", 0, 1}:
            refused.append(name)
        elif annotation is Any or "gnored" in description:
            ignored.append(name)
        else:
            others.append(name)
    return ignored, refused, others


def members(protocol: Protocol) -> Iterator[tuple[str, Any, str]]:
    """Each once, with its type and its description."""
    seen = set[str]()
    for body in BODIES[protocol]:
        for name, field in body.model_fields.items():
            if name not in seen:
                seen.add(name)
                yield name, field.annotation, field.description or ""
    if protocol == "ollama":
        for name, field in Options.model_fields.items():
            yield f"options.{name}", field.annotation, field.description or ""


def _cell(names: list[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def page() -> str:
    lines = [["", *COLUMNS], ["---"] * (1 + len(COLUMNS))]
    lines += [[row.means, *(_cell(row.of(protocol)) for protocol in BODIES)] for row in ROWS]
    sorts = [untold(protocol) for protocol in BODIES]
    lines.append(["ignored", *(_cell(ignored) for ignored, _, _ in sorts)])
    lines.append(
        ["refused, unless it asks for nothing", *(_cell(refused) for _, refused, _ in sorts)]
    )
    return HEAD + "".join(f"| {' | '.join(line)} |\n" for line in lines)


if __name__ == "__main__":
    TARGET.write_text(page(), encoding="utf-8")
