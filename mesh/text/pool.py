"""A few child processes that run what tenants bring: tokenizers, chat templates and grammars.

Each request has a bound of processor time, time, memory and output; a child that passes one is
killed, and another takes its place. Who has been killed or slow is served in a process apart, which
the others' requests never wait for, and is refused for a while when it happens again. Before: a
controller's `tokenizers` and a node's imports. After: `child`.
"""

import asyncio
import contextlib
import json
import os
import pickle
import signal
import sys
import time
from array import array
from collections import OrderedDict
from collections.abc import Callable, Mapping
from enum import StrEnum
from functools import partial
from hashlib import sha256
from typing import Any

from mesh.domain.errors import (
    InvalidInput,
    MeshError,
    Refused,
    TornModel,
    Unavailable,
    UnsupportedModel,
)
from mesh.domain.limits import forget_oldest
from mesh.domain.reasons import RefusalReason
from mesh.domain.text import TextAssets
from mesh.domain.units import format_bytes
from mesh.domain.values import dataclass
from mesh.text.child import ERROR, HEAD, OVER_MEMORY, TOKENS, TOKENS_MAX, Request

CHILDREN_MAX = 2
"""Beside the one for what has been killed or slow."""
CODECS_MAX = 16
"""Each child keeps this many codecs."""
CODECS_BYTES_MAX = 64 << 20
"""The files tokenizer.json of those may take this much together; in memory they take some twenty
times as much.
"""
WAITING_MAX = 256
WAITING_OF_ONE_MAX = 32
"""Requests of one tenant for one model that wait for its turn."""
WAIT_S_MAX = 10.0
TRIAL_WAIT_S_MAX = 300.0
"""A controller that starts tries all of its models, one after the other."""
CALL_CPU_S = 1.0
CALL_CPU_S_PER_CHAR = 4e-6
"""Ten times what tokenising takes."""
BUILD_CPU_S = 1.0
BUILD_CPU_S_PER_BYTE = 5e-7
"""Five times what building takes."""
TOKENIZER_BYTES_MAX = 64 << 20
"""The largest that is known, Gemma's, has 33 MB."""
STRETCH_MAX = 20.0
"""Seconds that may pass for each second of processor time, of which a machine whose cores are all
busy gives little. What never ends uses up its processor time first.
"""
START_S_MAX = 30.0
GRAMMAR_CPU_S = 0.5
"""What a node builds of it holds up the first tokens of other grammars there."""
CALL_MEMORY_BYTES = 256 << 20
CALL_MEMORY_BYTES_PER_CHAR = 256
"""This is twice what tokenising takes."""
BUILD_MEMORY_BYTES = 128 << 20
BUILD_MEMORY_BYTES_PER_BYTE = 40
"""This is twice what building takes."""
REPLY_BYTES_MAX = 4 * TOKENS_MAX
SLOW_SHARE = 0.25
"""A call may take this share of the processor time; whoever takes more is served apart."""
APART_S = 600.0
KILLS_MAX = 2
"""In a row; then the model is refused for `HOLD_S`."""
HOLD_S = 60.0
IDLE_S = 5.0
"""Then the process for what is served apart ends."""
RECORDS_MAX = 4096
"""Tenants' models of which it is known that they were killed or slow."""
TRY = "try"
_WHOLE = (TRY, "vocabulary")
"""Methods that look at the whole vocabulary."""
_ENVIRONMENT = ("PATH", "LANG", "LC_ALL", "TZ", "LD_LIBRARY_PATH")
"""What a child sees of the variables: no key is among them."""


def codec_key(assets: TextAssets) -> bytes:
    """Alike for assets that make the same codec."""
    return sha256(pickle.dumps(assets)).digest()


@dataclass(frozen=True, slots=True, kw_only=True)
class Owner:
    """Whose model a request is about: `name` is what errors call it."""

    tenant: str
    name: str
    key: bytes
    """The key of the codec, or of the grammar."""
    tokenizer_bytes: int = 0


Assets = Callable[[], TextAssets]
"""A model's, for a child that has to build its codec: they are too large to be kept at hand."""


