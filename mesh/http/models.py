"""`/v1/models`: the deployments, as OpenAI's protocol tells of models, with their state and SLO."""

from collections.abc import Callable, Sequence
from typing import Literal

from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response

from mesh.domain.ids import DeploymentName
from mesh.domain.views import CellSnapshot, DeploymentSnapshot


class SloCard(BaseModel):
    ttft_s: float
    ttft_tokens_per_s: float
    tpot_s: float | None
    """Null where there are no tokens after the first, or they come as others let them."""


class ModelCard(BaseModel):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: Literal["mesh"] = "mesh"
    root: str
    max_model_len: int | None
    """Null while the model is being imported."""
    state: str
    slo: SloCard


class ModelList(BaseModel):
    object: Literal["list"] = "list"
    data: list[ModelCard]


class Models:
    """`find` gives the snapshot of a deployment or raises NotFound. `started`: Unix time, in
    seconds; when a deployment was made is not kept.
    """

    def __init__(
        self,
        snapshot: Callable[[], CellSnapshot],
        find: Callable[[DeploymentName, Sequence[DeploymentSnapshot]], DeploymentSnapshot],
        started: int,
    ) -> None:
        self._snapshot = snapshot
        self._find = find
        self._started = started

    async def list(self, request: Request) -> Response:
        cards = [self._card(deployment) for deployment in self._snapshot().deployments]
        return _json(ModelList(data=cards))

    async def get(self, request: Request) -> Response:
        name = DeploymentName(request.path_params["model"])
        return _json(self._card(self._find(name, self._snapshot().deployments)))

    def _card(self, deployment: DeploymentSnapshot) -> ModelCard:
        spec = deployment.spec
        return ModelCard(
            id=spec.name,
            created=self._started,
            root=spec.source,
            max_model_len=deployment.context_tokens_max if deployment.model else None,
            state=deployment.state,
            slo=SloCard(
                ttft_s=spec.slo.ttft_s,
                ttft_tokens_per_s=spec.slo.ttft_tokens_per_s,
                tpot_s=spec.tpot_limit_s,
            ),
        )


def _json(model: BaseModel) -> Response:
    return Response(model.model_dump_json(), media_type="application/json")
