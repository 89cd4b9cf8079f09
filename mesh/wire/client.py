"""The client of a cell, for the command line and for programs: blocking calls, domain values.

Every failure is one of the error tree: what the controller raised, Unavailable when nobody answers
or a stream breaks, DeadlineExceeded when the caller's own time limit passed, InvalidInput for a
value that no message can hold. Safe to use from several threads.
"""

import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import TypeVar, cast

import grpc

from mesh.domain.actions import ReplyDone
from mesh.domain.deployment import DeploymentSpec
from mesh.domain.errors import DeadlineExceeded, InvalidInput, MeshError, Unavailable
from mesh.domain.ids import DeploymentName, NodeId, OperationId, RequestId
from mesh.domain.invocation import Invocation, InvocationEvent
from mesh.domain.text import TextAssets
from mesh.domain.usage import Usage, UsageBy, summed
from mesh.domain.values import replace
from mesh.domain.views import (
    Arrivals,
    CellEvent,
    CellStatus,
    DeploymentSnapshot,
    InstancePlan,
    NodeSnapshot,
    ProfileView,
    RequestSnapshot,
)
from mesh.runtime.link_life import LOOK_S
from mesh.v1 import control_pb2 as pb
from mesh.v1 import model_pb2
from mesh.v1.control_pb2_grpc import ControlStub
from mesh.v1.inference_pb2_grpc import InferenceStub
from mesh.wire.channel import dial_blocking, parse_address
from mesh.wire.codec import event_from_wire, from_wire, invocation_to_wire, to_wire, view_from_wire
from mesh.wire.credentials import credentials
from mesh.wire.errors import EndedCall, error_of, is_told
from mesh.wire.handshake import why_refused
from mesh.wire.leader import Look, look_blocking
from mesh.wire.resuming import CallMade, LeaderWatch, ResumedAnswer

Asked = TypeVar("Asked")
Answer = TypeVar("Answer")

LEADER_S_MAX = 5.0
"""Until one of several controllers leads."""
UNARY_S_MAX = 10.0
"""For a call that is answered from memory, unless its client is in a hurry."""


class Calls:
    """Calls to one controller, which the messages name by its address. `answer_s_max`: for a call
    that is answered from memory.
    """

    def __init__(self, address: str, answer_s_max: float = UNARY_S_MAX) -> None:
        self.address = address
        self._answer_s_max = answer_s_max

    def unary(self, call: "grpc.UnaryUnaryMultiCallable[Asked, Answer]", request: Asked) -> Answer:
        try:
            return call(request, timeout=self._answer_s_max)
        except grpc.RpcError as error:
            ended = cast(EndedCall, error)
            if ended.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
                raise Unavailable(
                    f"the controller at {self.address} did not answer within "
                    f"{self._answer_s_max:g} s",
                    hint="see its log; is the machine overloaded?",
                ) from error
            raise self._error_of(ended, started=False) from error

    def stream(
        self, call: "grpc.CallIterator[Answer]", *, timeout_s: float | None = None
    ) -> Iterator[Answer]:
        """The call's messages; the call is cancelled when the iterator is left early."""
        started = False
        try:
            for message in call:
                started = True
                yield message
        except grpc.RpcError as error:
            ended = cast(EndedCall, error)
            if ended.code() is grpc.StatusCode.DEADLINE_EXCEEDED and timeout_s is not None:
                raise DeadlineExceeded(
                    f"not done within {timeout_s:g} s, the time limit of the call",
                    hint="allow more time, or ask for fewer tokens",
                ) from error
            raise self._error_of(ended, started=started) from error
        finally:
            call.cancel()  # type: ignore[no-untyped-call]

    def _error_of(self, ended: EndedCall, *, started: bool) -> MeshError:
        if is_told(ended):
            return error_of(ended)
        code, details = ended.code(), ended.details() or ""
        # The first is a proxy's word where a controller died, the second gRPC's where one stops.
        if (code is grpc.StatusCode.INTERNAL and "RST_STREAM" in details) or (
            code is grpc.StatusCode.CANCELLED and details == "CANCELLED"
        ):
            code = grpc.StatusCode.UNAVAILABLE
        match code:
            case grpc.StatusCode.UNAVAILABLE if started:
                return Unavailable(
                    f"the controller at {self.address} went away while it answered",
                    hint="run the command again; see the controller's log",
                )
            case grpc.StatusCode.UNAVAILABLE:
                return why_refused(self.address, credentials().tls) or Unavailable(
                    f"no controller answers at {self.address}",
                    hint="start one with `mesh up`, or name another with --controller HOST:PORT",
                )
            case grpc.StatusCode.UNIMPLEMENTED:
                return Unavailable(
                    f"what answers at {self.address} is no controller of this version of mesh",
                    hint="check the address and the versions at both ends",
                )
            case grpc.StatusCode.RESOURCE_EXHAUSTED:
                return InvalidInput(f"the message is too large: {details}")
            case grpc.StatusCode.UNKNOWN | grpc.StatusCode.INTERNAL:
                return MeshError(
                    f"the controller at {self.address} failed: {details}",
                    hint="this is a fault of mesh; the controller's log has more",
                )
            case _:
                return error_of(ended)


