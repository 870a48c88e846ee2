"""The formats of model families by name, and the choice of a model's formats from its chat template.

Names are those of vLLM's `--tool-call-parser` and `--reasoning-parser`. Where several of its names, or SGLang's, mean
one format, the others are aliases.
"""

import re
from collections.abc import Callable, Mapping
from typing import Any

from router.formats.format import (
    Channels,
    JsonCall,
    NamedCall,
    OutputFormat,
    PythonicCall,
    QuotedCall,
    TaggedCall,
    ThinkingFormat,
    ToolsFormat,
)

_BAR = "\uff5c"  # DeepSeek's full-width vertical line
_DSML = f"{_BAR}DSML{_BAR}"
_DEEPSEEK_BEGIN, _DEEPSEEK_END = f"<{_BAR}tool▁calls▁begin{_BAR}>", f"<{_BAR}tool▁calls▁end{_BAR}>"
_DEEPSEEK_CALL_BEGIN, _DEEPSEEK_CALL_END = f"<{_BAR}tool▁call▁begin{_BAR}>", f"<{_BAR}tool▁call▁end{_BAR}>"
_DEEPSEEK_SEPARATOR = f"<{_BAR}tool▁sep{_BAR}>"


def _dsml(name: str, section: str, other: str) -> ToolsFormat:
    return ToolsFormat(
        name,
        begin=f"<{_DSML}{section}>",
        end=f"</{_DSML}{section}>",
        others=((f"<{_DSML}{other}>", f"</{_DSML}{other}>"),),
        calls=(
            TaggedCall(
                begin=f"<{_DSML}invoke name=",
                name=re.compile(r'\s*"(?P<name>[^"<>]+)"\s*'),
                name_end=">",
                key_begin=f"<{_DSML}parameter name=",
                key=re.compile(r'\s*"(?P<key>[^"]+)"(?:\s+string="(?P<kind>true|false)")?\s*'),
                key_end=">",
                value_end=f"</{_DSML}parameter>",
                end=f"</{_DSML}invoke>",
                bare=True,
            ),
        ),
        pieces=(_DSML,),
    )


_INSTRUCTION = """You can call tools. Each line between <tools> and </tools> describes one of them as JSON:
<tools>
{tools}
</tools>
To call a tool, write a JSON object with its name and its arguments between <tool_call> and </tool_call>:
<tool_call>
{"name": "the tool's name", "arguments": {"an argument's name": "its value"}}
</tool_call>
You may call several tools, each between tags of its own. Then stop: the results come in the next message. If no tool
is needed, answer without a call."""

