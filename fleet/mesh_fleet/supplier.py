"""The actor of a fleet: once a second it has as many agents run as are wanted, on machines of Ray.

A machine says by a resource of Ray, `mesh_cpu` or `mesh_gpu`, how many devices it has for mesh. The
supplier keeps nothing: it finds its keepers by their names, and agents of an earlier Ray by their
files. Before: `mesh fleet`. After: `keeper`, one for each device, and Ray's autoscaler.
"""

import threading
import time
from collections.abc import Iterable, Mapping, Set
from contextlib import suppress
from pathlib import Path
from typing import Any

import ray
import requests
from ray.autoscaler.sdk import request_resources
from ray.exceptions import ActorUnavailableError, GetTimeoutError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from mesh.domain.values import dataclass, replace
from mesh.wire.credentials import read_credentials
from mesh_fleet.agent_process import AgentProcess, folder_of
from mesh_fleet.choosing import Place, Use, choose
from mesh_fleet.keeper import AgentSeen, Keeper

LOOK_S = 1.0
ANSWER_S_MAX = 5.0
"""How long a keeper, a machine or the controller is waited for."""
ASK_AGAIN_S = 30.0
"""Machines are asked of Ray again after so long, which may have been started anew."""
LOST_MAX = 16
"""Of so many lost keepers it is told why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetSpec:
    device: str
    """`cpu` or `gpu`."""
    arguments: tuple[str, ...]
    """Those of `mesh node`, but for its device and its name."""
    home: str = ""
    """Of the agents; empty: as each machine has it."""
    nodes: int | None = None
    """As many nodes; `None`: as many as the controller wants."""
    wanted: tuple[str, ...] = ()
    """HTTP addresses of controllers, of which one says how many nodes it wants."""
    key_file: Path | None = None
    """Of a node's key, on each machine: it is not in Ray."""
    authority: Path | None = None
    """The file with the certificate by which the controllers' are checked, on each machine."""

    @property
    def resource(self) -> str:
        return f"mesh_{self.device}"

    @property
    def name(self) -> str:
        return f"fleet-{self.device}"


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetSeen:
    """What `mesh fleet status` shows."""

    wanted: int | None
    """`None`: not known yet."""
    places: int
    """Devices on the machines that Ray has."""
    agents: tuple[AgentSeen, ...]
    waiting: int = 0
    """Keepers that Ray has not started yet."""
    looked: bool = False
    """Whether the supplier has looked at its machines since it began."""
    problem: str = ""
    """Why the controller's number is not known, which agents and machines are lost, or why the last
    look failed.
    """


