"""What is measured of every engine: starts, from where, and the parts of the time that they took.

A start is a request to a model that is not there, or not all of it, up to its first token by the
caller's clock; a warm one comes right after another. Before: `cell` and `peers`. After: `report`.
"""

from dataclasses import dataclass, field
from enum import StrEnum

from mesh.domain.ids import DeploymentName

PROMPT = tuple(range(100, 127))
CONTEXT_TOKENS = 256
THREADS = 2
WARM_CALLS = 3
"""In a row, after one that makes it warm."""


class Engine(StrEnum):
    MESH = "mesh"
    GENAI = "openvino-genai"
    LLAMA_CPP = "llama.cpp"


class Tier(StrEnum):
    """From where a start comes, the nearest first."""

    WARM = "warm"
    RESIDENT = "resident"
    """The model is loaded, but has no KV cache: it was parked after its keep-alive."""
    HOST = "host"
    """What was compiled is in memory, for an instance of another deployment of the model."""
    CACHED = "cached"
    """No compile is needed (mesh: prepared; GenAI: by its model cache; llama.cpp has none), and all
    files are in the page cache."""
    STORED = "stored"
    """So it is, and none is."""
    COMPILED = "compiled, cached"
    COMPILED_STORED = "compiled, stored"


class Part(StrEnum):
    """The parts of mesh's time, one after the other."""

    QUEUE = "queue"
    """Until the node has the order to load, or, where nothing is loaded, the request."""
    READ = "read"
    """Checks, and mapping files; of a shared model, all until it runs."""
    GRAPH = "graph"
    """Import or compile, with what it reads of the weights."""
    FIRST_RUN = "first run"
    """With its KV cache, until the node knows that the load has ended."""
    HAND_OVER = "hand over"
    """Until the node begins the request's iteration."""
    PREFILL = "prefill"
    WIRE = "wire"
    """Until the caller has the token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    engine: Engine
    tier: Tier
    ttft_s: float
    parts_s: dict[Part, float] = field(default_factory=dict)
    """How long each part took. Of a peer, GRAPH is the time to load and PREFILL is the rest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Called:
    """A call of mesh, on the machine's monotonic clock."""

    deployment: DeploymentName
    tier: Tier
    sent_s: float
    first_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """The rates of this machine, in the same run; bytes a second."""

    memcpy: float
    disk: float
