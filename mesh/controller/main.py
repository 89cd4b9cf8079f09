"""`python -m mesh.controller`: reads the command line, runs a controller, says how it ended.

Exit codes: 0 stopped as asked, 1 failed, 2 usage. The log goes to stderr.
"""

import argparse
import asyncio
import gc
import logging
import os
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from mesh.controller.gateway import GatewayLimits
from mesh.controller.options import (
    HTTP_OFF,
    JOIN_MS_LARGEST,
    OPTIONS,
    TURN_S_LARGEST,
)
from mesh.controller.server import ControllerConfig, serve
from mesh.domain.errors import InvalidInput, MeshError
from mesh.domain.limits import NODES_MAX, CellLimits, NodeRange
from mesh.domain.reasons import DeviceKind
from mesh.domain.source_rules import read_source_rules
from mesh.policy.registry import DEFAULT_POLICY
from mesh.runtime.logs import begin_logging
from mesh.runtime.options import Option, parse, read_grace_s, read_number
from mesh.wire.channel import is_loopback, parse_address
from mesh.wire.credentials import Tls

DONE, FAILED, USAGE = 0, 1, 2
COLLECTORS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_PORTS = {"http": ":80", "https": ":443"}
_VERBOSE = Option(flag="--verbose", kind=bool, help="Log at level DEBUG.")

SWITCH_S = 0.0005
"""How long a thread may keep the event loop's from going on."""
YOUNG_OBJECTS = 150
"""New objects are looked at whenever there are so many, which takes 0.15 ms in the median beside a
browser on a busy machine, where 350 took 0.60 ms.
"""
YOUNG_COLLECTIONS = 1
"""What is left of them is looked at again after more than so many such collections."""
WHOLE_COLLECTIONS = 12_000
"""One in so many of those is of all objects."""


def main(arguments: Sequence[str] | None = None) -> int:
    def run() -> None:
        options = parsed(OPTIONS, arguments, "mesh.controller", "Run the controller of a cell.")
        config = ControllerConfig(
            **served(options),
            state=options.state,
            policy=DEFAULT_POLICY if options.policy is None else options.policy,
            limits=CellLimits(
                turn_s_max=_turn_s(options.turn), node_ranges=read_node_ranges(options.nodes_wanted)
            ),
            sources=read_source_rules(options.sources),
            traces=wants_traces(os.environ),
        )
        while asyncio.run(serve(config, ready=lambda *_: settle(), stands_by=settle_anew)):
            pass  # it has handed over, and stands by

    return exit_code(run, "controller")


def parsed(
    options: Iterable[Option], arguments: Sequence[str] | None, module: str, description: str
) -> argparse.Namespace:
    """The values of a server's options; it logs from now on. Raises InvalidInput."""
    prog = f"python -m {module}"
    given = parse((*options, _VERBOSE), arguments, os.environ, prog=prog, description=description)
    level = logging.DEBUG if given.verbose else logging.INFO
    begin_logging(level, "%(asctime)s %(levelname)s %(name)s: %(message)s")
    return given


def served(options: argparse.Namespace) -> dict[str, Any]:
    """What a `ControllerConfig` says of how clients are served. Raises InvalidInput."""
    return {
        "listen": options.listen,
        "http": None if options.http == HTTP_OFF else options.http,
        "http_hosts_allowed": tuple(map(_host, options.http_host_allowed)),
        "http_origins": tuple(map(read_origin, options.http_cors)),
        "page": not options.no_page,
        "home": Path(options.home),
        "journal": None if options.journal is None else Path(options.journal),
        "gateway": GatewayLimits(join_s=_join_s(options.join_ms)),
        "keys": _wants_keys(options),
        "tls": _tls(Path(options.tls)) if options.tls else None,
        "grace_s": read_grace_s(options.grace_s, "30 lets answers end for half a minute"),
    }


def exit_code(run: Callable[[], None], what: str) -> int:
    """Run a server; how it ended is told on stderr."""
    try:
        run()
    except MeshError as error:
        sys.stderr.write(f"error: {error.message}\n")
        if error.hint:
            sys.stderr.write(f"hint: {error.hint}\n")
        return USAGE if isinstance(error, InvalidInput) else FAILED
    except Exception as error:
        # The trace is in the log: a core's failure was logged where it happened.
        sys.stderr.write(f"error: the {what} failed: {type(error).__name__}: {error}\n")
        sys.stderr.write("hint: this is a fault of mesh; its log has the trace\n")
        return FAILED
    return DONE


