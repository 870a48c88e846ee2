"""Anthropic's endpoint, by Anthropic's own package."""

import json
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from shoal.lang.backend import Backend, Call, Generated, OutputPiece
from shoal.lang.backends.clients import MAX_RETRIES, Clients, package
from shoal.lang.errors import BackendError, NotSupported
from shoal.lang.ir import GenParams
from shoal.lang.speculation import Speculation
from shoal.lang.stops import first_stop, held_back

# Why an answer ended, in OpenAI's words.
_REASONS = {"end_turn": "stop", "stop_sequence": "stop", "max_tokens": "length"}


class Anthropic(Backend):
    """A model behind Anthropic's Messages.

    `prefill`: whether the model continues an assistant's message that has begun (Claude up to 4.5 does, later ones
    refuse). `client`: arguments of `anthropic.AsyncAnthropic`, such as `base_url`, `api_key` and `max_retries`.

    The endpoint takes no stop strings of nothing but white space: an output with one is streamed, and ended here. A
    temperature, `top_p` or `top_k` that asks for something is sent; later models refuse them.

    Raises ImportError without the package anthropic.
    """

    name = "Anthropic's protocol"
    params = frozenset({"max_new_tokens", "stop", "stop_regex", "temperature", "top_p", "top_k", "json_schema"})
    is_chat_model = True

    def __init__(self, model_name: str, *, prefill: bool = False, **client: Any) -> None:
        super().__init__()
        module = package("anthropic")
        self._clients = Clients(
            module, lambda: module.AsyncAnthropic(**({"max_retries": MAX_RETRIES} | client)), code="type"
        )
        self.model_name = model_name
        self.features = frozenset({"stream", "images", "prefill"} if prefill else {"stream", "images"})

    async def generate(self, call: Call) -> Generated:
        if _own_stops(call.params):
            return await self._collected(call)
        with self._clients.errors():
            answer = await self._clients.get().messages.create(**self._body(call))
        text = "".join(block.text for block in answer.content if block.type == "text")
        meta = {"id": answer.id, "finish_reason": self._reason(answer.stop_reason), **_usage(answer.usage)}
        self.token_usage.add(meta)
        return Generated([text], [meta])

    async def stream(self, call: Call) -> AsyncGenerator[OutputPiece, None]:
        stops = call.params.stop or () if _own_stops(call.params) else ()
        text, sent = "", 0
        async with aclosing(self._events(call)) as pieces:
            async for piece in pieces:
                text += piece.text
                if stop := first_stop(text, stops, sent):
                    yield OutputPiece(text[sent : stop[0]], piece.meta | {"finish_reason": "stop"})
                    return
                ready = len(text) if "finish_reason" in piece.meta else len(text) - held_back(text, stops)
                yield OutputPiece(text[sent:ready], piece.meta)
                sent = ready

    async def _collected(self, call: Call) -> Generated:
        text, meta = "", dict[str, Any]()
        async with aclosing(self.stream(call)) as pieces:
            async for piece in pieces:
                text += piece.text
                meta |= piece.meta
        return Generated([text], [meta])

    async def _events(self, call: Call) -> AsyncGenerator[OutputPiece, None]:
        """The pieces of an answer as they come."""
        meta: dict[str, Any] = {}
        with self._clients.errors():
            stream = await self._clients.get().messages.create(**self._body(call), stream=True)
            try:
                async for event in stream:
                    piece: dict[str, Any] = {}
                    text = ""
                    if event.type == "message_start":
                        piece = {"id": event.message.id, **_usage(event.message.usage)}
                    elif event.type == "content_block_delta" and event.delta.type == "text_delta":
                        text = event.delta.text
                    elif event.type == "message_delta":
                        piece = {
                            "finish_reason": self._reason(event.delta.stop_reason),
                            "completion_tokens": event.usage.output_tokens,
                        }
                    meta |= piece
                    if text or piece:
                        yield OutputPiece(text, piece)
                if "finish_reason" not in meta:
                    raise BackendError(f"{self._clients.url}: the stream ended before its answer did")
            finally:
                await stream.close()
                self.token_usage.add(meta)

    def speculating(self, num_tokens: int) -> Backend:
        return Speculation(self, num_tokens)

    async def close(self) -> None:
        """Closes the connections of the running event loop."""
        await self._clients.close()

    def _body(self, call: Call) -> dict[str, Any]:
        params = call.params
        system, messages = [], []
        for message in call.messages:
            if message["role"] == "system":
                system.append(message["content"])
            else:
                messages.append({"role": message["role"], "content": _content(message["content"])})
        if any(not isinstance(text, str) for text in system):
            raise NotSupported(f"{self.name} takes no pictures in a message of the system")
        if call.partial:
            messages.append({"role": "assistant", "content": call.partial})
        body: dict[str, Any] = {"model": self.model_name, "messages": messages, "max_tokens": params.max_new_tokens}
        if system:
            body["system"] = "\n".join(system)
        if params.stop and not _own_stops(params):
            body["stop_sequences"] = list(params.stop)
        if params.json_schema is not None:
            body["output_config"] = {"format": {"type": "json_schema", "schema": json.loads(params.json_schema)}}
        asked = {"temperature": (params.temperature, 1.0), "top_p": (params.top_p, 1.0), "top_k": (params.top_k, -1)}
        extra = {name: value for name, (value, neutral) in asked.items() if value not in (None, neutral)}
        return body | ({"extra_body": extra} if extra else {})

    def _reason(self, reason: str | None) -> str:
        if reason == "refusal":
            raise BackendError(f"{self.model_name} refuses to answer", code="refusal")
        return _REASONS.get(str(reason), str(reason))


def _own_stops(params: GenParams) -> bool:
    """Whether the stop strings are looked for here: the endpoint refuses those of white space alone."""
    return any(not stop.strip() for stop in params.stop or ())


def _content(content: str | list[dict[str, Any]]) -> str | list[dict[str, Any]]:
    """The content of a message in Anthropic's form, from OpenAI's."""
    if isinstance(content, str):
        return content
    return [part if part["type"] == "text" else _image(part["image_url"]["url"]) for part in content]


def _image(url: str) -> dict[str, Any]:
    if not url.startswith("data:"):
        return {"type": "image", "source": {"type": "url", "url": url}}
    kind, _, data = url.removeprefix("data:").partition(";base64,")
    return {"type": "image", "source": {"type": "base64", "media_type": kind, "data": data}}


def _usage(usage: Any) -> dict[str, Any]:
    """Token counts. The endpoint tells cached input apart from the rest."""
    cached, written = usage.cache_read_input_tokens or 0, usage.cache_creation_input_tokens or 0
    return {
        "prompt_tokens": usage.input_tokens + cached + written,
        "completion_tokens": usage.output_tokens,
        "cached_tokens": cached,
    }
