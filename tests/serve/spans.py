"""A collector of OpenTelemetry spans, as servers export them."""
from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

ENV = {"OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf", "OTEL_BSP_SCHEDULE_DELAY": "100"}


class Spans:
    """What came in, and where to send it."""

    def __init__(self, port: int) -> None:
        self.endpoint = f"http://127.0.0.1:{port}/v1/traces"
        self.found: list[tuple[str, dict[str, Any]]] = []

    def add(self, body: bytes) -> None:
        """Note the spans of one export: names and attributes, and the trace's id as "trace"."""
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            for scope in resource.scope_spans:
                self.found += [(span.name, {one.key: _plain(one.value) for one in span.attributes} | {"trace": span.trace_id.hex()})
                               for span in scope.spans]

    def wait(self, request: str) -> dict[str, Any]:
        """The attributes of the `llm_request` span of a request whose id holds this; AssertionError where none comes."""
        return self.several(1, lambda found: request in str(found.get("gen_ai.request.id")))[0]

    def several(self, n: int, wanted: Callable[[dict[str, Any]], bool]) -> list[dict[str, Any]]:
        """The attributes of all `llm_request` spans that are wanted, once there are so many; AssertionError where they do not come."""
        end = time.monotonic() + 20
        while time.monotonic() < end:
            said = [attributes for name, attributes in list(self.found) if name == "llm_request" and wanted(attributes)]
            if len(said) >= n:
                return said
            time.sleep(0.1)
        raise AssertionError(f"there are no {n} such spans among {self.found}")


def _plain(value: Any) -> Any:
    kind = value.WhichOneof("value")
    return [_plain(one) for one in value.array_value.values] if kind == "array_value" else getattr(value, kind)


@contextmanager
def collecting() -> Iterator[Spans]:
    """A collector on a free port as long as the block runs."""
    class Taking(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            spans.add(self.rfile.read(int(self.headers["content-length"])))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Taking)
    spans = Spans(server.server_port)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield spans
    finally:
        server.shutdown()
        server.server_close()
