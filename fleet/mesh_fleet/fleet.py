"""What `mesh fleet` asks of Ray: fleets are made, seen, changed and ended."""

import logging
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout, suppress
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from mesh.domain.errors import InvalidInput, MeshError, NotFound, Unavailable
from mesh.domain.values import replace
from mesh_fleet.supplier import FleetSeen, FleetSpec, Supplier

NAMESPACE = "mesh"
HEAD = "node:__internal_head__"
"""A resource that Ray gives to the machine with its GCS alone."""
CONNECT_S_MAX = 8.0
ANSWER_S_MAX = 10.0
POLL_S = 0.25
SAID_LENGTH_MAX = 400
"""So many characters of what Ray says, which may be long."""


@contextmanager
def connected(address: str) -> Iterator[None]:
    """Be a driver of the Ray at this address. Raises InvalidInput and Unavailable, within 10 s.

    What is printed within goes to stderr: Ray prints there what fails in its cluster.
    """
    with redirect_stdout(sys.stderr):
        yield from _driving(address)


def _driving(address: str) -> Iterator[None]:
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise InvalidInput(
            f"{address!r} is no address of Ray", hint="it is HOST:PORT, as `ray start --head` says"
        )
    unreached = Unavailable(
        f"no Ray answers at {address}", hint="`ray start --head --port PORT` starts one"
    )
    try:
        socket.create_connection((host, int(port)), CONNECT_S_MAX / 4).close()
    except OSError as error:
        raise unreached from error
    failed: list[Exception] = []
    logging.getLogger("ray").setLevel(logging.ERROR)

    def connect() -> None:
        try:
            ray.init(address, namespace=NAMESPACE, configure_logging=False, log_to_driver=False)
        except Exception as error:
            failed.append(error)

    # It waits for minutes where something else than Ray listens.
    trying = threading.Thread(target=connect, daemon=True)
    trying.start()
    trying.join(CONNECT_S_MAX)
    if failed:
        said = " ".join(str(failed[0]).split()) or type(failed[0]).__name__
        raise Unavailable(
            f"the Ray at {address} does not take this driver: {said[:SAID_LENGTH_MAX]}",
            hint="its version, Python's and the token (RAY_AUTH_MODE) must be those of the cluster",
        ) from failed[0]
    if trying.is_alive():
        raise unreached
    try:
        yield
    except RayError as error:
        raise Unavailable(
            f"the Ray at {address} failed meanwhile: {str(error).strip().splitlines()[0]}",
            hint="agents run on; when Ray is back, `mesh fleet up` finds them",
        ) from error
    finally:
        ray.shutdown()


def install(spec: FleetSpec) -> None:
    """Have a fleet be as specified from now on; the agents that run stay as they are."""
    with suppress(NotFound):
        actor = _supplier(spec.device)
        ray.kill(actor)
        _until_gone(spec.name)
    # Beside the GCS, so that no other machine that is lost takes it along with what it knows of it.
    heads = [n["NodeID"] for n in ray.nodes() if n["Alive"] and HEAD in n["Resources"]]
    beside = NodeAffinitySchedulingStrategy(heads[0], soft=True) if heads else "DEFAULT"
    made = ray.remote(Supplier).options(
        name=spec.name,
        lifetime="detached",
        max_restarts=-1,
        num_cpus=0,
        scheduling_strategy=beside,
    )
    made.remote(spec)


def seen(device: str) -> FleetSeen:
    """Raises NotFound and Unavailable."""
    found: FleetSeen = _answer(_supplier(device).seen.remote())
    return found


def change(device: str, nodes: int | None) -> FleetSpec:
    """Have a fleet have so many nodes; `None`: as many as the controller wants. Raises NotFound,
    InvalidInput and Unavailable.
    """
    spec: FleetSpec = _answer(_supplier(device).spec.remote())
    if nodes is None and not spec.wanted:
        raise InvalidInput(
            f"the {device} fleet does not know whom to ask how many nodes are wanted",
            hint="start it with `mesh fleet up --wanted URL`",
        )
    changed = replace(spec, nodes=nodes)
    install(changed)
    return changed


def end(device: str, s_max: float) -> None:
    """Drain all agents of a fleet, and end it. Raises NotFound, and MeshError where agents are
    still draining after `s_max`; they go on with that.
    """
    change(device, 0)
    until_s = time.monotonic() + s_max
    while (now := seen(device)).agents or now.waiting or not now.looked:
        if time.monotonic() > until_s:
            raise MeshError(
                f"{len(now.agents)} agents still drain after {s_max:.0f} s",
                hint="`mesh fleet status` shows them; `mesh fleet down` again ends the fleet",
            )
        time.sleep(POLL_S)
    ray.kill(_supplier(device))


def _supplier(device: str) -> Any:
    try:
        return ray.get_actor(f"fleet-{device}")
    except ValueError as error:
        raise NotFound(
            f"this Ray has no {device} fleet", hint="`mesh fleet up` makes one"
        ) from error


def _answer(asked: Any) -> Any:
    try:
        return ray.get(asked, timeout=ANSWER_S_MAX)
    except GetTimeoutError as error:
        raise Unavailable(
            f"the fleet's actor has not answered within {ANSWER_S_MAX:.0f} s",
            hint="Ray may be starting it; `ray list actors` says what it waits for",
        ) from error


def _until_gone(name: str) -> None:
    """A name is taken until Ray has noticed that its actor is dead."""
    until_s = time.monotonic() + ANSWER_S_MAX
    while name in ray.util.list_named_actors() and time.monotonic() < until_s:
        time.sleep(0.05)
