"""The node agent's arguments: what may be given, and what it means. No side effects.

`main` calls it first; environment variables come in as `environ`, as defaults of options.
"""

from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import TypeVar

from mesh.domain.checks import check_name
from mesh.domain.energy import Power, parse_watts
from mesh.domain.errors import InvalidInput
from mesh.domain.ids import NodeId
from mesh.domain.model import ComputePrecision, KvPrecision
from mesh.domain.reasons import DeviceKind
from mesh.domain.source_rules import SourceRules, read_source_rules
from mesh.domain.units import format_bytes, parse_bytes
from mesh.domain.values import dataclass
from mesh.runtime.options import (
    AUTO,
    DEFAULT_ADDRESS,
    GRACE_S_LARGEST,
    HOME,
    Option,
    parse,
    read_grace_s,
)
from mesh.wire.channel import parse_address
from mesh.wire.credentials import TLS_VARIABLE
from mesh_loader.digests import Verify
from mesh_loader.download_rate import parse_rate
from mesh_nodes.gpus import Gpu, Gpus, hardware_of
from mesh_nodes.hardware import Hardware, default_node_id, probe

THREADS_MAX = 1024
PREFETCH_PART = 4
"""One of so many parts of a node's memory, unless told otherwise."""
PAGE_CACHE_PART = 2
"""The same of what that leaves of the machine's."""
ASLEEP = 2
"""On a GPU, unless told otherwise."""
ASLEEP_MAX = 64


class EngineName(StrEnum):
    OPENVINO = "openvino"
    VLLM = "vllm"


_ENGINES = {
    DeviceKind.CPU: (EngineName.OPENVINO, EngineName.VLLM),
    DeviceKind.GPU: (EngineName.VLLM,),
}
"""Those that compute on a device; the first is its own."""


