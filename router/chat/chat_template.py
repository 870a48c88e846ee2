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
from jinja2 import meta, nodes
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
    """The chat template of one model. Models come from strangers, so templates run in Jinja's sandbox.

    | attribute | meaning |
    | --- | --- |
    | `source` | its text |
    | `for_tools` | the text of the template that is used where there are tools |
    | `takes_tools` | whether that has a place for tools |
    | `reads_tools_of_messages` | whether it looks for tools in messages alone |
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str], for_tools: str | None = None) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _refuse
        environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        self.source = source
        self.for_tools = source if for_tools is None else for_tools
        self._template = environment.from_string(source)
        self._with_tools = self._template if for_tools is None else environment.from_string(for_tools)
        tree = environment.parse(self.for_tools)
        of_request = "tools" in meta.find_undeclared_variables(tree)
        of_messages = any(node.attr == "tools" for node in tree.find_all(nodes.Getattr)) or any(
            isinstance(node.arg, nodes.Const) and node.arg.value == "tools" for node in tree.find_all(nodes.Getitem)
        )
        self.takes_tools = of_request or of_messages
        self.reads_tools_of_messages = of_messages and not of_request
        self._special_tokens = dict(special_tokens)

    @classmethod
    def from_folder(cls, folder: Path) -> "ChatTemplate | None":
        """The template of a Hugging Face folder; None if the model has none.

        Of several places, the first that has one counts: `chat_template.jinja`, `tokenizer_config.json`, and the files
        of processors, where models with a vision part may have theirs. Of several templates by name, `default` counts,
        and `tool_use` where there are tools.
        """
        named: dict[str, str] = {}
        for name in ("tokenizer_config.json", "chat_template.json", "processor_config.json"):
            source = _json_file(folder / name).get("chat_template")
            if isinstance(source, list):
                named = {entry["name"]: entry["template"] for entry in source} | named
            elif isinstance(source, dict):
                named = source | named
            elif isinstance(source, str):
                named.setdefault("default", source)
        for path in sorted((folder / "additional_chat_templates").glob("*.jinja")):
            named[path.stem] = path.read_text(encoding="utf-8")
        if (folder / "chat_template.jinja").exists():
            named["default"] = (folder / "chat_template.jinja").read_text(encoding="utf-8")
        source = named.get("default") or next(iter(named.values()), None)
        return None if source is None else cls(source, special_tokens(folder), named.get("tool_use"))

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
        template = self._with_tools if tools else self._template
        try:
            return template.render({**self._special_tokens, **own, **(arguments or {})})
        except _REFUSALS as error:
            raise TemplateError(str(error)) from error


def special_tokens(folder: Path) -> dict[str, str]:
    """The texts of a model's special tokens, by the names of SPECIAL_TOKENS. Older models have them in a file of their
    own."""
    said = _json_file(folder / "special_tokens_map.json")
    said |= {name: token for name, token in _json_file(folder / "tokenizer_config.json").items() if token is not None}
    texts = {name: token_content(said.get(name)) for name in SPECIAL_TOKENS}
    return {name: text for name, text in texts.items() if text is not None}


def token_content(token: Any) -> str | None:
    """The text of a token, which files have as such or in a description."""
    content = token.get("content") if isinstance(token, dict) else token
    return content if isinstance(content, str) else None


def _json_file(path: Path) -> dict[str, Any]:
    """The object in a file; empty if there is no file."""
    read = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    return read if isinstance(read, dict) else {}


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """The filter `tojson`, without the HTML escaping of Jinja's own."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _refuse(message: str) -> None:
    raise jinja2.TemplateError(message)
