"""A conversation as the router holds it, whichever protocol it came by: messages, tools, and how to think.

Chat completions, Responses and Messages each have a reader that makes a `Conversation`. What a model answers is
written by one of three writers, from the deltas of `router/chat/deltas.py`.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal


def arguments_text(arguments: str | Mapping[str, Any] | None) -> str:
    """The arguments of a past call as text, in whichever form a client has kept them."""
    if isinstance(arguments, str):
        return arguments
    return json.dumps(arguments or {}, ensure_ascii=False)


@dataclass(frozen=True)
class ToolCall:
    """A call of a tool. `arguments`: a JSON object, as text."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True)
class Message:
    """A message. Role assistant has `thinking` and `calls`, role tool has `call_id` and the tool's `name`."""

    role: Literal["system", "user", "assistant", "tool"]
    text: str = ""
    thinking: str = ""
    calls: tuple[ToolCall, ...] = ()
    call_id: str | None = None
    name: str | None = None


@dataclass(frozen=True)
class Tool:
    """A function that the model may call. `parameters`: a JSON schema of an object; `strict`: calls must be valid.
    `namespace`: the name that the client has for a group of tools, which `name` begins with."""

    name: str
    description: str = ""
    parameters: Mapping[str, Any] = field(default_factory=lambda: {"type": "object", "properties": {}})
    strict: bool = False
    namespace: str | None = None

    @property
    def own_name(self) -> str:
        """The name inside the namespace."""
        return self.name if self.namespace is None else self.name[len(qualified("", self.namespace)) :]


def qualified(name: str, namespace: str | None) -> str:
    """The name by which the model knows a function of a namespace, or of none."""
    if not namespace:
        return name
    return f"{namespace}{name}" if namespace.endswith("__") else f"{namespace}__{name}"


@dataclass(frozen=True)
class ToolChoice:
    """Whether the model may, or must, call a tool. `names`: the only tools allowed; all of them if empty."""

    mode: Literal["none", "auto", "required"] = "auto"
    names: tuple[str, ...] = ()


@dataclass(frozen=True)
class Thinking:
    """How the model is to think before its answer. None leaves each to the model's template.

    `budget`: most tokens of thinking; what is cut off there is ended for the model.
    """

    enabled: bool | None = None
    effort: str | None = None
    budget: int | None = None


@dataclass(frozen=True)
class Conversation:
    """Messages, and what the answer to them may be.

    `arguments`: further variables of the chat template. `prefill`: the beginning of the answer, which goes on from
    there; `prefill_thinking` is the thinking before it, which goes on where there is no `prefill`. `begins_answer`:
    whether the prompt ends where an answer begins.
    """

    messages: tuple[Message, ...]
    tools: tuple[Tool, ...] = ()
    choice: ToolChoice = ToolChoice()
    parallel: bool = True
    thinking: Thinking = Thinking()
    arguments: Mapping[str, Any] = field(default_factory=dict)
    prefill: str = ""
    prefill_thinking: str = ""
    begins_answer: bool = True

    @property
    def callable_tools(self) -> tuple[Tool, ...]:
        """The tools that the answer may call."""
        if self.choice.mode == "none":
            return ()
        return tuple(tool for tool in self.tools if not self.choice.names or tool.name in self.choice.names)
