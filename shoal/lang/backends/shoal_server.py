"""A Shoal server, over HTTP: completions with the field `program`, by which the server knows what belongs together.

Only new text travels: the server keeps what a branch holds. A server that does not know a branch (it was restarted, or
another router answers) says so with status 409, and the call goes out again with the whole text.
"""

import asyncio
import contextlib
import json
import os
import urllib.request
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import replace
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import httpx

from shoal.lang import loop
from shoal.lang.backend import Backend, Call, Generated, OutputPiece, RoleFormat
from shoal.lang.backends.connections import Connections
from shoal.lang.backends.fork_batches import ForkBatches
from shoal.lang.backends.patience import Patience
from shoal.lang.backends.role_format import derive_roles
from shoal.lang.backends.templates import AnnouncedCall, TemplateRuns
from shoal.lang.choices import ChoiceScore
from shoal.lang.errors import BackendError
from shoal.lang.ir import GenParams

LEASE_S = 60.0  # how long the KV of a program that thinks between two calls stays, unless memory is short
UNKNOWN_PROGRAM = "program_unknown"

Where = Callable[[bool], dict[str, Any]]
"""The prompt of a request and its `program`; with True for a server that does not know the branch."""


class ShoalServer(Backend):
    """A Shoal server at a URL; `RuntimeEndpoint` is the same under SGLang's name.

    `api_key` is by default that of OPENAI_API_KEY. `lease_s`: how long the server keeps a living program's KV between
    its calls. `transport`: an httpx transport, by which a server in this process is reached without a socket.
    """

    name = "a Shoal server"
    params = frozenset(GenParams.__dataclass_fields__) - {"logprob_start_len"}
    features = frozenset({"select", "stream", "prefill"})

    def __init__(
        self,
        base_url: str,
        api_key: str | None = None,
        *,
        lease_s: float = LEASE_S,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        super().__init__()
        self.base_url = base_url.rstrip("/").removesuffix("/v1")
        self.lease_s = lease_s
        self._key = api_key or os.environ.get("OPENAI_API_KEY")
        self._transport = transport
        self._clients: WeakKeyDictionary[asyncio.AbstractEventLoop, httpx.AsyncClient] = WeakKeyDictionary()
        self._locks: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Lock] = WeakKeyDictionary()
        self.model_path: str | None = None  # where the model's files are, if they are on this machine
        self._model: str | None = None
        self._roles: RoleFormat | None = None
        self._endings: set[asyncio.Task[Any]] = set()
        self._forks = ForkBatches(self._alone, self._generate_forks)
        self._templates = TemplateRuns(self._generate_template)

    # ------------------------------------------------------------ calls

    async def generate(self, call: Call) -> Generated:
        if _several(call):
            return await self._generate(call, await self._completion(call.params))
        if (announced := await self._templates.next_answer(call)) is not None:
            return announced
        body = await self._completion(call.params)
        if call.parent is not None or call.held == 0:
            return await self._forks.generate(call, body)
        return await self._alone(call, body)

    async def _alone(self, call: Call, body: dict[str, Any]) -> Generated:
        """The result of a call that begins no fork with others."""
        return await self._templates.begin(call, body) or await self._generate(call, body)

    async def _generate(self, call: Call, body: dict[str, Any]) -> Generated:
        answer = await self._continued("/v1/completions", call, body)
        metas = [_meta(answer, choice) for choice in answer["choices"]]
        self.token_usage.add(metas[0])
        return Generated([choice["text"] for choice in answer["choices"]], metas, held=not _several(call))

    async def stream(self, call: Call) -> AsyncGenerator[OutputPiece, None]:
        body = await self._completion(call.params)
        body |= {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}
        meta: dict[str, Any] = {}
        told = 0  # log probabilities: those of tokens whose text may still change come later
        where = partial(_where, call, lease_s=self.lease_s)
        async with aclosing(self._continued_events(body, where)) as events:
            async for event in events:
                for choice in event["choices"]:
                    piece = _meta(event, choice)
                    if "logprobs" in body:
                        told += len(piece.get("output_token_logprobs", ()))
                        piece["completion_tokens"] = told
                    meta |= piece
                    yield OutputPiece(choice["text"], piece, held=choice["finish_reason"] is not None)
                if not event["choices"]:
                    meta |= _usage(event)
                    yield OutputPiece("", _usage(event), held=True)
        self.token_usage.add(meta)

    def _generate_forks(
        self, calls: Sequence[Call], common: str, body: dict[str, Any]
    ) -> AsyncGenerator[tuple[int, Generated], None]:
        """Runs calls that begin branches with a common text as one request. Yields their numbers and results."""
        return self._choices(body, partial(_where_forks, calls, common, lease_s=self.lease_s))

    def _generate_template(
        self, call: Call, body: dict[str, Any], following: Sequence[AnnouncedCall], then: str
    ) -> AsyncGenerator[tuple[int, Generated], None]:
        """Runs a call and those that follow it as one request. Yields their numbers and results, in this order. `body`:
        the call's parameters, as the server takes them. `then`: the constant text after the last."""
        template = [{"prompt": each.prompt, **_parameters(each.params)} for each in following]

        def where(whole: bool) -> dict[str, Any]:
            told = _where(call, whole, self.lease_s, then)
            told["program"]["template"] = template
            return told

        return self._choices(body, where)

    async def _choices(self, body: dict[str, Any], where: Where) -> AsyncGenerator[tuple[int, Generated], None]:
        """The answers to a request for several, each with its number, as they end."""
        body = body | {"stream": True, "stream_options": {"include_usage": True, "whole_choices": True}}
        async with aclosing(self._continued_events(body, where)) as events:
            async for event in events:
                for choice in event["choices"]:
                    meta = _meta(event, choice)
                    self.token_usage.add(meta)
                    yield choice["index"], Generated([choice["text"]], [meta], held=True)

    async def score(self, call: Call, choices: Sequence[str], unconditional: bool) -> list[ChoiceScore]:
        body = {"model": await self._name(), "choices": list(choices), "unconditional": unconditional}
        # Which choice follows is not known, so nothing is.
        answer = await self._continued("/v1/choices", replace(call, template=()), body)
        self.token_usage.add(_usage(answer))
        return [
            ChoiceScore(
                tuple(choice["tokens"]),
                tuple(choice["logprobs"]),
                tuple(choice["unconditional_logprobs"]) if unconditional else None,
            )
            for choice in answer["choices"]
        ]

    async def prefetch(self, program: str, text: str) -> None:
        body = {"model": await self._name(), "prompt": text, "max_tokens": 0, "temperature": 0}
        await self._post("/v1/completions", body)

    async def end_program(self, program: str) -> None:
        async def tell() -> None:
            with contextlib.suppress(httpx.HTTPError):  # its lease ends by itself
                await self._client().delete(f"/v1/programs/{program}")

        self._templates.end_program(program)
        task = asyncio.create_task(tell())  # no caller waits for it
        self._endings.add(task)
        task.add_done_callback(self._endings.discard)

    async def roles(self) -> RoleFormat:
        async with self._lock():
            if self._roles is None:
                self._roles = await derive_roles(self._rendered, await self._beginning())
            return self._roles

    async def server_info(self) -> dict[str, Any]:
        models = await self._get("/v1/models")
        return {"version": (await self._get("/version"))["version"], **models["data"][0]}

    async def flush_cache(self) -> bool:
        await self._post("/flush_cache", {})
        return True

    def get_model_name(self) -> str:
        return self.model_path or loop.wait(self._name(), loop.background_loop())

    def shutdown(self) -> None:
        """Closes the connections of programs that have no event loop of their own."""
        loop.wait(self.close(), loop.background_loop())

    def speculating(self, num_tokens: int) -> Backend:
        """The backend itself: only new text travels, and the server has the KV of the rest."""
        return self

    async def close(self) -> None:
        """Closes the connections of the running event loop."""
        loop = asyncio.get_running_loop()
        ours = [
            task for task in (*self._endings, *self._forks.tasks, *self._templates.tasks) if task.get_loop() is loop
        ]
        await asyncio.gather(*ours, return_exceptions=True)
        client = self._clients.pop(loop, None)
        if client is not None:
            await client.aclose()

    # ------------------------------------------------------------ bodies

    async def _completion(self, params: GenParams) -> dict[str, Any]:
        """A request for completions but for its prompt."""
        several = {"n": params.n} if (params.n or 1) > 1 else {}
        return {"model": await self._name(), **_parameters(params), **several}

    async def _continued(self, path: str, call: Call, body: dict[str, Any]) -> dict[str, Any]:
        """The answer to a call of a branch, which the server knows or is told whole."""
        try:
            return await self._post(path, body | _where(call, False, self.lease_s))
        except BackendError as error:
            if error.code != UNKNOWN_PROGRAM:
                raise
        return await self._post(path, body | _where(call, True, self.lease_s))

    async def _continued_events(self, body: dict[str, Any], where: Where) -> AsyncGenerator[dict[str, Any], None]:
        """The events of a request on branches, which the server knows or is told whole."""
        for whole in (False, True):
            try:
                async with aclosing(self._events(body | where(whole))) as events:
                    async for event in events:
                        yield event
                return
            except BackendError as error:
                if whole or error.code != UNKNOWN_PROGRAM:
                    raise

    async def _name(self) -> str:
        if self._model is None:
            async with self._lock():
                if self._model is None:
                    self._model = (await self._get("/v1/models"))["data"][0]["id"]
        return self._model

    async def _rendered(self, messages: list[dict[str, str]], add_generation_prompt: bool) -> str:
        """A conversation as text, by the server's chat template."""
        body = {"messages": messages, "add_generation_prompt": add_generation_prompt}
        tokens = (await self._post("/tokenize", body))["tokens"]
        return (await self._post("/detokenize", {"tokens": tokens}))["prompt"]

    async def _beginning(self) -> str:
        """The special tokens before every text, which a plain completion gets anyway."""
        with_them = (await self._post("/tokenize", {"prompt": "a"}))["tokens"]
        without = (await self._post("/tokenize", {"prompt": "a", "add_special_tokens": False}))["tokens"]
        special = with_them[: len(with_them) - len(without)]
        return (await self._post("/detokenize", {"tokens": special}))["prompt"] if special else ""

    # ------------------------------------------------------------ HTTP

    def _lock(self) -> asyncio.Lock:
        """Held while something is asked that many programs need, and one asks for all."""
        return self._locks.setdefault(asyncio.get_running_loop(), asyncio.Lock())

    def _client(self) -> httpx.AsyncClient:
        """The client of the running event loop: connections belong to one loop."""
        loop = asyncio.get_running_loop()
        client = self._clients.get(loop)
        if client is None:
            # httpx knows proxies, which its own pool of connections then uses.
            transport = self._transport or (None if urllib.request.getproxies() else Connections())
            client = self._clients[loop] = httpx.AsyncClient(
                base_url=self.base_url,
                transport=transport,
                headers={"Authorization": f"Bearer {self._key}"} if self._key else {},
                timeout=httpx.Timeout(None, connect=10.0),
                limits=httpx.Limits(max_connections=None, max_keepalive_connections=1024),
            )
        return client

    async def _get(self, path: str) -> Any:
        return await self._asked("GET", path, None)

    async def _post(self, path: str, body: dict[str, Any]) -> Any:
        return await self._asked("POST", path, body)

    async def _asked(self, method: str, path: str, body: dict[str, Any] | None) -> Any:
        patience = Patience(self.base_url)
        while True:
            try:
                response = await self._client().request(method, path, json=body)
            except httpx.TransportError as error:
                await patience.unreachable(error)
                continue
            if response.is_success:
                return response.json()
            await patience.refused(response.status_code, response.content, response.headers)

    async def _events(self, body: dict[str, Any]) -> AsyncGenerator[dict[str, Any], None]:
        """The events of a stream. A stream that has not begun is tried again as `_asked` does."""
        patience = Patience(self.base_url)
        while True:
            begun = done = False
            try:
                async with self._client().stream("POST", "/v1/completions", json=body) as response:
                    if response.is_success:
                        async for line in _lines(response):  # to the end, so that the connection is used again
                            begun = True
                            if line == b"data: [DONE]":
                                done = True
                            elif line.startswith(b"data: "):
                                event = json.loads(line[6:])
                                if "error" in event:
                                    raise BackendError(str(event["error"].get("message")), None)
                                yield event
                        if done:
                            return
                        raise BackendError(f"{self.base_url}: the stream ended before its answer did")
                    content = await response.aread()
            except httpx.TransportError as error:
                if done:
                    return
                if begun:
                    raise BackendError(f"{self.base_url}: the stream broke off: {error}") from error
                await patience.unreachable(error)
                continue
            await patience.refused(response.status_code, content, response.headers)


