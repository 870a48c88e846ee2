"""Conversations in the templates of strict models: nothing that clients send ends one for good."""

import json
import logging
from collections.abc import Callable
from typing import Any

import pytest
import tokenizers

from router.chat import fitted_messages
from router.chat.chat_template import ChatTemplate, TemplateError
from router.chat.conversation import Conversation, Message, Tool, ToolCall
from router.formats.past_arguments import INVALID, past_arguments
from router.text.chat_prompt import chat_prompt
from router.text.tokenizer import Tokenizer

# The rules of families, in small: what each refuses, and in which words.
_TURN = "<|{{ m.role }}|>{{ m.content }}{% for call in m.tool_calls or [] %}{call}{% endfor %}\n"
_PRINTED = "<call>{{ call.function.name }} {{ call.function.arguments | tojson }}</call>"
_ITEMS = (
    "<call>{{ call.function.name }}{% for name, value in call.function.arguments.items() %} {{ name }}="
    "{{ value if value is string else value | tojson }}{% endfor %}</call>"
)
_PAIRS = _ITEMS.replace("arguments.items()", "arguments|items")
_ADDED = '<call>{{ \'{"arguments": \' + call.function.arguments + "}" }}</call>'
_TOOLS = "{% if tools %}{{ tools | tojson }}{% endif %}"
_LENIENT = "{% for m in messages %}{turn}{% endfor %}" + _TOOLS
_SYSTEM_FIRST = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
    "{{ raise_exception('System message must be at the beginning.') }}{% endif %}{turn}{% endfor %}" + _TOOLS
)
_GEMMA = (
    "{% set rest = messages %}{% if messages[0].role == 'system' %}{{ messages[0].content }}\n"
    "{% set rest = messages[1:] %}{% endif %}{% for m in rest %}"
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}"
    "{turn}{% endfor %}"
)
_NO_SYSTEM = _GEMMA.replace("{{ messages[0].content }}", "{{ raise_exception('no system') }}")
_MISTRAL = (
    "{% set ns = namespace(n=0) %}{% for m in messages %}{% if m.role == 'system' %}{% if not loop.first %}"
    "{{ raise_exception('only user, assistant and tool roles are supported') }}{% endif %}"
    "{% elif m.role == 'user' or (m.role == 'assistant' and not m.tool_calls) %}"
    "{% if (m.role == 'user') != (ns.n % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}"
    "{% set ns.n = ns.n + 1 %}{% endif %}{turn}{% endfor %}" + _TOOLS
)
_DROPS = "{% for m in messages %}{% if m.role != 'system' or loop.first %}{turn}{% endif %}{% endfor %}" + _TOOLS


def template(rule: str, call: str = _PRINTED) -> str:
    return rule.replace("{turn}", _TURN.replace("{call}", call))


RULES = {
    "lenient": _LENIENT, "system first": _SYSTEM_FIRST, "gemma": _GEMMA, "no system": _NO_SYSTEM,
    "mistral": _MISTRAL, "drops": _DROPS,
}  # fmt: skip
LOOK = ToolCall("c1", "look", '{"at": "x"}')
CONVERSATIONS = {
    "two systems": [Message("system", "S1"), Message("system", "S2"), Message("user", "U1")],
    "a late system": [
        Message("system", "S1"), Message("user", "U1"), Message("assistant", "A1"), Message("user", "U2"),
        Message("system", "S2"),
    ],
    "a system in the middle": [
        Message("user", "U1"), Message("system", "S1"), Message("assistant", "A1"), Message("user", "U2"),
    ],
    "users in a row": [Message("user", "U1"), Message("user", "U2"), Message("assistant", "A1"), Message("user", "U3")],
    "answers in a row": [
        Message("user", "U1"), Message("assistant", "A1"), Message("assistant", "A2"), Message("user", "U2"),
    ],
    "words after a result": [
        Message("system", "S1"), Message("user", "U1"), Message("assistant", "A1", calls=(LOOK,)),
        Message("tool", "R1", call_id="c1", name="look"), Message("user", "U2"),
    ],
    "a system after a result": [
        Message("user", "U1"), Message("assistant", "", calls=(LOOK,)),
        Message("tool", "R1", call_id="c1", name="look"), Message("system", "S1"), Message("assistant", "A1"),
        Message("user", "U2"),
    ],
    "a system alone": [Message("system", "S1")],
}  # fmt: skip


@pytest.fixture
def model(byte_level_tokenizer_maker: Callable[[], tokenizers.Tokenizer]) -> Callable[[str], Tokenizer]:
    backend = byte_level_tokenizer_maker()
    return lambda source: Tokenizer(backend, ChatTemplate(source, {}))


