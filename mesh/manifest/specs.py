"""Turns `model.yaml` into DeploymentSpecs, and these into such a file again.

It owns the manifest's schema and its bounds, and says what is wrong in terms of the file: the line,
the path of the field, what stands there, and the nearest field that is known. `mesh deploy` and the
page call it; what follows on the path (the wire, the controller) sees validated domain values.
"""

from collections.abc import Iterable, Sequence
from typing import Annotated, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator
from pydantic_core import PydanticCustomError

from mesh.domain.checks import (
    CELLS_MAX,
    CONTEXT_TOKENS_MAX,
    KEEP_ALIVE_S_MAX,
    NAME_CHARS_MAX,
    PLAN_S_MAX,
    PLAN_S_MIN,
    REPLICAS_MAX,
    SOURCE_CHARS_MAX,
    TENSOR_PARALLEL_MAX,
    check_spec,
)
from mesh.domain.deployment import DeploymentSpec, PlanRule, Scaling
from mesh.domain.errors import InvalidInput
from mesh.domain.ids import DeploymentName
from mesh.domain.model import ComputePrecision, Task, WeightPrecision
from mesh.domain.reasons import DeviceKind
from mesh.domain.slo import SLO_S_MAX, SLO_TOKENS_PER_S_MAX, ColdStart, Slo, best_effort
from mesh.domain.text import ToolFormat
from mesh.manifest.documents import Document, read_documents
from mesh.manifest.problem import explain
from mesh.report.plain import Plain, plain_fields

NAME_PATTERN = rf"^[a-z0-9]([a-z0-9-]{{0,{NAME_CHARS_MAX - 2}}}[a-z0-9])?$"

_SLO = Slo()
_SCALING = Scaling()

Seconds = Annotated[float, Field(gt=0, le=SLO_S_MAX)]
Price = Annotated[float, Field(ge=0)]
TokensPerSecond = Annotated[float, Field(gt=0, le=SLO_TOKENS_PER_S_MAX)]
Replicas = Annotated[int, Field(le=REPLICAS_MAX)]


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


class _Metadata(_Part):
    name: Annotated[str, Field(pattern=NAME_PATTERN)]


class _Slo(_Part):
    ttft_s: Seconds = _SLO.ttft_s
    ttft_tokens_per_s: TokensPerSecond = _SLO.ttft_tokens_per_s
    tpot_s: Seconds = _SLO.tpot_s
    cold_start: Annotated[ColdStart, Field(strict=False)] = _SLO.cold_start


class _Class(_Slo):
    """An SLO class with limits; or one of best effort, which has `within_s` in place of all."""

    price: Price = _SLO.price
    best_effort: bool = False
    within_s: Seconds | None = None

    @model_validator(mode="after")
    def _has_limits_or_none(self) -> "_Class":
        given = self.model_fields_set - {"price", "best_effort", "within_s"}
        problem = ""
        if not self.model_fields_set:
            problem = "is empty"
        elif self.best_effort and given:
            problem = f"is best effort, and has {', '.join(sorted(given))}"
        elif self.best_effort and self.within_s is None:
            problem = "is best effort, and lacks within_s"
        elif self.within_s is not None and not self.best_effort:
            problem = "has within_s, and is not best_effort: true"
        if problem:
            raise PydanticCustomError("classes", "{problem}", {"problem": problem})
        return self

    def named(self, name: str) -> Slo:
        if self.within_s is None:
            return Slo(name=name, **self.model_dump(exclude={"within_s"}))
        return best_effort(name, self.within_s, self.price)


class _Plan(_Part):
    every_s: Annotated[float, Field(ge=PLAN_S_MIN, le=PLAN_S_MAX)] = PlanRule().every_s


class _Scaling(_Part):
    replicas_min: Annotated[Replicas, Field(ge=0)] = _SCALING.replicas_min
    replicas_max: Annotated[Replicas, Field(ge=1)] = _SCALING.replicas_max
    keep_alive_s: Annotated[float, Field(ge=0, le=KEEP_ALIVE_S_MAX)] = _SCALING.keep_alive_s
    plan: _Plan | None = None

    @model_validator(mode="after")
    def _min_is_at_most_max(self) -> "_Scaling":
        if self.replicas_min > self.replicas_max:
            raise PydanticCustomError(
                "replicas",
                f"replicas_min {self.replicas_min} is above replicas_max {self.replicas_max}",
            )
        return self


class _Text(_Part):
    special_tokens_in_content: bool = False


