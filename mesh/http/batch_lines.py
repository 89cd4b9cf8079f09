"""The lines of batch files: what is wrong with them, and how they are answered.

A line of the input is a call by JSON; a line of the answers names it by its `custom_id`, which no
other line of its file has. Answers are appended, so that what a file of answers holds up to a line
that is torn is what has been answered. Before: `batches`. After: the files.
"""

import os
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import field
from functools import partial
from pathlib import Path
from secrets import token_hex
from typing import Any, Literal

from pydantic import Field
from pydantic_core import from_json

from mesh.domain.errors import InvalidInput, StorageError
from mesh.domain.values import dataclass
from mesh.http.bodies import ChatBody, CompletionBody, check_containers, validated
from mesh.http.embeddings import EmbeddingsBody
from mesh.http.kept_files import BatchError
from mesh.http.refusals import encoded
from mesh.http.responses import ResponsesBody
from mesh.http.tools import Strict

LINES_MAX = 50_000
"""As with OpenAI."""
LINE_BYTES_MAX = 1 << 20
"""Some hundred lines of a batch are in memory at a time."""
CUSTOM_ID_CHARS_MAX = 256
ERRORS_MAX = 100
"""A file with more errors is read no further."""
ANSWERS_BYTES_MAX = 1 << 30
"""The answers of a batch together."""
BODIES: Mapping[str, type[Strict]] = {
    "/v1/chat/completions": ChatBody,
    "/v1/completions": CompletionBody,
    "/v1/embeddings": EmbeddingsBody,
    "/v1/responses": ResponsesBody,
}
"""What lines may ask."""
_OTHERWISE = ("stream", "background")
"""Members by which an answer would not come whole."""


class RequestLine(Strict):
    custom_id: str = Field(min_length=1, max_length=CUSTOM_ID_CHARS_MAX)
    method: Literal["POST"]
    url: str
    body: dict[str, Any]


@dataclass(slots=True, kw_only=True)
class Checked:
    """What a file holds."""

    lines: int = 0
    errors: list[BatchError] = field(default_factory=list)
    models: dict[str, int] = field(default_factory=dict)
    """Those that are asked, and the first line that does so."""


def lines_of(path: Path) -> Iterator[tuple[int, bytes]]:
    """Those that are not blank, with their numbers from 1 on. One that is too long comes in parts,
    of which the first is longer than LINE_BYTES_MAX. Raises OSError.
    """
    with path.open("rb") as file:
        read = partial(file.readline, LINE_BYTES_MAX + 1)
        for number, line in enumerate(iter(read, b""), start=1):
            if not line.isspace():
                yield number, line


def checked(lines: Iterable[tuple[int, bytes]], endpoint: str) -> Checked:
    """Whether each line is a call of the endpoint. Other threads get on in between."""
    found, first = Checked(), dict[str, int]()
    for number, raw in lines:
        time.sleep(0)
        found.lines += 1
        try:
            if found.lines > LINES_MAX:
                raise _Wrong("too_many_lines", f"the file has more than {LINES_MAX} lines")
            line = _line(raw, endpoint)
            before = first.setdefault(line.custom_id, number)
            if before != number:
                said = f"custom_id {line.custom_id!r} is that of line {before}, too"
                raise _Wrong("duplicate_custom_id", said, "custom_id")
            found.models.setdefault(line.body["model"], number)
        except _Wrong as wrong:
            code, message, param = wrong.args
            found.errors.append(BatchError(code=code, message=message, line=number, param=param))
            if len(found.errors) == ERRORS_MAX or found.lines > LINES_MAX or _is_long(raw):
                break
    if not found.lines:
        found.errors.append(BatchError(code="empty_file", message="the file has no line"))
    return found


class _Wrong(Exception):
    """What is wrong with a line: a code, a message and a member."""

    def __init__(self, code: str, message: str, param: str | None = None) -> None:
        super().__init__(code, message, param)


def _is_long(raw: bytes) -> bool:
    return len(raw) > LINE_BYTES_MAX


