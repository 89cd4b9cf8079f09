"""The job of making the blob of one shape, as it goes from the node to the process that makes it.

`engine` has one where a load found no blob, `blob_maker` queues it, `blob_making` does it.
"""

import json
from dataclasses import asdict, dataclass

from mesh.domain.model import ComputePrecision, KvPrecision, WeightPrecision
from mesh_nodes.engines.openvino.precisions import Precisions


@dataclass(frozen=True, slots=True, kw_only=True)
class BlobJob:
    """The model whose shape is wanted, and how its node compiles."""

    key: str
    folder: str
    model_path: str
    context_tokens_max: int
    threads: int
    weights: WeightPrecision
    compute: ComputePrecision
    kv: KvPrecision

    @property
    def precisions(self) -> Precisions:
        return Precisions(compute=self.compute, kv=self.kv)

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "BlobJob":
        fields = json.loads(text)
        fields["weights"] = WeightPrecision(fields["weights"])
        fields["compute"] = ComputePrecision(fields["compute"])
        fields["kv"] = KvPrecision(fields["kv"])
        return cls(**fields)
