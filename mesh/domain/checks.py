"""What a deployment's spec must satisfy, whoever wrote it.

The command line checks while it reads the YAML, the controller checks again what arrives: both by
these functions. They raise InvalidInput that names the field, what was given and what is allowed.
"""

import math
import re
from urllib.parse import parse_qsl, urlsplit

from mesh.domain.deployment import DeploymentSpec, Scaling
from mesh.domain.errors import InvalidInput
from mesh.domain.slo import SLO_S_MAX, SLO_TOKENS_PER_S_MAX, Slo

NAME_CHARS_MAX = 63
"""The longest name: a DNS label may not be longer (RFC 1035 §2.3.4)."""
SOURCE_CHARS_MAX = 2048
CONTEXT_TOKENS_MAX = 1 << 24
REPLICAS_MAX = 1024
TENSOR_PARALLEL_MAX = 8
"""Devices of one machine."""
KEEP_ALIVE_S_MAX = 7 * 24 * 3600.0
PLAN_S_MIN, PLAN_S_MAX = 1.0, 3600.0
CACHE_SALT_CHARS_MAX = 256
CLASSES_MAX = 8
CELLS_MAX = 64
"""That serve one deployment."""

_SECRET = re.compile(r"sig|token|secret|passw|credential|api.?key|access.?key|^key$|^auth", re.I)
"""In names of a URL's parameters: those of signed URLs among them."""
_NAME = re.compile(r"[a-z0-9]([a-z0-9-]*[a-z0-9])?")


