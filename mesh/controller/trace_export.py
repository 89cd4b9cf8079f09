"""Where traces go, by OpenTelemetry's usual variables: most of them its library reads itself.

`OTEL_TRACES_EXPORTER` is `otlp`, `console` or `none`; `OTEL_EXPORTER_OTLP_PROTOCOL` is `grpc` or
`http/protobuf`. Imported where somebody wants traces alone. Before: `server`. After: `tracing`,
which makes them.
"""

import threading
from collections.abc import Callable, Mapping
from contextlib import ExitStack

from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, ConsoleSpanExporter, SpanExporter
from opentelemetry.trace import Tracer

from mesh import __version__
from mesh.domain.errors import InvalidInput

FLUSH_S_MAX = 1.0
"""For what is left when a controller ends; a collector that does not answer gets no more."""
SERVICE = "mesh-controller"
EXPORTER = "OTEL_TRACES_EXPORTER"
PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
_GRPC, _HTTP = "grpc", "http/protobuf"


def opened_tracer(environ: Mapping[str, str], opened: ExitStack) -> Tracer:
    """What it has not sent yet goes when `opened` ends. Raises InvalidInput where a variable cannot
    be meant.
    """
    exporter = _exporter(environ)
    named = Resource.create({"service.name": SERVICE, "service.version": __version__})
    provider = TracerProvider(
        resource=named.merge(OTELResourceDetector().detect()), shutdown_on_exit=False
    )
    provider.add_span_processor(BatchSpanProcessor(exporter))
    opened.callback(_within, FLUSH_S_MAX, provider.shutdown)
    return provider.get_tracer("mesh", __version__)


def _exporter(environ: Mapping[str, str]) -> SpanExporter:
    named = environ.get(EXPORTER) or "otlp"
    if named == "console":
        return ConsoleSpanExporter()
    if named != "otlp":
        raise InvalidInput(f"{EXPORTER} is {named!r}", hint="there are otlp, console and none")
    protocol = next((environ[name] for name in PROTOCOLS if environ.get(name)), _GRPC)
    if protocol == _GRPC:
        from opentelemetry.exporter.otlp.proto.grpc import trace_exporter as by_grpc

        return by_grpc.OTLPSpanExporter()
    if protocol == _HTTP:
        from opentelemetry.exporter.otlp.proto.http import trace_exporter as by_http

        return by_http.OTLPSpanExporter()
    raise InvalidInput(f"{PROTOCOLS[1]} is {protocol!r}", hint=f"there are {_GRPC} and {_HTTP}")


def _within(bound_s: float, what: Callable[[], None]) -> None:
    thread = threading.Thread(target=what, name="traces", daemon=True)
    thread.start()
    thread.join(bound_s)
