"""An HTTP client that times server-sent events, light enough to read tens of thousands a second in one process.

A general client costs 40 to 130 microseconds an event, this one about ten; a load generator that cannot keep up
measures itself. It speaks HTTP/1.1 over kept-alive connections, to OpenAI's completions and chat endpoints.
"""

import asyncio
import json
import ssl
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, cast
from urllib.parse import urlsplit

import httptools
import msgspec

from bench.metrics import Sample


class Broken(Exception):
    """The connection ended before the answer did. `clean` when not a byte of an answer had come."""

    def __init__(self, message: str, clean: bool) -> None:
        super().__init__(message)
        self.clean = clean


class Connection(asyncio.Protocol):
    """One connection, one request at a time. `on_data` gets the body as it comes, with the time of its arrival."""

    def __init__(self) -> None:
        self.open = False
        self.used = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's is one in all but its bases
        self.open = True
        self._done: asyncio.Future[int] | None = None

    async def send(self, request: bytes, on_data: Callable[[bytes, int, float], None]) -> int:
        """Write one request and read its whole answer; returns the status. Raises Broken."""
        self._parser = httptools.HttpResponseParser(self)
        self._on_data, self._begun, self._framed, self._status = on_data, False, False, 0
        self._done = asyncio.get_running_loop().create_future()
        self.transport.write(request)
        try:
            return await self._done
        finally:
            self._done = None
            self.used = True

    def close(self) -> None:
        self.open = False
        self.transport.close()

    def data_received(self, data: bytes) -> None:
        self._now = time.perf_counter()
        if self._done is None:
            self.close()  # bytes that nobody asked for
            return
        self._begun = True
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail(f"the answer is not HTTP: {error}")
            self.close()

    def connection_lost(self, error: Exception | None) -> None:
        self.open = False
        if self._done is not None and self._begun and self._status and not self._framed:
            self.on_message_complete()  # an answer without a length ends with its connection
        else:
            self._fail(str(error or "the server closed the connection"))

    def _fail(self, message: str) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_exception(Broken(message, clean=not self._begun))

    # What the parser calls.

    def on_message_begin(self) -> None:
        self._status = 0

    def on_header(self, name: bytes, value: bytes) -> None:
        self._framed = self._framed or name.lower() in (b"content-length", b"transfer-encoding")

    def on_headers_complete(self) -> None:
        self._status = self._parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        if self._done is not None and not self._done.done():
            self._on_data(body, self._status, self._now)

    def on_message_complete(self) -> None:
        if not self._parser.should_keep_alive():
            self.close()
        if self._done is not None and not self._done.done():
            self._done.set_result(self._status)


