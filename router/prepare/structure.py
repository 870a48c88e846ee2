"""Structured output: the grammar that a request asks for, by whichever of the usual parameters."""

import json
from typing import Any

import msgspec

from router.chat.conversation import Conversation
from router.http.body import read_as
from router.prepare.answer_syntax import AnswerSyntax
from router.wire.errors import invalid
from router.wire.requests import GenerationRequest, JsonObjectFormat, JsonSchema, JsonSchemaFormat, StructuralTagFormat
from worker.messages import Grammar

STRUCTURE = (
    "response_format",
    "regex",
    "choice",
    "ebnf",
    "structural_tag",
)  # the replicas' names for a grammar that they refuse


def structure(request: GenerationRequest) -> tuple[str | None, Grammar | None]:
    """The parameter that asks for a grammar, and the grammar; both None if the output may be any text. Raises ApiError
    if there is more than one."""
    asked: list[tuple[str, Grammar]] = []
    match request.response_format:
        case JsonObjectFormat():
            asked.append(("response_format", Grammar("json_object")))
        case JsonSchemaFormat(json_schema=json_schema):
            asked.append(("response_format", _of_schema(json_schema)))
        case StructuralTagFormat() as tag:
            asked.append(("response_format", _of_tag(tag, "response_format")))
    said = request.structured_outputs
    ways: list[tuple[str, Any]] = [
        ("regex", request.regex),
        ("choice", request.choice),
        ("ebnf", request.ebnf),
        ("guided_json", request.guided_json),
        ("guided_regex", request.guided_regex),
        ("guided_choice", request.guided_choice),
        ("guided_grammar", request.guided_grammar),
        ("guided_json_object", request.guided_json_object),
    ]
    if said is not None:
        ways += [
            (f"structured_outputs.{name}", getattr(said, name))
            for name in ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
        ]
    asked += [(name, _grammar(name, value)) for name, value in ways if value is not None and value is not False]
    if len(asked) > 1:
        names = " and ".join(repr(name) for name, _ in asked)
        raise invalid(f"{names} exclude each other: send one of them.", asked[1][0])
    if said is not None and not asked:
        raise invalid("'structured_outputs' asks for nothing: set one of its fields.", "structured_outputs")
    return asked[0] if asked else (None, None)


def _of_schema(asked: JsonSchema) -> Grammar:
    """A schema without `strict` is enforced or refused: a client that does not know the difference does not look
    whether its answer is valid."""
    return Grammar("json_schema", json.dumps(asked.schema), strict=asked.strict is not False)


def constrained(
    conversation: Conversation, syntax: AnswerSyntax, param: str | None, grammar: Grammar | None
) -> tuple[str | None, Grammar | None]:
    """The grammar of an answer that may think and call tools, and the parameter that asks for it. `grammar`: of the
    answer's text, which `param` asks for. Raises ApiError.

    | calls | the answer |
    | --- | --- |
    | none are possible | text of this form |
    | possible | either calls, or text of this form |
    | one is asked for | calls, so the text's form does not matter |

    Where calls are possible, a schema of the text is enforced as with `strict`.
    """
    is_required = conversation.choice.mode == "required"
    are_exact = is_required or any(tool.strict for tool in syntax.tools)
    if are_exact and not syntax.format.name:
        raise invalid("This server reads no calls (tool_call_parser is none), so none can be asked for.", "tools")
    tools = syntax.tools if syntax.format.name else ()
    form = None if is_required else grammar
    if form is None and not are_exact:
        return None, None
    is_whole = form is not None and form.kind in ("ebnf", "structural_tag")  # it says how the whole text is written
    if is_whole and tools:
        raise invalid(f"{param!r} excludes calls of 'tools': set 'tool_choice' to 'none', or leave one out.", param)
    is_marked = syntax.format.marks_text and syntax.format.name != ""
    if form is not None and not tools and (not is_marked or is_whole):
        return param, _after_thinking(syntax, form)
    thinking = syntax.format.thinking
    text = {
        "format": syntax.format.name,
        "tools": [{"name": tool.name, "parameters": dict(tool.parameters), "strict": tool.strict} for tool in tools],
        "mode": "required" if is_required else "auto",
        "parallel": syntax.parallel,
        "thinking": None
        if thinking is None or not (syntax.thinks or syntax.may_open_thinking)
        else {"begin": thinking.begin, "end": thinking.end, "open": syntax.thinks},
        "form": None if form is None else {"kind": form.kind, "text": form.text},
    }
    return (param if form is not None else "tools"), Grammar("tool_calls", json.dumps(text))


def _after_thinking(syntax: AnswerSyntax, grammar: Grammar) -> Grammar:
    """The grammar of an answer whose text alone has a form."""
    thinking = syntax.format.thinking
    if thinking is None or not (syntax.thinks or syntax.may_open_thinking):
        return grammar
    begin = None if syntax.thinks else thinking.begin
    return msgspec.structs.replace(grammar, after=thinking.end, begin=begin)


def _grammar(name: str, value: Any) -> Grammar:
    """The grammar of a parameter. Its kind is the last part of the parameter's name."""
    kind = name.rpartition(".")[2].removeprefix("guided_")
    if kind == "json_object":
        return Grammar("json_object")
    if kind == "structural_tag":
        given = _object(name, value) | {"type": "structural_tag"}
        return _of_tag(read_as(StructuralTagFormat, given, name), name)
    if kind == "json":
        return Grammar("json_schema", _schema(name, value))
    if kind == "choice":
        return Grammar("choice", json.dumps(value))
    return Grammar("regex" if kind == "regex" else "ebnf", value)


def _of_tag(tag: StructuralTagFormat, name: str) -> Grammar:
    """The grammar of a structural tag, in either of its forms."""
    if (tag.format is None) == (tag.structures is None):
        raise invalid("A structural tag has either 'format', or 'structures' and 'triggers'.", name)
    if tag.structures is not None and tag.triggers is None:
        where = f"{name}.triggers"
        raise invalid(f"Missing required parameter: {where!r}.", where, "missing_required_parameter")
    said = {field: value for field, value in msgspec.to_builtins(tag).items() if value is not None}
    return Grammar("structural_tag", json.dumps(said))


def _schema(name: str, schema: dict[str, Any] | str) -> str:
    if not isinstance(schema, str):
        return json.dumps(schema)
    _object(name, schema)
    return schema


def _object(name: str, value: dict[str, Any] | str) -> dict[str, Any]:
    """An object that may be sent as text."""
    if not isinstance(value, str):
        return value
    try:
        read = json.loads(value)
    except (ValueError, RecursionError) as error:
        raise invalid(f"{name!r} is a string that is not JSON: {error}.", name) from None
    if not isinstance(read, dict):
        raise invalid(f"{name!r} is a string, but not of a JSON object, as a schema must be.", name)
    return read
