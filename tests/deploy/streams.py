"""Streams that last, and are checked whole: what a client sees while a server is changed."""

import json
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import httpx

Result = TypeVar("Result")

IMAGE = Path(__file__).parent / "image"  # on PYTHONPATH, steps take SHOAL_STEP_S seconds
SILENCE_S = 120.0  # after which a client gives up


@dataclass
class Stream:
    """One answer as it comes.

    | attribute | meaning |
    | --- | --- |
    | `entry` | the address that the client connected to |
    | `router` | what answers behind that address, where the caller found it out |
    | `gap_s` | the longest time without a token after the first |
    | `error` | the code of the error event that ended it |
    | `broken` | the exception by which the connection ended it |
    """

    entry: str
    tokens: int
    router: str = ""
    text: str = ""
    finish_reason: str | None = None
    done: bool = False
    gap_s: float = 0.0
    error: str | None = None
    broken: str | None = None
    began: threading.Event = field(default_factory=threading.Event)
    future: "Future[None] | None" = None

    def read(self, url: str, body: dict[str, Any]) -> None:
        try:
            with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=SILENCE_S) as answer:
                if answer.status_code != 200:
                    self.error = str(answer.status_code)
                    return
                last = None
                for line in answer.iter_lines():
                    if line == "data: [DONE]":
                        self.done = True
                    elif line.startswith("data: "):
                        self._take(json.loads(line.removeprefix("data: ")))
                        now = time.monotonic()
                        self.gap_s = max(self.gap_s, now - (last or now))
                        last = now
                        self.began.set()
        except httpx.HTTPError as error:
            self.broken = repr(error)
        finally:
            self.began.set()

    def _take(self, chunk: dict[str, Any]) -> None:
        if "error" in chunk:
            self.error = chunk["error"]["code"]
            return
        (choice,) = chunk["choices"]
        self.text += choice["text"]
        self.finish_reason = choice["finish_reason"] or self.finish_reason

    def is_whole(self, text: str) -> bool:
        """Whether the answer ended as one that nothing disturbed. `text`: of an answer that is at least as long."""
        ended = self.done and self.finish_reason == "length" and self.error is None and self.broken is None
        # Of a character that its last token began, there is a sign of replacement, which a longer answer has not.
        return ended and text.startswith(self.text.removesuffix("\ufffd")) and len(self.text) > 0

    def told(self) -> str:
        """How it ended, in short."""
        how = f"finish_reason={self.finish_reason} done={self.done} error={self.error} broken={self.broken}"
        return f"by {self.entry} and {self.router}: {len(self.text)} characters, {how}, gap {self.gap_s:.1f} s"


class Clients:
    """Clients of a server, in threads that `enter` puts in their place."""

    def __init__(self, enter: Callable[[], None], prompt: str) -> None:
        self._pool = ThreadPoolExecutor(64, initializer=enter)
        self._prompt = prompt
        self.streams: list[Stream] = []

    def begin(self, entry: str, tokens: int, port: int = 8000) -> Stream:
        """Starts a stream, and returns it with its first token."""
        body = {"prompt": self._prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True, "stream": True}
        stream = Stream(entry, tokens)
        url = f"http://{entry}:{port}"
        stream.future = self._pool.submit(stream.read, url, body | {"model": "tiny"})
        self.streams.append(stream)
        assert stream.began.wait(SILENCE_S)
        return stream

    def call(self, method: str, url: str, **more: Any) -> httpx.Response:
        """A request on its own. Raises httpx.HTTPError."""
        return self.submit(lambda: httpx.request(method, url, **{"timeout": 30.0, **more})).result()

    def submit(self, work: Callable[[], Result]) -> "Future[Result]":
        """Runs `work` in the clients' place."""
        return self._pool.submit(work)

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)
