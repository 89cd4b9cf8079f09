"""Sends a plan's calls to a cell, and makes results of the answers.

It owns the results of one replay. Prompts are made as their calls come near, so that a long trace
of long prompts never is in memory. Before: `replay_plan`, `cell`. After: `numbers`.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence

from mesh.domain.ids import DeploymentName
from mesh.domain.slo import Slo
from mesh.domain.views import DeploymentSnapshot
from mesh.evaluation import load_client
from mesh.evaluation.load_client import CALL_S_MAX, OPEN_MAX, Answer, outcome_of, send
from mesh.evaluation.replay.results import CallResult
from mesh_workloads.prompts import Prompts
from mesh_workloads.replay_plan import Call, ReplayPlan


class Replaying:
    """`ended` is told each result as it comes; what it raises ends the replay."""

    def __init__(
        self,
        plan: ReplayPlan,
        deployments: Mapping[str, DeploymentSnapshot],
        prompts: Mapping[str, Prompts],
        ended: Callable[[CallResult], None] = lambda result: None,
    ) -> None:
        self._plan = plan
        self._slos: dict[str, Slo] = {name: view.spec.slo for name, view in deployments.items()}
        self._prompts = prompts
        self._ended = ended
        self._start_s = 0.0
        self._results: dict[int, CallResult] = {}

    def run(
        self,
        address: str,
        *,
        call_s_max: float = CALL_S_MAX,
        open_max: int = OPEN_MAX,
        watch: Callable[[float], None] = lambda at_s: None,
    ) -> None:
        """To the end of the last call. What `watch` raises cancels the open ones; their results
        are there then as the others' are.
        """
        send(
            address,
            self._calls(),
            self._take,
            call_s_max=call_s_max,
            open_max=open_max,
            started=self._started,
            watch=watch,
        )

    @property
    def results(self) -> Sequence[CallResult]:
        """The results so far, in the order of the calls."""
        return [self._results[number] for number in sorted(self._results.copy())]

    def _started(self, start_s: float) -> None:
        self._start_s = start_s

    def _calls(self) -> Iterator[load_client.Call]:
        for call in self._plan.calls:
            name = call.deployment
            yield as_sent(call, self._slos[name], self._prompts[name], forced=self._plan.forced)

    def _take(self, number: int, call: load_client.Call, answer: Answer) -> None:
        result = result_of(self._plan.calls[number], call, answer, self._start_s)
        self._results[number] = result
        self._ended(result)


def as_sent(planned: Call, slo: Slo, prompts: Prompts, *, forced: bool) -> load_client.Call:
    """With its prompt, and what its caller expects."""
    return load_client.Call(
        at_s=planned.at_s,
        deployment=DeploymentName(planned.deployment),
        slo=slo,
        prompt_tokens=prompts.prompt(planned.number, planned.input_tokens),
        output_tokens=planned.output_tokens,
        forced=forced,
    )


def result_of(planned: Call, call: load_client.Call, answer: Answer, start_s: float) -> CallResult:
    """`start_s` is the replay's start, on the clock of the answer's sending."""
    return CallResult(
        call=planned,
        outcome=outcome_of(call, answer, start_s),
        late_s=answer.lag_s,
        failed=answer.failed,
    )
