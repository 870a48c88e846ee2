"""A receiver of traces (OTLP over HTTP), of the tests' own."""

import threading
from collections import deque
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

WAIT_S = 20.0


class Receiver:
    """Keeps the spans that come. `statuses`: of the next answers; then 200. `sent_to`: the paths. `resources`: who has
    sent, by attribute."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self.statuses: deque[int] = deque()
        self.sent_to: list[str] = []
        self.resources: list[dict[str, Any]] = []
        self._news = threading.Condition()
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                status = receiver._take(self.path, self.headers["Content-Type"], body)
                self.send_response(status)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,), name="receiver")
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(WAIT_S)

    def __enter__(self) -> "Receiver":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _take(self, path: str, kind: str, body: bytes) -> int:
        with self._news:
            status = self.statuses.popleft() if self.statuses else 200
            self.sent_to.append(path)
            if status == 200:
                assert kind == "application/x-protobuf"
                message = ExportTraceServiceRequest.FromString(body)
                for whole in message.resource_spans:
                    self.resources.append(attributes(whole.resource))
                    for scope in whole.scope_spans:
                        self.spans += scope.spans
            self._news.notify_all()
            return status

    def until(self, true: Callable[[], Any]) -> None:
        """Waits until something is true of what has come."""
        with self._news:
            assert self._news.wait_for(true, WAIT_S), [span.name for span in self.spans]

    def requests(self, number: int) -> list[Span]:
        """The spans of requests themselves, once there are so many."""
        self.until(lambda: len(self._own()) >= number)
        return self._own()

    def _own(self) -> list[Span]:
        return [span for span in self.spans if span.kind == Span.SPAN_KIND_SERVER]

    def children(self, parent: Span, sequence: int | None = None) -> list[Span]:
        """The spans below one, in their order; of one sequence of the request, or of all."""
        found = [span for span in self.spans if span.parent_span_id == parent.span_id]
        if sequence is not None:
            found = [span for span in found if attributes(span)["shoal.sequence"] == sequence]
        return sorted(found, key=lambda span: span.start_time_unix_nano)


def seconds(span: Span) -> float:
    return float(span.end_time_unix_nano - span.start_time_unix_nano) / 1e9


def attributes(span: Any) -> dict[str, Any]:
    found = {}
    for pair in span.attributes:
        kind = pair.value.WhichOneof("value")
        value = getattr(pair.value, kind)
        found[pair.key] = [each.string_value for each in value.values] if kind == "array_value" else value
    return found
