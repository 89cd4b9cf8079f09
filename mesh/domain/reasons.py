"""Why things end, and kinds of them: low-cardinality enums, alike as messages, metric labels and
journal values.
"""

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


class FinishReason(StrEnum):
    """Why a request has no further token. STOP covers end-of-sequence tokens and stop strings."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    FAILED = "failed"


class TurnRule(StrEnum):
    """Which instance of a node computes next."""

    HEADROOM = "headroom"
    """The one whose request can be delayed least (LLM-Mesh §5.1)."""
    FIRST_COME = "first_come"
    """The one with the oldest request."""
    ALTERNATE = "alternate"
    """The one whose last turn is longest ago: equal shares of the node."""


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
