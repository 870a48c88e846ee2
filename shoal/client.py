"""A small client of a running server, for the command line: lists its models, and streams a chat answer.

Works with any server that speaks OpenAI's protocol. (From Python, use the `openai` package.)
"""

import json
import time
import uuid
from collections.abc import Generator, Iterator
from dataclasses import dataclass, field
from typing import Any, Self

import httpx

# Servers send thinking under one of these names. Shoal and some others send it under both.
THINKING_NAMES = ("reasoning_content", "reasoning")
JSON = {"Content-Type": "application/json"}


class ServerError(Exception):
    """No server answers, or it refuses the request or breaks off. The message is for the user as it stands."""


@dataclass(frozen=True)
class ThoughtPiece:
    """A piece of what the model thinks before it answers."""

    text: str


@dataclass
class StreamedCall:
    """A call of a tool that the model wants. `arguments`, a JSON object as text, grow while it streams."""

    id: str
    name: str
    arguments: str = ""


Streamed = str | ThoughtPiece | StreamedCall


@dataclass
class ChatAnswer:
    """A chat answer. `text`, `thinking`, `calls` and `pieces` (how many pieces all of them came in) grow while it
    streams; `thinking_name` is the server's name for thinking in a message. The token counts are the server's and come
    at the end; None if it sends none. Times are in seconds since the request was sent."""

    text: str = ""
    pieces: int = 0
    finish_reason: str | None = None
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    output_tokens: int | None = None
    first_s: float | None = None
    last_s: float | None = None
    thinking: str = ""
    thinking_name: str = THINKING_NAMES[0]
    calls: list[StreamedCall] = field(default_factory=list)
    started: float = field(default_factory=time.perf_counter)

    @property
    def tokens_per_s(self) -> float | None:
        """Tokens per second after the first token; None if that cannot be measured."""
        if self.output_tokens is None or self.first_s is None or self.last_s is None:
            return None
        time_s = self.last_s - self.first_s
        return (self.output_tokens - 1) / time_s if self.output_tokens > 1 and time_s > 0 else None


class Client:
    """Requests to one server, at `url` with or without `/v1`. Use as a context manager."""

    def __init__(self, url: str, api_key: str | None = None) -> None:
        self.url = (url if "//" in url else f"http://{url}").rstrip("/").removesuffix("/v1")
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        # No time limit for an answer, but one for connecting (and for pages about the server: see `get`).
        try:
            self._http = httpx.Client(base_url=self.url, headers=headers, timeout=httpx.Timeout(None, connect=10))
        except httpx.InvalidURL as error:
            raise ServerError(f"{url!r} is not the URL of a server: {error}") from None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._http.close()

    def get(self, path: str) -> httpx.Response:
        """Sends a GET; returns the response, whatever its status. Raises ServerError if there is no response."""
        try:
            return self._http.get(path, timeout=10)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise self._unreachable(error) from None

    def models(self) -> dict[str, dict[str, Any]]:
        """The server's models: name to its description, in the server's order. Raises ServerError."""
        response = self.get("/v1/models")
        try:
            if response.status_code != 200:
                raise ServerError(f"{self.url}: {_reason(response)}")
            return {model["id"]: model for model in response.json()["data"]}
        except (ValueError, KeyError, TypeError):
            raise ServerError(
                f"{self.url} does not speak OpenAI's protocol: /v1/models is not a list of models"
            ) from None

    def chat(
        self, model: str, messages: list[dict[str, Any]], answer: ChatAnswer, **parameters: Any
    ) -> Generator[Streamed, None, None]:
        """Streams an answer: fills `answer`, and yields each piece of text or thinking, and a call each time it has
        grown. Closing the iterator stops the server's work.

        Raises ServerError; the text that came before the error is in `answer`.
        """
        body = {
            "model": model,
            "messages": messages,
            "stream": True,
            "stream_options": {"include_usage": True},
            **parameters,
        }
        try:
            with self._http.stream("POST", "/v1/chat/completions", content=_json(body), headers=JSON) as response:
                if response.status_code != 200:
                    response.read()
                    raise ServerError(_reason(response))
                yield from _pieces(response, answer)
        except httpx.HTTPError as error:
            raise self._unreachable(error) from None

    def _unreachable(self, error: Exception) -> ServerError:
        if isinstance(error, httpx.ConnectError | httpx.ConnectTimeout):
            return ServerError(
                f"no server at {self.url}; start one with `shoal serve`, wait for one that starts, or say --url"
            )
        return ServerError(f"{self.url}: the connection broke: {error or type(error).__name__}")