class Supplier:
    def __init__(self, spec: FleetSpec) -> None:
        self._spec = spec
        self._keepers: dict[str, tuple[int, Any]] = {}
        """By the name of their place: the order in which they came, and the actor."""
        self._started = 0
        self._found: dict[str, frozenset[str]] = {}
        """Devices with living agents of each machine, as they were when it was first seen."""
        self._asking: dict[str, Any] = {}
        """The answers of machines that have not said yet which agents live there."""
        self._lost: dict[str, str] = {}
        """Why keepers were lost, by their places, until as many agents run as are wanted."""
        self._seen = FleetSeen(wanted=spec.nodes, places=0, agents=())
        self._asked, self._asked_s = 0, 0.0
        threading.Thread(target=self._run, name="supply", daemon=True).start()

    def spec(self) -> FleetSpec:
        return self._spec

    def seen(self) -> FleetSeen:
        return self._seen

    def _run(self) -> None:
        while True:
            try:
                self._look()
            except Exception as error:  # of Ray, or a file's: the next look may be better
                self._seen = replace(self._seen, problem=_reason(error))
            time.sleep(LOOK_S)

    def _look(self) -> None:
        wanted, problem = self._wanted()
        nodes = ray.nodes()
        hosts = {node["NodeID"]: node["NodeManagerHostname"] for node in nodes}
        devices = [
            (node["NodeID"], f"{self._spec.device}{index}")
            for node in nodes
            if node["Alive"]
            for index in range(int(node["Resources"].get(self._spec.resource, 0)))
        ]
        self._find_keepers()
        agents = self._ask_keepers({node["NodeID"] for node in nodes if node["Alive"]})
        if wanted is not None and sum(bool(a and a.pid) for a in agents.values()) >= wanted:
            self._lost.clear()
        unusable = self._ask_machines(m for m, device in devices if f"{device}@{m}" not in agents)
        problems = [problem] * bool(problem)
        problems += [f"{hosts[machine]} is not used: {why}" for machine, why in unusable.items()]
        for lost, why in self._lost.items():
            device, _, machine = lost.partition("@")
            problems.append(f"{hosts.get(machine, machine)}-{device} is lost: {why}")
        if wanted is not None:
            self._ask_for_machines(max(wanted, len(self._keepers)))
        self._seen = FleetSeen(
            wanted=wanted,
            places=len(devices),
            agents=tuple(agent for agent in agents.values() if agent is not None),
            waiting=sum(agent is None for agent in agents.values()),
            looked=True,
            problem="; ".join(problems),
        )
        if wanted is None:
            return
        places = [
            self._place(machine, device, agents)
            for machine, device in devices
            if machine not in unusable or f"{device}@{machine}" in agents
        ]
        choice = choose(places, wanted)
        for place in choice.keep:
            with suppress(ValueError):  # its keeper lives after all: the next look finds it
                self._keep(place)
        for place in choice.drain:
            self._keepers[place.name][1].drain.remote()

    def _wanted(self) -> tuple[int | None, str]:
        """How many nodes are wanted, and why that is not known anew."""
        if self._spec.nodes is not None:
            return self._spec.nodes, ""
        key = read_credentials({}, self._spec.key_file, None).key if self._spec.key_file else ""
        headers = {"authorization": f"Bearer {key}"} if key else {}
        problem = ""
        for url in self._spec.wanted:
            try:
                answer = requests.get(
                    f"{url}/api/v1/nodes/wanted",
                    headers=headers,
                    timeout=ANSWER_S_MAX,
                    verify=str(self._spec.authority or "") or True,
                    allow_redirects=False,
                )
                answer.raise_for_status()
                return int(answer.json()[self._spec.device]["wanted"]), ""
            except KeyError:
                kinds = f"--nodes-wanted {self._spec.device}=LEAST..MOST"
                problem = f"{url} wants no {self._spec.device} nodes; start it with {kinds}"
            except (requests.RequestException, ValueError, TypeError) as error:
                problem = f"{url} does not say how many nodes it wants: {error}"
        return self._seen.wanted, problem

    def _find_keepers(self) -> None:
        """Those of an earlier supplier."""
        prefix = f"{self._spec.name}/"
        for name in sorted(ray.util.list_named_actors()):
            place = name.removeprefix(prefix)
            if place != name and place not in self._keepers:
                with suppress(ValueError):  # it has died since
                    self._keepers[place] = self._started + 1, ray.get_actor(name)
                    self._started += 1

    def _ask_keepers(self, living: Set[str]) -> dict[str, AgentSeen | None]:
        """What each keeper sees; `None`: Ray is starting it. Those that Ray cannot start, and those
        whose machine does not live, are forgotten, and those that have drained their agent end.
        """
        for place in [one for one in self._keepers if one.partition("@")[2] not in living]:
            # Ray may keep it for the next machine that joins, and say until then that it starts it.
            ray.kill(self._lose(place, "Ray has lost its machine"))
        asked = {place: actor.seen.remote() for place, (_, actor) in self._keepers.items()}
        if asked:
            ray.wait(list(asked.values()), num_returns=len(asked), timeout=ANSWER_S_MAX)
        agents: dict[str, AgentSeen | None] = {}
        for place, answer in asked.items():
            try:
                agent: AgentSeen = ray.get(answer, timeout=0.0)
            except (GetTimeoutError, ActorUnavailableError):
                agents[place] = None
                continue
            except RayError as error:
                self._lose(place, _reason(error))
                continue
            if agent.leaving and agent.pid is None:
                ray.kill(self._forget(place))
                continue
            agents[place] = agent
        return agents

    def _lose(self, place: str, why: str) -> Any:
        self._lost[place] = why
        for earlier in list(self._lost)[:-LOST_MAX]:
            del self._lost[earlier]
        return self._forget(place)

    def _forget(self, place: str) -> Any:
        """Its keeper is no more; agents that it may have left are looked for anew."""
        self._found.pop(place.partition("@")[2], None)
        return self._keepers.pop(place)[1]

    def _ask_machines(self, machines: Iterable[str]) -> dict[str, str]:
        """Find out which agents live on these machines, and why that is not known of some."""
        unknown = [machine for machine in dict.fromkeys(machines) if machine not in self._found]
        new = [machine for machine in unknown if machine not in self._asking]
        for machine in new:
            living = ray.remote(_living).options(num_cpus=0, scheduling_strategy=_on(machine))
            self._asking[machine] = living.remote(self._spec.home)
        if new:
            answers = [self._asking[machine] for machine in new]
            ray.wait(answers, num_returns=len(new), timeout=ANSWER_S_MAX)
        self._asking = {machine: self._asking[machine] for machine in unknown}
        failed = {}
        for machine in unknown:
            try:
                self._found[machine] = ray.get(self._asking[machine], timeout=0.0)
            except GetTimeoutError:
                failed[machine] = "it has not said yet which agents live there"
                continue
            except RayError as error:
                failed[machine] = _reason(error)
            del self._asking[machine]
        return failed

    def _place(self, machine: str, device: str, agents: Mapping[str, AgentSeen | None]) -> Place:
        name = f"{device}@{machine}"
        if name in self._keepers:
            agent = agents.get(name)
            leaving = agent is not None and agent.leaving
            use = Use.LEAVING if leaving else Use.KEPT
            return Place(machine=machine, device=device, use=use, since=self._keepers[name][0])
        use = Use.FOUND if device in self._found[machine] else Use.FREE
        return Place(machine=machine, device=device, use=use)

    def _keep(self, place: Place) -> None:
        spec, name = self._spec, f"{self._spec.name}/{place.name}"
        kept = ray.remote(Keeper).options(
            name=name,
            lifetime="detached",
            max_restarts=-1,
            num_cpus=0,
            resources={spec.resource: 1},
            scheduling_strategy=_on(place.machine),
        )
        self._started += 1
        self._keepers[place.name] = (
            self._started,
            kept.remote(spec.home, place.device, spec.arguments),
        )

    def _ask_for_machines(self, count: int) -> None:
        """Ray's autoscaler adds machines until there are so many devices, and may return those that
        are beyond it and idle. Where there is none, nothing comes of it.
        """
        now_s = time.monotonic()
        if count == self._asked and now_s - self._asked_s < ASK_AGAIN_S:
            return
        self._asked, self._asked_s = count, now_s
        request_resources(bundles=[*self.asks(), *self._others_ask()])

    def asks(self) -> list[dict[str, int]]:
        return [{self._spec.resource: 1}] * self._asked

    def _others_ask(self) -> list[dict[str, int]]:
        """What the fleet of the other device asks for: Ray forgets what it was asked before."""
        other = "gpu" if self._spec.device == "cpu" else "cpu"
        try:
            asked = ray.get_actor(f"fleet-{other}").asks.remote()
            found: list[dict[str, int]] = ray.get(asked, timeout=ANSWER_S_MAX)
        except (ValueError, RayError):
            return []
        return found


def _reason(error: Exception) -> str:
    """Ray's errors begin with where they come from."""
    return (str(error).strip().splitlines() or [type(error).__name__])[-1]


def _on(machine: str) -> NodeAffinitySchedulingStrategy:
    return NodeAffinitySchedulingStrategy(machine, soft=False)


def _living(home: str) -> frozenset[str]:
    """The devices of this machine whose agents run."""
    folder = folder_of(home)
    devices = [file.stem for file in folder.glob("*.pid")]
    return frozenset(each for each in devices if AgentProcess(folder, each).pid is not None)
