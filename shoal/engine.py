"""Shoal in a Python program: no server, no Ray, on CPUs or GPUs.

    import shoal

    with shoal.Engine("SmolLM2-135M-Instruct") as llm:
        print(llm.generate("Once upon a time", max_tokens=16).text)

An `Engine` is a client of the same router and replica that `shoal serve` runs, through a transport without sockets. So
every parameter of a request is that of `/v1/completions` and `/v1/chat/completions`, with the same checks.
"""

import asyncio
import json
import os
import weakref
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any, Self, TypeVar

import httpx

from cluster.in_process import Ended, InProcessServer, configured
from cluster.replica_process import ReplicaEnded
from shoal.lang.backends.shoal_server import ShoalServer

Value = TypeVar("Value")
Prompt = str | Sequence[int]
Conversation = Sequence[Mapping[str, Any]]

OWN = ("prompt", "messages", "stream", "stream_options", "return_token_ids")  # fields that the methods set
# Sequences of one batch that are in flight at once. Each takes some 40 kB of this process's memory.
MAX_IN_FLIGHT = 4096


class EngineError(RuntimeError):
    """The Engine did not start, was closed, lost its replica, or cannot answer now. The message is for the user as it
    stands."""


class RequestError(ValueError):
    """A request that the Engine refuses. `param` names the parameter at fault, `code` is for programs; both as in
    OpenAI's errors."""

    def __init__(self, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.code = code


@dataclass(frozen=True)
class TokenLogprob:
    """A token of the text, its natural log probability (None for the first token of an echoed prompt), and those of
    the likeliest tokens, by text, if they were asked for."""

    token: str
    logprob: float | None
    top: dict[str, float]


@dataclass
class GeneratedText:
    """An answer. The fields grow while it is streamed.

    | field | meaning |
    | --- | --- |
    | `token_ids` | the tokens that were generated, a stop token included |
    | `finish_reason` | "stop" or "length"; None before the end |
    | `logprobs` | the tokens of the text, if log probabilities were asked for |
    | `prompt_tokens`, `cached_tokens` | tokens of the prompt, and how many of them were found in the cache |
    | `schema_check` | of a schema that is enforced in part: `not_enforced`, `valid`, ..., as in the server's answers |
    """

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    logprobs: list[TokenLogprob] | None = None
    prompt_tokens: int = 0
    cached_tokens: int = 0
    schema_check: dict[str, Any] | None = None

    @property
    def completion_tokens(self) -> int:
        """Number of tokens that were generated."""
        return len(self.token_ids)


class Engine:
    """A model in this process: the router in a thread, the replica in a child process, which ends with this one.

    Methods may be called from any thread, and the `async` ones from any event loop. The keyword arguments of all
    methods are the fields of OpenAI's endpoints and those that Shoal adds (`temperature`, `max_tokens`, `stop`,
    `seed`, `top_k`, `regex`, `response_format`, ...); `generate` takes those of `/v1/completions`, `chat` those of
    `/v1/chat/completions`. `model` may be the name of an adapter of `lora_modules`. With `n` above 1 there is a list of
    n answers in the place of each answer. All methods raise RequestError and EngineError.

    | attribute | meaning |
    | --- | --- |
    | `model` | the model's name in requests |
    | `transport` | an `httpx.AsyncBaseTransport` to all endpoints of a Shoal server, for any client made of `httpx` |
    | `base_url` | the URL of these endpoints over `transport`, with `/v1` |
    | `endpoint` | the backend of programs that run here; `shoal.set_default_backend` takes the Engine itself |
    """

    base_url = "http://engine/v1"

    def __init__(self, model: str | os.PathLike[str], **settings: Any) -> None:
        """Loads the model: a known name, a folder, a .gguf file, or a Hugging Face id, fetched if it is missing.
        `settings` are those of a replica, by their names in the configuration: `dtype`, `tp`, `kv_tokens`, ...

        Raises ConfigError for a wrong setting, ModelError if there is no such model, and EngineError if it cannot be
        loaded.
        """
        try:
            self._server = InProcessServer(configured(os.fspath(model), settings))
        except ReplicaEnded as error:
            raise EngineError(str(error)) from None
        self._close = weakref.finalize(self, self._server.close)
        self.model = self._server.model
        self.transport = self._server.transport
        self.endpoint = ShoalServer(self.base_url, transport=self.transport)
        self._client = httpx.AsyncClient(transport=self.transport, base_url=self.base_url, timeout=None)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the replica and frees its memory. Requests in flight raise EngineError."""
        self._close()

    # ------------------------------------------------------------ whole answers

    def generate(self, prompt: Prompt | Sequence[Prompt], **parameters: Any) -> Any:
        """Continues `prompt`, a text or a list of token ids. Returns a GeneratedText; for a list of prompts a list, in
        their order, computed as a batch. `max_tokens` is 16 unless it is set, as in OpenAI's API."""
        return self._result(self._submit(self.generate_async(prompt, **parameters)))

    async def generate_async(self, prompt: Prompt | Sequence[Prompt], **parameters: Any) -> Any:
        """Does what `generate` does, for programs with an event loop."""
        if isinstance(prompt, str) or _is_list_of(int, prompt):
            return await self._answer(prompt, parameters)
        return await self._batch(prompt, parameters)

    def chat(self, messages: Conversation | Sequence[Conversation], **parameters: Any) -> Any:
        """Answers a conversation, a list of messages as `{"role": "user", "content": "Hi"}`. Returns a GeneratedText;
        for a list of conversations a list, in their order, computed as a batch."""
        return self._result(self._submit(self.chat_async(messages, **parameters)))

    async def chat_async(self, messages: Conversation | Sequence[Conversation], **parameters: Any) -> Any:
        """Does what `chat` does, for programs with an event loop."""
        if isinstance(messages, str):
            raise TypeError('a conversation is a list of messages, as [{"role": "user", "content": "Hi"}]')
        if _is_list_of(Mapping, messages):
            return await self._answer(messages, parameters)
        return await self._batch(messages, parameters)

    # ------------------------------------------------------------ answers as they end

    def as_completed(
        self, prompts: Sequence[Prompt] | Sequence[Conversation], **parameters: Any
    ) -> Generator[tuple[int, Any], None, None]:
        """Answers a batch of prompts or conversations. Yields each answer as soon as it is whole, with its index in
        `prompts`. Work begins with the first, and ends when the iterator is closed or dropped. With `schedule:
        offline` and `finish: most`, the first enough of many samples come early, and the others are cancelled."""
        ended: SimpleQueue[tuple[int, Any] | None] = SimpleQueue()  # None: all have ended, or one has failed
        work = self._submit(self._batch(prompts, parameters, lambda number, answer: ended.put((number, answer))))
        work.add_done_callback(lambda _: ended.put(None))
        try:
            while (pair := ended.get()) is not None:
                yield pair
            self._result(work)
        finally:
            work.cancel()

    # ------------------------------------------------------------ streams

    def stream(self, prompt: Prompt | Conversation, **parameters: Any) -> "TextStream":
        """Continues a prompt or answers a conversation, and yields the text in pieces as they come. Work begins with
        the first piece, and ends when the iterator is closed or dropped."""
        answer = GeneratedText()
        return TextStream(self._pieces(prompt, parameters, answer), answer)

    def stream_async(self, prompt: Prompt | Conversation, **parameters: Any) -> "AsyncTextStream":
        """Does what `stream` does, for `async for`."""
        answer = GeneratedText()
        return AsyncTextStream(self._stream(prompt, parameters, answer), answer)

    def _pieces(self, prompt: Any, parameters: dict[str, Any], answer: GeneratedText) -> Generator[str, None, None]:
        arrived: SimpleQueue[str | None] = SimpleQueue()  # None: the stream has ended

        async def pump() -> None:
            async for piece in self._stream(prompt, parameters, answer):
                arrived.put(piece)

        pumped = self._submit(pump())
        pumped.add_done_callback(lambda _: arrived.put(None))
        try:
            while (piece := arrived.get()) is not None:
                yield piece
            self._result(pumped)
        finally:
            pumped.cancel()

    async def _stream(
        self, prompt: Any, parameters: dict[str, Any], answer: GeneratedText
    ) -> AsyncGenerator[str, None]:
        if _count(parameters) > 1:
            raise RequestError("'n' is above 1: a stream has one answer.", "n")
        path, body = self._request(prompt, parameters)
        body |= {"stream": True, "stream_options": {"include_usage": True}}
        with _translated():
            async with self._client.stream("POST", path, json=body) as response:
                if response.status_code != 200:
                    raise _error(json.loads(await response.aread()))
                async for chunk in _chunks(response):
                    if "error" in chunk:
                        raise _error(chunk)
                    _count_prompt(answer, chunk["usage"])
                    for choice in chunk["choices"]:
                        if piece := _add(answer, choice):
                            yield piece

    # ------------------------------------------------------------ requests

    def _request(self, prompt: Any, parameters: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
        """The path and the body of a request. Raises RequestError for a field that the Engine sets."""
        for name in OWN:
            if name in parameters:
                raise RequestError(f"{name!r} is set by the Engine: leave it out.", name)
        is_chat = _is_list_of(Mapping, prompt)
        own = {"return_token_ids": True, "messages" if is_chat else "prompt": prompt}
        own["model"] = parameters.get("model", self.model)
        return "/chat/completions" if is_chat else "/completions", {**parameters, **own}

    async def _answer(self, prompt: Any, parameters: Mapping[str, Any]) -> GeneratedText | list[GeneratedText]:
        path, body = self._request(prompt, parameters)
        with _translated():
            response = await self._client.post(path, json=body)
        whole = json.loads(response.content)
        if response.status_code != 200:
            raise _error(whole)
        answers = [GeneratedText() for _ in whole["choices"]]
        for answer, choice in zip(answers, whole["choices"], strict=True):
            _add(answer, choice)
            _count_prompt(answer, whole["usage"])
        return answers if _count(parameters) > 1 else answers[0]

    async def _batch(
        self,
        prompts: Sequence[Any],
        parameters: Mapping[str, Any],
        ended: Callable[[int, Any], None] = lambda number, answer: None,
    ) -> list[Any]:
        """The answers to all prompts. When one fails, stops the others, and raises its error. `ended` is called with
        the index and the answer of each prompt, as it ends."""
        answers: list[Any] = [None] * len(prompts)
        left = iter(enumerate(prompts))

        async def work() -> None:
            for number, prompt in left:
                try:
                    answers[number] = await self._answer(prompt, parameters)
                    ended(number, answers[number])
                except RequestError as error:
                    error.add_note(f"at index {number} of the batch")
                    raise

        at_once = min(MAX_IN_FLIGHT, self._server.config.max_waiting) // _count(parameters)
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(min(max(1, at_once), len(prompts))):
                    group.create_task(work())
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None
        return answers

    def _submit(self, work: Coroutine[Any, Any, Value]) -> "Future[Value]":
        """Runs `work` in the router's event loop. Raises EngineError."""
        try:
            return self._server.submit(work)
        except Ended as error:
            raise EngineError(str(error)) from None

    def _result(self, work: "Future[Value]") -> Value:
        """Waits for the result. When the wait is interrupted, as by Ctrl-C, stops the work."""
        try:
            return work.result()
        except CancelledError:
            raise EngineError("the Engine was closed") from None
        except BaseException:
            work.cancel()
            raise


class TextStream:
    """An iterator over pieces of text. `answer` is complete when the iteration has ended."""

    def __init__(self, pieces: Generator[str, None, None], answer: GeneratedText) -> None:
        self._pieces = pieces
        self.answer = answer

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> str:
        return next(self._pieces)

    def close(self) -> None:
        """Stops the work, if it has not ended."""
        self._pieces.close()


class AsyncTextStream:
    """An asynchronous iterator over pieces of text. `answer` is complete when the iteration has ended."""

    def __init__(self, pieces: AsyncGenerator[str, None], answer: GeneratedText) -> None:
        self._pieces = pieces
        self.answer = answer

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> str:
        return await anext(self._pieces)

    async def aclose(self) -> None:
        """Stops the work, if it has not ended."""
        await self._pieces.aclose()


def _is_list_of(kind: type, value: object) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str) and len(value) > 0 and isinstance(value[0], kind)


def _count(parameters: Mapping[str, Any]) -> int:
    """The number of answers to a prompt. An `n` that is none is left to the router to refuse."""
    n = parameters.get("n")
    return n if isinstance(n, int) and n > 1 else 1


@contextmanager
def _translated() -> Iterator[None]:
    """Raises what goes wrong in the transport as EngineError."""
    try:
        yield
    except httpx.ConnectError as error:
        raise EngineError(str(error)) from None
    except httpx.ReadError:
        raise EngineError("the Engine was closed") from None


async def _chunks(response: httpx.Response) -> AsyncGenerator[dict[str, Any], None]:
    """The objects of a stream of server-sent events. (`httpx` would also cut lines at U+2028, which is text here.)"""
    rest = b""
    async for data in response.aiter_bytes():
        *events, rest = (rest + data).split(b"\n\n")
        for event in events:
            if event != b"data: [DONE]":
                yield json.loads(event.removeprefix(b"data: "))


def _error(body: dict[str, Any]) -> EngineError | RequestError:
    error = body["error"]
    if error["type"] == "invalid_request_error":
        return RequestError(error["message"], error["param"], error["code"])
    return EngineError(error["message"])


def _count_prompt(answer: GeneratedText, usage: dict[str, Any] | None) -> None:
    if usage is not None:
        answer.prompt_tokens = usage["prompt_tokens"]
        answer.cached_tokens = usage["prompt_tokens_details"]["cached_tokens"]


def _add(answer: GeneratedText, choice: dict[str, Any]) -> str:
    """Adds a choice of a whole answer or of a chunk, of either endpoint. Returns its text."""
    message = choice.get("message") or choice.get("delta") or {}
    text: str = choice["text"] if "text" in choice else message.get("content", "")
    answer.text += text
    answer.token_ids += choice.get("token_ids", ())
    answer.finish_reason = choice["finish_reason"]
    answer.schema_check = choice.get("schema_check")
    if choice["logprobs"] is not None:
        answer.logprobs = (answer.logprobs or []) + list(_logprobs(choice["logprobs"]))
    return text


def _logprobs(logprobs: dict[str, Any]) -> Iterator[TokenLogprob]:
    if "content" in logprobs:
        for token in logprobs["content"]:
            top = {other["token"]: other["logprob"] for other in reversed(token["top_logprobs"])}
            yield TokenLogprob(token["token"], token["logprob"], top)
        return
    columns = (logprobs[name] for name in ("tokens", "token_logprobs", "top_logprobs"))
    for token, logprob, top in zip(*columns, strict=True):
        yield TokenLogprob(token, logprob, top or {})
