"""A client for OpenAI's completions and chat endpoints that times one stream at a time, and a probe for the extensions
of the protocol that a server accepts."""

import asyncio
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from bench.load.http import Broken, Events, Http
from bench.load.metrics import Sample


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
    """Extensions of OpenAI's protocol that the server accepts, as `probe` finds them."""

    prompt_ids: bool = True  # prompts as token ids (OpenAI's own completions accept them, some servers do not)
    ignore_eos: bool = True  # answers of exactly the requested length
    chunk_usage: bool = True  # a token count in every chunk


@dataclass(frozen=True)
class Endpoint:
    """The form of requests: chat or completions, the model, and extra fields for the body of every request."""

    chat: bool
    model: str
    extra: Mapping[str, Any]
    abilities: Abilities = Abilities()

    def body(self, prompt: list[int] | str | list[dict[str, str]], output_tokens: int) -> bytes:
        """The JSON body of a streamed request. `prompt` is messages for chat, token ids or text for completions."""
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
    """Reads the events of one answer into its sample."""

    def __init__(self, sample: Sample, start: float) -> None:
        self.sample = sample
        self._start = start
        self._events = Events()
        self._text: list[str] = []
        self._refused: list[bytes] = []
        self._counted = 0
        self._done = False

    def data(self, data: bytes, status: int, now: float) -> None:
        """Takes a piece of the body that arrived at `now`, a time of the client's clock in seconds."""
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
        # A chunk with tokens but without text (half a character, say) counts as output, if the server sends token
        # counts with every chunk. A last chunk that holds only the usage does not count.
        if text or (tokens > 0 and chunk.choices):
            sample.chunk_s.append(now - self._start)
            if tokens > 0:
                sample.chunk_tokens.append(tokens)

    def fail(self, kind: str, message: str) -> None:
        """Records a failure of the request. Only the first one is kept."""
        if self.sample.error is None:
            self.sample.error, self.sample.message = kind, message

    def end(self, status: int) -> None:
        """Completes the sample of an answer that has ended with this status, or records what is missing."""
        sample = self.sample
        sample.text = "".join(self._text)
        if len(sample.chunk_tokens) != len(sample.chunk_s):
            sample.chunk_tokens = []  # the server does not send counts with every chunk
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
    """Send one streamed request and fill `sample` with the answer. Raises only CancelledError. `sample.error` has the
    kind of any other failure: http_STATUS, connect, disconnected, timeout, stream_error, invalid_chunk, cut_off or
    empty; it is "interrupted" after a cancellation.
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
        reader.end(status)
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
    """Find out which extensions the server accepts, with requests of one output token: first with all extensions, then
    with fewer, until the server no longer refuses.

    `token_id` is sent as the prompt, where token ids are accepted. Returns:

    - the endpoint with its abilities;
    - the sample of the last request. Its `error` is None, or the reason why the server cannot be used at all (no
      server, a wrong key, an unknown model);
    - the server's messages when it refused.
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