OPTIONS = (
    Option(
        flag="--join",
        metavar="HOST:PORT,…",
        default=DEFAULT_ADDRESS,
        environ="MESH_CONTROLLER",
        help="The controller of the cell to join, or all of those of which one leads.",
    ),
    Option(flag="--name", help="The node's name in its cell; default: <host>-cpu0, -gpu0, …"),
    Option(
        flag="--device",
        choices=tuple(DeviceKind),
        default=DeviceKind.CPU,
        help="What it computes on.",
    ),
    Option(
        flag="--gpu",
        metavar="N",
        kind=int,
        help="With --device gpu: which one of those that CUDA_VISIBLE_DEVICES leaves; default: 0.",
    ),
    Option(
        flag="--engine",
        choices=tuple(EngineName),
        help="What computes; default: openvino on CPUs, vllm on GPUs.",
    ),
    Option(
        flag="--memory",
        metavar="SIZE",
        help="Limit of its process, like 4GiB: weights, KV caches and what it takes by itself; "
        "default: 70 % of what the machine and its control groups allow.",
    ),
    Option(
        flag="--prefetch-memory",
        metavar="SIZE",
        help="Of that, for models loaded before they are called, 0 for none; default: a quarter.",
    ),
    Option(
        flag="--page-cache",
        metavar="SIZE",
        help="Of the memory beside it, for files of stored models that openvino's loads will read; "
        "default: half.",
    ),
    Option(
        flag="--threads",
        metavar="N",
        kind=int,
        least=1,
        help="Threads to compute with; default: the usable cores.",
    ),
    Option(
        flag="--numa", metavar="N", kind=int, help="CPUs of NUMA node N alone, near its memory."
    ),
    Option(
        flag="--watts",
        metavar="IDLE:BUSY",
        help="What it draws at rest and while it computes, like 60:230: its joules are reckoned by "
        "that where no energy counter (RAPL, NVML) can be read.",
    ),
    Option(
        flag="--precision",
        choices=(AUTO, *ComputePrecision),
        default=AUTO,
        help="What openvino multiplies in; auto: f32, or what is clearly quicker.",
    ),
    Option(
        flag="--kv",
        choices=(AUTO, *KvPrecision),
        default=AUTO,
        help="Elements of openvino's KV caches; auto: f16, or bf16 beside bf16.",
    ),
    Option(
        flag="--asleep",
        metavar="N",
        kind=int,
        help="With --device gpu: unloaded instances that stay with their weights in the host's "
        f"memory, to be woken by their next load; default: {ASLEEP}.",
    ),
    Option(
        flag="--asleep-memory",
        metavar="SIZE",
        help="The host's memory for them, like 16GiB; default: half of what there is.",
    ),
    Option(
        flag="--verify",
        choices=tuple(Verify),
        default=Verify.FIRST,
        help="When a load checks the digests of its files; first: the first time that this process "
        "meets a file as it is.",
    ),
    Option(
        flag="--download-rate",
        metavar="SIZE",
        help="A second, of all imports together (but pkg://); default: any.",
    ),
    Option(
        flag="--sources",
        metavar="ROLE=RULE,…",
        repeatable=True,
        help="As of the controller: from a host of http(s) that a rule names, models are fetched "
        "though its address is private; repeatable.",
    ),
    Option(
        flag="--tls",
        metavar="DIR",
        environ=TLS_VARIABLE,
        help="Certificates for the cell, as of `mesh tls init DIR`: ca.pem, node.pem, node.key.",
    ),
    Option(
        flag="--key-file", metavar="FILE", help="The node's key for the cell; default: MESH_KEY."
    ),
    Option(
        flag="--policy",
        metavar="FILE.py",
        help="The policy file of the cell's controller, for the turn rule that it brings along.",
    ),
    Option(
        flag="--grace-s",
        metavar="SECONDS",
        kind=float,
        most=GRACE_S_LARGEST,
        default="0",
        help="After SIGTERM, what runs on it may move to other nodes or end within so long.",
    ),
    Option(flag="--journal", metavar="FILE", help="Write every decision of this node there."),
    HOME,
)
"""All that `mesh node` has, too."""
_PARENT = Option(
    flag="--parent-pid", metavar="PID", kind=int, help="End when this parent process ends."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeOptions:
    """What a node agent is to be. `home` may not exist yet."""

    join: str
    """The controller's HOST:PORT, or those of several with commas between."""
    name: NodeId
    device: DeviceKind
    engine: EngineName
    hardware: Hardware
    """The cores and the memory of the device."""
    gpu: Gpu | None
    """The GPU of a GPU node; `None` for a CPU node."""
    memory_bytes: int
    """Limit of the node's process: weights, KV caches and what the process takes by itself."""
    prefetch_bytes: int
    """How much of the node's memory may hold what is loaded before anybody calls for it."""
    page_cache_bytes: int
    """How much of the host's memory beside the node's may hold files that loads will read; openvino
    alone has this.
    """
    threads: int
    """The threads that one iteration computes with."""
    numa: int | None
    """The NUMA node that all of it is near to, if to any."""
    power: Power | None
    """By which its joules are reckoned where no counter tells them."""
    precision: ComputePrecision | None
    """The precision of computation; `None` stands for the quickest by the clock. The same holds for
    `kv`.
    """
    kv: KvPrecision | None
    asleep_max: int
    """Unloaded instances that stay with their weights in the host's memory; 0 on a CPU."""
    asleep_bytes_max: int
    """The most host memory that all sleeping instances may take together."""
    verify: Verify
    """When a load checks the digests of its files."""
    download_bytes_per_s: int | None
    """Bound of all imports together; None for none."""
    sources: SourceRules
    """The operator's; a node takes from them which hosts may have private addresses."""
    policy: str
    """The policy file whose turn rule it has beside the built-in ones; empty without one."""
    grace_s: float
    """For what runs on it when it is to stop."""
    home: Path
    journal: Path | None
    key_file: Path | None
    tls: Path | None
    parent_pid: int | None


def read_options(
    arguments: Sequence[str],
    environ: Mapping[str, str],
    machine: Hardware,
    gpus: Callable[[], Gpus] = Gpus,
    near: Callable[[int], Hardware] = lambda number: probe(numa=number),
) -> NodeOptions:
    """`near`: what a NUMA node of the machine has.

    Raises InvalidInput, which names the option; Unavailable for a GPU that cannot be asked;
    SystemExit(0) after --help.
    """
    given = parse(
        (*OPTIONS, _PARENT),
        arguments,
        environ,
        prog="python -m mesh_nodes",
        description="Serve models on this machine for a cell of mesh.",
    )
    device = DeviceKind(given.device)
    engine = _engine(given.engine, device)
    gpu = None
    if device is DeviceKind.GPU:
        gpu = gpus().visible(given.gpu or 0, environ.get("CUDA_VISIBLE_DEVICES"))
    if given.numa is not None:
        machine = near(given.numa)
    hardware = machine if gpu is None else hardware_of(gpu, machine)
    index = (given.gpu if gpu is not None else given.numa) or 0
    name = given.name or default_node_id(device=device, index=index)
    check_name(name, "--name")
    memory_bytes = _memory_bytes(given.memory, hardware)
    return NodeOptions(
        join=_address(given.join),
        name=NodeId(name),
        device=device,
        engine=engine,
        hardware=hardware,
        gpu=gpu,
        memory_bytes=memory_bytes,
        prefetch_bytes=_prefetch_bytes(given.prefetch_memory, memory_bytes),
        page_cache_bytes=_page_cache_bytes(given.page_cache, memory_bytes, machine, engine),
        threads=_threads(given.threads, hardware),
        numa=given.numa,
        power=None if given.watts is None else parse_watts(given.watts),
        precision=_of_openvino(ComputePrecision, "--precision", given.precision, engine),
        kv=_of_openvino(KvPrecision, "--kv", given.kv, engine),
        asleep_max=_asleep(given.asleep, device),
        asleep_bytes_max=_asleep_bytes(given.asleep_memory, device, machine),
        verify=Verify(given.verify),
        download_bytes_per_s=given.download_rate and parse_rate(given.download_rate),
        sources=read_source_rules(given.sources),
        policy=given.policy or "",
        grace_s=read_grace_s(given.grace_s, "60 drains it for a minute at most"),
        home=Path(given.home).expanduser().absolute(),
        journal=None if given.journal is None else Path(given.journal),
        key_file=None if given.key_file is None else Path(given.key_file),
        tls=None if not given.tls else Path(given.tls),
        parent_pid=given.parent_pid,
    )


def _engine(name: str | None, device: DeviceKind) -> EngineName:
    engines = _ENGINES[device]
    engine = engines[0] if name is None else EngineName(name)
    if engine not in engines:
        raise InvalidInput(
            f"--engine {engine} does not compute on a {device.value.upper()}",
            hint=f"start the node with --engine {engines[0]}",
        )
    return engine


def _address(text: str) -> str:
    addresses = text.split(",")
    for address in addresses:
        _, port = parse_address(address)
        if port == 0:
            raise InvalidInput(
                f"--join {address}: no controller listens on port 0",
                hint="give the port that the controller says it listens on",
            )
        if addresses.count(address) > 1:
            raise InvalidInput(f"--join {text}: {address} is there twice", hint="give each once")
    return text


def _memory_bytes(text: str | None, hardware: Hardware) -> int:
    if text is None:
        return hardware.budget_bytes
    size_bytes = parse_bytes(text)
    if not 0 < size_bytes <= hardware.memory_bytes:
        raise InvalidInput(
            f"--memory {text} is {format_bytes(size_bytes)}; this process may use "
            f"{format_bytes(hardware.memory_bytes)}",
            hint="give less than that: imports and other processes need some too",
        )
    return size_bytes


def _prefetch_bytes(text: str | None, memory_bytes: int) -> int:
    if text is None:
        return memory_bytes // PREFETCH_PART
    there = f"the node has {format_bytes(memory_bytes)} (--memory)"
    hint = "give less than that, or 0 for none"
    return _at_most(memory_bytes, "--prefetch-memory", text, there, hint)


def _page_cache_bytes(
    text: str | None, memory_bytes: int, machine: Hardware, engine: EngineName
) -> int:
    beside_bytes = max(machine.memory_bytes - memory_bytes, 0)
    if engine is not EngineName.OPENVINO:
        if text is not None:
            raise InvalidInput(
                f"--page-cache {text}: {engine} keeps no files in memory",
                hint=f"leave it out, or start a node with --engine {EngineName.OPENVINO}",
            )
        return 0
    if text is None:
        return beside_bytes // PAGE_CACHE_PART
    there = f"beside --memory this machine has {format_bytes(beside_bytes)}"
    hint = "give less than that, or 0 to leave it to the kernel"
    return _at_most(beside_bytes, "--page-cache", text, there, hint)


def _at_most(most_bytes: int, option: str, text: str, there: str, hint: str) -> int:
    size_bytes = parse_bytes(text)
    if size_bytes > most_bytes:
        what = f"{option} {text} is {format_bytes(size_bytes)}; {there}"
        raise InvalidInput(what, hint=hint)
    return size_bytes


def _threads(number: int | None, hardware: Hardware) -> int:
    if number is None:
        return hardware.cores
    if not 1 <= number <= THREADS_MAX:
        raise InvalidInput(f"--threads {number} is not from 1 to {THREADS_MAX}")
    return number


_Kind = TypeVar("_Kind", bound=StrEnum)


def _of_openvino(kind: type[_Kind], option: str, text: str, engine: EngineName) -> _Kind | None:
    if text == AUTO:
        return None
    if engine is not EngineName.OPENVINO:
        raise InvalidInput(
            f"{option} {text}: {engine} computes in what the model's files say",
            hint=f"leave it out, or start a node with --engine {EngineName.OPENVINO}",
        )
    return kind(text)


def _asleep(number: int | None, device: DeviceKind) -> int:
    if device is DeviceKind.CPU:
        if number:
            raise _sleeps_in_vain(f"--asleep {number}")
        return 0
    if number is None:
        return ASLEEP
    if not 0 <= number <= ASLEEP_MAX:
        raise InvalidInput(f"--asleep {number} is not from 0 to {ASLEEP_MAX}")
    return number


def _asleep_bytes(text: str | None, device: DeviceKind, machine: Hardware) -> int:
    if text is None:
        return machine.memory_bytes // 2
    if device is DeviceKind.CPU:
        raise _sleeps_in_vain(f"--asleep-memory {text}")
    size_bytes = parse_bytes(text)
    if not 0 < size_bytes <= machine.memory_bytes:
        raise InvalidInput(
            f"--asleep-memory {text} is {format_bytes(size_bytes)}; this process may use "
            f"{format_bytes(machine.memory_bytes)}",
            hint="give less than that, or --asleep 0 for none",
        )
    return size_bytes


def _sleeps_in_vain(given: str) -> InvalidInput:
    return InvalidInput(
        f"{given}: on a CPU the device's memory is the host's; weights that sleep there would "
        "free nothing",
        hint="leave it out, or start a node with --device gpu",
    )
