"""The formats of model families by name, each described once: readers and grammars follow from it.

Names are those of vLLM's `--tool-call-parser` and `--reasoning-parser`. Where several of its names, or SGLang's, mean
one format, the others are aliases.
"""

import re
from collections.abc import Mapping

from worker.formats.syntax import (
    LINE,
    CallStyle,
    JsonCall,
    NamedCall,
    PythonicCall,
    QuotedCall,
    TaggedCall,
    TextPattern,
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
        written=CallStyle(
            quote='"',
            kind=" string=",
            strings="true",
            others="false",
            after_begin=("\n",),
            after_name=("\n",),
            after_value=("\n",),
            after_call=("\n",),
        ),
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
        written=CallStyle(each=True, after_begin=("\n",), after_call=("\n",), separator=(LINE,)),
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
        written=CallStyle(
            each=True,
            after_begin=("\n",),
            after_name=("\n",),
            after_key=("\n",),
            before_value_end=("\n",),
            after_value=("\n",),
            after_call=("\n",),
            separator=(LINE,),
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
        written=CallStyle(
            each=True,
            after_begin=("\n",),
            after_name=("\n",),
            after_value=("\n",),
            after_call=("\n",),
            separator=(LINE,),
        ),
    ),
    ToolsFormat(
        "llama3_json",
        begin="<|python_tag|>",
        calls=(
            JsonCall(
                argument_keys=("parameters", "arguments"),
                other_keys=("type", "id"),
                needs_arguments=True,
                separators=(";",),
            ),
        ),
        bare="{",
        written=CallStyle(marked=False, separator=("; ",)),
    ),
    ToolsFormat(
        "granite",
        begin="<|tool_call|>",
        calls=(
            _JSON_LIST,
            JsonCall(begin="<tool_call>", list_begin="[", list_end="]", separators=(",",), bare=True),  # version 3.1
        ),
        written=CallStyle(separator=(", ",)),
    ),
    ToolsFormat(
        "nemotron_json",
        begin="<TOOLCALL>",
        end="</TOOLCALL>",
        calls=(_JSON_LIST,),
        written=CallStyle(separator=(", ",)),
    ),
    ToolsFormat(
        "phi4_mini_json",
        begin="functools",
        others=(("<|tool_call|>", "<|/tool_call|>"),),
        calls=(_JSON_LIST,),
        written=CallStyle(separator=(", ",)),
    ),
    ToolsFormat(
        "hunyuan_a13b",
        begin="<tool_calls>",
        end="</tool_calls>",
        calls=(_JSON_LIST,),
        written=CallStyle(separator=(", ",)),
    ),
    ToolsFormat(
        "xlam",
        begin="[TOOL_CALLS]",
        others=(("<tool_call>", "</tool_call>"), ("```json", "```")),
        calls=(_JSON_LIST,),
        bare="[",
        trims=True,
        written=CallStyle(marked=False, separator=(", ",)),
    ),
    ToolsFormat(
        "internlm",
        begin="<|action_start|><|plugin|>",
        end="<|action_end|>",
        calls=(JsonCall(argument_keys=("parameters", "arguments")),),
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
        written=CallStyle(separator=(", ",)),
    ),
    ToolsFormat(
        "olmo3",
        begin="<function_calls>",
        end="</function_calls>",
        calls=(PythonicCall(list_begin="", list_end=""),),
        written=CallStyle(after_begin=("\n",), before_end=("\n",), separator=("\n",)),
    ),
    ToolsFormat("pythonic", calls=(PythonicCall(),), bare="[", written=CallStyle(marked=False, separator=(", ",))),
    ToolsFormat(
        "lfm2",
        begin="<|tool_call_start|>",
        end="<|tool_call_end|>",
        calls=(PythonicCall(),),
        repeats=True,
        written=CallStyle(separator=(", ",)),
    ),
    ToolsFormat(
        "llama4_pythonic",
        begin="<|python_start|>",
        end="<|python_end|>",
        calls=(PythonicCall(),),
        bare="[",
        written=CallStyle(separator=(", ",)),
    ),
    ToolsFormat(
        "mistral",
        begin="[TOOL_CALLS]",
        calls=(
            _JSON_LIST,
            NamedCall(id_begin="[CALL_ID]", name_ends=("[ARGS]",), brace_ends_name=True),
        ),
        ids="nine",
        written=CallStyle(call=1, each=True),
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
        written=CallStyle(after_name=("\n",), separator=("\n",)),
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
        trims=True,
        written=CallStyle(after_name=(LINE,), after_key=(LINE,), after_value=(LINE,), separator=(LINE,)),
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
        written=CallStyle(
            after_begin=(LINE,), after_name=(LINE,), after_key=(LINE,), after_value=(LINE,), after_call=(LINE,)
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
        written=CallStyle(prefix="functions.", number=(":", TextPattern("[0-9]{1,3}"))),
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
        written=CallStyle(
            between_marks=True,
            quote='"',
            number=(' index="', TextPattern("[0-9]{1,3}"), '"'),
            kind=" type=",
            strings="string",
            others=TextPattern("(?:number|boolean|null|object|array)"),
            ends=("<|close|>argument", "<|open|>argument", "<|close|>call"),
        ),
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
        written=CallStyle(quote='"', after_begin=("\n",), after_name=("\n",), after_value=("\n",), after_call=("\n",)),
    ),
    ToolsFormat(
        "gemma4",
        calls=(QuotedCall(begin="<|tool_call>", end="<tool_call|>", prefix="call:", quote='<|"|>'),),
        trims=True,
        thinking="gemma4",
    ),
    ToolsFormat(
        "functiongemma",
        calls=(QuotedCall(begin="<start_function_call>", end="<end_function_call>", prefix="call:", quote="<escape>"),),
        trims=True,
    ),
)
_THINKING = (
    ThinkingFormat("hunyuan_a13b", around=("<answer>", "</answer>"), breaks=True),
    ThinkingFormat("ernie45", around=("<response>", "</response>"), breaks=True),
    ThinkingFormat("deepseek_r1"),
    ThinkingFormat("qwen3"),
    ThinkingFormat("mistral", "[THINK]", "[/THINK]"),
    ThinkingFormat("granite", "Here is my thought process:", "Here is my response:"),
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
TEMPLATE_TELLS: tuple[tuple[tuple[str, ...], str], ...] = (
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
CONFIG_TELLS: Mapping[str, str] = {  # model types whose files may have no template
    "mistral": "mistral", "mistral3": "mistral", "ministral3": "mistral", "mistral4": "mistral",
    "mixtral": "mistral", "seed_oss": "seed_oss", "deepseek_v32": "deepseek_v32",
    "deepseek_v4": "deepseek_v4", "kimi_k2": "kimi_k2", "kimi_k3": "kimi_k3", "minimax_m2": "minimax_m2",
}  # fmt: skip
