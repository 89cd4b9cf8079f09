"""The composition root of a node agent: options, engine, agent, signals, exit codes.

The only module that brings in an engine: by `engines.choosing`, the one that the options ask for.
Exit codes: 0 stopped as asked, 1 failed, 2 usage. A failure is two lines on stderr, whatever raised
it.
"""

import asyncio
import gc
import logging
import os
import secrets
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

from mesh import __version__
from mesh.domain.errors import InvalidInput, MeshError, StorageError
from mesh.domain.limits import NodeLimits
from mesh.domain.messages import NodeHello, NodeStarting
from mesh.domain.steps import LoadTier
from mesh.domain.units import format_bytes
from mesh.domain.values import replace
from mesh.policy.rules.turns import name_of
from mesh.runtime.engine import Engine
from mesh.runtime.logs import begin_logging
from mesh.runtime.policies import rule_of_file
from mesh.wire.credentials import credentials, read_credentials, show
from mesh_loader.bounded_child import die_with_parent
from mesh_loader.importing import ImportRules
from mesh_loader.store import ModelStore
from mesh_nodes.agent import Agent
from mesh_nodes.announcing import Announcer
from mesh_nodes.energy import energy_counter
from mesh_nodes.engines.choosing import BuiltEngine, Say, build_engine
from mesh_nodes.engines.host_memory import own_resident_bytes
from mesh_nodes.hardware import fingerprint, probe
from mesh_nodes.kept_loads import KeptLoads
from mesh_nodes.lanes import SWITCH_INTERVAL_S
from mesh_nodes.load_probe import measured_rate, tried_rates
from mesh_nodes.options import NodeOptions, read_options
from mesh_nodes.topology import bind, numa_node, usable_cpus

DONE, FAILED, USAGE = 0, 1, 2

EngineOf = Callable[[NodeOptions], Engine | BuiltEngine]

log = logging.getLogger(__name__)


def main(arguments: Sequence[str] | None = None, engine_of: EngineOf | None = None) -> int:
    """Run a node agent until it is stopped; the exit code. `engine_of`: another engine than the
    device's own, built once the options have been found good.
    """
    try:
        begin_logging(logging.WARNING, "%(asctime)s %(levelname)s %(message)s")
        logging.getLogger("mesh_nodes").setLevel(logging.INFO)
        options = read_options(
            sys.argv[1:] if arguments is None else arguments, os.environ, probe()
        )
        if options.parent_pid is not None:
            die_with_parent(options.parent_pid)
        if options.numa is not None:
            bind(numa_node(options.numa, usable_cpus()))  # before engines start their threads
        _show(options)
        return _run(options, build_engine if engine_of is None else _built_by(engine_of))
    except KeyboardInterrupt:
        # Before the agent listened for it.
        return DONE
    except Exception as error:
        _tell(error)
        return USAGE if isinstance(error, InvalidInput) else FAILED


def _show(options: NodeOptions) -> None:
    """The node's key and certificate; a key that the command line has read holds on."""
    tls = None
    if options.tls is not None:
        from mesh.wire.certificates import Part, read_tls

        tls = read_tls(options.tls, Part.NODE)
    if options.key_file is None and credentials().key:
        show(replace(credentials(), tls=tls))
    else:
        show(read_credentials(os.environ, options.key_file, tls))


def _run(options: NodeOptions, build: Callable[[NodeOptions, Say], BuiltEngine]) -> int:
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    store_path = _store_path(options.home)
    limits = NodeLimits()
    own_rule = rule_of_file(options.policy)
    with ExitStack() as stack:
        recorders = []
        if options.journal is not None:
            from mesh.runtime.journal import NodeStart, open_journal  # with cattrs: 30 ms of CPU

            start = NodeStart(
                version=__version__, limits=limits, policy=options.policy, power=options.power
            )
            recorders.append(open_journal(options.journal, start))
            stack.callback(recorders[0].close)
        announcer = Announcer(options.join.split(",")[0], _starting(options))
        stack.callback(announcer.close)
        built = build(options, announcer.say)
        identity = _identity(options, built)
        if own_rule is not None:
            identity = replace(identity, rule_digest=name_of(own_rule).digest)
        built.base_read()
        agent = Agent(
            engine=built.engine,
            identity=identity,
            loads=_loads(options.home, identity, store_path, built),
            limits=limits,
            own_rule=own_rule,
            power=options.power,
            energy=energy_counter(options.gpu),
            store_path=store_path,
            controller=options.join,
            resident_bytes=built.resident_bytes,
            nearer=built.nearer,
            imports=ImportRules(
                download_bytes_per_s=options.download_bytes_per_s,
                as_is=built.as_is,
                plain=built.plain,
                reach=options.sources.named_hosts(),
            ),
            recorders=recorders,
            joined=announcer.close,
            grace_s=options.grace_s,
        )
        # Modules and engine stay as they are: no collection amid an iteration need look at them.
        gc.freeze()
        code = _serve(agent)
    if not agent.clean:
        # Taking the interpreter down under a thread in native code could crash instead of end.
        log.warning("%s stops amid a call that does not end", options.name)
        logging.shutdown()
        os._exit(code)
    return code


