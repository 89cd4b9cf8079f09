"""What a refused caller, or the operator of its cell, can do about it: a line for each reason.

`Refused` takes its hint from here unless it is given a better one, so that the command line and
other clients on the wire are told the same. Before: whoever refuses. After: people.
"""

from collections.abc import Mapping

from mesh.domain.reasons import RefusalReason

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
