"""OpenAI's endpoint, and any other that speaks its protocol, by OpenAI's own package.

Chat completions take conversations; completions take texts. Endpoints that speak more than OpenAI's protocol are named
by their dialect:

| `dialect` | endpoints | what they take besides |
| --- | --- | --- |
| openai | OpenAI, Azure, and those that take no more | |
| vllm | vLLM; a Shoal server, but for prefill and films | `structured_outputs`, sampling, prefill, films, select |
| sglang | SGLang | `regex`, `json_schema`, sampling, prefill, films, select |

Chat completions of any dialect tell how likely the first token of an answer is. So there `select` takes choices of one
token each.
"""

import json
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

from shoal.lang.backend import PLAIN_ROLES, Backend, Call, Generated, OutputPiece, RoleFormat
from shoal.lang.backends.clients import MAX_RETRIES, Clients, package
from shoal.lang.choices import ChoiceScore
from shoal.lang.errors import BackendError, NotSupported
from shoal.lang.ir import GenParams
from shoal.lang.speculation import Speculation

Dialect = Literal["openai", "vllm", "sglang"]

COMPLETION_MODELS = ("gpt-3.5-turbo-instruct", "davinci-002", "babbage-002")

_EVERYWHERE = frozenset(
    "max_new_tokens n stop stop_regex temperature top_p frequency_penalty presence_penalty return_logprob "
    "top_logprobs_num return_text_in_logprobs".split()
)
MAX_LIKELY_TOKENS = 20  # tokens of which OpenAI tells the log probability
_OPEN = frozenset("min_new_tokens stop_token_ids top_k min_p ignore_eos dtype regex json_schema".split())


