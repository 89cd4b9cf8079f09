"""Where the time to a lone first token goes: hop by hop, by the journals of a cell's two cores.

Client, controller and node are on one machine, so that their monotonic clocks are one. Between two
moments that are kept, everything counts: threads that wake up, gRPC, the text. Writing journals is
part of it, as an operator who keeps them has it.
"""

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median

from mesh.domain.events import InvokeRequested, NodeReported
from mesh.domain.ids import RequestId
from mesh.domain.messages import SubmitRequest, TokensReport
from mesh.domain.node_events import CommandReceived, StepFinished
from mesh.evaluation.load_client import Answer
from mesh.runtime.journal import Decision, read_journal

HOPS = (
    "client to the controller's core",
    "controller's core to the node's",
    "node's core to the iteration",
    "the iteration",
    "iteration to the controller's core",
    "controller's core to the client",
)


def hops_ms(controller: Path, node: Path, answers: Sequence[Answer]) -> Mapping[str, float]:
    """Medians over the answers, each of one token to a request that was alone, in the order of the
    way. Raises InvalidInput for what is no journal, KeyError where one lacks an answer's request.
    """
    asked, came, _ = _moments(read_journal(controller)[1])
    given, computed, took_s = _moments(read_journal(node)[1])
    ways = []
    for answer in answers:
        assert answer.request_id is not None
        request_id = answer.request_id
        begun_s = computed[request_id] - took_s[request_id]
        moments = (
            *(answer.sent_s, asked[request_id], given[request_id], begun_s),
            *(computed[request_id], came[request_id], answer.sent_s + answer.tokens_s[0]),
        )
        ways.append([1e3 * (b - a) for a, b in pairwise(moments)])
    return dict(zip(HOPS, map(median, zip(*ways, strict=True)), strict=True))


_Moments = dict[RequestId, float]


def _moments(decisions: Iterable[Decision]) -> tuple[_Moments, _Moments, _Moments]:
    """When a core was told of each request, when of its first token, and how long that was computed
    where the core is a node's.
    """
    asked: _Moments = {}
    came: _Moments = {}
    took_s: _Moments = {}
    for decision in decisions:
        match decision.event:
            case InvokeRequested(request=request):
                asked[request.request_id] = decision.now_s
            case CommandReceived(command=SubmitRequest(order=order)):
                asked[order.request.request_id] = decision.now_s
            case NodeReported(report=TokensReport(outputs=outputs)):
                for output in outputs:
                    came.setdefault(output.request_id, decision.now_s)
            case StepFinished(result=result):
                for output in result.outputs:
                    came.setdefault(output.request_id, decision.now_s)
                    took_s.setdefault(output.request_id, result.elapsed_s)
    return asked, came, took_s