class _Kind(StrEnum):
    """What a child is for."""

    TEXT = "text"
    GRAMMAR = "grammar"
    APART = "apart"
    """Trials, and what has been killed or slow."""


class OverLimit(Exception):
    """A child went beyond a limit; says which, and its number."""


@dataclass(eq=False, slots=True)
class _Job:
    owner: Owner
    assets: Assets | None
    method: str
    arguments: tuple[Any, ...]
    chars: int
    answer: "asyncio.Future[Any]"

    @property
    def whose(self) -> tuple[str, bytes]:
        return self.owner.tenant, self.owner.key


@dataclass(slots=True)
class _Record:
    """What is known of a tenant's model that was killed or slow."""

    apart_until_s: float = 0.0
    kills: int = 0
    held_until_s: float = 0.0
    why: str = ""


class _Child:
    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.codecs: OrderedDict[bytes, int] = OrderedDict()
        """The size of tokenizer.json of those that it has built, the latest used last."""

    async def ask(self, request: Request) -> tuple[Any, float]:
        """The answer, and the processor time that it took. Raises MeshError as the child did,
        OverLimit where it went beyond a limit, which ends it but for that of memory.
        """
        wall_s = request.cpu_s * STRETCH_MAX
        try:
            async with asyncio.timeout(wall_s):
                kind, payload, cpu_s = await self._exchanged(pickle.dumps(request))
        except TimeoutError:
            await self.end()
            raise OverLimit(f"took more than {wall_s:.1f} s, which is the limit") from None
        except (EOFError, OSError):
            await self.end()
            raise OverLimit(self._fate(request)) from None
        if kind == OVER_MEMORY:
            raise OverLimit(_over_memory(request))
        if kind == ERROR:
            raise _error(json.loads(payload))
        return array("I", payload) if kind == TOKENS else json.loads(payload), cpu_s

    async def build(self, key: bytes, assets: Assets) -> None:
        """A codec, unless it has that one. Raises as `ask` does."""
        if key not in self.codecs:
            # The registry waits for its write under way, which a disk may take seconds for.
            made_of, forgotten = await asyncio.to_thread(assets), []
            size = len(made_of.tokenizer_json)
            while self.codecs and (
                len(self.codecs) >= CODECS_MAX
                or sum(self.codecs.values()) + size > CODECS_BYTES_MAX
            ):
                forgotten.append(self.codecs.popitem(last=False)[0])
            await self.ask(
                Request(
                    method="build",
                    arguments=(made_of,),
                    codec=key,
                    forgotten=tuple(forgotten),
                    cpu_s=BUILD_CPU_S + BUILD_CPU_S_PER_BYTE * size,
                    memory_bytes=BUILD_MEMORY_BYTES + BUILD_MEMORY_BYTES_PER_BYTE * size,
                )
            )
            self.codecs[key] = size
        self.codecs.move_to_end(key)

    async def end(self) -> None:
        _kill(self.process)
        await self.process.wait()

    async def _exchanged(self, frame: bytes) -> tuple[bytes, bytes, float]:
        source, sink = self.process.stdout, self.process.stdin
        assert source is not None
        assert sink is not None
        sink.write(len(frame).to_bytes(4, "little") + frame)
        await sink.drain()
        size, kind, cpu_s = HEAD.unpack(await source.readexactly(HEAD.size))
        if size > REPLY_BYTES_MAX:
            raise OSError(f"a reply of {size} bytes")
        return kind, await source.readexactly(size), cpu_s

    def _fate(self, request: Request) -> str:
        if self.process.returncode == -signal.SIGPROF:
            return f"took more than {request.cpu_s:.1f} s of processor time, which is the limit"
        if self.process.returncode == -signal.SIGABRT:  # an allocation that failed outside Python
            return _over_memory(request)
        return f"ended the process that it ran in (exit code {self.process.returncode})"


