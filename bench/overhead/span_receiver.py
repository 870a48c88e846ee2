"""A receiver of traces as a process of its own.

    python -m bench.overhead.span_receiver   # prints its URL, runs on

Messages are kept as they came and read when they are asked for (`GET /`): meanwhile the receiver takes next to no time
from what is measured. The answer is a table: by the request's id, the sum of the times of its phases, in seconds.
"""

import json
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

HOST = "127.0.0.1"
REQUEST_ID = "shoal.request_id"


def sums_s(messages: list[bytes]) -> dict[str, float]:
    """By the request's id, the sum of the times of its phases."""
    spans: list[Span] = []
    for message in messages:
        for whole in ExportTraceServiceRequest.FromString(message).resource_spans:
            for scope in whole.scope_spans:
                spans += scope.spans
    names = {
        span.span_id: pair.value.string_value for span in spans for pair in span.attributes if pair.key == REQUEST_ID
    }
    sums = dict.fromkeys(names.values(), 0.0)
    for span in spans:
        if (name := names.get(span.parent_span_id)) is not None:
            sums[name] += (span.end_time_unix_nano - span.start_time_unix_nano) / 1e9
    return sums


def serve() -> None:
    """Receives until the process ends. Prints the URL."""
    messages: list[bytes] = []

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            messages.append(self.rfile.read(int(self.headers["Content-Length"])))
            self._answer(b"")

        def do_GET(self) -> None:
            self._answer(json.dumps(sums_s(messages)).encode())

        def _answer(self, body: bytes) -> None:
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """Nothing: a line for each message would cost more than the message."""

    server = ThreadingHTTPServer((HOST, 0), Handler)
    print(f"http://{HOST}:{server.server_port}", flush=True)
    server.serve_forever()


if __name__ == "__main__":
    serve()
