"""A server that speaks enough of OpenAI's protocol to be chatted with."""

import json
import os
import pty
import select
import signal
import subprocess
import sys
import termios
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

import shoal
from tests.conftest import Reference
from tests.quick_http import served


@pytest.fixture(scope="session")
def real_engine(reference: Reference) -> Iterator[shoal.Engine]:
    """SmolLM2 in a replica of its own."""
    settings = {"device": "cpu", "dtype": "float32", "kv_tokens": 16384, "cpu_threads": 1}
    with shoal.Engine(reference.folder.name, **settings) as engine:
        yield engine


@dataclass
class Fake:
    """Answers "You said: ..." word by word, or the deltas that `answers` has next. `bodies` has every chat request;
    `api_key` is wanted where set; `fault` is what goes wrong: "refuses", "hangs up", "error" or "no end"."""

    url: str = ""
    bodies: list[dict[str, Any]] = field(default_factory=list)
    answers: list[list[dict[str, Any]]] = field(default_factory=list)
    api_key: str | None = None
    fault: str | None = None
    ready: Response = field(default_factory=lambda: JSONResponse({}))
    metrics: bytes = b""

    def refused(self, request: Request) -> Response | None:
        if self.api_key and request.headers.get("authorization") != f"Bearer {self.api_key}":
            return JSONResponse({"error": {"message": "wrong key"}}, 401)
        return None

    async def list_models(self, request: Request) -> Response:
        own = {"id": "own", "default_sampling": {"temperature": 0.7}}
        return self.refused(request) or JSONResponse({"data": [{"id": "fake"}, {"id": "other"}, own]})

    async def is_ready(self, request: Request) -> Response:
        return self.ready

    async def show_metrics(self, request: Request) -> Response:
        return PlainTextResponse(self.metrics)

    async def chat(self, request: Request) -> Response:
        if refused := self.refused(request):
            return refused
        self.bodies.append(await request.json())
        if self.fault == "refuses":
            return JSONResponse({"error": {"message": "the prompt is too long", "type": "invalid_request_error"}}, 400)
        return StreamingResponse(self._stream(self.bodies[-1]), media_type="text/event-stream")

    async def _stream(self, body: dict[str, Any]) -> AsyncIterator[str]:
        def event(value: object) -> str:
            return f"data: {json.dumps(value, ensure_ascii=False)}\n\n"

        if self.answers:
            deltas = self.answers.pop(0)
            for delta in deltas:
                yield event({"choices": [{"delta": delta}]})
            called = any("tool_calls" in delta for delta in deltas)
            yield event({"choices": [{"delta": {}, "finish_reason": "tool_calls" if called else "stop"}]})
            yield "data: [DONE]\n\n"
            return
        words = f"You said: {body['messages'][-1]['content']}".split(" ")
        yield event({"choices": [{"delta": {"role": "assistant", "content": ""}}]})
        for n, word in enumerate(words):
            if n == 2 and self.fault == "hangs up":
                raise ConnectionAbortedError  # uvicorn closes the connection without an end
            if n == 2 and self.fault == "error":
                yield event({"error": {"message": "out of luck"}})
                return
            yield event({"choices": [{"delta": {"content": (" " if n else "") + word}}]})
        yield event({"choices": [{"delta": {}, "finish_reason": "stop"}]})
        usage = {"prompt_tokens": 9, "completion_tokens": len(words), "prompt_tokens_details": {"cached_tokens": 4}}
        yield event({"choices": [], "usage": usage})
        if self.fault != "no end":
            yield "data: [DONE]\n\n"


@pytest.fixture
def fake() -> Iterator[Fake]:
    server = Fake()
    routes = [
        Route("/ready", server.is_ready),
        Route("/metrics", server.show_metrics),
        Route("/v1/models", server.list_models),
        Route("/v1/chat/completions", server.chat, methods=["POST"]),
    ]
    with served(Starlette(routes=routes)) as server.url:
        yield server


class InTerminal:
    """A `shoal` command in a terminal of its own. `shown` is all that it has written so far."""

    def __init__(self, command: list[str], env: dict[str, str]) -> None:
        self._ours, self._its = pty.openpty()
        self.modes = termios.tcgetattr(self._its)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "shoal.cli", *command],
            stdin=self._its,
            stdout=self._its,
            stderr=self._its,
            env=os.environ | {"TERM": "xterm", "COLUMNS": "100"} | env,
            start_new_session=True,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a shell's background jobs ignore it
        )
        self.shown = ""

    def type(self, text: str) -> None:
        os.write(self._ours, text.encode())

    def wait_for(self, text: str, times: int = 1) -> None:
        """Until `text` was written so many times."""
        while self.shown.count(text) < times:
            readable, _, _ = select.select([self._ours], [], [], 60)
            assert readable, f"no {text!r} in {self.shown!r}"
            self.shown += os.read(self._ours, 4096).decode()

    def stop_and_go_on(self) -> None:
        """As Ctrl-Z and `fg` do, while it waits for something to be typed; between them a shell sets its own modes."""
        pid = self.process.pid
        while Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "S":
            pass
        os.kill(pid, signal.SIGSTOP)
        assert os.WIFSTOPPED(os.waitpid(pid, os.WUNTRACED)[1])
        termios.tcsetattr(self._its, termios.TCSANOW, self.modes)
        os.kill(pid, signal.SIGCONT)

    def edits(self) -> bool:
        """Whether it gets each key as it is typed, and shows it itself."""
        return not termios.tcgetattr(self._its)[3] & (termios.ICANON | termios.ECHO)

    def end(self) -> int:
        """The exit code, once it has ended by itself; what it wrote last is in `shown`, and how it left the terminal
        in `modes`."""
        deadline = time.monotonic() + 60
        while self.process.poll() is None:  # what it writes is read meanwhile, or it would wait for room to write
            assert time.monotonic() < deadline, f"it does not end: {self.shown!r}"
            if select.select([self._ours], [], [], 0.05)[0]:
                self.shown += os.read(self._ours, 4096).decode()
        code = self.process.returncode
        self.modes = termios.tcgetattr(self._its)
        while select.select([self._ours], [], [], 0)[0]:
            self.shown += os.read(self._ours, 4096).decode()
        return code

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._ours)
        os.close(self._its)


@pytest.fixture
def in_terminal(tmp_path: Path) -> Iterator[Callable[..., InTerminal]]:
    """Starts a `shoal` command in a terminal."""
    begun: list[InTerminal] = []

    def begin(*command: str) -> InTerminal:
        begun.append(InTerminal(list(command), {"XDG_STATE_HOME": str(tmp_path)}))
        return begun[-1]

    yield begin
    for terminal in begun:
        terminal.close()