def is_unicode(text: str) -> bool:
    """Whether UTF-8 can hold it: JSON can say half a character."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def check_spec(spec: DeploymentSpec) -> None:
    """Raise InvalidInput when no deployment can be meant by this."""
    check_name(spec.name)
    if not spec.source.strip():
        raise InvalidInput("source is empty", hint="name one like pkg://package/file.gguf")
    if len(spec.source) > SOURCE_CHARS_MAX:
        raise InvalidInput(
            f"source has {len(spec.source)} characters; at most {SOURCE_CHARS_MAX} are allowed"
        )
    check_no_credentials(spec.source)
    context = spec.context_tokens_max
    if context is not None and not 1 <= context <= CONTEXT_TOKENS_MAX:
        raise InvalidInput(
            f"context_tokens_max is {context}; it must be from 1 to {CONTEXT_TOKENS_MAX}"
        )
    check_slo(spec.slo)
    check_classes(spec)
    check_scaling(spec.scaling)
    if spec.scaling.plan is not None and spec.task is not None:
        raise InvalidInput(
            f"scaling.plan is for text; {spec.name!r} has task {spec.task}",
            hint="leave the plan out, and say with replicas_min how many instances stay loaded",
        )
    if not spec.devices:
        raise InvalidInput("devices is empty", hint="name at least one of cpu, gpu")
    if len(set(spec.devices)) != len(spec.devices):
        raise InvalidInput(f"devices names one twice: {', '.join(spec.devices)}")
    if not 1 <= spec.tensor_parallel <= TENSOR_PARALLEL_MAX:
        raise InvalidInput(
            f"tensor_parallel is {spec.tensor_parallel}; it must be from 1 to {TENSOR_PARALLEL_MAX}"
        )
    if not 1 <= spec.cells <= CELLS_MAX:
        raise InvalidInput(f"cells is {spec.cells}; it must be from 1 to {CELLS_MAX}")


def check_no_credentials(source: str) -> None:
    """Raise InvalidInput, which does not repeat them, for a source with a login or a key in it:
    sources are shown to all, and lie in journals and stores.
    """
    try:
        parts = urlsplit(source)
    except ValueError:
        return  # no URL at all: whoever fetches it says so
    names = [name for name, _ in parse_qsl(parts.query, keep_blank_values=True)]
    login = parts.scheme in ("http", "https", "s3") and "@" in parts.netloc
    found = ["user:password@"] if login else []
    found += [f"the parameter {name}" for name in names if _SECRET.search(name)]
    if found:
        raise InvalidInput(
            f"the source at {parts.hostname} holds credentials: {', '.join(found)}",
            hint="leave them out; logins for s3:// are in the AWS environment or configuration of "
            "the node, and http(s):// is asked without any",
        )


def check_name(name: str, noun: str = "name") -> None:
    """Raise InvalidInput unless `name` is a DNS label: it becomes part of ids and host names."""
    if len(name) > NAME_CHARS_MAX:
        raise InvalidInput(
            f"{noun} has {len(name)} characters; at most {NAME_CHARS_MAX} are allowed"
        )
    if _NAME.fullmatch(name) is None:
        raise InvalidInput(
            f"{noun} {name!r} is no DNS label",
            hint="use a-z, 0-9 and -, with a letter or digit first and last",
        )


def check_slo(slo: Slo) -> None:
    _positive("slo.ttft_s", slo.ttft_s, SLO_S_MAX)
    _positive("slo.ttft_tokens_per_s", slo.ttft_tokens_per_s, SLO_TOKENS_PER_S_MAX)
    _positive("slo.tpot_s", slo.tpot_s, SLO_S_MAX)
    if not (math.isfinite(slo.price) and slo.price >= 0):
        raise InvalidInput(f"slo.price is {slo.price:g}; it must be 0 or more")
    if slo.best_effort and slo.tpot_s != SLO_S_MAX:
        raise InvalidInput(
            f"class {slo.name!r} is best effort, and its tpot_s is {slo.tpot_s:g}",
            hint="leave tpot_s out: best effort promises no pace, only within_s",
        )


def check_classes(spec: DeploymentSpec) -> None:
    """Raise InvalidInput unless each class has a name of its own and the default is one of them."""
    names = [slo.name for slo in spec.classes]
    if len(names) > CLASSES_MAX:
        raise InvalidInput(f"classes has {len(names)}; at most {CLASSES_MAX} are allowed")
    for slo in spec.classes:
        check_name(slo.name, "class name")
        check_slo(slo)
        if names.count(slo.name) > 1:
            raise InvalidInput(f"classes has {slo.name!r} twice")
    default = next((slo for slo in spec.classes if slo.name == spec.class_default), None)
    if spec.class_default and default is None:
        raise InvalidInput(
            f"class_default {spec.class_default!r} is none of the classes",
            hint=f"name one of {', '.join(names)}" if names else "give classes, or leave it out",
        )
    if spec.classes and (default is None or default.best_effort or default != spec.slo):
        raise InvalidInput(
            f"class_default {spec.class_default!r} must be a class with limits, and spec.slo its",
            hint="a request that names no class is promised something: name a class with tpot_s",
        )


def check_scaling(scaling: Scaling) -> None:
    if scaling.replicas_min < 0:
        raise InvalidInput(f"scaling.replicas_min is {scaling.replicas_min}; it must be 0 or more")
    if not 1 <= scaling.replicas_max <= REPLICAS_MAX:
        raise InvalidInput(
            f"scaling.replicas_max is {scaling.replicas_max}; it must be from 1 to {REPLICAS_MAX}"
        )
    if scaling.replicas_min > scaling.replicas_max:
        raise InvalidInput(
            f"scaling.replicas_min is {scaling.replicas_min}, "
            f"more than replicas_max, {scaling.replicas_max}"
        )
    keep_alive_s = scaling.keep_alive_s
    if not (math.isfinite(keep_alive_s) and 0 <= keep_alive_s <= KEEP_ALIVE_S_MAX):
        raise InvalidInput(
            f"scaling.keep_alive_s is {keep_alive_s:g}; it must be from 0 to {KEEP_ALIVE_S_MAX:g}"
        )
    plan = scaling.plan
    if plan is not None and not PLAN_S_MIN <= plan.every_s <= PLAN_S_MAX:
        raise InvalidInput(
            f"scaling.plan.every_s is {plan.every_s:g}; it must be from {PLAN_S_MIN:g} to "
            f"{PLAN_S_MAX:g}"
        )


def _positive(field: str, value: float, most: float) -> None:
    if not (math.isfinite(value) and 0 < value <= most):
        raise InvalidInput(f"{field} is {value:g}; it must be above 0 and at most {most:g}")
