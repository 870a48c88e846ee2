"""A well-behaved client: streams of several kinds at a pace, and the errands that it has besides."""

import asyncio
import itertools
import json
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from random import Random
from typing import Any
from uuid import uuid4

from bench.load.http import Broken, Events, Http

CHAT, COMPLETIONS, RESPONSES, TOKENIZE = "/v1/chat/completions", "/v1/completions", "/v1/responses", "/tokenize"
WAIT_S = 30.0  # an answer that takes longer is none
TOKENS = 6  # of an answer
WORDS = "the sea a boat salt light wind old stone house bread rain wool iron north bell gull rope tide lamp".split()
LONG_CHARS = 257 << 10  # characters: a text of more than 256 KiB waits for other threads than short ones
POLL_S = 0.05


class Refused(Exception):
    """An answer that is an error, or none. The message says what came instead."""


@dataclass(frozen=True)
class Waited:
    """A stream that was waited for. `ttft_s`: from the moment when it was due to its first token, or to its error."""

    kind: str
    ttft_s: float
    error: str | None


def has_text(event: dict[str, Any]) -> bool:
    """Whether an event of a stream, by any protocol, has a part of the answer."""
    if event.get("type") == "response.output_text.delta":
        return True
    choices = event.get("choices", ())
    return any(choice.get("text") or choice.get("delta", {}).get("content") for choice in choices)


def error_of(event: dict[str, Any]) -> Any:
    """The error that an event tells of, if it does."""
    if event.get("type") in ("error", "response.failed"):
        return event
    return event.get("error") if "choices" not in event and "type" not in event else None


class PacedClient:
    """A client that sends `rate_s` requests a second, each at a random moment of its own part of time, whether those
    before it are answered or not. Prompts are new, so nothing of them is cached."""

    def __init__(self, http: Http, model: str, rate_s: float, random: Random) -> None:
        self._http, self._model, self._rate_s, self._random = http, model, rate_s, random
        self._kinds = itertools.cycle([self._chat, self._completion, self._structured, self._response])
        self.answers: list[Waited] = []
        self.kept: list[str] = []  # names of stored responses

    async def run(self, seconds: float) -> list[Waited]:
        """Asks for some time. Returns all answers of this client so far."""
        begun_s = time.perf_counter()
        async with asyncio.TaskGroup() as group:
            for number in range(round(seconds * self._rate_s)):
                due_s = begun_s + (number + self._random.random()) / self._rate_s
                await asyncio.sleep(due_s - time.perf_counter())
                group.create_task(self._ask(next(self._kinds), due_s))
        return self.answers

    # ------------------------------------------------------------ streams

    def text(self, words: int = 8) -> str:
        """A text that was never asked: a byte is a token."""
        return f"{uuid4().hex[:12]} {' '.join(self._random.choices(WORDS, k=words))}"

    def _chat(self, **fields: Any) -> tuple[str, dict[str, Any]]:
        return CHAT, {"messages": [{"role": "user", "content": self.text()}], "max_tokens": TOKENS} | fields

    def _completion(self) -> tuple[str, dict[str, Any]]:
        return COMPLETIONS, {"prompt": self.text(), "max_tokens": TOKENS}

    def _structured(self) -> tuple[str, dict[str, Any]]:
        """A grammar that was never compiled."""
        return self._chat(structured_outputs={"regex": f"[a-z]{{4,9}}{uuid4().hex}"})

    def _response(self) -> tuple[str, dict[str, Any]]:
        return RESPONSES, {"input": self.text(), "max_output_tokens": TOKENS}

    async def _ask(self, kind: Callable[[], tuple[str, dict[str, Any]]], due_s: float) -> None:
        path, body = kind()
        events, first_s, refused = Events(), 0.0, ""

        def take(data: bytes, status: int, now_s: float) -> None:
            nonlocal first_s, refused
            if status != 200:
                refused = refused or f"{status} {data[:200].decode(errors='replace')}"
                return
            for told in (json.loads(event) for event in events.feed(data) if event != b"[DONE]"):
                if (error := error_of(told)) is not None:
                    refused = f"an error event: {error}"
                if not first_s and has_text(told):
                    first_s = now_s
                if told.get("type") in ("response.completed", "response.incomplete"):
                    self.kept.append(told["response"]["id"])

        error = await self._refusal(self._send("POST", path, body | {"stream": True, "ignore_eos": True}, take))
        error = error or refused or (None if first_s else "a stream without a token")
        name = kind.__name__.strip("_")
        self.answers.append(Waited(name, (first_s or time.perf_counter()) - due_s, error))

    # ------------------------------------------------------------ errands

    async def errands(self) -> list[Waited]:
        """Does each of the things that clients do besides, one after the other. An answer's time is the whole one's."""
        errands = self._read, self._continue, self._long_text, self._in_background
        return [await self._timed(errand) for errand in errands]

    async def _timed(self, errand: Callable[[], Awaitable[None]]) -> Waited:
        begun_s = time.perf_counter()
        error = await self._refusal(errand())
        return Waited(errand.__name__.strip("_"), time.perf_counter() - begun_s, error)

    async def _read(self) -> None:
        """Reads a response of its own, the one longest there."""
        if self.kept:
            await self._whole("GET", f"{RESPONSES}/{self.kept[0]}")

    async def _continue(self) -> None:
        body = {"input": self.text(), "max_output_tokens": TOKENS, "ignore_eos": True}
        await self._whole("POST", RESPONSES, body | ({"previous_response_id": self.kept[-1]} if self.kept else {}))

    async def _long_text(self) -> None:
        await self._whole("POST", TOKENIZE, {"prompt": self.text(LONG_CHARS // 5)[:LONG_CHARS].ljust(LONG_CHARS)})

    async def _in_background(self) -> None:
        body = {"input": self.text(), "max_output_tokens": TOKENS, "background": True}
        made = await self._whole("POST", RESPONSES, body)
        while made["status"] in ("queued", "in_progress"):
            await asyncio.sleep(POLL_S)
            made = await self._whole("GET", f"{RESPONSES}/{made['id']}")
        if made["status"] not in ("completed", "incomplete"):
            raise Refused(f"a response in the background is {made['status']}: {made.get('error')}")

    async def forget(self) -> None:
        """Deletes what the server keeps for this client."""
        while self.kept:
            await self._whole("DELETE", f"{RESPONSES}/{self.kept.pop()}")

    # ------------------------------------------------------------ requests

    async def _whole(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        """The JSON value of an answer. Raises Refused, Broken or OSError."""
        parts: list[bytes] = []
        status = await self._send(method, path, body, lambda data, _status, _now: parts.append(data))
        if status != 200:
            raise Refused(f"{method} {path}: {status} {b''.join(parts)[:200].decode(errors='replace')}")
        return json.loads(b"".join(parts))

    async def _send(
        self, method: str, path: str, body: dict[str, Any] | None, take: Callable[[bytes, int, float], None]
    ) -> int:
        sent = b"" if body is None else json.dumps(body | {"model": self._model}).encode()
        return await self._http.send(method, path, sent, take)

    async def _refusal(self, asked: Awaitable[Any]) -> str | None:
        """Waits for something that was asked. Returns what went wrong."""
        try:
            async with asyncio.timeout(WAIT_S):
                await asked
        except TimeoutError:
            return f"no answer in {WAIT_S:g} s"
        except (Refused, Broken, OSError, ValueError) as error:
            return f"{type(error).__name__}: {error}"
        return None