def _serve(agent: Agent) -> int:
    """Until it is stopped or fails; the exit code."""

    async def until_stopped() -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, agent.stop)
        await agent.run()

    try:
        asyncio.run(until_stopped())
    except Exception as error:
        _tell(error)
        return FAILED
    return DONE


def _built_by(engine_of: EngineOf) -> Callable[[NodeOptions, Say], BuiltEngine]:
    def build(options: NodeOptions, say: Say) -> BuiltEngine:
        made = engine_of(options)
        return made if isinstance(made, BuiltEngine) else BuiltEngine(made, own_resident_bytes)

    return build


def _starting(options: NodeOptions) -> NodeStarting:
    return NodeStarting(
        node_id=options.name,
        device=options.device,
        hardware=options.hardware.text,
        cores=options.threads,
        engine=options.engine,
        memory_bytes=options.memory_bytes,
        phase="starts",
    )


def _identity(options: NodeOptions, built: BuiltEngine) -> NodeHello:
    engine_is, hardware = built.engine.capabilities, options.hardware
    return NodeHello(
        node_id=options.name,
        run_id=secrets.token_hex(8),
        device=options.device,
        hardware=hardware.text,
        cores=options.threads,
        engine=engine_is.name,
        memory_bytes=options.memory_bytes,
        base_bytes=_base_bytes(options.memory_bytes, built.resident_bytes() + built.kept_bytes),
        fingerprint=fingerprint(
            hardware, device=options.device, threads=options.threads, engine=engine_is
        ),
        tensor_parallel_max=engine_is.tensor_parallel_max,
        batch_max=engine_is.batch_max,
        computes_ahead=engine_is.computes_ahead,
        swaps=engine_is.swaps,
        swaps_parts=engine_is.swaps_parts,
        loads_on_device=engine_is.loads_on_device,
        shares_weights=engine_is.shares_weights,
        as_published=engine_is.as_published,
        embeds=engine_is.embeds,
        busy_load_factor=engine_is.busy_load_factor,
        prefetch_bytes=options.prefetch_bytes,
        precision=built.precision,
        version=__version__,
    )


def _loads(
    home: Path, identity: NodeHello, store_path: Path, built: BuiltEngine
) -> KeptLoads | None:
    """What is known of loads here, if only by measurement; a node that cannot measure learns."""
    if built.least_load_s is None:
        return None
    loads = KeptLoads(home, identity.fingerprint, identity.busy_load_factor)
    if not loads:
        try:
            store = ModelStore(store_path)
            rates = tried_rates(
                built.engine,
                store,
                built.nearer(store.folders()),
                identity.memory_bytes - identity.base_bytes,
            )
            if not rates:
                rates = {LoadTier.DISK: measured_rate(store_path, built.least_load_s)}
            loads.note_measured(rates)
        except (OSError, MeshError) as error:
            log.warning("what a load takes here could not be measured: %s", error)
    return loads


def _base_bytes(limit_bytes: int, base_bytes: int) -> int:
    """What this node takes without any instance: now that its modules and its engine are there, and
    nothing has been loaded; and what its engine will hold without an instance.

    Raises InvalidInput when the node may not take more than that.
    """
    if limit_bytes <= base_bytes:
        raise InvalidInput(
            f"the node's process may take {format_bytes(limit_bytes)} (--memory), and takes "
            f"{format_bytes(base_bytes)} without any model",
            hint="give --memory more than that: weights and KV caches come on top of it",
        )
    return base_bytes


def _store_path(home: Path) -> Path:
    """The model store's folder, made if need be. Raises StorageError when it is no use."""
    path = home / "store"
    try:
        path.mkdir(parents=True, exist_ok=True)
        writable = os.access(path, os.W_OK | os.X_OK)
        reason = "permission denied"
    except OSError as error:
        writable, reason = False, (error.strerror or str(error)).lower()
    if not writable:
        raise StorageError(
            f"the model store {path} cannot be written: {reason}",
            hint="choose a state folder that you may write with --home or MESH_HOME",
        )
    return path


def _tell(error: Exception) -> None:
    """Two lines on stderr; for what is no expected failure, the trace before them."""
    if not isinstance(error, MeshError):
        log.error("the node failed unexpectedly", exc_info=error)
        error = MeshError(
            f"the node failed unexpectedly: {type(error).__name__}: {error}",
            hint="this is a fault of mesh; the lines above say where",
        )
    sys.stderr.write(f"error: {error.message}\n")
    sys.stderr.write(f"hint: {error.hint}\n" if error.hint else "")
