"""How model families write calls of tools, as their own chat templates do, for grammars of calls.

A format is a few texts around the names and the arguments of calls. Texts may contain markers (`MARKERS`). A marker
that is a token of the vocabulary is written as that token; otherwise it is text.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from worker.structured_output.rules.ebnf import Node, Regex

Text = tuple[str | Node, ...]

_BAR = "\uff5c"  # DeepSeek's full-width vertical line
_DSML = f"{_BAR}DSML{_BAR}"
_LINE_END = Regex("\\n{0,1}")  # where some models of a family write one


@dataclass(frozen=True)
class Tags:
    """Arguments between tags.

    | field | meaning |
    | --- | --- |
    | `before`, `between`, `after` | around a key and its value |
    | `string`, `other` | after `between`, for strings as they are and for JSON; the schema tells if both are none |
    | `ends` | what would end a value too early if it occurred in it. Each begins with its only `<` |
    | `trims` | a reader leaves out a line's end at the value's start and end, and `between` and `after` have none |
    """

    before: str
    between: Text
    after: Text
    ends: tuple[str, ...]
    string: Text = ()
    other: Text = ()
    trims: bool = False


@dataclass(frozen=True)
class Quotes:
    """Arguments as an object without spaces, with bare keys; strings stand between two of `mark`, without escapes. It
    begins with its only `<`."""

    mark: str


@dataclass(frozen=True)
class CallFormat:
    """An answer of calls: `opening`, calls with `separator` between them, `closing`. A call consists of `before`, the
    name, `between`, the arguments, `after`.

    | field | meaning |
    | --- | --- |
    | `arguments` | how they are written: as a JSON object, as Python's keyword arguments, as `Tags` or `Quotes` say |
    | `bare` | an answer in which calls come without a marker begins like this, in free choice between calls and text |
    | `around` | before and after the text, which comes before calls. The prompt has the first, or begins thinking |
    | `last` | ends the answer |
    """

    before: Text
    between: Text
    after: Text
    opening: Text = ()
    separator: Text = ()
    closing: Text = ()
    arguments: Literal["json", "python"] | Tags | Quotes = "json"
    bare: bool = False
    around: tuple[str, str] | None = None
    last: Text = ()


def _deepseek(before: str, between: str, after: str, separator: str) -> CallFormat:
    return CallFormat(
        opening=(f"<{_BAR}tool▁calls▁begin{_BAR}>",),
        before=(f"<{_BAR}tool▁call▁begin{_BAR}>{before}",),
        between=(between,),
        after=(f"{after}<{_BAR}tool▁call▁end{_BAR}>",),
        separator=(separator,) if separator else (),
        closing=(f"<{_BAR}tool▁calls▁end{_BAR}>",),
    )


def _dsml(section: str) -> CallFormat:
    return CallFormat(
        opening=(f"<{_DSML}{section}>\n",),
        before=(f'<{_DSML}invoke name="',),
        between=('">\n',),
        after=(f"</{_DSML}invoke>\n",),
        closing=(f"</{_DSML}{section}>",),
        arguments=Tags(
            before=f'<{_DSML}parameter name="',
            between=('" string="',),
            string=('true">',),
            other=('false">',),
            after=(f"</{_DSML}parameter>\n",),
            ends=(f"</{_DSML}parameter>", f"<{_DSML}parameter name=", f"</{_DSML}invoke>"),
        ),
    )


def _json_list(opening: str, closing: str, name: str = "name", arguments: str = "arguments") -> CallFormat:
    return CallFormat(
        opening=(opening,),
        before=(f'{{"{name}": "',),
        between=(f'", "{arguments}": ',),
        after=("}",),
        separator=(", ",),
        closing=(closing,),
    )


_PYTHONIC = CallFormat(
    opening=("[",), before=(), between=("(",), after=(")",), separator=(", ",), closing=("]",), arguments="python"
)
FORMATS: Mapping[str, CallFormat] = {
    "hermes": CallFormat(
        before=('<tool_call>\n{"name": "',),
        between=('", "arguments": ',),
        after=("}\n</tool_call>",),
        separator=(_LINE_END,),
    ),
    "qwen3_coder": CallFormat(
        before=("<tool_call>\n<function=",),
        between=(">\n",),
        after=("</function>\n</tool_call>",),
        separator=(_LINE_END,),
        arguments=Tags(
            before="<parameter=",
            between=(">\n",),
            after=("\n</parameter>\n",),
            ends=("</parameter>", "<parameter=", "</function>"),
        ),
    ),
    "seed_oss": CallFormat(
        before=("<seed:tool_call>\n<function=",),
        between=(">\n",),
        after=("</function>\n</seed:tool_call>",),
        separator=(_LINE_END,),
        arguments=Tags(
            before="<parameter=",
            between=(">",),
            after=("</parameter>\n",),
            ends=("</parameter>", "<parameter=", "</function>"),
        ),
    ),
    "glm45": CallFormat(
        before=("<tool_call>",),
        between=(_LINE_END,),
        after=("</tool_call>",),
        separator=(_LINE_END,),
        arguments=Tags(
            before="<arg_key>",
            between=("</arg_key>", _LINE_END, "<arg_value>"),
            after=("</arg_value>", _LINE_END),
            ends=("</arg_value>", "<arg_key>", "</tool_call>"),
        ),
    ),
    "hy_v3": CallFormat(
        opening=("<tool_calls>", _LINE_END),
        before=("<tool_call>",),
        between=("<tool_sep>", _LINE_END),
        after=("</tool_call>", _LINE_END),
        closing=("</tool_calls>",),
        arguments=Tags(
            before="<arg_key>",
            between=("</arg_key>", _LINE_END, "<arg_value>"),
            after=("</arg_value>", _LINE_END),
            ends=("</arg_value>", "<arg_key>", "</tool_call>"),
        ),
    ),
    "minimax": CallFormat(
        opening=("<minimax:tool_call>\n",),
        before=('<invoke name="',),
        between=('">\n',),
        after=("</invoke>\n",),
        closing=("</minimax:tool_call>",),
        arguments=Tags(
            before='<parameter name="',
            between=('">',),
            after=("</parameter>\n",),
            ends=("</parameter>", "<parameter name=", "</invoke>"),
        ),
    ),
    "deepseek_v3": _deepseek(f"function<{_BAR}tool▁sep{_BAR}>", "\n```json\n", "\n```", "\n"),
    "deepseek_v31": _deepseek("", f"<{_BAR}tool▁sep{_BAR}>", "", ""),
    "deepseek_v32": _dsml("function_calls"),
    "deepseek_v4": _dsml("tool_calls"),
    "kimi_k2": CallFormat(
        opening=("<|tool_calls_section_begin|>",),
        before=("<|tool_call_begin|>functions.",),
        between=(":", Regex("[0-9]{1,3}"), "<|tool_call_argument_begin|>"),
        after=("<|tool_call_end|>",),
        closing=("<|tool_calls_section_end|>",),
    ),
    "kimi_k3": CallFormat(
        opening=("<|open|>tools<|sep|>",),
        before=('<|open|>call tool="',),
        between=('" index="', Regex("[0-9]{1,3}"), '"<|sep|>'),
        after=("<|close|>call<|sep|>",),
        closing=("<|close|>tools<|sep|>",),
        arguments=Tags(
            before='<|open|>argument key="',
            between=('" type="',),
            string=('string"<|sep|>',),
            other=(Regex("(?:number|boolean|null|object|array)"), '"<|sep|>'),
            after=("<|close|>argument<|sep|>",),
            ends=("<|close|>argument", "<|open|>argument", "<|close|>call"),
        ),
        around=("<|open|>response<|sep|>", "<|close|>response<|sep|>"),
        last=("<|close|>message<|sep|>",),
    ),
    "mistral": CallFormat(before=("[TOOL_CALLS]",), between=("[ARGS]",), after=()),
    # Mistral's tokenizers before version 11, which have no token [ARGS].
    "mistral_list": _json_list("[TOOL_CALLS][", "]"),
    "granite": _json_list("<|tool_call|>[", "]"),
    "nemotron_json": _json_list("<TOOLCALL>[", "]</TOOLCALL>"),
    "phi4_mini_json": _json_list("functools[", "]"),
    "hunyuan_a13b": _json_list("<tool_calls>[", "]</tool_calls>"),
    "xlam": replace(_json_list("[", "]"), bare=True),
    "cohere_command3": _json_list("<|START_ACTION|>[", "]<|END_ACTION|>", "tool_name", "parameters"),
    "internlm": CallFormat(
        opening=("<|action_start|><|plugin|>",),
        before=('{"name": "',),
        between=('", "parameters": ',),
        after=("}",),
        closing=("<|action_end|>",),
    ),
    "functiongemma": CallFormat(
        before=("<start_function_call>call:",),
        between=(),
        after=("<end_function_call>",),
        arguments=Quotes("<escape>"),
    ),
    "gemma4": CallFormat(before=("<|tool_call>call:",), between=(), after=("<tool_call|>",), arguments=Quotes('<|"|>')),
    "llama3_json": CallFormat(
        before=('{"name": "',), between=('", "parameters": ',), after=("}",), separator=("; ",), bare=True
    ),
    "pythonic": replace(_PYTHONIC, bare=True),
    "olmo3": replace(_PYTHONIC, opening=("<function_calls>\n",), separator=("\n",), closing=("\n</function_calls>",)),
    "lfm2": replace(_PYTHONIC, opening=("<|tool_call_start|>[",), closing=("]<|tool_call_end|>",)),
    "llama4_pythonic": replace(_PYTHONIC, opening=("<|python_start|>[",), closing=("]<|python_end|>",)),
}
ALIASES = {"minimax_m2": "minimax", "openai": "harmony"}


@dataclass(frozen=True)
class HarmonyMarkers:
    """OpenAI's harmony: messages with headers. The prompt ends with `start` and `role`."""

    start: str = "<|start|>"
    role: str = "assistant"
    channel: str = "<|channel|>"
    constrain: str = "<|constrain|>"
    message: str = "<|message|>"
    end: str = "<|end|>"
    call: str = "<|call|>"
    last: str = "<|return|>"
    namespace: str = "functions."


