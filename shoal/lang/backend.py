"""The interface between the interpreter and a backend: a `Call` goes in, text comes back.

A backend takes texts (completions) or conversations (`is_chat_model`). It says what it can do, and a program that asks
for more is refused by name before its first call.
"""

from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field
from typing import Any

from shoal.lang.choices import ChoiceScore
from shoal.lang.errors import NotSupported
from shoal.lang.ir import GenParams


@dataclass(frozen=True)
class RoleFormat:
    """How a conversation is written as text: what stands before and after a message of each role.

    `default_system` is what stands before the first message of a conversation that has no system message. `stop` are
    texts that end an answer.
    """

    prefix: dict[str, str]
    suffix: dict[str, str]
    default_system: str = ""
    stop: tuple[str, ...] = ()


# For backends that take conversations: only messages matter, and text marks where they begin.
PLAIN_ROLES = RoleFormat(
    prefix={"system": "SYSTEM:", "user": "USER:", "assistant": "ASSISTANT:"},
    suffix={"system": "\n", "user": "\n", "assistant": "\n"},
)


@dataclass
class Call:
    """A call of the model, from one branch of a program.

    | field | meaning |
    | --- | --- |
    | `program`, `branch` | ids of the program's run and of the branch; `parent` is the branch that it was forked from |
    | `held` | characters of `text` that the backend has from earlier calls of this branch or its parent |
    | `text` | all text before the output |
    | `messages` | the conversation before the current message, in OpenAI's form |
    | `role`, `partial` | the role of the current message, and its text so far |
    | `has_media` | whether a message has pictures or films |
    | `remaining` | calls that are known to follow on this branch |
    | `template` | what is known to follow: constant texts, and the parameters of calls. If the backend takes \
conversations, in the current message |
    """

    program: str
    branch: str
    parent: str | None
    held: int
    text: str
    messages: list[dict[str, Any]]
    role: str | None
    partial: str
    has_media: bool
    params: GenParams
    remaining: int = 0
    template: tuple[str | GenParams, ...] = ()

    @property
    def then(self) -> str:
        """The constant text that is known to follow the output."""
        texts: list[str] = []
        for part in self.template:
            if not isinstance(part, str):
                break
            texts.append(part)
        return "".join(texts)


@dataclass
class Generated:
    """The result of a call: `texts` has `n` outputs, `meta` their details.

    Keys of `meta`, as far as the backend knows them: `id`, `finish_reason`, `prompt_tokens`, `completion_tokens`,
    `cached_tokens`, `output_token_logprobs` (a list of (log probability, token id or None, text or None)) and
    `output_top_logprobs` (a list of such lists). `held`: whether the backend now holds the call's text and its output.
    """

    texts: list[str]
    meta: list[dict[str, Any]]
    held: bool = False


@dataclass
class OutputPiece:
    """A part of a streamed output. `meta` has what is known so far, logarithms of this piece alone."""

    text: str
    meta: dict[str, Any] = field(default_factory=dict)
    held: bool = False


@dataclass
class TokenUsage:
    """Tokens and calls since the last `reset`."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    calls: int = 0

    def reset(self) -> None:
        self.prompt_tokens = self.completion_tokens = self.cached_tokens = self.calls = 0

    def add(self, meta: dict[str, Any]) -> None:
        """Counts one call."""
        self.calls += 1
        self.prompt_tokens += meta.get("prompt_tokens") or 0
        self.completion_tokens += meta.get("completion_tokens") or 0
        self.cached_tokens += meta.get("cached_tokens") or 0


class Backend:
    """Runs calls. Its coroutines may be called from several event loops.

    `params` are the fields of `GenParams` that it honours; `features` are other abilities: "select", "images", "video",
    "stream", "prefill" (an assistant's message that has begun is continued). `tells_tokens`: log probabilities name all
    tokens of an output. `incremental_streaming_output`: lists in the details of a streamed output have what is new with
    each piece, and not all so far.
    """

    name: str = "backend"
    params: frozenset[str] = frozenset()
    features: frozenset[str] = frozenset()
    is_chat_model: bool = False
    tells_tokens: bool = False
    incremental_streaming_output: bool = False

    def __init__(self) -> None:
        self.token_usage = TokenUsage()

    @property
    def endpoint(self) -> "Backend":
        """The backend itself: what has a backend, as an `Engine`, has it under this name."""
        return self

    async def roles(self) -> RoleFormat:
        """How conversations are written. Raises BackendError."""
        return PLAIN_ROLES

    async def generate(self, call: Call) -> Generated:
        """Runs a call. Raises BackendError, NotSupported."""
        raise NotImplementedError

    def stream(self, call: Call) -> AsyncGenerator[OutputPiece, None]:
        """Runs a call, and yields its output as it comes. Closing the iterator ends the call."""
        raise NotImplementedError

    async def score(self, call: Call, choices: Sequence[str], unconditional: bool) -> list[ChoiceScore]:
        """The log probabilities of each choice after the call's text. What the backend holds stays as it is."""
        raise NotSupported(f"{self.name} cannot select among choices: it does not tell the probabilities of a text")

    async def prefetch(self, program: str, text: str) -> None:
        """Computes a text that many calls will begin with. Backends without a cache of prefixes do nothing."""

    async def end_program(self, program: str) -> None:
        """Forgets what was kept for a program."""

    async def flush_cache(self) -> bool:
        """Empties the backend's cache of prefixes. Returns whether there was one."""
        return False

    async def server_info(self) -> dict[str, Any] | None:
        """The version and model, as far as the backend tells."""
        return None

    def get_model_name(self) -> str:
        """The model's name. Raises BackendError, and NotSupported where the backend does not tell."""
        raise NotSupported(f"{self.name} does not tell the name of its model")

    def shutdown(self) -> None:
        """Ends what belongs to the backend alone. A server that others may use goes on."""

    def speculating(self, num_tokens: int) -> "Backend":
        """A backend for one run, whose calls generate `num_tokens` past their stop and serve later calls from that."""
        raise NotSupported(f"num_api_spec_tokens is not supported by {self.name}")

    def check(self, params: GenParams) -> None:
        """Raises NotSupported for parameters that this backend would not honour."""
        neutral = {"temperature", "top_p"} | {name for name, value in NEUTRAL.items() if getattr(params, name) == value}
        wrong = sorted(params.used() - self.params - neutral)
        if wrong:
            raise NotSupported(f"{self.name} does not support {', '.join(wrong)}")

    def check_feature(self, feature: str) -> None:
        """Raises NotSupported."""
        if feature not in self.features:
            raise NotSupported(f"{self.name} does not support {_FEATURES[feature]}")


# Values that ask for nothing: `run` sets all of them.
NEUTRAL: dict[str, Any] = {
    "min_new_tokens": 0,
    "n": 1,
    "stop": (),
    "stop_token_ids": (),
    "stop_regex": (),
    "top_k": -1,
    "min_p": 0.0,
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
    "ignore_eos": False,
    "return_logprob": False,
    "logprob_start_len": -1,
    "top_logprobs_num": 0,
    "return_text_in_logprobs": False,
}
_FEATURES = {
    "select": "select: it does not tell the probabilities of a text",
    "images": "images",
    "video": "video",
    "stream": "streams",
    "prefill": "text before gen in an assistant's message (gen must come first in it, or num_api_spec_tokens be given)",
}
