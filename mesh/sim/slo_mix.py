"""SLO classes of a scenario's deployments and the shares of its requests that name them.

A mix is text such as `0.1:0.3,0.25:0.4,best:0.3`: TPOT limits in seconds, or `best` for best
effort, each with its share. Before: `scenario`. After: `cluster`, whose arrivals bring the SLO of a
class.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from random import Random

from mesh.domain.checks import check_spec
from mesh.domain.deployment import Deployment
from mesh.domain.errors import InvalidInput
from mesh.domain.profile import Profile
from mesh.domain.slo import Slo, best_effort
from mesh.sim.cluster import Arrival

WITHIN_S = 600.0
"""How long best effort waits at most."""


def read_mix(text: str) -> tuple[tuple[Slo, float], ...]:
    """The classes and their shares, which sum to 1. Raises InvalidInput."""
    found: list[tuple[Slo, float]] = []
    for part in text.split(","):
        tpot, _, share = part.partition(":")
        try:
            if tpot == "best":
                slo = best_effort("best", WITHIN_S)
            else:
                slo = Slo(name=f"tpot-{float(tpot) * 1e3:.0f}ms", tpot_s=float(tpot))
            found.append((slo, float(share)))
        except ValueError:
            raise _wrong(text) from None
    if any(not 0 < share <= 1 for _, share in found) or abs(sum(s for _, s in found) - 1) > 1e-6:
        raise _wrong(text)
    return tuple(found)


def _wrong(text: str) -> InvalidInput:
    return InvalidInput(
        f"the mix of SLOs {text!r} is none",
        hint="write TPOT:SHARE,... whose shares sum to 1, such as 0.1:0.3,0.25:0.4,best:0.3",
    )


def with_classes(deployment: Deployment, mix: str) -> Deployment:
    """The deployment with the classes of a mix, each with its own TTFT limits. Raises
    InvalidInput.
    """
    own = deployment.spec.slo
    classes = tuple(
        slo if slo.best_effort else replace(own, name=slo.name, tpot_s=slo.tpot_s)
        for slo, _ in read_mix(mix)
    )
    slo = next((slo for slo in classes if not slo.best_effort), classes[0])
    spec = replace(deployment.spec, slo=slo, classes=classes, class_default=slo.name)
    check_spec(spec)
    return replace(deployment, spec=spec)


def with_slos(
    arrivals: Iterator[Arrival],
    deployments: tuple[Deployment, ...],
    mix: str,
    seed: int,
    ttfts_s: Sequence[float] = (),
    profiles: Sequence[Profile] = (),
) -> Iterator[Arrival]:
    """Each arrival with a class of its deployment, drawn by the shares, and with one of the TTFT
    limits, where there are some; the same for a seed. What no idle node of the profiles could keep
    is not drawn then; a request for which nothing is left does not come (PolyServe §5.1).
    """
    shares, rng = [share for _, share in read_mix(mix)], Random(f"slo mix {seed}")
    classes = {str(one.spec.name): one.spec.classes for one in deployments}
    times = {
        str(one.spec.name): [of for of in profiles if of.model_id == one.model.model_id]
        for one in deployments
    }
    for arrival in arrivals:
        offered = list(zip(classes[arrival.deployment], shares, strict=True))
        if ttfts_s:
            offered = [
                (slo if slo.best_effort else replace(slo, ttft_s=ttft_s), share)
                for slo, share in offered
                for ttft_s in ttfts_s
            ]
            known = times[arrival.deployment]
            offered = [of for of in offered if any(_keeps(one, arrival, of[0]) for one in known)]
        if offered:
            (slo,) = rng.choices([slo for slo, _ in offered], [share for _, share in offered])
            yield arrival._replace(slo=slo)


def _keeps(profile: Profile, arrival: Arrival, slo: Slo) -> bool:
    """Whether an idle node gives the request its first token in time, and then each further one."""
    tokens, limit_s = arrival.input_tokens, slo.ttft_limit_s(arrival.input_tokens)
    last_s = profile.decode.at(1, tokens + arrival.output_tokens)
    return profile.prefill.at(tokens, 0) <= limit_s and last_s <= slo.tpot_s
