"""A proxy between an agent and the server that tells the model what to do: which tool to call, with which arguments. It
also lets a prompt be longer than the context, and keeps what was asked and answered.

A tool is told by the agent's own request: `tool_choice` names it, and its schema is narrowed to one set of arguments.
So the server, the grammar, the parser and the stream are what they are without the proxy, and any model obeys.
"""

import http.client
import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

from bench.correctness.clients.checks import long_text

WAIT_S = 300
PIECE = 1 << 16
OWN_HEADERS = ("host", "content-length", "connection", "accept-encoding", "transfer-encoding")
ENDPOINTS = ("/chat/completions", "/responses", "/messages")


@dataclass
class Exchange:
    """A request for text, as the agent sent it, and its answer."""

    path: str
    sent: dict[str, Any]
    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    answer: str = ""


class Director:
    """The proxy, as a context manager. `url`: of the proxy, without /v1. `preface`: a text that the model says before
    it calls, in whole answers of chat completions: clients send it back in one message with the calls.

        with Director(server) as director:
            director.call("bash", {"command": "echo hi"})
            ...  # the agent, at director.url
            director.exchanges
    """

    def __init__(self, server: str) -> None:
        self.exchanges: list[Exchange] = []
        self._url = server
        self._server = urlsplit(server)
        self._long_text = ""
        self._calls: list[tuple[str, dict[str, Any]]] = []
        self._texts: list[str] = []
        self._too_long = 0
        self.preface = ""
        self._lock = threading.Lock()
        director = self

        class ForwardingHandler(BaseHTTPRequestHandler):
            """A request of the agent's."""

            def do_GET(self) -> None:
                director._forward(self)

            do_POST = do_HEAD = do_DELETE = do_GET

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), ForwardingHandler)
        self._http.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._http.server_port}"

    def __enter__(self) -> "Director":
        threading.Thread(target=self._http.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._http.shutdown()
        self._http.server_close()

    def call(self, tool: str, arguments: dict[str, Any]) -> None:
        """The next answer that may call this tool does so. Namespaces are written before the name, with a dot."""
        self._calls.append((tool, arguments))

    def say(self, text: str) -> None:
        """The next answer, which is not to a request that a call has been told for, is this text."""
        self._texts.append(text)

    def overflow(self, requests: int = 1) -> None:
        """The next requests that have tools have prompts longer than the context."""
        self._long_text = long_text(self._url)
        self._too_long = requests

    @property
    def refused(self) -> list[Exchange]:
        """The requests that were not answered with 200."""
        return [each for each in self.exchanges if each.status != 200]

    def told(self) -> None:
        """Raises AssertionError unless every call has been made, and every text said."""
        assert not self._texts, f"never asked for {self._texts[0]!r}; asked: {self._asked()}"
        assert not self._calls, f"never asked with the tool {self._calls[0][0]!r}; asked: {self._asked()}"

    def _asked(self) -> list[str]:
        return [f"{each.path} {each.status} {sorted(_names(each.sent))} {each.answer[:300]}" for each in self.exchanges]

    def _forward(self, request: BaseHTTPRequestHandler) -> None:
        body = request.rfile.read(int(request.headers.get("content-length") or 0))
        exchange = None
        path = request.path.partition("?")[0]
        if body and path.endswith(ENDPOINTS):
            sent = json.loads(body)
            exchange = Exchange(path, sent)
            with self._lock:
                self.exchanges.append(exchange)
                body = json.dumps(self._directed(path, json.loads(body))).encode()
        headers = {name: value for name, value in request.headers.items() if name.lower() not in OWN_HEADERS}
        connection = http.client.HTTPConnection(self._server.hostname or "", self._server.port, timeout=WAIT_S)
        try:
            connection.request(request.command, request.path, body or None, headers)
            answer = connection.getresponse()
            request.send_response(answer.status)
            for name, value in answer.getheaders():
                if name.lower() not in OWN_HEADERS:
                    request.send_header(name, value)
            request.send_header("Connection", "close")
            request.end_headers()
            whole = b""
            streams = "text/event-stream" in answer.headers.get("content-type", "")
            while piece := answer.read1(PIECE) if streams else self._prefaced(answer.read()):
                whole += piece
                request.wfile.write(piece)
                request.wfile.flush()
            if exchange is not None:
                exchange.answer, exchange.headers = whole.decode(), {k.lower(): v for k, v in answer.getheaders()}
                exchange.status = answer.status  # last: who waits for it finds the rest
        except OSError:
            pass  # the agent has gone
        finally:
            connection.close()
            request.close_connection = True

    def _prefaced(self, answer: bytes) -> bytes:
        if not self.preface or b'"tool_calls"' not in answer:
            return answer
        told = json.loads(answer)
        told["choices"][0]["message"]["content"] = self.preface
        return json.dumps(told).encode()

    def _directed(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        if self._too_long and _names(body):
            self._too_long -= 1
            where = "input" if "input" in body else "messages"
            return body | {where: [*body[where], {"role": "user", "content": self._long_text}]}
        for told in self._calls:
            if (tool := _find(body, told[0])) is not None:
                self._calls.remove(told)
                _demand(path, body, tool, *told)
                return body
        return body | {"guided_choice": [self._texts.pop(0)]} if self._texts else body


def _tools(body: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The functions of a request, each by its name with its namespace."""
    for tool in body.get("tools") or ():
        if tool.get("type") == "namespace":
            yield from ((f"{tool['name']}.{inner.get('name')}", inner) for inner in tool["tools"])
        else:
            function = tool.get("function", tool)
            yield str(function.get("name")), function


def _names(body: dict[str, Any]) -> list[str]:
    return [name for name, _ in _tools(body)]


def _find(body: dict[str, Any], name: str) -> dict[str, Any] | None:
    return next((tool for known, tool in _tools(body) if known == name), None)


def _demand(path: str, body: dict[str, Any], tool: dict[str, Any], name: str, arguments: dict[str, Any]) -> None:
    """Changes the request so that its answer is this call."""
    schema = {
        "type": "object",
        "properties": {key: {"const": value} for key, value in arguments.items()},
        "required": list(arguments),
        "additionalProperties": False,
    }
    tool["strict"] = True
    tool["input_schema" if path.endswith("/messages") else "parameters"] = schema
    namespace, _, own = name.rpartition(".")
    if path.endswith("/messages"):
        body["tool_choice"] = {"type": "tool", "name": name, "disable_parallel_tool_use": True}
        body.pop("thinking", None)
    elif path.endswith("/responses"):
        choice = {"type": "function", "name": own} | ({"namespace": namespace} if namespace else {})
        body |= {"tool_choice": choice, "parallel_tool_calls": False}
    else:
        body |= {"tool_choice": {"type": "function", "function": {"name": name}}, "parallel_tool_calls": False}
