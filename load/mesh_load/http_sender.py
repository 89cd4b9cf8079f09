"""Calls by OpenAI's protocol: completions of tokens, streamed, with connections kept for the next.

A text's chunk does not say how many tokens it holds, so each is asked to
(`continuous_usage_stats`), and what comes are the events that gRPC would have brought. Tokens are
counted, not known. Before: `replayer`. After: the cell's HTTP.
"""

import json
import ssl
from collections.abc import Iterator
from typing import Any

import gevent
from gevent.ssl import SSLContext
from geventhttpclient import HTTPClient, HTTPParseError

from mesh.domain.errors import DeadlineExceeded, MeshError, Unavailable
from mesh.domain.ids import RequestId
from mesh.domain.invocation import Accepted, Finished, InvocationEvent, Tokens
from mesh.domain.reasons import FinishReason
from mesh.evaluation.load_client import CALL_S_MAX, OPEN_MAX, Call
from mesh.wire.channel import parse_address
from mesh.wire.credentials import Tls, credentials
from mesh.wire.errors import error_coded

PATH = "/v1/completions"
JSON = "application/json"
_DATA, _DONE, _ERROR = b"data: ", b"data: [DONE]", b"event: error"


class HttpSender:
    """Dials `HOST:PORT` when a call finds no connection free."""

    def __init__(self, address: str, *, call_s_max: float = CALL_S_MAX) -> None:
        """Raises InvalidInput for no address. The key and the authority are this process'."""
        host, port = parse_address(address)
        shown = credentials()
        tls = shown.tls
        self._client = HTTPClient(
            host,
            port,
            headers={name.title(): value for name, value in shown.metadata},
            concurrency=OPEN_MAX,
            connection_timeout=call_s_max,
            network_timeout=call_s_max,
            ssl=tls is not None,
            ssl_context_factory=None if tls is None else lambda **_: _trusting(tls),
        )

    def send(self, call: Call, timeout_s: float) -> Iterator[InvocationEvent]:
        late = DeadlineExceeded(f"the answer has not ended within {timeout_s:g} s")
        try:
            with gevent.Timeout(timeout_s, late):
                yield from self._answer(call)
        except (OSError, HTTPParseError) as error:
            raise Unavailable(f"the connection broke: {error}") from error

    def _answer(self, call: Call) -> Iterator[InvocationEvent]:
        response = self._client.request(
            "POST", PATH, body=_body(call), headers={"Content-Type": JSON}
        )
        with response:
            if response.status_code != 200:
                raise _error(response.status_code, response.read(), response)
            yield Accepted(
                request_id=RequestId(str(response.get("x-request-id", ""))),
                prompt_tokens=len(call.prompt_tokens),
                ttft_limit_s=call.slo.ttft_limit_s(len(call.prompt_tokens)),
                tpot_limit_s=call.slo.tpot_s,
                grace_s=_milliseconds(response.get("x-slo-grace-ms")),
            )
            yield from _events(iter(lambda: response.readline(b"\n"), b""), call)

    def close(self) -> None:
        self._client.close()


def _body(call: Call) -> bytes:
    """What gRPC's call asks for: the same numbers, and greedily."""
    asked = {
        "model": call.deployment,
        "prompt": call.prompt_tokens,
        "max_tokens": call.output_tokens,
        "temperature": 0,
        "top_p": 1,
        "top_k": 0,
        "repetition_penalty": 1,
        "ignore_eos": call.forced,
        "seed": 1,
        "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    }
    return json.dumps(asked, separators=(",", ":")).encode()


def _events(lines: Iterator[bytes], call: Call) -> Iterator[InvocationEvent]:
    """The events in a stream's lines. Raises the error that the stream ends with, Unavailable where
    it just ends.
    """
    tokens, failed = 0, False
    for line in lines:
        if line.startswith(_DONE):
            return
        failed = failed or line.startswith(_ERROR)
        if not line.startswith(_DATA):
            continue
        if failed:
            raise _error(500, line[len(_DATA) :])
        chunk = json.loads(line[len(_DATA) :])
        if not chunk["choices"]:
            continue
        so_far = chunk["usage"]["completion_tokens"]
        if so_far > tokens:
            # Whoever judges the answer goes by their number.
            yield Tokens(first_index=tokens, token_ids=(0,) * (so_far - tokens), text="")
            tokens = so_far
        if reason := chunk["choices"][0]["finish_reason"]:
            yield Finished(
                reason=FinishReason(reason),
                prompt_tokens=len(call.prompt_tokens),
                output_tokens=so_far,
                ttft_s=0.0,
                tpot_s=0.0,
            )
    raise Unavailable("the answer ended before it was complete")


def _error(status: int, body: bytes, headers: Any = None) -> MeshError:
    try:
        told = json.loads(body)["error"]
        code, message = str(told["code"]), str(told["message"])
    except (ValueError, KeyError, TypeError):
        return MeshError(f"status {status}, and no word why")
    again = None if headers is None else headers.get("retry-after-ms")
    return error_coded(code, message, retry_after_s=_milliseconds(again))


def _milliseconds(text: object) -> float:
    return (
        int(text) / 1000.0 if isinstance(text, str) and text.isascii() and text.isdigit() else 0.0
    )


def _trusting(tls: Tls) -> SSLContext:
    """HTTP's server shows a certificate of the cell's authority, and asks for none."""
    context = SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_verify_locations(cadata=tls.authority.decode("ascii"))
    return context