M = TypeVar("M")
V = TypeVar("V")
Stream = Generator[V, None, None]
Progress = Callable[[str, float], None]
"""The client calls it with a phase in words and the share done, 0 to 1."""


class MeshClient:
    """Dials `HOST:PORT` when it is first used. A context manager; `close` ends every open call. A
    call that is answered from memory raises Unavailable after `answer_s_max`. Several addresses,
    with commas between, are those of one cell's controllers: it asks the one that leads. Raises
    InvalidInput for what is no address.
    """

    def __init__(self, address: str, *, answer_s_max: float = UNARY_S_MAX) -> None:
        self._addresses = [one.strip() for one in address.split(",")]
        for one in self._addresses:
            parse_address(one)
            if self._addresses.count(one) > 1:
                raise InvalidInput(f"{one} is named twice", hint="name each controller once")
        self._watch = LeaderWatch(self._addresses)
        self._channels = [dial_blocking(one) for one in self._addresses]
        """They connect when they are first used."""
        self._at = 0
        """Which of them led last."""
        self._calls = Calls(self._addresses[0], answer_s_max)

    def __enter__(self) -> "MeshClient":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        for channel in self._channels:
            channel.close()

    @property
    def _control(self) -> ControlStub:
        """The controller that leads, where there are several; the last one where none does."""
        until_s = time.monotonic() + LEADER_S_MAX
        while len(self._channels) > 1 and look_blocking(self._channels[self._at]) is not Look.LEADS:
            self._at = (self._at + 1) % len(self._channels)
            self._calls.address = self._addresses[self._at]
            if time.monotonic() > until_s:
                break
            if not self._at:
                time.sleep(LOOK_S)
        return ControlStub(self._channels[self._at])

    def deploy(self, spec: DeploymentSpec, progress: Progress | None = None) -> ReplyDone:
        """Deploy and wait until it is acknowledged; what the controller says of it.

        Leaving before that (an exception from `progress`, Ctrl-C) cancels the deployment.
        """
        with _writing("the deployment"):
            request = pb.DeployRequest(spec=to_wire(spec, model_pb2.DeploymentSpec))
        return self._done(self._control.Deploy(request), progress)

    def undo(self, name: DeploymentName, to: int | None = None) -> str:
        """Back to the revision that served before, or to that of a number; what the controller
        says of it. Raises NotFound where there is none.
        """
        with _writing("the name or the revision's number"):
            request = pb.UndoRequest(name=name, to=to)
        return self._operation(self._control.Undo(request), None)

    def delete(self, name: DeploymentName, progress: Progress | None = None) -> str:
        with _writing("the name"):
            request = pb.DeleteRequest(name=name)
        return self._operation(self._control.Delete(request), progress)

    def scale(
        self,
        name: DeploymentName,
        *,
        replicas_min: int | None = None,
        replicas_max: int | None = None,
        keep_alive_s: float | None = None,
        revision: int | None = None,
    ) -> str:
        """None leaves a limit as it is. With a `revision`, InvalidInput unless that serves."""
        with _writing("a scaling limit"):
            request = pb.ScaleRequest(
                name=name,
                replicas_min=replicas_min,
                replicas_max=replicas_max,
                keep_alive_s=keep_alive_s,
                revision=revision,
            )
        return self._operation(self._control.Scale(request), None)

    def load(self, name: DeploymentName) -> str:
        """Begin to load an instance; what the controller says of it in a word. Raises Unavailable
        where there is no room.
        """
        with _writing("the name"):
            request = pb.LoadRequest(name=name)
        return self._operation(self._control.Load(request), None)

    def unload(self, name: DeploymentName) -> str:
        """Its instances go, busy ones with their last request. Raises InvalidInput where a minimum
        keeps them.
        """
        with _writing("the name"):
            request = pb.UnloadRequest(name=name)
        return self._operation(self._control.Unload(request), None)

    def drain(self, node_id: NodeId, *, undo: bool = False) -> str:
        """No new work for a node; `undo` takes that back."""
        with _writing("the node's name"):
            request = pb.DrainRequest(node_id=node_id, undo=undo)
        return self._operation(self._control.Drain(request), None)

    def profile(
        self,
        name: DeploymentName,
        node_id: NodeId | None = None,
        progress: Progress | None = None,
        *,
        operators: bool = False,
        cores: tuple[int, ...] = (),
    ) -> str:
        """Measure the deployment's model and wait until its profile is stored; what the controller
        says of it in a word. None: on any node that has the model, or has room for it. `operators`:
        count what these take, too, and once more with each of these numbers of `cores`.

        Leaving before that (an exception from `progress`, Ctrl-C) cancels the measurement.
        """
        with _writing("a name"):
            request = pb.ProfileRequest(
                name=name, node_id=node_id, operators=operators, cores=cores
            )
        return self._operation(self._control.Profile(request), progress)

    def profiles(self, name: DeploymentName) -> tuple[ProfileView, ...]:
        """What the cell knows of the iteration times of the deployment's model, and on which
        nodes. Raises NotFound.
        """
        with _writing("the name"):
            request = pb.GetProfilesRequest(name=name)
        answer = self._calls.unary(self._control.GetProfiles, request)
        return tuple(view_from_wire(p, ProfileView) for p in answer.profiles)

    def plan(self, name: DeploymentName, calls: Arrivals | None = None) -> InstancePlan:
        """How many instances these calls need, or those that have come lately. Raises InvalidInput
        where nothing can be planned, or no plan keeps the SLO.
        """
        with _writing("the calls to plan for"):
            told = None if calls is None else to_wire(calls, pb.Arrivals)
            request = pb.GetPlanRequest(name=name, calls=told)
        return view_from_wire(self._calls.unary(self._control.GetPlan, request), InstancePlan)

    def get(self, name: DeploymentName) -> DeploymentSnapshot:
        """Raises NotFound."""
        with _writing("the name"):
            request = pb.GetDeploymentRequest(name=name)
        return view_from_wire(
            self._calls.unary(self._control.GetDeployment, request), DeploymentSnapshot
        )

    def list(self) -> tuple[DeploymentSnapshot, ...]:
        """All deployments, by name."""
        answer = self._calls.unary(self._control.ListDeployments, pb.ListDeploymentsRequest())
        return tuple(view_from_wire(d, DeploymentSnapshot) for d in answer.deployments)

    def nodes(self) -> tuple[NodeSnapshot, ...]:
        """All nodes, by id."""
        answer = self._calls.unary(self._control.ListNodes, pb.ListNodesRequest())
        return tuple(view_from_wire(n, NodeSnapshot) for n in answer.nodes)

    def requests(self) -> tuple[RequestSnapshot, ...]:
        """Those whose clients wait, the oldest first."""
        answer = self._calls.unary(self._control.ListRequests, pb.ListRequestsRequest())
        return tuple(view_from_wire(r, RequestSnapshot) for r in answer.requests)

    def cancel(self, request_id: RequestId) -> None:
        """Its client is told so. Raises NotFound for a request that is not open."""
        with _writing("the request's id"):
            request = pb.CancelRequest(request_id=request_id)
        self._calls.unary(self._control.Cancel, request)

    def step_down(self) -> None:
        """Have a controller that stands by lead. Raises Unavailable where there is none."""
        self._calls.unary(self._control.StepDown, pb.StepDownRequest())

    def tokenizer(self, name: DeploymentName) -> TextAssets:
        """The text assets of the deployment's model. Raises NotFound, and Unavailable while the
        model is being imported.
        """
        with _writing("the name"):
            request = pb.GetTokenizerRequest(name=name)
        return from_wire(self._calls.unary(self._control.GetTokenizer, request), TextAssets)

    def status(self) -> CellStatus:
        answer = self._calls.unary(self._control.GetStatus, pb.GetStatusRequest())
        return view_from_wire(answer, CellStatus)

    def usage(self, since_unix_s: float = 0.0, by: UsageBy | None = None) -> tuple[Usage, ...]:
        """That of the hours that had not ended by then. A controller of before `by` sums nothing;
        what it answers is summed here.
        """
        with _writing("the time"):
            request = pb.GetUsageRequest(since_unix_s=since_unix_s, by=by)
        answer = self._calls.unary(self._control.GetUsage, request)
        return summed((view_from_wire(usage, Usage) for usage in answer.usages), by)

    def report(self, since_s: float) -> str:
        """What the last seconds were like, as JSON."""
        with _writing("the time"):
            request = pb.GetReportRequest(since_s=since_s)
        return self._calls.unary(self._control.GetReport, request).report

    def watch(self, backlog: int = 0, follow: bool = False) -> Stream[CellEvent]:
        """The last `backlog` events, then with `follow` new ones as they happen."""
        with _writing("the backlog"):
            request = pb.WatchRequest(backlog=backlog, follow=follow)
        call = self._control.Watch(request)
        return _each(lambda event: view_from_wire(event, CellEvent), self._calls.stream(call))

    def invoke(
        self, invocation: Invocation, timeout_s: float | None = None
    ) -> Stream[InvocationEvent]:
        """The answer as it is generated, from Accepted to Finished. Raises Refused with the reason.
        Where its controller goes away it is asked for again, at each of the addresses, and goes on
        where it was; what broke it is raised after RESUME_S_MAX.

        The call begins at once. Closing the stream, or leaving it to be collected, cancels it.
        """
        answer = ResumedAnswer(invocation, self._invoke, self._addresses, timeout_s, self._watch)
        return answer.events()

    def _invoke(self, address: str, asked: Invocation, timeout_s: float | None) -> CallMade:
        """The call is made at once. One that goes on has a channel of its own: one that was refused
        would first back off for a while.
        """
        with _writing("the invocation"):
            request = invocation_to_wire(asked)
        at = self._watch.at
        first = asked.resume is None and address == self._addresses[at]
        channel = None if first else dial_blocking(address)
        call = InferenceStub(channel or self._channels[at]).Invoke(request, timeout=timeout_s)
        events = Calls(address).stream(call, timeout_s=timeout_s)
        return call, _each(event_from_wire, events, channel)

    def _operation(
        self, call: "grpc.CallIterator[pb.OperationEvent]", progress: Progress | None
    ) -> str:
        return self._done(call, progress).text

    def _done(
        self, call: "grpc.CallIterator[pb.OperationEvent]", progress: Progress | None
    ) -> ReplyDone:
        done = ReplyDone(operation_id=OperationId(""))
        for event in self._calls.stream(call):
            if event.WhichOneof("event") == "done":
                done = replace(done, message=event.done.message, amiss=event.done.amiss)
            elif event.WhichOneof("event") == "progress" and progress is not None:
                progress(event.progress.phase, event.progress.share)
        return done


def _each(
    read: Callable[[M], V], messages: Iterator[M], channel: grpc.Channel | None = None
) -> Stream[V]:
    """What they say. A channel of their own is closed at the end."""
    try:
        for message in messages:
            yield read(message)
    finally:
        if channel is not None:
            channel.close()


@contextmanager
def _writing(what: str) -> Iterator[None]:
    """Say which value no message can hold."""
    try:
        yield
    except UnicodeEncodeError as error:
        raise InvalidInput(
            f"{what} holds text that is not valid UTF-8", hint="check the encoding of your input"
        ) from error
    except (ValueError, TypeError) as error:
        raise InvalidInput(f"{what} holds a value out of range: {error}") from error