async def _lines(response: httpx.Response) -> AsyncGenerator[bytes, None]:
    """The lines of a body. httpx's own would also cut at line separators within the text of an event."""
    rest = b""
    async for chunk in response.aiter_bytes():
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            yield line
    if rest:
        yield rest


def _several(call: Call) -> bool:
    return call.params.n is not None and call.params.n > 1


def _parameters(params: GenParams) -> dict[str, Any]:
    """How a text is generated, in a request's words."""
    body: dict[str, Any] = {
        "max_tokens": params.max_new_tokens,
        "temperature": params.temperature,
        "top_p": params.top_p,
        "stop": list(params.stop or ()) or None,
        "stop_token_ids": list(params.stop_token_ids or ()) or None,
        "top_k": params.top_k,
        "min_p": params.min_p,
        "frequency_penalty": params.frequency_penalty,
        "presence_penalty": params.presence_penalty,
        "min_tokens": params.min_new_tokens,
        "ignore_eos": params.ignore_eos,
    }
    if params.return_logprob:
        body["logprobs"] = params.top_logprobs_num or 0
    if params.json_schema is not None:
        body["structured_outputs"] = {"json": params.json_schema}
    elif (pattern := params.pattern()) is not None:
        body["structured_outputs"] = {"regex": pattern}
    return {name: value for name, value in body.items() if value is not None}


