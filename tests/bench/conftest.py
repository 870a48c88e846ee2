"""A tiny OpenAI-compatible server, as good or as bad as a test wants it."""

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from tests.quick_http import served


@dataclass
class Fake:
    """`bodies` has every request that came. `ids`, `ignore_eos` and `chunk_usage` are what the server takes; `usage`
    whether it counts at all; `per_chunk` how many tokens it puts into a chunk. `faults` says for a 0-based request
    what goes wrong with it."""

    url: str = ""
    bodies: list[dict[str, Any]] = field(default_factory=list)
    ids: bool = True
    ignore_eos: bool = True
    chunk_usage: bool = True
    usage: bool = True
    per_chunk: int = 1
    cached: int | None = 3
    faults: dict[int, str] = field(default_factory=dict)
    given_up: int = 0

    def refusal(self, body: dict[str, Any]) -> str | None:
        if isinstance(body.get("prompt"), list) and not self.ids:
            return "prompt: must be a string"
        if "ignore_eos" in body and not self.ignore_eos:
            return "ignore_eos: not supported"
        if "continuous_usage_stats" in body["stream_options"] and not self.chunk_usage:
            return "stream_options.continuous_usage_stats: not supported"
        return None

    async def models(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [{"id": "fake", "object": "model"}]})

    async def complete(self, request: Request) -> Response:
        body = await request.json()
        if refusal := self.refusal(body):
            return JSONResponse({"error": {"message": refusal, "type": "invalid_request_error"}}, 400)
        self.bodies.append(body)
        fault = self.faults.get(len(self.bodies) - 1)
        if fault == "overloaded":
            return JSONResponse({"error": {"message": "too many requests"}}, 429)
        if fault == "broken":
            return Response("<html>oh no</html>", 502)
        return StreamingResponse(self._stream(body, fault), media_type="text/event-stream")

    async def _stream(self, body: dict[str, Any], fault: str | None) -> AsyncIterator[str]:
        chat, count = "messages" in body, body["max_tokens"]
        if fault == "hangs":
            try:
                await asyncio.Event().wait()
            finally:
                self.given_up += 1
        if chat:
            yield self._event(body, {"delta": {"role": "assistant", "content": ""}}, 0)
        for done in range(0, count, self.per_chunk):
            if done and fault == "hangs up":
                raise ConnectionAbortedError  # uvicorn closes the connection without an end
            if done and fault == "error":
                yield f"data: {json.dumps({'error': {'message': 'out of luck'}})}\n\n"
                return
            if done and fault == "nonsense":
                yield "data: {nonsense\n\n"
                return
            text = "".join(f" w{i}" for i in range(done, min(done + self.per_chunk, count)))
            choice = {"delta": {"content": text}} if chat else {"text": text}
            yield ": ping\n\n" + self._event(body, choice, min(done + self.per_chunk, count))
        yield self._event(body, {"finish_reason": "length", **({"delta": {}} if chat else {"text": ""})}, count)
        if self.usage and body["stream_options"].get("include_usage"):
            yield f"data: {json.dumps({'choices': [], 'usage': self._usage(body, count)})}\n\n"
        if fault != "cut off":
            yield "data: [DONE]\n\n"

    def _event(self, body: dict[str, Any], choice: dict[str, Any], tokens: int) -> str:
        chunk: dict[str, Any] = {"choices": [{"index": 0, **choice}]}
        if body["stream_options"].get("continuous_usage_stats"):
            chunk["usage"] = self._usage(body, tokens)
        return f"data: {json.dumps(chunk)}\n\n"

    def _usage(self, body: dict[str, Any], tokens: int) -> dict[str, Any]:
        prompt = body.get("prompt") or "".join(message["content"] for message in body["messages"])
        details = {"cached_tokens": self.cached} if self.cached is not None else None
        length = len(prompt) if isinstance(prompt, list) else len(prompt.split())
        return {"prompt_tokens": length, "completion_tokens": tokens, "prompt_tokens_details": details}


@pytest.fixture
def fake() -> Iterator[Fake]:
    server = Fake()
    routes = [
        Route("/v1/models", server.models),
        Route("/v1/completions", server.complete, methods=["POST"]),
        Route("/v1/chat/completions", server.complete, methods=["POST"]),
    ]
    with served(Starlette(routes=routes)) as server.url:
        yield server
