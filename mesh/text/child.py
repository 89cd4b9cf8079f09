"""`python -m mesh.text.child`: builds and calls other people's tokenizers, templates and grammars.

`pool` starts it, sends it one request at a time on stdin and kills it when it takes too long. It
holds itself to its limits, too: the kernel ends it after so much processor time in one request, and
refuses it more memory than so much above what it had before. It can write no file. The frames of
both directions are described at `read_frame`.
"""

import json
import os
import pickle
import resource
import signal
import struct
import sys
import time
from array import array
from collections.abc import Mapping
from typing import Any, BinaryIO

from mesh.domain.errors import InvalidInput, MeshError, ModelError, UnsupportedModel
from mesh.domain.grammar import Grammar
from mesh.domain.text import ChatMessage, TextAssets
from mesh.domain.values import dataclass
from mesh.text.recognised import decoder_fault
from mesh.text.tokenizer import TextCodec

TOKENS_MAX = 1 << 21
"""In the answer to one request: above every context that there is."""
TOKEN_CHARS_MAX = 16 << 10
"""The longest text of one token in a vocabulary: nodes decode some twenty at a time."""
TRIAL_TEXTS = ("Hello, world!\n\n  12345 (é中🙂)", "a" * 2000, " " * 2000, "\n" * 500)
"""What a tokenizer is tried on: words, and the runs on which patterns backtrack."""
HEAD = struct.Struct("<Icd")
"""Bytes of the payload, kind of the payload, seconds of processor time that the request took."""
TOKENS, VALUE, ERROR, OVER_MEMORY = b"T", b"J", b"E", b"M"
"""Kinds of payloads: array('I') of token ids, JSON, a MeshError as JSON, nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """`codec` names the codec that `method` is called on; without one, it is a function of this
    module. `build` makes one of text assets; `forgotten` are those that the child need not keep.
    """

    method: str
    arguments: tuple[Any, ...] = ()
    codec: bytes = b""
    forgotten: tuple[bytes, ...] = ()
    cpu_s: float
    memory_bytes: int


def main() -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    try:
        with open("/proc/self/oom_score_adj", "w", encoding="ascii") as score:
            score.write("1000")  # this one goes first when the machine's memory runs out
    except OSError:
        pass
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    codecs: dict[bytes, TextCodec] = {}
    source, sink = sys.stdin.buffer, sys.stdout.buffer
    sink.write(HEAD.pack(0, VALUE, 0.0))
    sink.flush()
    while frame := read_frame(source):
        kind, payload, cpu_s = _answer(codecs, pickle.loads(frame))
        sink.write(HEAD.pack(len(payload), kind, cpu_s) + payload)
        sink.flush()


def read_frame(source: BinaryIO) -> bytes:
    """The next request: four bytes with its length, then as many, a pickled Request. Empty at the
    end. What comes back is HEAD and its payload: never a pickle, since the child is not trusted.
    """
    head = source.read(4)
    return source.read(int.from_bytes(head, "little")) if len(head) == 4 else b""


def _answer(codecs: dict[bytes, TextCodec], request: Request) -> tuple[bytes, bytes, float]:
    begun_s = time.process_time()
    _limit_memory(request.memory_bytes)
    signal.setitimer(signal.ITIMER_PROF, request.cpu_s)
    try:
        for forgotten in request.forgotten:
            codecs.pop(forgotten, None)
        result = _called(codecs, request)
        if isinstance(result, array):
            kind, payload = TOKENS, result.tobytes()
        else:
            kind, payload = VALUE, json.dumps(result).encode()
    except MemoryError:
        kind, payload = OVER_MEMORY, b""
    except MeshError as error:
        kind, payload = _error(error)
    except Exception as error:
        why = f"a tokenizer or template fails: {type(error).__name__}: {error}"
        of_model = request.method in ("build", "try")
        kind, payload = _error(UnsupportedModel(why) if of_model else InvalidInput(why))
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        _limit_memory(None)
    return kind, payload, time.process_time() - begun_s


def _called(codecs: dict[bytes, TextCodec], request: Request) -> Any:
    if not request.codec:
        return _FUNCTIONS[request.method](*request.arguments)
    if request.method == "build":
        (assets,) = request.arguments
        codecs[request.codec] = TextCodec(assets)
        return None
    codec = codecs[request.codec]
    if request.method == "ready":
        return None
    if request.method == "try":
        return _tried(codec, *request.arguments)
    if request.method == "thinking":
        thinking = codec.thinking(*request.arguments)
        return None if thinking is None else [thinking.amid, thinking.by_tokens]
    if request.method == "decode":
        return codec.decode(*request.arguments, special_tokens=True)
    if request.method == "vocabulary":
        return [codec.token_bytes(token).hex() for token in range(codec.vocabulary_tokens)]
    tokens = getattr(codec, request.method)(*request.arguments)
    if len(tokens) > TOKENS_MAX:
        raise InvalidInput(
            f"the prompt comes to {len(tokens)} tokens; at most {TOKENS_MAX} are taken"
        )
    return array("I", tokens)


def _tried(codec: TextCodec, assets: TextAssets) -> dict[str, Any]:
    """What a controller wants to know of a codec that has passed. Refusals of a text or of a
    conversation are no fault of a model's; what goes beyond the limits ends this process.
    """
    _check_parts(assets.tokenizer_json)
    for text in TRIAL_TEXTS:
        _unless_refused(codec.encode, text)
    _unless_refused(codec.decode, range(min(64, codec.vocabulary_tokens)))
    hello = [ChatMessage(role="user", content="Hello")]
    if assets.tool_template:
        tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
        _unless_refused(codec.encode_chat, hello, "", json.dumps([tool]))
    if assets.chat_template:
        _unless_refused(codec.encode_chat, hello)
        _unless_refused(
            codec.encode_chat, [ChatMessage(role="system", content="Be brief."), *hello] * 4
        )
    return codec.known()


def _unless_refused(call: Any, *arguments: Any) -> None:
    try:
        call(*arguments)
    except (InvalidInput, ModelError) as error:
        if isinstance(error.__cause__, MemoryError):
            raise error.__cause__ from None


def _check_parts(tokenizer_json: bytes) -> None:
    """Raises UnsupportedModel for a tokenizer that nodes must not decode with."""
    try:
        parts = json.loads(tokenizer_json)
        fault = decoder_fault(parts.get("decoder"))
        vocabulary = parts["model"]["vocab"]
        names = vocabulary if isinstance(vocabulary, dict) else [piece for piece, _ in vocabulary]
        added = [token["content"] for token in parts.get("added_tokens") or ()]
        longest = max(map(len, (*names, *added)), default=0)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        fault, longest = f"its parts cannot be read: {type(error).__name__}: {error}", 0
    if longest > TOKEN_CHARS_MAX:
        fault = f"it has a token of {longest} characters, and {TOKEN_CHARS_MAX} is the limit"
    if fault:
        raise UnsupportedModel(f"the tokenizer is not served: {fault}")


def _check_grammar(grammar: Grammar) -> None:
    from mesh.text.grammars import check_grammar  # a child that tokenises needs none

    check_grammar(grammar)


_FUNCTIONS: Mapping[str, Any] = {"check_grammar": _check_grammar}


def _error(error: MeshError) -> tuple[bytes, bytes]:
    if isinstance(error.__cause__, MemoryError):
        return OVER_MEMORY, b""
    said = {
        "error": type(error).__name__,
        "message": error.message,
        "hint": error.hint,
        "field": getattr(error, "field", ""),
    }
    return ERROR, json.dumps(said).encode()


def _limit_memory(more_bytes: int | None) -> None:
    """Let the address space grow by so much from now on; None: as it will."""
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    soft = resource.RLIM_INFINITY
    if more_bytes is not None:
        with open("/proc/self/statm", encoding="ascii") as statm:
            soft = int(statm.read().split()[0]) * resource.getpagesize() + more_bytes
    resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


if __name__ == "__main__":
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    main()