_JSON_LIST = JsonCall(list_begin="[", list_end="]", separators=(",",))
_TOOLS = (
    ToolsFormat(
        "hermes",
        begin="<tool_call>",
        end="</tool_call>",
        calls=(JsonCall(),),
        instruction=_INSTRUCTION,
        result="<tool_response>\n{text}\n</tool_response>",
    ),
    ToolsFormat(
        "qwen3_coder",
        begin="<tool_call>",
        end="</tool_call>",
        calls=(
            TaggedCall(
                begin="<function=",
                name_end=">",
                key_begin="<parameter=",
                key_end=">",
                value_end="</parameter>",
                end="</function>",
                trims=True,
                bare=True,
            ),
        ),
    ),
    ToolsFormat(
        "seed_oss",
        begin="<seed:tool_call>",
        end="</seed:tool_call>",
        calls=(
            TaggedCall(
                begin="<function=",
                name_end=">",
                key_begin="<parameter=",
                key_end=">",
                value_end="</parameter>",
                end="</function>",
                bare=True,
            ),
        ),
        others=(("<tool_call>", "</tool_call>"),),
    ),
    ToolsFormat(
        "llama3_json",
        begin="<|python_tag|>",
        calls=(JsonCall(other_keys=("type", "id"), needs_arguments=True, separators=(";",)),),
        bare="{",
    ),
    ToolsFormat(
        "granite",
        begin="<|tool_call|>",
        calls=(
            _JSON_LIST,
            JsonCall(begin="<tool_call>", list_begin="[", list_end="]", separators=(",",), bare=True),  # version 3.1
        ),
    ),
    ToolsFormat(
        "nemotron_json",
        begin="<TOOLCALL>",
        end="</TOOLCALL>",
        calls=(_JSON_LIST,),
    ),
    ToolsFormat(
        "phi4_mini_json",
        begin="functools",
        others=(("<|tool_call|>", "<|/tool_call|>"),),
        calls=(_JSON_LIST,),
    ),
    ToolsFormat(
        "hunyuan_a13b",
        begin="<tool_calls>",
        end="</tool_calls>",
        calls=(_JSON_LIST,),
    ),
    ToolsFormat(
        "xlam",
        begin="[TOOL_CALLS]",
        others=(("<tool_call>", "</tool_call>"), ("```json", "```")),
        calls=(_JSON_LIST,),
        bare="[",
    ),
    ToolsFormat(
        "internlm",
        begin="<|action_start|><|plugin|>",
        end="<|action_end|>",
        calls=(JsonCall(),),
        pieces=("<|action_start|>", "<|plugin|>"),
    ),
    ToolsFormat(
        "cohere_command3",
        begin="<|START_ACTION|>",
        end="<|END_ACTION|>",
        calls=(
            JsonCall(
                name_keys=("tool_name", "name"),
                argument_keys=("parameters", "arguments"),
                list_begin="[",
                list_end="]",
                separators=(",",),
            ),
        ),
        thinking="cohere_command3",
    ),
    ToolsFormat(
        "olmo3",
        begin="<function_calls>",
        end="</function_calls>",
        calls=(PythonicCall(list_begin="", list_end=""),),
    ),
    ToolsFormat("pythonic", calls=(PythonicCall(),), bare="["),
    ToolsFormat("lfm2", begin="<|tool_call_start|>", end="<|tool_call_end|>", calls=(PythonicCall(),)),
    ToolsFormat("llama4_pythonic", begin="<|python_start|>", end="<|python_end|>", calls=(PythonicCall(),), bare="["),
    ToolsFormat(
        "mistral",
        begin="[TOOL_CALLS]",
        calls=(
            _JSON_LIST,
            NamedCall(id_begin="[CALL_ID]", name_ends=("[ARGS]",), brace_ends_name=True),
        ),
        ids="nine",
    ),
    ToolsFormat(
        "deepseek_v3",
        begin=_DEEPSEEK_BEGIN,
        end=_DEEPSEEK_END,
        calls=(
            NamedCall(
                begin=_DEEPSEEK_CALL_BEGIN,
                end=_DEEPSEEK_CALL_END,
                prefix=f"function{_DEEPSEEK_SEPARATOR}",
                name_ends=("\n",),
                fence=("```json", "```"),
                bare=True,
            ),
        ),
        pieces=(_DEEPSEEK_SEPARATOR,),
    ),
    ToolsFormat(
        "deepseek_v31",
        begin=_DEEPSEEK_BEGIN,
        end=_DEEPSEEK_END,
        calls=(
            NamedCall(begin=_DEEPSEEK_CALL_BEGIN, end=_DEEPSEEK_CALL_END, name_ends=(_DEEPSEEK_SEPARATOR,), bare=True),
        ),
    ),
    _dsml("deepseek_v32", "function_calls", "tool_calls"),
    _dsml("deepseek_v4", "tool_calls", "function_calls"),
    ToolsFormat(
        "glm45",
        calls=(
            TaggedCall(
                begin="<tool_call>",
                key_begin="<arg_key>",
                key_end="</arg_key>",
                value_begin="<arg_value>",
                value_end="</arg_value>",
                end="</tool_call>",
            ),
        ),
    ),
    ToolsFormat(
        "hy_v3",
        begin="<tool_calls>",
        end="</tool_calls>",
        calls=(
            TaggedCall(
                begin="<tool_call>",
                name_end="<tool_sep>",
                key_begin="<arg_key>",
                key_end="</arg_key>",
                value_begin="<arg_value>",
                value_end="</arg_value>",
                end="</tool_call>",
                bare=True,
            ),
        ),
    ),
    ToolsFormat(
        "kimi_k2",
        begin="<|tool_calls_section_begin|>",
        end="<|tool_calls_section_end|>",
        calls=(
            NamedCall(
                begin="<|tool_call_begin|>",
                end="<|tool_call_end|>",
                name=re.compile(r"(?:functions\.)?(?P<name>.+?)(?::\d+)?"),
                is_id=True,
                name_ends=("<|tool_call_argument_begin|>",),
                bare=True,
            ),
        ),
        ids="counted",
    ),
    ToolsFormat(
        "kimi_k3",
        begin="<|open|>tools<|sep|>",
        end="<|close|>tools<|sep|>",
        calls=(
            TaggedCall(
                begin="<|open|>call tool=",
                name=re.compile(r'\s*"(?P<name>[^"<>]+)"(?:\s+index="[0-9]+")?\s*'),
                name_end="<|sep|>",
                key_begin="<|open|>argument key=",
                key=re.compile(r'\s*"(?P<key>[^"]+)"(?:\s+type="(?P<kind>\w+)")?\s*'),
                key_end="<|sep|>",
                value_end="<|close|>argument<|sep|>",
                end="<|close|>call<|sep|>",
                bare=True,
            ),
        ),
        pieces=("<|open|>", "<|close|>", "<|sep|>"),
        thinking="kimi_k3",
    ),
    ToolsFormat(
        "minimax_m2",
        begin="<minimax:tool_call>",
        end="</minimax:tool_call>",
        calls=(
            TaggedCall(
                begin="<invoke name=",
                name=re.compile(r"""\s*(?P<quote>["']?)(?P<name>[^\s"'<>]+)(?P=quote)\s*"""),
                name_end=">",
                key_begin="<parameter name=",
                key=re.compile(r"""\s*(?P<quote>["']?)(?P<key>[^"'<>]+)(?P=quote)\s*"""),
                key_end=">",
                value_end="</parameter>",
                end="</invoke>",
                bare=True,
            ),
        ),
    ),
    ToolsFormat(
        "gemma4",
        calls=(QuotedCall(begin="<|tool_call>", end="<tool_call|>", prefix="call:", quote='<|"|>'),),
        thinking="gemma4",
    ),
    ToolsFormat(
        "functiongemma",
        calls=(QuotedCall(begin="<start_function_call>", end="<end_function_call>", prefix="call:", quote="<escape>"),),
    ),
)
_THINKING = (
    ThinkingFormat("hunyuan_a13b", around=("<answer>", "</answer>"), breaks=True),
    ThinkingFormat("ernie45", around=("<response>", "</response>"), breaks=True),
    ThinkingFormat("deepseek_r1"),
    ThinkingFormat("qwen3"),
    ThinkingFormat("mistral", "[THINK]", "[/THINK]"),
    ThinkingFormat("granite", "<|start_of_thinking|>", "<|end_of_thinking|>"),
    ThinkingFormat(
        "cohere_command3",
        "<|START_THINKING|>",
        "<|END_THINKING|>",
        around=("<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|START_TEXT|>", "<|END_TEXT|>"),
    ),
    ThinkingFormat("seed_oss", "<seed:think>", "</seed:think>"),
    ThinkingFormat("kimi", "◁think▷", "◁/think▷"),
    ThinkingFormat("gemma4", "<|channel>", "<channel|>", label="thought"),
    ThinkingFormat(
        "kimi_k3",
        "<|open|>think<|sep|>",
        "<|close|>think<|sep|>",
        around=("<|open|>response<|sep|>", "<|close|>response<|sep|>", "<|close|>message<|sep|>"),
    ),
)
TOOLS: Mapping[str, ToolsFormat] = {format.name: format for format in _TOOLS}
THINKING: Mapping[str, ThinkingFormat] = {format.name: format for format in _THINKING}
HARMONY = "openai"
# Other names of formats, in vLLM and in SGLang.
TOOL_ALIASES: Mapping[str, str] = {
    "qwen": "hermes", "qwen25": "hermes", "qwen3_json": "hermes", "granite4": "hermes", "ernie45": "hermes",
    "qwen3_xml": "qwen3_coder", "mimo": "qwen3_coder", "step3p5": "qwen3_coder", "nemotron_3": "qwen3_coder",
    "llama3": "llama3_json", "llama4_json": "llama3_json", "jamba": "hunyuan_a13b", "hunyuan": "hunyuan_a13b",
    "glm": "glm45", "glm47": "glm45", "poolside_v1": "glm45", "interns1": "internlm",
    "deepseekv3": "deepseek_v3", "deepseekv31": "deepseek_v31", "deepseekv32": "deepseek_v32",
    "deepseekv4": "deepseek_v4", "minimax-m2": "minimax_m2", "cohere_command4": "cohere_command3", "gpt-oss": HARMONY,
}  # fmt: skip
THINKING_ALIASES: Mapping[str, str] = {
    **dict.fromkeys(
        (
            "deepseek-r1", "deepseek_v3", "deepseek-v3", "deepseek_v4", "deepseek-v4", "glm45", "glm47", "holo2",
            "hy_v3", "interns1", "kimi_k2", "mimo", "minimax", "minimax_m2", "minimax-append-think",
            "minimax_m2_append_think", "nemotron_v3", "nemotron_3", "olmo3", "poolside_v1", "qwen3-thinking", "step3",
            "step3p5", "granite_thinking_parser",
        ),
        "qwen3",
    ),
    "cohere_command4": "cohere_command3", "hunyuan": "hunyuan_a13b", "openai_gptoss": HARMONY, "gpt-oss": HARMONY,
}  # fmt: skip
PARSERS = "auto", "none", HARMONY  # names beyond those of the formats
# The first entry whose texts all occur in a template tells how its model writes calls.
_TEMPLATE_TELLS: tuple[tuple[tuple[str, ...], str], ...] = (
    ((f"{_DSML}function_calls",), "deepseek_v32"),
    ((f"{_DSML}tool_calls",), "deepseek_v4"),
    ((_DEEPSEEK_BEGIN, "```json"), "deepseek_v3"),
    ((_DEEPSEEK_BEGIN,), "deepseek_v31"),
    (("<|tool_calls_section_begin|>",), "kimi_k2"),
    (("<|open|>", "<|close|>", "<|sep|>"), "kimi_k3"),
    (("<minimax:tool_call>",), "minimax_m2"),
    (("<tool_calls>", "<tool_sep>", "<arg_key>"), "hy_v3"),
    (("<tool_call>", "<arg_key>"), "glm45"),
    (("<seed:tool_call>",), "seed_oss"),
    (("<function=", "<parameter="), "qwen3_coder"),
    (("[TOOL_CALLS]",), "mistral"),
    (("<|START_ACTION|>",), "cohere_command3"),
    (("<|action_start|>", "<|plugin|>"), "internlm"),
    (("<start_function_call>",), "functiongemma"),
    (("<function_calls>",), "olmo3"),
    (("<tool_calls>",), "hunyuan_a13b"),
    (("functools[",), "phi4_mini_json"),
    (("<|tool|>", "<|/tool|>"), "phi4_mini_json"),
    (("<TOOLCALL>",), "nemotron_json"),
    (("<|python_start|>",), "llama4_pythonic"),
    (("<|tool_call|>", "<|start_of_role|>"), "granite"),
    (("<|tool_call>", "<tool_call|>"), "gemma4"),
    (("<tool_call>",), "hermes"),
    (("<|python_tag|>",), "llama3_json"),
    (('"parameters": dictionary of argument name and its value',), "llama3_json"),
    (("[func_name1(", "<|header_start|>"), "llama4_pythonic"),
    (("[func_name1(",), "pythonic"),
    (("<|tool_list_start|>",), "lfm2"),
    (("List of tools: ",), "lfm2"),  # since version 2.5
)
_CONFIG_TELLS: Mapping[str, str] = {  # model types whose files may have no template
    "mistral": "mistral", "mistral3": "mistral", "ministral3": "mistral", "mistral4": "mistral",
    "mixtral": "mistral", "seed_oss": "seed_oss", "deepseek_v32": "deepseek_v32",
    "deepseek_v4": "deepseek_v4", "kimi_k2": "kimi_k2", "kimi_k3": "kimi_k3", "minimax_m2": "minimax_m2",
}  # fmt: skip


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
    found = next((name for texts, name in _TEMPLATE_TELLS if all(text in source for text in texts)), None)
    tools = TOOLS[found or _CONFIG_TELLS.get(model_type, "hermes")]
    thinking = _thinking_with(tools)
    if thinking is None:
        thinking = next((each for each in _THINKING if each.tells(source)), None)
    if thinking is None:
        thinking = next((each for each in _THINKING if each.is_in(token_of)), None)
    return OutputFormat(tools=tools, thinking=thinking).bound(token_of)


def _thinking_with(tools: ToolsFormat | None) -> ThinkingFormat | None:
    return None if tools is None or not tools.thinking else THINKING[tools.thinking]