def _line(raw: bytes, endpoint: str) -> RequestLine:
    """Raises _Wrong."""
    if _is_long(raw):
        said = f"the line has more than {LINE_BYTES_MAX} bytes, which is the limit"
        raise _Wrong("line_too_long", said)
    try:
        data = from_json(raw, allow_inf_nan=False)
    except ValueError as error:
        raise _Wrong("invalid_json_line", f"the line is no valid JSON: {error}") from error
    if not isinstance(data, dict):
        raise _Wrong("invalid_json_line", "the line is no JSON object")
    at = ""
    try:
        line = validated(RequestLine, data)
        if line.url != endpoint:
            raise _Wrong("mismatched_url", f"url is {line.url[:100]!r}, not {endpoint!r}", "url")
        at = "body."
        check_containers(line.body)
        body = validated(BODIES[endpoint], line.body)
    except InvalidInput as error:
        param = at + error.field or None
        raise _Wrong("invalid_request", error.message, param) from error
    for name in _OTHERWISE:
        if getattr(body, name, None):
            raise _Wrong("invalid_request", f"{name}: a line is answered whole", f"body.{name}")
    return line


def call_of(raw: bytes, endpoint: str) -> tuple[str, bytes]:
    """The `custom_id` of a line that was checked, and the body of its call. What it asks of
    Responses is not kept by these unless it says so: its answer stays in the file.
    """
    data = from_json(raw)
    body = {"store": False, **data["body"]} if endpoint == "/v1/responses" else data["body"]
    return data["custom_id"], encoded(body)


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    status: int
    body: bytes
    """JSON."""
    request_id: str = ""
    retry_s: float | None = None
    """When the call may be made again; `None` where that does not help."""


class Answers:
    """The files of a batch's answers and of its errors, as far as they were written: what is torn
    at their ends is cut off. Raises OSError, or StorageError where they are too long.
    """

    def __init__(self, answers: Path, errors: Path) -> None:
        self.ids = set[str]()
        """Lines that are answered."""
        self.completed, self.failed = _read(answers, self.ids), _read(errors, self.ids)
        self._paths = answers, errors
        self._bytes = sum(path.stat().st_size for path in self._paths)

    def add(self, custom_id: str, answer: Answer) -> None:
        if self._bytes + len(answer.body) > ANSWERS_BYTES_MAX:
            raise StorageError(f"the answers have more than {ANSWERS_BYTES_MAX} bytes")
        response = b'{"status_code":%d,"request_id":%b,"body":%b}' % (
            *(answer.status, encoded(answer.request_id), answer.body),
        )
        self._append(custom_id, response, b"null", completed=answer.status == 200)

    def add_unanswered(self, custom_id: str, code: str, message: str) -> None:
        """Its call will not be made."""
        error = encoded({"code": code, "message": message})
        self._append(custom_id, b"null", error, completed=False)

    def _append(self, custom_id: str, response: bytes, error: bytes, *, completed: bool) -> None:
        line = b'{"id":"batch_req_%b","custom_id":%b,"response":%b,"error":%b}\n' % (
            *(token_hex(12).encode(), encoded(custom_id), response, error),
        )
        self._bytes += len(line)
        with self._paths[0 if completed else 1].open("ab", buffering=0) as file:
            written = file.write(line)
            if written != len(line):
                file.truncate(file.tell() - written)
                said = f"{written} bytes of {len(line)} could be written: the disk is full"
                raise StorageError(said)
        self.ids.add(custom_id)
        self.completed += completed
        self.failed += not completed

    def sync(self) -> None:
        """They are on disk then."""
        for path in self._paths:
            with path.open("ab") as file:
                os.fsync(file.fileno())


def _read(path: Path, ids: set[str]) -> int:
    """How many lines a file of answers has, which are added to `ids`. It ends with the last whole
    one from then on.
    """
    count = whole_bytes = 0
    with path.open("a+b") as file:
        file.seek(0)
        for line in file:
            try:
                custom_id = from_json(line)["custom_id"] if line.endswith(b"\n") else None
            except ValueError:
                custom_id = None
            if custom_id is None:
                break
            ids.add(custom_id)
            count, whole_bytes = count + 1, whole_bytes + len(line)
        file.truncate(whole_bytes)
    return count