def _json(body: dict[str, Any]) -> bytes:
    """A body in JSON. What the terminal or a pipe gave that is no UTF-8 becomes question marks."""
    return json.dumps(body, ensure_ascii=False).encode(errors="replace")


def _pieces(response: httpx.Response, answer: ChatAnswer) -> Iterator[Streamed]:
    """The pieces of an answer in a stream of server-sent events. Raises ServerError when the stream reports an error or
    ends too early."""
    for line in _lines(response):
        if not line.startswith(b"data:"):
            continue
        data = line[5:].decode(errors="replace").strip()
        if data == "[DONE]":
            return
        try:
            chunk = json.loads(data)
        except ValueError:
            raise ServerError(f"the server sent a chunk that is not JSON: {data[:100]}") from None
        if chunk.get("error"):
            raise ServerError(_message(chunk))
        _count(chunk.get("usage"), answer)
        for choice in chunk.get("choices") or []:
            answer.finish_reason = choice.get("finish_reason") or answer.finish_reason
            for piece in _added(choice.get("delta") or {}, answer):
                answer.last_s = time.perf_counter() - answer.started
                answer.first_s = answer.first_s if answer.first_s is not None else answer.last_s
                answer.pieces += 1
                yield piece
    raise ServerError("the server broke the answer off")


def _added(delta: dict[str, Any], answer: ChatAnswer) -> Iterator[Streamed]:
    """Adds a delta to the answer; yields its pieces."""
    for name in THINKING_NAMES:
        if (thought := delta.get(name)) and isinstance(thought, str):
            answer.thinking += thought
            answer.thinking_name = name
            yield ThoughtPiece(thought)
            break
    if text := delta.get("content"):
        answer.text += text
        yield text
    for part in delta.get("tool_calls") or []:
        yield _grown(part, answer.calls)


def _grown(part: dict[str, Any], calls: list[StreamedCall]) -> StreamedCall:
    """The call that a part of a delta begins or continues. (Some servers send whole calls, without an index or with 0
    for each.)"""
    index, call_id, function = part.get("index"), part.get("id"), part.get("function") or {}
    name, arguments = function.get("name") or "", function.get("arguments") or ""
    at = len(calls) if index is None and name else len(calls) - 1 if index is None else index
    if at >= len(calls) or (name and call_id and call_id != calls[at].id):
        calls.append(StreamedCall(call_id or f"call_{uuid.uuid4().hex[:24]}", name))
        at = len(calls) - 1
    calls[at].arguments += arguments
    return calls[at]


def _lines(response: httpx.Response) -> Iterator[bytes]:
    """The lines of an answer. (`httpx` would also cut them at U+2028 and others, which are text here.)"""
    rest = b""
    for data in response.iter_bytes():
        *lines, rest = (rest + data).split(b"\n")
        yield from lines
    yield rest


def _count(usage: dict[str, Any] | None, answer: ChatAnswer) -> None:
    if usage:
        answer.prompt_tokens = usage.get("prompt_tokens")
        answer.output_tokens = usage.get("completion_tokens")
        answer.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")


def _reason(response: httpx.Response) -> str:
    if response.status_code == 401:
        return "the server wants a key: say --api-key KEY, or set OPENAI_API_KEY"
    try:
        return _message(response.json())
    except ValueError:
        return f"the server answers {response.status_code}: {response.text[:200].strip() or response.reason_phrase}"


def _message(body: Any) -> str:
    """The message of an error in OpenAI's form, or the whole of it."""
    error = body.get("error", body) if isinstance(body, dict) else body
    return error["message"] if isinstance(error, dict) and isinstance(error.get("message"), str) else json.dumps(error)