def settle() -> None:
    """What start-up has made stays: the collector need not look at it again and again, which it
    does beside the tokens (a tenth of the controller's time under load). Since each look of the
    collector keeps the loop, it looks at all objects seldom, and at few new ones at a time. And
    threads that render metrics and reports let the event loop's go on soon.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG_OBJECTS, YOUNG_COLLECTIONS, WHOLE_COLLECTIONS)
    sys.setswitchinterval(SWITCH_S)


def settle_anew() -> None:
    """The same of a controller that stands by, so that the collector has little left to look at
    once it leads. What it was before it handed over goes.
    """
    gc.unfreeze()
    settle()


def _tls(folder: Path) -> Tls:
    """Raises InvalidInput. Its library is imported where it is asked for alone."""
    from mesh.wire.certificates import Part, read_tls

    return read_tls(folder, Part.CONTROLLER)


def wants_traces(environ: Mapping[str, str]) -> bool:
    """Whether OpenTelemetry's variables name a place for them."""
    if environ.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return False
    exporter = environ.get("OTEL_TRACES_EXPORTER")
    return exporter != "none" if exporter else any(environ.get(name) for name in COLLECTORS)


def _wants_keys(options: argparse.Namespace) -> bool:
    """Off this machine's loopback unless --open says otherwise; there, with --keys. Raises
    InvalidInput for both.
    """
    if options.open and options.keys:
        raise InvalidInput("--open and --keys exclude each other", hint="leave one out")
    listens = [options.listen] + ([options.http] if options.http != HTTP_OFF else [])
    reached = not all(is_loopback(parse_address(address)[0]) for address in listens)
    return bool(options.keys or (reached and not options.open))


def _host(text: str) -> str:
    """In lower case. Raises InvalidInput for what is no host's name."""
    name = text.lower()
    if not re.fullmatch(r"[a-z0-9._-]+", name):
        raise InvalidInput(
            f"--http-host-allowed: {text!r} is no host's name",
            hint="give it as mesh.example, with no scheme and no port",
        )
    return name


def read_origin(text: str) -> str:
    """As browsers say it: in lower case, and without the port that its scheme has anyhow. Raises
    InvalidInput for what is none.
    """
    parts = re.fullmatch(
        r"([a-z][a-z0-9+.-]*)(://(?:[a-z0-9._-]+|\[[0-9a-f:.]+\]))(:[0-9]{1,5})?/?", text.lower()
    )
    if parts is None and text != "*":
        raise InvalidInput(
            f"--http-cors: {text!r} is no origin of pages",
            hint="give it as https://chat.example or http://localhost:3000, with no path, or * for "
            "all",
        )
    if parts is None:
        return text
    scheme, host, port = parts.groups(default="")
    return f"{scheme}{host}{port if port != _PORTS.get(scheme) else ''}"


def _turn_s(text: str) -> float:
    """Raises InvalidInput for what is none."""
    hint = "0.02 makes a turn of the decodes that take 20 ms together"
    return read_number("--turn", text, "seconds", TURN_S_LARGEST, hint)


def _join_s(text: str) -> float:
    """Raises InvalidInput for what is none."""
    hint = "20 joins the tokens of an answer that come within 20 ms of each other"
    return read_number("--join-ms", text, "milliseconds", JOIN_MS_LARGEST, hint) / 1e3


def read_node_ranges(given: Sequence[str]) -> tuple[NodeRange, ...]:
    """Those of `KIND=LEAST..MOST`. Raises InvalidInput for what is none, and for a kind twice."""
    found: dict[DeviceKind, NodeRange] = {}
    for text in given:
        kind, least, most = "", "", ""
        if parts := re.fullmatch(r"([a-z]+)=([0-9]{1,4})\.\.([0-9]{1,4})", text):
            kind, least, most = parts.groups()
        if kind not in set(DeviceKind) or not int(least) <= int(most) <= NODES_MAX or most == "0":
            raise InvalidInput(
                f"--nodes-wanted: {text!r} is no KIND=LEAST..MOST up to {NODES_MAX}",
                hint="cpu=1..8 lets the cell want from one CPU node to eight",
            )
        device = DeviceKind(kind)
        if device in found:
            raise InvalidInput(
                f"--nodes-wanted: {device} is there twice", hint="give each kind once"
            )
        found[device] = NodeRange(device=device, least=int(least), most=int(most))
    return tuple(found.values())
