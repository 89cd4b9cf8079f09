"""Waiting in queues of several servers: what a plan expects of it before anything is executed.

`wait_s` is the paper's (eq. 1 and 2): requests and services without memory. `wait_of_s` knows how
much services vary, and `shared_sojourn_s` knows that servers which share a device slow each other.
After: `mesh.plan.problem`.
"""

import math
from collections.abc import Sequence

STATES_MAX = 100_000


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


def wait_s(rate_per_s: float, service_s: float, servers: int) -> float:
    """The mean wait of M/M/R (eq. 1); infinite where requests come quicker than they are served."""
    load = rate_per_s * service_s
    if load >= servers:
        return math.inf
    return erlang_c(servers, load) * service_s / (servers - load)


def wait_of_s(rate_per_s: float, service_s: float, servers: int, variation: float) -> float:
    """The mean wait of M/G/R, whose services have this squared coefficient of variation: between
    that of equal services (Cosmetatos 1975) and M/M/R in proportion (Kimura 1986); exact for one
    server.
    """
    memoryless = wait_s(rate_per_s, service_s, servers)
    if math.isinf(memoryless):
        return memoryless
    return memoryless * (variation + (1 - variation) * _equal(rate_per_s * service_s, servers))


def _equal(load: float, servers: int) -> float:
    """The wait of equal services over that of services without memory."""
    if load <= 0:
        return 0.5
    used = load / servers
    more = (1 - used) * (servers - 1) * (math.sqrt(4 + 5 * servers) - 2) / (16 * used * servers)
    return min(0.5 * (1 + more), 1.0)


def shared_sojourn_s(
    rate_per_s: float,
    work_s: float,
    devices: int,
    yields: Sequence[float],
    variation: float = 1.0,
) -> float:
    """Mean seconds from arrival to end on `devices`, each of which serves at most
    `len(yields) - 1` requests at a time and does `yields[n]` seconds of work in a second with n.

    Requests spread evenly. The number of requests is a chain of births and deaths: what is in
    service does not depend on how services vary, what waits does (`wait_of_s`). With one request a
    device and `variation` 1 it is M/M/R. Infinite where the devices cannot do the work.
    """
    lanes = len(yields) - 1
    servers = devices * lanes
    if rate_per_s * work_s >= devices * yields[-1]:
        return math.inf
    if servers > STATES_MAX:
        return work_s
    weight, total, inside = 1.0, 1.0, 0.0
    for number in range(1, servers + 1):
        full, over = divmod(number, devices)
        done = over * yields[min(full + 1, lanes)] + (devices - over) * yields[full]
        weight *= rate_per_s * work_s / done
        total += weight
        inside += number * weight
        if total > 1e200:
            weight, total, inside = weight / total, 1.0, inside / total
    used = rate_per_s * work_s / (devices * yields[-1])
    beyond = weight * used / (1 - used)
    total += beyond
    inside += servers * beyond
    waiting = beyond / (1 - used)
    shrunk = variation + (1 - variation) * _equal(used * servers, servers)
    return (inside + shrunk * waiting) / total / rate_per_s
