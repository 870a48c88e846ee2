"""Chat templates: a conversation's messages, rendered as the text that the model was trained on.

Renders the Jinja template that comes with a model exactly as `transformers` does (a test compares the two), but without
the seconds that importing `transformers` takes.
"""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")

# Errors that a template raises because of its input. RecursionError: arguments that are nested too deeply.
_REFUSALS = (
    jinja2.TemplateError,
    TypeError,
    ValueError,
    LookupError,
    AttributeError,
    ArithmeticError,
    RecursionError,
)


class TemplateError(Exception):
    """The template refuses its input. `param` names the parameter of the request at fault."""

    def __init__(self, message: str, param: str = "messages") -> None:
        super().__init__(message)
        self.param = param


class _Generation(Extension):
    """`{% generation %}` marks the assistant's part for training; it changes nothing here."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


class ChatTemplate:
    """The chat template of one model. `source` is its text. Models come from strangers, so templates run in Jinja's
    sandbox."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _refuse
        environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        self.source = source
        self._template = environment.from_string(source)
        self._special_tokens = dict(special_tokens)

    @classmethod
    def from_folder(cls, folder: Path) -> "ChatTemplate | None":
        """The template of a Hugging Face folder: `chat_template.jinja`, or the one in `tokenizer_config.json`; None if
        the model has none."""
        config: dict[str, Any] = {}
        if (folder / "tokenizer_config.json").exists():
            config = json.loads((folder / "tokenizer_config.json").read_text())
        source = config.get("chat_template")
        if isinstance(source, list):  # several templates, by name
            source = next((entry["template"] for entry in source if entry["name"] == "default"), None)
        if (folder / "chat_template.jinja").exists():
            source = (folder / "chat_template.jinja").read_text()
        if source is None:
            return None
        tokens = {name: config[name] for name in SPECIAL_TOKENS if config.get(name) is not None}
        return cls(
            source, {name: token if isinstance(token, str) else token["content"] for name, token in tokens.items()}
        )

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        arguments: Mapping[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> str:
        """Returns the text of a conversation. `arguments`: further variables for the template, such as
        `enable_thinking`. `tools`: as OpenAI's. Raises TemplateError with the template's own message, and for an
        argument whose name the server itself sets."""
        own = {"messages": messages, "add_generation_prompt": add_generation_prompt, "tools": tools, "documents": None}
        if taken := sorted((arguments or {}).keys() & {*own, *SPECIAL_TOKENS}):
            raise TemplateError(f"{taken[0]!r} is set by the server, leave it out", "chat_template_kwargs")
        try:
            return self._template.render({**self._special_tokens, **own, **(arguments or {})})
        except _REFUSALS as error:
            raise TemplateError(str(error)) from error


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """The filter `tojson`, without the HTML escaping of Jinja's own."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _refuse(message: str) -> None:
    raise jinja2.TemplateError(message)
