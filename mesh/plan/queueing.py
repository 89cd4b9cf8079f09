"""Waiting in queues of several servers: what a plan expects of it before anything is executed.

`wait_s` is the paper's (eq. 1 and 2): requests and services without memory, unless it is told how
much services vary. `shared_s` knows that servers which share a device slow each other.
After: `mesh.plan.problem`.
"""

import math
from collections.abc import Callable, Sequence

ROUNDS = 40
"""The steps after which a fixed point is near enough."""


def erlang_c(servers: int, load: float) -> float:
    """The probability that a request waits for one of `servers`, on which requests make a load of
    `load` (rate times service); 1 where they come quicker than they are served (eq. 2).

    The blocking of Erlang B is computed server by server, which is stable for any number of them.
    """
    if load >= servers:
        return 1.0
    blocked = 1.0
    for server in range(1, servers + 1):
        blocked = load * blocked / (server + load * blocked)
    used = load / servers
    return blocked / (1 - used * (1 - blocked))


def wait_s(rate_per_s: float, service_s: float, servers: int, variation: float = 1.0) -> float:
    """The mean wait of M/M/R (eq. 1); with another `variation`, the squared coefficient of that of
    services, of M/G/R. Infinite where requests come quicker than they are served.
    """
    load = rate_per_s * service_s
    if load >= servers:
        return math.inf
    memoryless = erlang_c(servers, load) * service_s / (servers - load)
    return memoryless if variation == 1.0 else memoryless * _varied(variation, load, servers)


def _varied(variation: float, load: float, servers: int) -> float:
    """The wait over that of services without memory: between that of equal ones (Cosmetatos 1975)
    and 1, by the weighted harmonic mean of Kimura (1986); exact for one server.
    """
    used, equal = load / servers, 0.5
    if load > 0:
        more = (1 - used) * (servers - 1) * (math.sqrt(4 + 5 * servers) - 2) / (16 * used * servers)
        equal = min(0.5 * (1 + more), 1.0)
    return (1 + variation) / (2 * variation + (1 - variation) / equal)


def shared_s(
    rate_per_s: float, work_s: float, devices: int, yields: Sequence[float], variation: float = 1.0
) -> tuple[float, float]:
    """Mean seconds in service, and of waiting before it, on `devices`, each of which serves at most
    `len(yields) - 1` requests at a time and does `yields[n]` seconds of work in a second with n.

    Requests spread evenly. The number of requests is a chain of births and deaths: what is in
    service does not depend on how services vary, what waits does (`wait_s`). With one request a
    device and `variation` 1 it is M/M/R. Infinite where the devices cannot do the work.
    """
    servers = devices * (len(yields) - 1)
    there, used = present(
        rate_per_s, lambda number: worked_s(number, devices, yields) / work_s, servers
    )
    if used >= 1:
        return math.inf, math.inf
    beyond = there[-1] * used / (1 - used)
    served = sum(number * share for number, share in enumerate(there)) + servers * beyond
    waiting = _varied(variation, used * servers, servers) * beyond / (1 - used)
    return served / rate_per_s, waiting / rate_per_s


def worked_s(number: int, devices: int, yields: Sequence[float]) -> float:
    """Seconds of work that devices do in a second with so many requests spread evenly."""
    full, over = divmod(number, devices)
    return over * yields[min(full + 1, len(yields) - 1)] + (devices - over) * yields[full]


def present(
    rate_per_s: float, done: Callable[[int], float], number_max: int
) -> tuple[list[float], float]:
    """The shares of the time in which 0, 1, … requests are there, of whom `done(n)` end in a second
    with n there (a chain of births and deaths), and the ratio of the last share to the one before:
    beyond `number_max`, from which on no more end, they go on as a geometric series. `done` must
    not fall. Ends early where a share is below 1e-12. Empty where more come than end.
    """
    weights, total, used = [1.0], 1.0, 0.0
    for number in range(1, number_max + 1):
        used = rate_per_s / done(number)
        weights.append(weights[-1] * used)
        total += weights[-1]
        if total > 1e200:
            weights, total = [each / total for each in weights], 1.0
        if used < 1 and weights[-1] < 1e-12 * total:
            break
    if used >= 1:
        return [], used
    total += weights[-1] * used / (1 - used)
    return [each / total for each in weights], used


def batched_sojourn_s(
    rate_per_s: float,
    first_s: float,
    further_s: float,
    servers: int,
    batch_max: int,
    variation: float = 0.0,
) -> float:
    """Mean seconds from arrival to end where each of `servers`, once it is free, takes what waits
    as one batch: `first_s` for one request and `further_s` for each further one, whose squared
    coefficient of variation is `variation`. Infinite where servers do not keep up.

    A batch N has what came while the one before was served (bulk service as in Bailey 1954): N' =
    max(1, Poisson(λX)), where X is the time between two ends: S of a single server, of several less
    by their number, and less varied. The first two moments of N and of S = `first_s` + (N - 1)
    `further_s` follow, closed by the probability that nobody came, as if X had a gamma
    distribution. Who meets all servers at work (Erlang C) waits for the rest of X, E[X²] / 2E[X],
    and takes as long as its batch, E[NS] / E[N], of which what comes behind it is bounded by
    `batch_max`. For one server without that bound and with equal seconds of first and further ones
    this is exact: the wait of M/G/1 times (1 + 2ρ) / (1 + ρ). For several servers the two constants
    below are fitted: up to ρ = 0.8 it is within 10 % of simulations of 1 to 8 servers.
    """
    rate, setup_s = rate_per_s / servers, first_s - further_s
    if rate * max(setup_s / batch_max + further_s, further_s) >= 1:
        return math.inf
    size, size_2, kept = 1.0, 1.0, 3 / (servers + 2)
    for _ in range(ROUNDS):
        mean_s = setup_s + further_s * size
        varied_s2 = (2 * setup_s * further_s + variation * first_s**2) * size
        varied_s2 += setup_s**2 + further_s**2 * size_2 - mean_s**2
        between_s2 = mean_s**2 + kept * varied_s2
        spread = max(between_s2 / mean_s**2 - 1, 1e-9)
        size = max(rate * mean_s + (1 + rate * mean_s * spread) ** (-1 / spread), 1.0)
        size_2 = rate**2 * between_s2 + size
    used = rate * mean_s / size
    own_s = (setup_s + further_s * size_2 / size - (1 - used) * first_s) / used
    behind_s, most_s = further_s * (size_2 / size - 1) / 2, further_s * (batch_max - 1) / 2
    if behind_s > 0:
        lost = (2 - 1 / servers) * (1 - most_s / math.hypot(behind_s, most_s))
        own_s -= lost * behind_s / used
    rest_s = between_s2 / (2 * mean_s * servers)
    return first_s + erlang_c(servers, used * servers) * (rest_s + own_s - first_s)
