"""Every error that mesh raises on purpose, in one tree.

    MeshError
    ├── InvalidInput          what the caller wrote cannot be meant (exit code 2)
    ├── NotFound              no such deployment, node, request or file
    ├── AlreadyExists         the name is taken
    ├── Unauthenticated       a key is wanted, and none was given, or none that is known
    ├── Forbidden             the key is of a role that may not do this
    ├── Refused               an invocation that will not be served; carries a RefusalReason
    ├── Cancelled             the caller went away or asked to stop
    │   └── DeadlineExceeded  the time limit that it gave has passed
    ├── Unavailable           a controller, node or network that cannot be reached now
    │   └── StandsBy          another controller leads, or none does now
    ├── StorageError          the state folder or model store cannot be read or written
    │   ├── LaterSchema       a later mesh has written the registry
    │   └── Unreached         the registry's database cannot be reached, or not be written to now
    ├── ModelError            a model that cannot be imported or loaded
    │   ├── UnknownSource     a source scheme that mesh does not know
    │   ├── TornModel         a truncated or corrupt file
    │   └── UnsupportedModel  an architecture, tensor type or tokenizer that mesh does not run
    └── EngineError           the engine failed while it loaded, resized or stepped
        └── OutOfMemory       it did so for want of memory

A message says what happened, to which id, and the numbers compared; the hint says what to do next.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from mesh.domain.reasons import RefusalReason, hint_for

HOME_HINT = "choose a state folder that you may write with --home or MESH_HOME"


class MeshError(Exception):
    """An expected failure. `message` is one line; `hint` is one line or empty."""

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


class InvalidInput(MeshError):
    """What the caller wrote cannot be meant: YAML, a flag, a prompt, a limit. `field` names what is
    wrong in the call, where it is one thing.
    """

    def __init__(self, message: str, *, hint: str = "", field: str = "") -> None:
        super().__init__(message, hint=hint)
        self.field = field


class NotFound(MeshError):
    """The named deployment, node, request or file does not exist."""


class AlreadyExists(MeshError):
    """The name is taken by something else."""


class Unauthenticated(MeshError):
    """A key is wanted, and none was given, or one that is unknown, expired or revoked."""


class Forbidden(MeshError):
    """The key is of a role that may not do this."""


class Refused(MeshError):
    """An invocation is refused at once; `retry_after_s` is 0 when a retry cannot help. Unless it is
    given, the hint is what helps against the reason.
    """

    def __init__(
        self, message: str, *, reason: RefusalReason, retry_after_s: float = 0.0, hint: str = ""
    ) -> None:
        super().__init__(message, hint=hint or hint_for(reason, retry_after_s))
        self.reason = reason
        self.retry_after_s = retry_after_s


class Cancelled(MeshError):
    """The caller went away, or asked to stop."""


class DeadlineExceeded(Cancelled):
    """The time limit that the caller gave has passed."""


class Unavailable(MeshError):
    """A controller, a node or the network cannot be reached now; a retry may help."""


class StandsBy(Unavailable):
    """Another controller of the cell leads, or none does now."""


class StorageError(MeshError):
    """The state folder or the model store cannot be read or written."""


class LaterSchema(StorageError):
    """A later mesh has written the registry."""


class Unreached(StorageError):
    """The database cannot be reached, or takes no writes of this controller now."""


class ModelError(MeshError):
    """A model cannot be imported or loaded."""


class UnknownSource(ModelError):
    """The source's scheme is none of those that mesh knows."""


class TornModel(ModelError):
    """A file of the model is truncated or corrupt."""


class UnsupportedModel(ModelError):
    """The architecture, tensor type or tokenizer is not one that mesh runs."""


class EngineError(MeshError):
    """An engine failed while it loaded, resized or stepped an instance."""


class OutOfMemory(EngineError):
    """An engine failed for want of memory."""


@contextmanager
def system_errors(kind: type[MeshError], what: str, hint: str) -> Iterator[None]:
    """An OSError of the block is raised as `kind`: what failed, and why by the system's words."""
    try:
        yield
    except OSError as error:
        raise kind(f"{what}: {(error.strerror or str(error)).lower()}", hint=hint) from error