@dataclass(eq=False, slots=True)
class _Place:
    """Where one request at a time is served."""

    kind: _Kind
    child: _Child | None = None
    job: _Job | None = None
    last: tuple[str, bytes] | None = None
    """The owner whose request was served here last."""
    expiry: asyncio.TimerHandle | None = None

    @property
    def running(self) -> _Child | None:
        return self.child if self.child and self.child.process.returncode is None else None


class TextPool:
    """For one event loop. Nothing is started before the first request."""

    def __init__(self, *, children_max: int = CHILDREN_MAX) -> None:
        self._waiting: list[_Job] = []
        kinds = [*[_Kind.TEXT] * children_max, _Kind.GRAMMAR, _Kind.APART]
        self._places = [_Place(kind) for kind in kinds]
        self._serving: set[asyncio.Task[None]] = set()
        self._records: OrderedDict[tuple[str, bytes], _Record] = OrderedDict()
        self._served: OrderedDict[object, int] = OrderedDict()
        """When tenants, and models, were served last, as a number that counts up."""
        self._count = 0
        self._closed = False

    async def call(
        self,
        owner: Owner,
        assets: Assets | None,
        method: str,
        *arguments: Any,
        chars: int = 0,
    ) -> Any:
        """What the method of the codec gives: token ids as an array, else JSON's values; see
        `child`. `chars` is how much there is to work on.

        Raises what the codec raises, InvalidInput beyond a limit, Refused for what finds no room in
        the queue or waits for too long, and for a model that is on hold.
        """
        try:
            return await self._done(_Job(owner, assets, method, arguments, chars, _future()))
        except OverLimit as over:
            if assets is None:
                raise InvalidInput(f"{owner.name} {over}", field=owner.name) from None
            raise InvalidInput(
                f"what the model {owner.name} makes of this text {over}",
                hint="a shorter text may do; else its tokenizer or its chat template is at fault",
            ) from None

    async def tried(self, owner: Owner, assets: TextAssets) -> Mapping[str, Any]:
        """Build a codec and try it: what is known of it then; see `child`.

        Raises UnsupportedModel where it went beyond a limit, and what building raises.
        """
        size = len(assets.tokenizer_json)
        if size > TOKENIZER_BYTES_MAX:
            raise UnsupportedModel(
                f"the tokenizer.json of {owner.name} has {size} bytes; at most "
                f"{TOKENIZER_BYTES_MAX} are taken"
            )
        try:
            tried = await self._done(_Job(owner, lambda: assets, TRY, (assets,), 0, _future()))
        except OverLimit as over:
            raise UnsupportedModel(
                f"the tokenizer and the chat template of {owner.name} were tried on a few short "
                f"texts, which {over}",
                hint="mend tokenizer.json or the chat template, and deploy it again",
            ) from None
        if not isinstance(tried, dict):
            raise UnsupportedModel(f"the trial of {owner.name} gave no answer that can be meant")
        return tried

    async def close(self) -> None:
        """Kill the children; whoever waits is refused."""
        self._closed = True
        for task in self._serving:
            task.cancel()
        await asyncio.gather(*self._serving, return_exceptions=True)
        for job in self._waiting:
            _fail(job, _stopping())
        self._waiting.clear()
        for place in self._places:
            await self._end(place)

    async def _done(self, job: _Job) -> Any:
        if self._closed:
            raise _stopping()
        if held := self._held(job):
            raise held
        same = sum(one.whose == job.whose for one in self._waiting)
        if len(self._waiting) >= WAITING_MAX or same >= WAITING_OF_ONE_MAX:
            raise Refused(
                f"{len(self._waiting)} texts wait for a process, {same} of them for "
                f"{job.owner.name}; the limits are {WAITING_MAX} and {WAITING_OF_ONE_MAX}",
                reason=RefusalReason.QUEUE_FULL,
                retry_after_s=1.0,
            )
        self._waiting.append(job)
        wait_s = TRIAL_WAIT_S_MAX if job.method == TRY else WAIT_S_MAX
        expiry = asyncio.get_running_loop().call_later(wait_s, self._expire, job, wait_s)
        self._begin()
        try:
            return await job.answer
        finally:
            expiry.cancel()
            if job in self._waiting:
                self._waiting.remove(job)

    def _expire(self, job: _Job, wait_s: float) -> None:
        if job in self._waiting:
            message = f"no process was free within {wait_s:g} s for {job.owner.name}"
            _fail(job, Refused(message, reason=RefusalReason.QUEUE_TIMEOUT, retry_after_s=1.0))

    def _begin(self) -> None:
        """Serve what can be served now."""
        for kind in _Kind if self._waiting else ():
            while (free := [p for p in self._places if p.kind is kind and p.job is None]) and (
                job := self._next(kind)
            ):
                self._waiting.remove(job)
                place = min(free, key=partial(_nearness, job))
                place.job = job
                task = asyncio.create_task(self._serve(place, job))
                self._serving.add(task)
                task.add_done_callback(self._serving.discard)

    def _next(self, kind: _Kind) -> _Job | None:
        """Who has waited for longest, of the tenant, and then of the model, that was served least
        lately. No model is served twice at once, and no tenant everywhere at once.
        """
        places = [place for place in self._places if place.kind is kind]
        running = [place.job for place in places if place.job]
        busy = {job.whose for job in running}
        most = max(1, len(places) - 1)
        fit = [
            job
            for job in self._waiting
            if self._kind(job) is kind
            and job.whose not in busy
            and (
                not job.owner.tenant
                or sum(one.owner.tenant == job.owner.tenant for one in running) < most
            )
        ]
        if not fit:
            return None
        served = self._served
        job = min(fit, key=lambda one: (served.get(one.whose[0], 0), served.get(one.whose, 0)))
        self._count += 1
        for who in (job.whose[0], job.whose):
            served[who] = self._count
            served.move_to_end(who)
        forget_oldest(served, RECORDS_MAX)
        return job

    def _kind(self, job: _Job) -> _Kind:
        if job.assets is None:
            return _Kind.GRAMMAR
        record = self._records.get(job.whose)
        apart = record is not None and record.apart_until_s > _now_s()
        return _Kind.APART if apart or job.method == TRY else _Kind.TEXT

    async def _serve(self, place: _Place, job: _Job) -> None:
        try:
            result, cpu_s = await self._answer(place, job)
        except OverLimit as over:
            self._note_over(job, over)
            _fail(job, over)
        except MeshError as error:
            _fail(job, error)
        except asyncio.CancelledError:
            _fail(job, _stopping())
            raise
        except Exception as error:
            # What a child answers is not to be trusted: it may be anything.
            await self._end(place)
            _fail(job, MeshError(f"a text process failed: {type(error).__name__}: {error}"))
        else:
            if job.method != TRY and cpu_s > SLOW_SHARE * _cpu_s(job):
                self._note(job).apart_until_s = _now_s() + APART_S
            elif job.whose in self._records:
                self._records[job.whose].kills = 0
            if not job.answer.done():
                job.answer.set_result(result)
        finally:
            place.job = None
        if place.kind is _Kind.APART:
            loop = asyncio.get_running_loop()
            place.expiry = loop.call_later(IDLE_S, self._end_idle, place)
        self._begin()

    async def _answer(self, place: _Place, job: _Job) -> tuple[Any, float]:
        if place.expiry is not None:
            place.expiry.cancel()
        if place.running is None or (place.kind is _Kind.APART and place.last != job.whose):
            await self._end(place)
            place.child = await _started()
        place.last = job.whose
        child = place.child
        assert child is not None
        if job.assets is not None:
            await child.build(job.owner.key, job.assets)
        build_bytes = job.owner.tokenizer_bytes if job.method in _WHOLE else 0
        return await child.ask(
            Request(
                method=job.method,
                arguments=job.arguments,
                codec=job.owner.key if job.assets is not None else b"",
                cpu_s=_cpu_s(job),
                memory_bytes=CALL_MEMORY_BYTES
                + CALL_MEMORY_BYTES_PER_CHAR * job.chars
                + BUILD_MEMORY_BYTES_PER_BYTE * build_bytes,
            )
        )

    def _held(self, job: _Job) -> Refused | None:
        record = self._records.get(job.whose)
        left_s = 0.0 if record is None else record.held_until_s - _now_s()
        if record is None or left_s <= 0:
            return None
        return Refused(
            f"{job.owner.name} is on hold: {record.kills} times in a row, what it makes of a text "
            f"{record.why}",
            reason=RefusalReason.TEXT_ON_HOLD,
            retry_after_s=left_s,
        )

    def _note_over(self, job: _Job, over: OverLimit) -> None:
        if job.method == TRY:
            return
        record, now_s = self._note(job), _now_s()
        record.apart_until_s, record.kills, record.why = (
            now_s + APART_S,
            record.kills + 1,
            str(over),
        )
        if record.kills >= KILLS_MAX:
            record.held_until_s = now_s + HOLD_S
            for other in [one for one in self._waiting if one.whose == job.whose]:
                if held := self._held(other):
                    _fail(other, held)

    def _note(self, job: _Job) -> _Record:
        record = self._records.setdefault(job.whose, _Record())
        self._records.move_to_end(job.whose)
        forget_oldest(self._records, RECORDS_MAX)
        return record

    def _end_idle(self, place: _Place) -> None:
        if place.job is None and place.running is not None:
            _kill(place.running.process)

    async def _end(self, place: _Place) -> None:
        if place.expiry is not None:
            place.expiry.cancel()
        if place.child is not None:
            await place.child.end()
        place.child = None