class Http:
    """Connections to one server, kept and reused. `url` is the server's, with or without `/v1`."""

    def __init__(self, url: str, api_key: str | None = None) -> None:
        parts = urlsplit(url if "//" in url else f"http://{url}")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"{url!r} is no URL of a server: use http://HOST:PORT")
        self.base = f"{parts.scheme}://{parts.netloc}"
        self._prefix = parts.path.rstrip("/").removesuffix("/v1")
        self._host, self._netloc = parts.hostname, parts.netloc
        self._port = parts.port or (443 if parts.scheme == "https" else 80)
        self._ssl = ssl.create_default_context() if parts.scheme == "https" else None
        self._key = f"Authorization: Bearer {api_key}\r\n" if api_key else ""
        self._idle: list[Connection] = []

    async def send(self, method: str, path: str, body: bytes, on_data: Callable[[bytes, int, float], None]) -> int:
        """One request; returns the status once the body is read. Raises OSError when the server cannot be reached,
        Broken when the connection ends early. A kept connection that the server had closed meanwhile is replaced."""
        request = (
            f"{method} {self._prefix}{path} HTTP/1.1\r\nHost: {self._netloc}\r\n{self._key}Accept: */*\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        ).encode() + body
        while True:
            connection = await self._connection()
            try:
                status = await connection.send(request, on_data)
            except Broken as broken:
                if broken.clean and connection.used:
                    continue
                raise
            except BaseException:
                connection.close()  # given up in the middle of an answer: that tells the server to stop
                raise
            if connection.open:
                self._idle.append(connection)
            return status

    async def _connection(self) -> Connection:
        while self._idle:
            if (connection := self._idle.pop()).open:
                return connection
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(Connection, self._host, self._port, ssl=self._ssl)
        return connection

    async def get(self, path: str) -> tuple[int, Any]:
        """A GET whose answer is JSON: status and value (None when it is not JSON)."""
        parts: list[bytes] = []
        status = await self.send("GET", path, b"", lambda data, _status, _now: parts.append(data))
        try:
            return status, json.loads(b"".join(parts))
        except ValueError:
            return status, None

    def close(self) -> None:
        """Close the connections that are kept."""
        while self._idle:
            self._idle.pop().close()


class Events:
    """Cuts a stream of bytes into the data of server-sent events, wherever the bytes were cut."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[bytes]:
        """The data of every event that `data` completes. Events without data (comments, pings) are left out."""
        data = self._rest + data
        held = b"\r" if data.endswith(b"\r") else b""  # half of a line's end, perhaps
        data = data[: len(data) - len(held)]
        if b"\r" in data:
            data = data.replace(b"\r\n", b"\n")
        *whole, rest = data.split(b"\n\n")
        self._rest = rest + held
        return [found for event in whole if (found := _data(event))]


def _data(event: bytes) -> bytes:
    if event.startswith(b"data: ") and b"\n" not in event:
        return event[6:]
    lines = [line[5:].removeprefix(b" ") for line in event.split(b"\n") if line.startswith(b"data:")]
    return b"\n".join(lines)


# ---------------------------------------------------------------- OpenAI's endpoints


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None
    finish_reason: str | None = None


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: _Details | None = None


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


_decode = msgspec.json.Decoder(_Chunk).decode


@dataclass(frozen=True)
class Abilities:
    """What the server takes beyond OpenAI's protocol; `probe` finds it out."""

    prompt_ids: bool = True  # prompts as token ids (OpenAI's own completions take them, some servers do not)
    ignore_eos: bool = True  # answers of exactly the length that is asked for
    chunk_usage: bool = True  # a token count in every chunk


@dataclass(frozen=True)
class Endpoint:
    """How requests are worded: the path, the model, and fields of the body that every request carries."""

    chat: bool
    model: str
    extra: Mapping[str, Any]
    abilities: Abilities = Abilities()

    def body(self, prompt: list[int] | str | list[dict[str, str]], output_tokens: int) -> bytes:
        """The JSON of one streamed request. `prompt` is messages for chat, ids or text for completions."""
        options: dict[str, Any] = {"include_usage": True}
        if self.abilities.chunk_usage:
            options["continuous_usage_stats"] = True
        body: dict[str, Any] = {
            "model": self.model,
            "messages" if self.chat else "prompt": prompt,
            "max_tokens": output_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": options,
        }
        if self.abilities.ignore_eos:
            body["ignore_eos"] = True
        return msgspec.json.encode(body | dict(self.extra))

    @property
    def path(self) -> str:
        return "/v1/chat/completions" if self.chat else "/v1/completions"


class Reader:
    """Puts the events of one answer into its sample."""

    def __init__(self, sample: Sample, start: float) -> None:
        self.sample = sample
        self._start = start
        self._events = Events()
        self._text: list[str] = []
        self._refused: list[bytes] = []
        self._counted = 0
        self._done = False

    def data(self, data: bytes, status: int, now: float) -> None:
        """A piece of the body, arrived at `now`."""
        if status != 200:
            self._refused.append(data)
            return
        for event in self._events.feed(data):
            if event == b"[DONE]":
                self._done = True
            else:
                self._chunk(event, now)

    def _chunk(self, event: bytes, now: float) -> None:
        sample = self.sample
        try:
            chunk = _decode(event)
        except msgspec.MsgspecError as error:
            self.fail("invalid_chunk", f"{error}: {event[:200]!r}")
            return
        if chunk.error is not None:
            self.fail("stream_error", _reason(chunk.error))
            return
        text = ""
        for choice in chunk.choices:
            delta = choice.delta
            text += choice.text or (delta and (delta.content or delta.reasoning_content)) or ""
            sample.finish_reason = choice.finish_reason or sample.finish_reason
        tokens = 0
        if chunk.usage is not None:
            usage, details = chunk.usage, chunk.usage.prompt_tokens_details
            tokens, self._counted = usage.completion_tokens - self._counted, usage.completion_tokens
            sample.prompt_tokens = usage.prompt_tokens
            if details is not None and details.cached_tokens is not None:
                sample.cached_tokens = details.cached_tokens
        self._text.append(text)
        # Tokens without text (half a character, say) count as output where the server counts tokens in every chunk;
        # a last chunk with nothing but the sum does not.
        if text or (tokens > 0 and chunk.choices):
            sample.chunk_s.append(now - self._start)
            if tokens > 0:
                sample.chunk_tokens.append(tokens)

    def fail(self, kind: str, message: str) -> None:
        """The request went wrong; the first reason stays."""
        if self.sample.error is None:
            self.sample.error, self.sample.message = kind, message

    def end(self, status: int) -> None:
        """The answer has ended with this status: the sample is complete, or says what is missing."""
        sample = self.sample
        sample.text = "".join(self._text)
        if len(sample.chunk_tokens) != len(sample.chunk_s):
            sample.chunk_tokens = []  # the server does not count in every chunk
        sample.output_tokens = self._counted or len(sample.chunk_s)
        if status != 200:
            self.fail(f"http_{status}", _refusal(b"".join(self._refused)))
        elif not sample.chunk_s:
            self.fail("empty", "the answer has no output")
        elif not self._done:
            self.fail("cut_off", "the stream ended without [DONE]")


def _refusal(body: bytes) -> str:
    try:
        value = json.loads(body)
    except ValueError:
        return body[:300].decode(errors="replace").strip()
    return _reason(value.get("error", value) if isinstance(value, dict) else value)


def _reason(error: object) -> str:
    if isinstance(error, dict) and isinstance(error.get("message"), str):
        return error["message"]
    return error if isinstance(error, str) else json.dumps(error)[:300]


async def ask(http: Http, path: str, body: bytes, sample: Sample, start: float, timeout_s: float) -> None:
    """Send one streamed request and fill `sample` with what came. Never raises but for cancellation: what goes wrong
    is in `sample.error` as http_STATUS, connect, disconnected, timeout, stream_error, invalid_chunk, cut_off, empty or
    interrupted.
    """
    reader = Reader(sample, start)
    status = 200
    sample.sent_s = time.perf_counter() - start
    try:
        async with asyncio.timeout(timeout_s):
            status = await http.send("POST", path, body, reader.data)
    except asyncio.CancelledError:
        reader.fail("interrupted", "given up by the load generator")
        sample.end_s = time.perf_counter() - start
        raise
    except TimeoutError:
        reader.fail("timeout", f"no end after {timeout_s:g} s")
    except Broken as broken:
        reader.fail("disconnected", str(broken))
    except OSError as error:
        reader.fail("connect", f"{http.base}: {error.strerror or error}")
    sample.end_s = time.perf_counter() - start
    reader.end(status)


async def probe(
    http: Http, endpoint: Endpoint, token_id: int, timeout_s: float, text: bool = False
) -> tuple[Endpoint, Sample, list[str]]:
    """Find what the server takes, with requests of a token each: first all, then without what it may have refused.

    `token_id` is sent as a prompt. Returns the endpoint with its abilities; the sample of the last request, whose
    `error` is None or why the server cannot be asked at all (no server, a wrong key, an unknown model); and what the
    server said as it refused.
    """
    tries = [
        Abilities(prompt_ids=ids, ignore_eos=eos, chunk_usage=usage)
        for ids in ((False,) if text or endpoint.chat else (True, False))
        for eos, usage in ((True, True), (True, False), (False, True), (False, False))
    ]
    refusals: list[str] = []
    for abilities in tries:
        endpoint = replace(endpoint, abilities=abilities)
        prompt: Any = [token_id] if abilities.prompt_ids else " time"
        if endpoint.chat:
            prompt = [{"role": "user", "content": "time"}]
        sample = Sample(due_s=0.0, asked_tokens=1)
        await ask(http, endpoint.path, endpoint.body(prompt, 1), sample, time.perf_counter(), timeout_s)
        if sample.error not in ("http_400", "http_422"):
            break
        if sample.message not in refusals:
            refusals.append(sample.message)
    if sample.error == "empty":  # one token may be half a character and give no text
        sample.error = None
    return endpoint, sample, refusals