class _Spec(_Part):
    source: Annotated[str, Field(pattern=r"^\S", max_length=SOURCE_CHARS_MAX)]
    context_tokens_max: Annotated[int, Field(ge=1, le=CONTEXT_TOKENS_MAX)] | None = None
    slo: _Slo = _Slo()
    classes: Annotated[dict[str, _Class], Field(min_length=1)] = {}
    class_default: str = ""
    scaling: _Scaling = _Scaling()
    devices: Annotated[list[Literal["cpu", "gpu"]], Field(min_length=1)] = ["cpu", "gpu"]
    tensor_parallel: Annotated[int, Field(ge=1, le=TENSOR_PARALLEL_MAX)] = 1
    cells: Annotated[int, Field(ge=1, le=CELLS_MAX)] = 1
    weights: Annotated[WeightPrecision, Field(strict=False)] | None = None
    precision: Annotated[ComputePrecision, Field(strict=False)] | None = None
    task: Annotated[Task, Field(strict=False)] | None = None
    prefix_cache: bool = True
    tool_format: Annotated[ToolFormat, Field(strict=False)] | None = None
    text: _Text = _Text()

    @field_validator("devices")
    @classmethod
    def _each_once(cls, devices: list[str]) -> list[str]:
        if len(set(devices)) < len(devices):
            raise PydanticCustomError("devices", f"names a device twice: {', '.join(devices)}")
        return devices

    @model_validator(mode="after")
    def _slo_or_classes(self) -> "_Spec":
        if self.classes and "slo" in self.model_fields_set:
            raise PydanticCustomError("classes", "has slo and classes: give one of them")
        return self

    def slos(self) -> tuple[Slo, tuple[Slo, ...], str]:
        """The SLO of a request that names no class, all classes, and the name of its class: without
        a `class_default` the first that has limits.
        """
        if not self.classes:
            return Slo(**self.slo.model_dump()), (), self.class_default
        classes = tuple(one.named(name) for name, one in self.classes.items())
        named = self.class_default
        named = named or next((slo.name for slo in classes if not slo.best_effort), "")
        return next((slo for slo in classes if slo.name == named), classes[0]), classes, named


class _Manifest(_Part):
    api_version: Annotated[Literal["mesh/v1"], Field(alias="apiVersion")]
    kind: Literal["Model"]
    metadata: _Metadata
    spec: _Spec


def read_manifests(files: Sequence[tuple[str, bytes]]) -> list[DeploymentSpec]:
    """The deployments of several files, given as (name for messages, content), in their order.

    Raises InvalidInput when one cannot be meant, or when two of them have the same name.
    """
    specs: list[DeploymentSpec] = []
    seen: dict[str, str] = {}
    for origin, raw in files:
        for spec, line in _specs(raw, origin):
            if spec.name in seen:
                raise InvalidInput(
                    f"{origin}:{line}: the name {spec.name} is taken by {seen[spec.name]}",
                    hint="give every deployment a name of its own",
                )
            seen[spec.name] = f"{origin}:{line}"
            specs.append(spec)
    return specs


def written(specs: Iterable[DeploymentSpec]) -> str:
    """These deployments as a file that `read_manifests` reads. What is as it is by default is left
    out, but for the SLO and the scaling.
    """
    return yaml.safe_dump_all(map(_manifest, specs), sort_keys=False, allow_unicode=True)


def _manifest(spec: DeploymentSpec) -> dict[str, object]:
    usual = plain_fields(DeploymentSpec(name=spec.name, source=""))
    told = {
        name: value
        for name, value in plain_fields(spec).items()
        if name not in ("name", "tenant") and (value != usual[name] or name in ("slo", "scaling"))
    }
    if told.pop("special_tokens_in_content", False):
        told["text"] = {"special_tokens_in_content": True}
    scaling = plain_fields(spec.scaling)
    told["scaling"] = {name: value for name, value in scaling.items() if value is not None}
    told["slo"] = _limits(spec.slo)
    if spec.classes:
        told["classes"] = {slo.name: _limits(slo) for slo in spec.classes}
        del told["slo"]
    head = {"apiVersion": "mesh/v1", "kind": "Model", "metadata": {"name": str(spec.name)}}
    return {**head, "spec": told}


def _limits(slo: Slo) -> dict[str, Plain]:
    if slo.best_effort:
        return {"best_effort": True, "within_s": slo.ttft_s, "price": slo.price}
    return {
        name: value
        for name, value in plain_fields(slo).items()
        if name not in ("name", "best_effort") and (slo.name or name != "price")
    }


def _specs(raw: bytes, origin: str) -> list[tuple[DeploymentSpec, int]]:
    documents = read_documents(raw, origin)
    if not documents:
        raise InvalidInput(
            f"{origin}: holds no document",
            hint="write apiVersion, kind, metadata and spec; `mesh deploy --help` shows an example",
        )
    return [(_spec(document, origin), document.line) for document in documents]


def _scaling(given: _Scaling) -> Scaling:
    plan = None if given.plan is None else PlanRule(every_s=given.plan.every_s)
    return Scaling(**given.model_dump(exclude={"plan"}), plan=plan)


def _spec(document: Document, origin: str) -> DeploymentSpec:
    try:
        manifest = _Manifest.model_validate(document.value)
    except ValidationError as error:
        raise explain(error.errors(include_url=False), document, origin, _Manifest) from error
    spec = manifest.spec
    slo, classes, class_default = spec.slos()
    deployment = DeploymentSpec(
        name=DeploymentName(manifest.metadata.name),
        source=spec.source.rstrip(),
        context_tokens_max=spec.context_tokens_max,
        slo=slo,
        classes=classes,
        class_default=class_default,
        scaling=_scaling(spec.scaling),
        devices=tuple(DeviceKind(device) for device in spec.devices),
        tensor_parallel=spec.tensor_parallel,
        cells=spec.cells,
        weights=spec.weights,
        precision=spec.precision,
        task=spec.task,
        prefix_cache=spec.prefix_cache,
        tool_format=spec.tool_format,
        special_tokens_in_content=spec.text.special_tokens_in_content,
    )
    # The schema's bounds are the domain's, but for classes; the controller checks it again.
    try:
        check_spec(deployment)
    except InvalidInput as error:
        line = document.line_of(("spec", "scaling" if "scaling" in error.message else "classes"))
        raise InvalidInput(f"{origin}:{line}: {error.message}", hint=error.hint) from error
    return deployment