HARMONY = HarmonyMarkers()

# Texts that are tokens of their own in the vocabularies of the models that use them.
MARKERS = (
    *("<think>", "</think>", "[THINK]", "[/THINK]", "<seed:think>", "</seed:think>", "◁think▷", "◁/think▷"),
    *("<|start_of_thinking|>", "<|end_of_thinking|>"),
    *("<seed:tool_call>", "</seed:tool_call>"),
    *("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
    *("<minimax:tool_call>", "</minimax:tool_call>", "[TOOL_CALLS]", "[ARGS]", "<|python_tag|>"),
    *("<TOOLCALL>", "</TOOLCALL>", "<tool_calls>", "</tool_calls>", "<tool_sep>", "functools["),
    *("<|START_THINKING|>", "<|END_THINKING|>", "<|START_ACTION|>", "<|END_ACTION|>"),
    *("<|action_start|>", "<|plugin|>", "<|action_end|>", "<function_calls>", "</function_calls>"),
    *("<start_function_call>", "<end_function_call>", "<escape>"),
    *("<|python_start|>", "<|python_end|>", "<|tool_call|>", "<|tool_call_start|>", _DSML),
    *(f"<{_BAR}tool▁{name}{_BAR}>" for name in ("calls▁begin", "calls▁end", "call▁begin", "call▁end", "sep")),
    *("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
    *("<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"),
    *("<|open|>", "<|close|>", "<|sep|>"),
    *("<|tool_call>", "<tool_call|>", '<|"|>', "<|channel>", "<channel|>"),
    *("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>"),
)
