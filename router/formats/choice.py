"""The choice of a model's formats: from names of parsers, its chat template, its vocabulary and its configuration."""

from collections.abc import Callable, Mapping
from typing import Any

from router.formats.format import OutputFormat
from worker.formats.families import (
    CONFIG_TELLS,
    HARMONY,
    TEMPLATE_TELLS,
    THINKING,
    THINKING_ALIASES,
    TOOL_ALIASES,
    TOOLS,
)
from worker.formats.syntax import Channels, ThinkingFormat, ToolsFormat


def choose(
    tool_call_parser: str,
    reasoning_parser: str,
    template: str | None,
    token_of: Callable[[str], int | None] = lambda token: None,
    config: Mapping[str, Any] | None = None,
) -> OutputFormat:
    """The format of a model's answers by the names of its parsers: `auto` for what `detect` finds, `none` for text.
    Raises KeyError for an unknown name."""
    tool_call_parser = TOOL_ALIASES.get(tool_call_parser, tool_call_parser)
    reasoning_parser = THINKING_ALIASES.get(reasoning_parser, reasoning_parser)
    found = detect(template, token_of, config)
    if HARMONY in (tool_call_parser, reasoning_parser):
        return OutputFormat(channels=Channels()).bound(token_of)
    if (tool_call_parser, reasoning_parser) == ("auto", "auto"):
        return found
    tools = found.tools if tool_call_parser == "auto" else TOOLS.get(tool_call_parser)
    thinking = THINKING.get(reasoning_parser)
    if reasoning_parser == "auto":
        thinking = _thinking_with(tools) or found.thinking
    for name, known in ((tool_call_parser, TOOLS), (reasoning_parser, THINKING)):
        if name not in ("auto", "none") and name not in known:
            raise KeyError(name)
    return OutputFormat(tools=tools, thinking=thinking).bound(token_of)


def named(tools: str | None, thinking: str | None) -> OutputFormat:
    """The format with these names, None for none, but for the thinking that belongs to the tools' format. `openai` is
    harmony, which is both. Raises KeyError for an unknown name."""
    tools, thinking = TOOL_ALIASES.get(tools or "", tools), THINKING_ALIASES.get(thinking or "", thinking)
    if HARMONY in (tools, thinking):
        return OutputFormat(channels=Channels())
    form = None if tools is None else TOOLS[tools]
    return OutputFormat(tools=form, thinking=_thinking_with(form) if thinking is None else THINKING[thinking])


def detect(
    template: str | None,
    token_of: Callable[[str], int | None] = lambda token: None,
    config: Mapping[str, Any] | None = None,
) -> OutputFormat:
    """The format of a model's answers, bound to its vocabulary.

    - `template`: the source of its chat template.
    - `token_of`: the id of the added token with a given text, None if there is none.
    - `config`: the content of its `config.json`; counts where the template tells nothing.

    A model whose template has no tools gets `hermes`, whose `instruction` describes them in a system message. Thinking
    is looked for only where the template or the vocabulary has its markers.
    """
    source = template or ""
    model_type = str((config or {}).get("model_type", ""))
    channels = Channels()
    if (channels.channel in source and channels.message in source) or model_type == "gpt_oss":
        return OutputFormat(channels=channels).bound(token_of)
    found = next((name for texts, name in TEMPLATE_TELLS if all(text in source for text in texts)), None)
    tools = TOOLS[found or CONFIG_TELLS.get(model_type, "hermes")]
    thinking = _thinking_with(tools)
    if thinking is None:
        thinking = next((each for each in THINKING.values() if each.tells(source)), None)
    if thinking is None:
        thinking = next((each for each in THINKING.values() if each.is_in(token_of)), None)
    return OutputFormat(tools=tools, thinking=thinking).bound(token_of)


def _thinking_with(tools: ToolsFormat | None) -> ThinkingFormat | None:
    return None if tools is None or not tools.thinking else THINKING[tools.thinking]