class OpenAI(Backend):
    """A model behind OpenAI's protocol.

    | argument | meaning |
    | --- | --- |
    | `is_chat_model` | whether it takes conversations; None: all do but `COMPLETION_MODELS` |
    | `chat_template` | how the roles of a program are written for a model that takes texts |
    | `is_azure` | whether the endpoint is Azure's |
    | `dialect` | what it takes besides OpenAI's parameters: see the module |
    | `extra_body` | fields for the body of every call |
    | `client` | arguments of `openai.AsyncOpenAI` (or `AsyncAzureOpenAI`): `base_url`, `api_key`, `max_retries` ... |

    Raises ImportError without the package openai, and its OpenAIError without a key.
    """

    name = "OpenAI's protocol"
    tells_tokens = True

    def __init__(
        self,
        model_name: str,
        is_chat_model: bool | None = None,
        chat_template: RoleFormat | None = None,
        is_azure: bool = False,
        *,
        dialect: Dialect = "openai",
        extra_body: Mapping[str, Any] | None = None,
        **client: Any,
    ) -> None:
        super().__init__()
        if dialect not in ("openai", "vllm", "sglang"):
            raise ValueError(f"dialect is {dialect!r}; it may be openai, vllm or sglang")
        self._package = package("openai")
        self._clients = Clients(
            self._package, lambda: self._made(is_azure, {"max_retries": MAX_RETRIES} | client), code="code"
        )
        self.model_name = model_name
        self.is_chat_model = model_name not in COMPLETION_MODELS if is_chat_model is None else is_chat_model
        self.dialect = dialect
        self._template = chat_template or PLAIN_ROLES
        self._extra_body = dict(extra_body or {})
        self.params = _EVERYWHERE | (_OPEN if dialect != "openai" else frozenset())
        if self.is_chat_model:
            self.params |= {"json_schema"}
            self.features = frozenset({"stream", "images", "select"})
            if dialect != "openai":
                self.features |= {"prefill", "video"}
        else:
            self.features = frozenset({"stream"} if dialect == "openai" else {"stream", "select"})

    def _made(self, is_azure: bool, arguments: dict[str, Any]) -> Any:
        client = (self._package.AsyncAzureOpenAI if is_azure else self._package.AsyncOpenAI)(**arguments)
        # OpenAI's own newer models take no max_tokens; other endpoints often know nothing else.
        is_own = is_azure or client.base_url.host.endswith("openai.com")
        self._max_tokens = "max_completion_tokens" if is_own else "max_tokens"
        return client

    # ------------------------------------------------------------ calls

    async def generate(self, call: Call) -> Generated:
        create, body = self._request(call)
        with self._clients.errors():
            answer = await create(**body)
        choices = sorted(answer.choices, key=lambda choice: choice.index)
        texts = [self._text(choice.message if self.is_chat_model else choice) for choice in choices]
        metas = [
            {"id": answer.id, "finish_reason": choice.finish_reason, **_usage(answer), **_logprobs(choice.logprobs)}
            for choice in choices
        ]
        self.token_usage.add(metas[0])
        return Generated(texts, metas)

    async def stream(self, call: Call) -> AsyncGenerator[OutputPiece, None]:
        create, body = self._request(call)
        meta: dict[str, Any] = {}
        with self._clients.errors():
            stream = await create(**body, stream=True, stream_options={"include_usage": True})
            try:
                async for event in stream:
                    usage = _usage(event)
                    meta |= usage
                    for choice in event.choices:
                        text = self._text(choice.delta if self.is_chat_model else choice)
                        if choice.finish_reason is not None:
                            meta["finish_reason"] = choice.finish_reason
                        known = {"id": event.id, "finish_reason": choice.finish_reason}
                        yield OutputPiece(text, {**known, **usage, **_logprobs(choice.logprobs)})
                    if usage and not event.choices:
                        yield OutputPiece("", usage)
                if "finish_reason" not in meta:
                    raise BackendError(f"{self._clients.url}: the stream ended before its answer did")
            finally:
                await stream.close()
                self.token_usage.add(meta)

    async def score(self, call: Call, choices: Sequence[str], unconditional: bool) -> list[ChoiceScore]:
        if self.is_chat_model:
            return await self._scored_by_first_token(call, choices, unconditional)
        scored = await self._echoed([call.text + choice for choice in choices], choices)
        if any(value is None for _, values in scored for value in values):
            raise BackendError("select needs a text before it: nothing tells how likely the first token of a text is")
        alone: list[Any] = [None] * len(choices)
        if unconditional:
            # With the tokens that the prompt gave them: one may have begun within the prompt.
            texts = ["".join(tokens) for tokens, _ in scored]
            alone = await self._echoed(texts, texts)
        found = []
        for choice, (tokens, values), other in zip(choices, scored, alone, strict=True):
            if other is not None and other[0] != tokens:
                raise BackendError(f"{choice!r} has other tokens with the prompt than without it")
            no_ids = (None,) * len(tokens)
            found.append(ChoiceScore(no_ids, tuple(values), None if other is None else tuple(other[1])))
        return found

    async def _scored_by_first_token(
        self, call: Call, choices: Sequence[str], unconditional: bool
    ) -> list[ChoiceScore]:
        """The scores of choices that are one token each, from the likeliest first tokens of an answer."""
        if unconditional:
            raise NotSupported(
                "conversations do not tell how likely a text is without them: use another choices_method"
            )
        params = GenParams(max_new_tokens=1, temperature=0.0, return_logprob=True, top_logprobs_num=MAX_LIKELY_TOKENS)
        create, body = self._request(replace(call, params=params))
        with self._clients.errors():
            answer = await create(**body)
        self.token_usage.add(_usage(answer))
        told = _logprobs(answer.choices[0].logprobs)
        first = [*told.get("output_token_logprobs", [])[:1], *(told.get("output_top_logprobs") or [[]])[0]]
        known = {text: value for value, _, text in first}
        found = []
        for choice in choices:
            token = choice if call.partial else choice.lstrip()  # a message begins without white space
            if token not in known:
                raise BackendError(
                    f"{self._clients.url} does not tell how likely {choice!r} is: in a conversation, select takes "
                    f"choices of one token that are among the {MAX_LIKELY_TOKENS} likeliest"
                )
            found.append(ChoiceScore((None,), (known[token],)))
        return found

    async def _echoed(self, prompts: Sequence[str], endings: Sequence[str]) -> list[tuple[list[str], list[Any]]]:
        """The tokens of each prompt that reach into its ending, and their log probabilities."""
        with self._clients.errors():
            answer = await self._clients.get().completions.create(
                model=self.model_name,
                prompt=list(prompts),
                max_tokens=0,
                echo=True,
                logprobs=1,
                temperature=0,
                extra_body=self._extra_body,
            )
        self.token_usage.add(_usage(answer))
        found = []
        for choice, ending in zip(sorted(answer.choices, key=lambda choice: choice.index), endings, strict=True):
            tokens = [] if choice.logprobs is None else list(choice.logprobs.tokens or ())
            values = [] if choice.logprobs is None else list(choice.logprobs.token_logprobs or ())
            if not "".join(tokens).endswith(ending):
                raise BackendError(f"{self._clients.url} does not tell which tokens {ending!r} has")
            first, length = len(tokens), 0
            while length < len(ending):
                first -= 1
                length += len(tokens[first])
            while first and not tokens[first - 1] and values[first - 1] is not None:
                first -= 1  # the beginning of a character that the next token completes
            found.append((tokens[first:], values[first:]))
        return found

    async def roles(self) -> RoleFormat:
        return PLAIN_ROLES if self.is_chat_model else self._template

    def speculating(self, num_tokens: int) -> Backend:
        return Speculation(self, num_tokens)

    async def close(self) -> None:
        """Closes the connections of the running event loop."""
        await self._clients.close()

    # ------------------------------------------------------------ bodies

    def _request(self, call: Call) -> tuple[Any, dict[str, Any]]:
        """The method of the package that makes a call, and its arguments."""
        client, params = self._clients.get(), call.params
        body: dict[str, Any] = {
            "model": self.model_name,
            "temperature": params.temperature,
            "stop": list(params.stop or ()) or None,
            "frequency_penalty": params.frequency_penalty or None,
            "presence_penalty": params.presence_penalty or None,
            "n": params.n if params.n != 1 else None,
            # Others may have defaults of their own; OpenAI's models that reason refuse it, even 1.
            "top_p": params.top_p if params.top_p != 1 or self.dialect != "openai" else None,
        }
        extra = self._open_params(params) if self.dialect != "openai" else {}
        if self.is_chat_model:
            body |= {"messages": list(call.messages), self._max_tokens: params.max_new_tokens}
            if params.return_logprob:
                body |= {"logprobs": True, "top_logprobs": params.top_logprobs_num or None}
            if params.json_schema is not None:
                schema = {"name": "output", "schema": json.loads(params.json_schema), "strict": True}
                body["response_format"] = {"type": "json_schema", "json_schema": schema}
            if call.partial:
                body["messages"].append({"role": "assistant", "content": call.partial})
                extra |= {"continue_final_message": True, "add_generation_prompt": False}
            if "video" in self.features:
                extra |= self._videos(body)
            create = client.chat.completions.create
        else:
            body |= {"prompt": call.text, "max_tokens": params.max_new_tokens}
            if params.return_logprob:
                body["logprobs"] = params.top_logprobs_num or 0
            if params.json_schema is not None and self.dialect == "vllm":
                extra["structured_outputs"] = {"json": json.loads(params.json_schema)}
            elif params.json_schema is not None:
                extra["json_schema"] = params.json_schema
            create = client.completions.create
        sent = {name: value for name, value in body.items() if value is not None}
        return create, sent | {"extra_body": extra | self._extra_body}

    def _open_params(self, params: GenParams) -> dict[str, Any]:
        """Parameters that vLLM and SGLang take besides OpenAI's."""
        extra: dict[str, Any] = {
            "min_tokens": params.min_new_tokens or None,
            "stop_token_ids": list(params.stop_token_ids or ()) or None,
            "top_k": params.top_k,
            "min_p": params.min_p,
            "ignore_eos": params.ignore_eos or None,
        }
        if (pattern := params.pattern()) is not None:
            constraint = {"structured_outputs": {"regex": pattern}} if self.dialect == "vllm" else {"regex": pattern}
            extra |= constraint
        return {name: value for name, value in extra.items() if value is not None}

    def _videos(self, body: dict[str, Any]) -> dict[str, Any]:
        """Writes the number of pictures that films have in the endpoint's way: SGLang's is in each part, vLLM's is one
        for the call. Returns further fields of the body."""
        counts = set()
        messages = []
        for message in body["messages"]:
            content = message["content"]
            if isinstance(content, list):
                parts = []
                for part in content:
                    if part["type"] == "video_url":
                        count = part["video_url"]["num_frames"]
                        counts.add(count)
                        own = {"max_frames": count} if self.dialect == "sglang" else {}
                        part = {"type": "video_url", "video_url": {"url": part["video_url"]["url"], **own}}
                    parts.append(part)
                message = message | {"content": parts}
            messages.append(message)
        body["messages"] = messages
        if not counts or self.dialect == "sglang":
            return {}
        if len(counts) > 1:
            raise NotSupported("vLLM takes one num_frames for all videos of a conversation")
        return {"media_io_kwargs": {"video": {"num_frames": counts.pop()}}}

    # ------------------------------------------------------------ answers

    def _text(self, part: Any) -> str:
        """The text of a message, of its delta, or of a completion's choice."""
        if not self.is_chat_model:
            return part.text or ""
        if refusal := getattr(part, "refusal", None):
            raise BackendError(f"{self.model_name} refuses to answer: {refusal}", code="refusal")
        return part.content or ""


def _usage(answer: Any) -> dict[str, Any]:
    usage = answer.usage
    if usage is None:
        return {}
    details = usage.prompt_tokens_details
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "cached_tokens": None if details is None else details.cached_tokens,
    }


def _logprobs(logprobs: Any) -> dict[str, Any]:
    """Log probabilities of a chat completion's tokens, or of a completion's."""
    if logprobs is None:
        return {}
    if hasattr(logprobs, "content"):
        entries = logprobs.content or ()
        own = [(entry.logprob, None, entry.token) for entry in entries]
        top = [[(other.logprob, None, other.token) for other in entry.top_logprobs or ()] for entry in entries]
    else:
        pairs = zip(logprobs.token_logprobs or (), logprobs.tokens or (), strict=True)
        own = [(value, None, text) for value, text in pairs]
        top = [[(value, None, text) for text, value in (at or {}).items()] for at in logprobs.top_logprobs or ()]
    return {"output_token_logprobs": own, "output_top_logprobs": top}
