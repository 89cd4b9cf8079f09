"""Whether a request may join a loaded instance for which it has room: what the policy says of it.

What an instance has refused is remembered and not validated again. Before: `queueing`, and
`cold_starts` where the policy would rather start an instance. After: `submitting`.
"""

from mesh.core.controller.instances.node_schedule import Forecast
from mesh.core.controller.instances.prefixes import cached_tokens
from mesh.core.controller.instances.pricing import Price
from mesh.core.controller.requests.fairness import must_give_way
from mesh.core.controller.state.context import EventContext
from mesh.core.controller.state.deployment import DeploymentEntry
from mesh.core.controller.state.instance import InstanceEntry
from mesh.core.controller.state.request import RequestEntry
from mesh.domain.reasons import Verdict
from mesh.policy.plans import Plan


def in_time(
    ctx: EventContext,
    entry: DeploymentEntry,
    plan: Plan,
    instance: InstanceEntry,
    request: RequestEntry,
) -> bool:
    """Whether the policy lets the request join there; if not, the request knows why. What was
    promised with the load was tested then, and others with it in mind, unless by an estimate that
    the first of them is to try out.
    """
    promised = request.waits_for is instance
    if promised and instance.profile and instance.profile.measured:
        return True

    late, node = request.accepted, instance.node
    price = _Remembered(ctx, plan, entry, node, instance, request, late=late)
    verdict = price.verdict()
    if verdict is Verdict.PASSES:
        return True
    request.refusals.note(verdict)
    return False


class _Remembered(Price):
    """What has refused the request, or one that was no longer, is not validated again."""

    def validate(self) -> Forecast:
        ctx, instance, request = self.ctx, self.instance, self.request
        assert instance is not None
        assert request is not None
        known = _known_refusal(ctx, instance, request)
        if known is not None:
            return Forecast(verdict=known)
        ctx.note_validation(self.node)
        forecast = self.forecast()
        if forecast.verdict is not Verdict.PASSES:
            left = request.tokens - cached_tokens(instance, request)
            ctx.cell.refusals.note_refused(instance, request, left, forecast.verdict)
            care = instance.node.rule.overestimate
            if forecast.in_time_as_predicted(request.due_s, ctx.now_s, care):
                request.refusals.note_in_time_as_predicted()
        return forecast


def _known_refusal(
    ctx: EventContext, instance: InstanceEntry, request: RequestEntry
) -> Verdict | None:
    """A refusal that is known without a validation: an earlier request has to be let through, or
    the instance has refused one that was no longer; see `state.refusals`.
    """
    if must_give_way(ctx, instance.node, request):
        return Verdict.DELAYS_RUNNING
    left = request.tokens - cached_tokens(instance, request)
    verdict = ctx.cell.refusals.why_refuses(instance, request, left)
    if verdict is Verdict.TPOT_EXCEEDED:
        # Counts as one all the same: an event must not go through every full instance of a cell.
        ctx.note_validation()
    return verdict
