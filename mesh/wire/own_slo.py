"""The limits that a call brings of its own, by headers of HTTP or metadata of gRPC alike."""

from collections.abc import Callable

from mesh.domain.errors import InvalidInput

SLO_HEADERS = ("x-slo-ttft-ms", "x-slo-tpot-ms")


def own_limits_s(
    header: Callable[[str], str | bytes | None],
) -> tuple[float | None, float | None]:
    """To the first token, and for each further one; whether such limits can be is checked for every
    protocol alike. Raises InvalidInput.
    """
    ttft_s, tpot_s = (_seconds(name, header(name)) for name in SLO_HEADERS)
    return ttft_s, tpot_s


def _seconds(name: str, value: str | bytes | None) -> float | None:
    if value is None:
        return None
    try:
        return float(value) / 1000.0
    except ValueError:
        raise InvalidInput(
            f"the header {name} is no number of milliseconds", hint="such as 500", field=name
        ) from None