def _where(call: Call, whole: bool, lease_s: float, then: str | None = None) -> dict[str, Any]:
    """The prompt of a call and its `program`. `whole`: the server does not know the branch. `then`: the constant text
    that follows, by default after the call itself."""
    if _several(call):
        return {"prompt": call.text}  # a branch goes on with one output
    continues = not whole and call.held > 0
    program: dict[str, Any] = {
        "id": call.program,
        "branch": call.branch,
        "continues": continues,
        "lease_s": lease_s,
        "remaining": call.remaining,
    }
    if continues:
        program["held"] = call.held  # a server that holds something else says that it does not know the branch
    if continues and call.parent is not None:
        program["parent"] = call.parent
    if text := call.then if then is None else then:
        program["then"] = text
    return {"prompt": call.text[call.held :] if continues else call.text, "program": program}


def _where_forks(calls: Sequence[Call], common: str, whole: bool, lease_s: float) -> dict[str, Any]:
    """The prompt and the `program` of calls whose new texts begin with `common`. `whole`: as in `_where`."""
    first = calls[0]
    continues = not whole and first.held > 0
    if whole:
        common = first.text[: first.held] + common
    beginning = len(common) + (first.held if continues else 0)
    program: dict[str, Any] = {
        "id": first.program,
        "continues": continues,
        "lease_s": lease_s,
        "forks": [
            {"branch": call.branch, "prompt": call.text[beginning:], "remaining": call.remaining}
            | ({"then": call.then} if call.then else {})
            for call in calls
        ],
    }
    if continues:
        program |= {"held": first.held, "parent": first.parent}
    return {"prompt": common, "program": program}


def _usage(answer: dict[str, Any]) -> dict[str, Any]:
    usage = answer.get("usage") or {}
    return {
        "prompt_tokens": usage.get("prompt_tokens"),
        "completion_tokens": usage.get("completion_tokens"),
        "cached_tokens": (usage.get("prompt_tokens_details") or {}).get("cached_tokens"),
    }


def _meta(answer: dict[str, Any], choice: dict[str, Any]) -> dict[str, Any]:
    meta = {"id": answer["id"], "finish_reason": choice["finish_reason"]}
    if answer.get("usage"):
        meta |= _usage(answer)
    logprobs = choice.get("logprobs")
    if logprobs:
        meta["output_token_logprobs"] = [
            (value, None, text) for value, text in zip(logprobs["token_logprobs"], logprobs["tokens"], strict=True)
        ]
        meta["output_top_logprobs"] = [
            [(value, None, text) for text, value in (top or {}).items()] for top in logprobs["top_logprobs"] or []
        ]
    return meta


RuntimeEndpoint = ShoalServer  # SGLang's name