def _kill(process: asyncio.subprocess.Process) -> None:
    """Its own method would reap it beside asyncio's watcher, which loses its exit code then."""
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGKILL)


async def _started() -> _Child:
    """A child that waits for its first request. Raises Unavailable."""
    variables = {name: os.environ[name] for name in _ENVIRONMENT if name in os.environ}
    try:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-P", "-m", "mesh.text.child",
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
            env={**variables, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            cwd="/",
            start_new_session=True,
        )  # fmt: skip
    except OSError as error:
        raise Unavailable(f"no process can be started for texts: {error}") from error
    child = _Child(process)
    assert process.stdout is not None
    try:
        async with asyncio.timeout(START_S_MAX):
            await process.stdout.readexactly(HEAD.size)
    except (TimeoutError, EOFError) as error:
        await child.end()
        raise Unavailable(
            f"a process for texts did not begin within {START_S_MAX:.0f} s "
            f"(exit code {process.returncode})"
        ) from error
    except asyncio.CancelledError:
        await child.end()
        raise
    return child


def _nearness(job: _Job, place: _Place) -> int:
    """The least first: where the codec is, where a process runs, where one has to be started."""
    if place.running is None:
        return 2
    return 0 if job.owner.key in place.running.codecs else 1


def _cpu_s(job: _Job) -> float:
    if job.assets is None:
        return GRAMMAR_CPU_S + CALL_CPU_S_PER_CHAR * job.chars
    size = job.owner.tokenizer_bytes if job.method in _WHOLE else 0
    return CALL_CPU_S + CALL_CPU_S_PER_CHAR * job.chars + BUILD_CPU_S_PER_BYTE * size


def _over_memory(request: Request) -> str:
    return (
        f"took more than {format_bytes(request.memory_bytes)} of further memory, which is the limit"
    )


def _error(said: Mapping[str, str]) -> MeshError:
    """As the child has raised it; of errors that it has no business to raise, the words alone."""
    match said["error"]:
        case "InvalidInput":
            return InvalidInput(said["message"], hint=said["hint"], field=said["field"])
        case "TornModel":
            return TornModel(said["message"], hint=said["hint"])
        case "UnsupportedModel":
            return UnsupportedModel(said["message"], hint=said["hint"])
    return MeshError(said["message"], hint=said["hint"])


def _fail(job: _Job, error: Exception) -> None:
    if not job.answer.done():
        job.answer.set_exception(error)


def _stopping() -> Refused:
    return Refused("the controller is stopping", reason=RefusalReason.SHUTTING_DOWN)


def _future() -> "asyncio.Future[Any]":
    return asyncio.get_running_loop().create_future()


def _now_s() -> float:
    return time.monotonic()
