"""A result as entries of locust's own statistics: they reach its table, CSV, page and JSON alike.

A call's entry has its whole time, its output tokens as the size, and refusals and failures by
reason. Beside it stand entries of TTFT, of TPOT, and two of the SLO, whose failures are the calls
that missed it; these are no requests, leave locust's total alone, and are of the calls that
`numbers` judges, too. Before: `session`.
"""

from locust.env import Environment

from mesh.evaluation.replay.results import CallResult

CALL, TTFT, TPOT = "call", "TTFT", "TPOT"
SLO_MEAN, SLO_EACH = "SLO mean", "SLO each"
"""TTFT and the mean TPOT in time; every token in time. Load time granted to both."""


class NotServed(Exception):
    """Why a call has no whole answer, without anything that differs from call to call."""


def log(environment: Environment, result: CallResult) -> None:
    outcome = result.outcome
    why = f"refused: {result.refused}" if result.refused else f"failed: {result.failed or 'torn'}"
    environment.events.request.fire(
        request_type=CALL,
        name=outcome.deployment,
        response_time=1000 * (outcome.ended_s - outcome.arrival_s),
        response_length=len(outcome.tokens_s),
        context={},
        exception=None if result.finished else NotServed(why),
    )
    if not result.judged:
        return
    for kind, seconds in ((TTFT, outcome.ttft_s), (TPOT, outcome.tpot_s)):
        if seconds is not None:
            environment.stats.get(outcome.deployment, kind).log(round(1000 * seconds), 0)
    for kind, met in ((SLO_MEAN, outcome.met_in_the_mean), (SLO_EACH, outcome.met)):
        entry = environment.stats.get(outcome.deployment, kind)
        entry.log(None, 0)  # type: ignore[arg-type]
        if not met:
            entry.log_error(None)
