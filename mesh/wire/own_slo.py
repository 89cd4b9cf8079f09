"""The SLO class or the limits that a call brings, by headers of HTTP or metadata of gRPC alike."""

from collections.abc import Callable

from mesh.domain.errors import InvalidInput
from mesh.domain.invocation import Invocation
from mesh.domain.values import replace

SLO_HEADERS = ("x-slo-ttft-ms", "x-slo-tpot-ms")
CLASS_HEADER = "x-slo-class"


def with_own_slo(asked: Invocation, header: Callable[[str], str | bytes | None]) -> Invocation:
    """The call with what its headers say of its SLO; whether such a class or such limits can be is
    checked for every protocol alike. Raises InvalidInput.
    """
    ttft_s, tpot_s = (_seconds(name, header(name)) for name in SLO_HEADERS)
    named = header(CLASS_HEADER)
    slo_class = named.decode("latin-1") if isinstance(named, bytes) else named
    return replace(
        asked, slo_ttft_s=ttft_s, slo_tpot_s=tpot_s, slo_class=slo_class or asked.slo_class
    )


def _seconds(name: str, value: str | bytes | None) -> float | None:
    if value is None:
        return None
    try:
        return float(value) / 1000.0
    except ValueError:
        raise InvalidInput(
            f"the header {name} is no number of milliseconds", hint="such as 500", field=name
        ) from None