@pytest.fixture
def warnings(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    fitted_messages.tell.cache_clear()
    caplog.set_level(logging.WARNING)
    return lambda: [record.message for record in caplog.records]


def rendered(tokenizer: Tokenizer, *messages: Message, tools: Any = ()) -> str:
    conversation = Conversation(tuple(messages), tools=tools)
    return chat_prompt(conversation, tokenizer.output_format("auto", "auto"), tokenizer)


@pytest.mark.parametrize("name", CONVERSATIONS)
@pytest.mark.parametrize("rule", RULES)
def test_strict_templates_take_what_clients_send(
    rule: str, name: str, model: Callable[[str], Tokenizer], warnings: Callable[[], list[str]]
) -> None:
    """All words are there, once each and in their order."""
    messages = CONVERSATIONS[name]
    text = rendered(model(template(RULES[rule])), *messages)
    places = [text.index(message.text) for message in messages if message.text]
    assert places == sorted(places)
    assert all(text.count(message.text) == 1 for message in messages if message.text)
    told = bool(warnings())
    if rule not in ("gemma", "no system"):  # these have no tools, and other words for the system
        assert told == (text != rendered(model(template(_LENIENT)), *messages))
    assert not told or rule != "lenient"


def test_a_prefix_stays_where_it_was(model: Callable[[str], Tokenizer]) -> None:
    """A late system message does not go to the front: all that was computed before it is still right."""
    for rule in (_SYSTEM_FIRST, _MISTRAL, _GEMMA):
        tokenizer = model(template(rule).replace(_TOOLS, ""))
        *before, _ = CONVERSATIONS["a late system"]
        assert (
            rendered(tokenizer, *before[:-1])
            == rendered(tokenizer, *CONVERSATIONS["a late system"])[: len(rendered(tokenizer, *before[:-1]))]
        )


def test_what_a_template_refuses_all_the_same(model: Callable[[str], Tokenizer]) -> None:
    tokenizer = model("{{ raise_exception('never') }}")
    with pytest.raises(TemplateError, match="never"):
        rendered(tokenizer, *CONVERSATIONS["two systems"])
    with pytest.raises(TemplateError) as error:
        chat_prompt(
            Conversation((Message("user", "x"),), arguments={"tools": []}),
            tokenizer.output_format("auto", "auto"),
            tokenizer,
        )
    assert error.value.param == "chat_template_kwargs"


# ---------------------------------------------------------------- past calls

WRONG = {
    r'{"path": "C:\Users\new"}': {"path": "C:\\Users\new"},
    r'{"path": "C:\users"}': {"path": "C:\\users"},
    '{"a": 1, "b': {"a": 1},
    '{"a": 1, "b": "cut he': {"a": 1, "b": "cut he"},
    '{"a": 1, "b": "cut \\': {"a": 1, "b": "cut "},
    '{"a": [1, {"b": 2': {"a": [1, {"b": 2}]},
    '{"a": 1, "b": [1, "x': {"a": 1, "b": [1, "x"]},
    '{"a": 1, "b": tr': {"a": 1},
    "{'a': None, 'b': (1,)}": {"a": None, "b": [1]},
    "[1]": {INVALID: "[1]"},
    "3": {INVALID: "3"},
    '"words"': {INVALID: "words"},
    "words": {INVALID: "words"},
    '{"a" 1}': {INVALID: '{"a" 1}'},
    '{"a": ]': {INVALID: '{"a": ]'},
    '{"a": "\\ud83d"}': {"a": "?"},
}
RIGHT = {
    "": {}, " ": {}, "null": {}, '""': {}, "{}": {}, '{"a": 1}': {"a": 1}, '"{\\"a\\": 1}"': {"a": 1},
    '{"a": "b\nc"}': {"a": "b\nc"}, '{"a": "\\ud83d\\ude00"}': {"a": "😀"},
}  # fmt: skip


@pytest.mark.parametrize("raw", [*WRONG, *RIGHT])
def test_the_arguments_of_a_past_call(raw: str) -> None:
    assert past_arguments(raw) == ((WRONG | RIGHT)[raw], raw in RIGHT)


@pytest.mark.parametrize("raw", [*WRONG, "null", ""])
@pytest.mark.parametrize(
    "call", [_PRINTED, _ITEMS, _PAIRS, _ADDED, ""], ids=["tojson", "items()", "items", "+", "none"]
)
def test_malformed_past_calls_in_every_style_of_template(
    raw: str, call: str, model: Callable[[str], Tokenizer], warnings: Callable[[], list[str]]
) -> None:
    source = template(_LENIENT, call) if call else "{% for m in messages %}{{ m.content }}{% endfor %}"
    tokenizer = model(source)
    past = Message("assistant", "A1", calls=(ToolCall("c1", "look", raw),))
    text = rendered(tokenizer, Message("user", "U1"), past, Message("tool", "R1", call_id="c1", name="look"))
    for key, value in (WRONG | RIGHT)[raw].items():
        shown = value if isinstance(value, str) and call in (_ITEMS, _PAIRS) else json.dumps(value, ensure_ascii=False)
        assert key in text and shown in text
    tokenizer.encode(text)
    assert len(warnings()) == (raw in WRONG)
    rendered(tokenizer, Message("user", "U1"), past)
    assert len(warnings()) == (raw in WRONG)  # it is told once


def test_past_calls_in_words_of_their_own(model: Callable[[str], Tokenizer]) -> None:
    """Where the template has no place for calls, they are written as the model writes them: without escapes."""
    said = {"q": "图书馆在哪里呢", "r": "é 🦊"}
    for given in (json.dumps(said), json.dumps(said, ensure_ascii=False)):
        tokenizer = model("{% for m in messages %}{{ m.content }}{% endfor %}")
        text = rendered(tokenizer, Message("user", "U"), Message("assistant", calls=(ToolCall("c", "look", given),)))
        assert json.dumps(said, ensure_ascii=False) in text and "\\u" not in text


@pytest.mark.parametrize("depth", [1000, 100_000])
@pytest.mark.parametrize("call", [_PRINTED, _ITEMS, ""], ids=["tojson", "items()", "none"])
def test_arguments_that_are_nested_too_deeply(depth: int, call: str, model: Callable[[str], Tokenizer]) -> None:
    raw = '{"a":' * depth + "1" + "}" * depth
    tokenizer = model(template(_LENIENT, call) if call else "{% for m in messages %}{{ m.content }}{% endfor %}")
    with pytest.raises(TemplateError) as error:
        rendered(tokenizer, Message("user", "U"), Message("assistant", calls=(ToolCall("c", "look", raw),)))
    assert error.value.param == "messages"


# ---------------------------------------------------------------- billing, tools


BILLING = "x-anthropic-billing-header: cc_version=2.1; cc_entrypoint=cli; cch=f00ba;"


@pytest.mark.parametrize(
    ("system", "left"),
    [
        (f"{BILLING}\nYou are a pirate.", "You are a pirate."),
        (f"{BILLING} You are a pirate. a=b;", "You are a pirate. a=b;"),
        (f"{BILLING[:-1]}\nYou are a pirate.", "You are a pirate."),
        ("x-anthropic-billing-header: anything else\nYou are a pirate.", "You are a pirate."),
        (f"You are a pirate.\n{BILLING}\nBe brief.", "You are a pirate.\nBe brief."),
        ("The header x-anthropic-billing-header: is left out.", "The header x-anthropic-billing-header: is left out."),
    ],
)
def test_a_line_about_billing_is_left_out_and_not_what_follows(
    system: str, left: str, model: Callable[[str], Tokenizer]
) -> None:
    tokenizer = model(template(_LENIENT).replace(_TOOLS, ""))
    wanted = rendered(tokenizer, Message("system", left), Message("user", "U"))
    assert rendered(tokenizer, Message("system", system), Message("user", "U")) == wanted


def test_nothing_but_billing_is_no_message(model: Callable[[str], Tokenizer]) -> None:
    tokenizer = model(template(_LENIENT).replace(_TOOLS, ""))
    user = Message("user", f"What is this? {BILLING}\n{BILLING}")
    assert rendered(tokenizer, Message("system", BILLING), user) == rendered(tokenizer, user)
    assert rendered(tokenizer, user).count("cch=f00ba") == 2


def test_tools_that_the_template_looks_for_in_a_message(model: Callable[[str], Tokenizer]) -> None:
    source = (
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% if 'tools' in m %}<t>{{ m['tools'] }}</t>{% endif %}"
        "{% endfor %}"
    )
    tokenizer = model(source)
    tool = Tool("look", "Look.", {"type": "object"})
    said = json.dumps([{"name": "look", "description": "Look.", "parameters": {"type": "object"}}])
    assert rendered(tokenizer, Message("user", "U"), tools=(tool,)) == f"<system><t>{said}</t><user>U"
    assert (
        rendered(tokenizer, Message("system", "S"), Message("user", "U"), tools=(tool,))
        == f"<system>S<t>{said}</t><user>U"
    )
    assert rendered(tokenizer, Message("user", "U")) == "<user>U"


def test_the_word_alone_is_no_place_for_tools(model: Callable[[str], Tokenizer]) -> None:
    source = "You have no tools.{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    assert '"name": "look"' in rendered(model(source), Message("user", "U"), tools=(Tool("look"),))
