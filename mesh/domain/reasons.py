"""Why things end, and kinds of them: low-cardinality enums, alike as messages, metric labels and
journal values.
"""

from collections.abc import Mapping
from enum import StrEnum


class RefusalReason(StrEnum):
    """Why an invocation is not served, or is given up before its last token."""

    UNKNOWN_DEPLOYMENT = "unknown_deployment"
    PROMPT_TOO_LONG = "prompt_too_long"
    QUEUE_FULL = "queue_full"
    QUEUE_TIMEOUT = "queue_timeout"
    NO_NODE = "no_node"
    MEMORY_FULL = "memory_full"
    FIRST_TOKEN_LATE = "first_token_late"
    """No place would give the first token in time (LLM-Mesh §5.3, case 1)."""
    DELAYS_RUNNING = "delays_running"
    """Every place that would do makes a running request late (case 2)."""
    TPOT_EXCEEDED = "tpot_exceeded"
    """No node could give all of its requests a token within their TPOT SLO any more (case 3)."""
    LOAD_FAILED = "load_failed"
    NODE_LOST = "node_lost"
    ENGINE_FAILED = "engine_failed"
    DEPLOYMENT_DELETED = "deployment_deleted"
    SHUTTING_DOWN = "shutting_down"
    CELL_AWAY = "cell_away"
    """No cell that serves its deployment can be asked: a front has found none that is led."""
    TEXT_ON_HOLD = "text_on_hold"
    """Its model's tokenizer or chat template went beyond its limits, again and again."""
    TENANT_LIMIT = "tenant_limit"
    """Its caller's tenant is at a limit of its own."""
    POLICY = "policy"
    """The cell's policy has a reason of its own, which the message tells."""


class Verdict(StrEnum):
    """What validation found; the three refusals are the three cases of LLM-Mesh §5.3, figure 6."""

    PASSES = "passes"
    FIRST_TOKEN_LATE = "first_token_late"
    """1: the request's own first token would come after its deadline."""
    DELAYS_RUNNING = "delays_running"
    """2: a token of another request would come after its deadline, on account of this one, or the
    iterations that are looked at do not tell that none would.
    """
    TPOT_EXCEEDED = "tpot_exceeded"
    """3: one decode of every instance of the node takes longer than the TPOT SLO allows."""
    POLICY = "policy"
    """The policy has a reason of its own (`mesh.policy.plans.Shortage`)."""


class ProfileSource(StrEnum):
    """How the iteration times of a model on a device are known, the least reliable way first."""

    ESTIMATE = "estimate"
    """The times were scaled from another profile, by bytes and shape."""
    OPERATORS = "operators"
    """The times were scaled from another profile, operator by operator."""
    ITERATIONS = "iterations"
    """An estimate, as the iterations of requests have shown it to be."""
    PRIMING = "priming"
    """A few sizes were timed after a load."""
    REST = "rest"
    """The times were surveyed in pieces while the node had nothing to do."""
    SURVEY = "survey"
    """The times were surveyed all at once: by `mesh profile`, or as tables that were given."""

    @property
    def rank(self) -> int:
        """Greater where the times are better known."""
        return tuple(ProfileSource).index(self)


class PolicyFaultKind(StrEnum):
    """What a policy did that the core put up with."""

    RAISED = "raised"
    NO_END = "no_end"
    """It yields without end."""
    NO_ANSWER = "no_answer"
    """What it answers cannot be meant."""
    TOOK_LONG = "took_long"
    NOT_IN_BOOKS = "not_in_books"
    """A plan that the books do not allow: what it is about has gone, or may not go."""
    NO_CAPABILITY = "no_capability"
    """A plan that no engine of this cell can carry out."""


class FinishReason(StrEnum):
    """Why a request has no further token. STOP covers end-of-sequence tokens and stop strings."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    FAILED = "failed"


class DeviceKind(StrEnum):
    """What a node computes on."""

    CPU = "cpu"
    GPU = "gpu"


class OperationKind(StrEnum):
    """What an operator asked for."""

    DEPLOY = "deploy"
    DELETE = "delete"
    SCALE = "scale"
    PROFILE = "profile"
    ROLLOUT = "rollout"
    """A change that needs no import: of what serves, or back to an earlier revision."""


_REMEDIES: Mapping[RefusalReason, str] = {
    RefusalReason.UNKNOWN_DEPLOYMENT: "`mesh get` lists the deployments",
    RefusalReason.PROMPT_TOO_LONG: "shorten the prompt; spec.context_tokens_max may be raised as "
    "far as the model allows",
    RefusalReason.QUEUE_FULL: "send fewer calls at once, or let more instances share them: "
    "spec.scaling.replicas_max, more nodes",
    RefusalReason.QUEUE_TIMEOUT: "`mesh status` shows what its instances are busy with; more of "
    "them need spec.scaling.replicas_max, or another node",
    RefusalReason.NO_NODE: "`mesh nodes` shows those that there are, `mesh node --join` starts one",
    RefusalReason.MEMORY_FULL: "`mesh top` shows who holds the memory; more of it needs another "
    "node, or one with more --memory",
    RefusalReason.FIRST_TOKEN_LATE: "a longer spec.slo.ttft_s, an instance that stays loaded "
    "(spec.scaling.replicas_min) or another node would do",
    RefusalReason.DELAYS_RUNNING: "its nodes are busy with calls that came before it; another node "
    "would do",
    RefusalReason.TPOT_EXCEEDED: "its nodes have no time left for further answers; another node or "
    "a longer spec.slo.tpot_s would do",
    RefusalReason.LOAD_FAILED: "`mesh logs` shows the loads that failed; where one lacked memory, "
    "lower spec.context_tokens_max or give its node more --memory",
    RefusalReason.NODE_LOST: "`mesh nodes` shows whether its node is back, `mesh logs` what became "
    "of it",
    RefusalReason.ENGINE_FAILED: "`mesh logs` shows what happened on its node",
    RefusalReason.DEPLOYMENT_DELETED: "`mesh deploy` brings it back",
    RefusalReason.TEXT_ON_HOLD: "its tokenizer or its chat template is at fault: mend it, and "
    "deploy it again",
    RefusalReason.TENANT_LIMIT: "whoever operates the cell may raise it: `mesh key limit`",
    RefusalReason.POLICY: "the policy of the cell has it so; whoever operates the cell chose it",
    RefusalReason.SHUTTING_DOWN: "call again once the controller has started",
    RefusalReason.CELL_AWAY: "see that the controllers of its cell run; the front's log tells "
    "which cells are away; spec.cells: 2 has another one serve it, too",
}


def hint_for(reason: RefusalReason, retry_after_s: float = 0.0) -> str:
    """One line. `retry_after_s` above 0: a retry may help after so many seconds."""
    remedy = _REMEDIES[reason]
    if retry_after_s <= 0:
        return remedy
    if reason is RefusalReason.LOAD_FAILED:
        # The next load may well fail as the last ones did: what mends it comes first.
        return f"{remedy}; mesh loads it again in {retry_after_s:.1f} s"
    return f"try again in {retry_after_s:.1f} s; {remedy}"
