"""Chat templates, against transformers rendering them."""

import json
from pathlib import Path
from typing import Any

import pytest

from router.chat.chat_template import ChatTemplate, TemplateError
from router.text.tokenizer import Tokenizer
from tests.kept import kept

CONVERSATIONS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "What is the capital of France?"}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hé 🦊\n<|im_end|>"}],
    [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b & <c>"},
        {"role": "user", "content": ""},
    ],
]
# Each uses something that templates of real models use.
TEMPLATES = [
    "{{ bos_token }}{% for m in messages %}{{ m['role'] }}: {{ m['content'] | trim }}{{ eos_token }}\n{% endfor %}",
    "{% for m in messages %}\n    {% if loop.last %}\n<last>{% break %}{% endif %}\n{{ m | tojson }}\n{% endfor %}",
    "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + m.content | length %}{% endfor %}"
    "{{ ns.n }}",
    "{% macro turn(m) %}[{{ m.role }}]{{ m.content }}{% endmacro %}{% for m in messages %}{{ turn(m) }}{% endfor %}"
    "{% if add_generation_prompt %}>>{% endif %}",
    "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{% endgeneration %}{% endif %}"
    "{% endfor %}{{ dict(a=1) | tojson(indent=2) }}{{ tools is none }}{{ documents is defined }}",
    "{{ strftime_now('%Y') }}{{ messages[0]['content'].split(' ') | join('-') }}{{ messages[-1].missing is defined }}",
]


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("messages", CONVERSATIONS)
@pytest.mark.parametrize("prompt", [True, False])
def test_renders_as_transformers(template: str, messages: list[dict[str, Any]], prompt: bool) -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    special = {"bos_token": "<s>", "eos_token": "</s>"}
    expected, _ = render_jinja_template(
        [messages], chat_template=template, add_generation_prompt=prompt, tools=None, documents=None, **special
    )
    assert ChatTemplate(template, special).render(messages, prompt) == expected[0]


def test_arguments_of_one_template() -> None:
    """As Qwen3 has it: thinking, unless it is switched off."""
    source = (
        "{{ messages[0].content }}{% if enable_thinking is defined and enable_thinking is false %}<think/>{% endif %}"
    )
    template = ChatTemplate(source, {})
    messages = [{"role": "user", "content": "a"}]
    assert template.render(messages) == template.render(messages, arguments={"enable_thinking": True}) == "a"
    assert template.render(messages, arguments={"enable_thinking": False, "other": [1]}) == "a<think/>"
    deep: list[Any] = []
    for _ in range(10_000):
        deep = [deep]
    with pytest.raises(TemplateError, match="recursion"):
        ChatTemplate("{{ a | tojson }}", {}).render(messages, arguments={"a": deep})
    for name in ("messages", "tools", "add_generation_prompt", "bos_token"):
        with pytest.raises(TemplateError, match=name):
            template.render(messages, arguments={name: []})


@pytest.mark.parametrize("messages", CONVERSATIONS)
@pytest.mark.slow
def test_tokens_of_the_real_model_are_those_of_transformers(real_folder: Path, messages: list[dict[str, Any]]) -> None:
    def reference() -> tuple[list[tuple[str, list[int]]], list[int]]:
        from transformers import AutoTokenizer

        theirs = AutoTokenizer.from_pretrained(real_folder)
        chats = [
            (
                theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=prompt),
                theirs.apply_chat_template(messages, add_generation_prompt=prompt, return_dict=False),
            )
            for prompt in (True, False)
        ]
        return chats, theirs(messages[0]["content"])["input_ids"]

    files = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
    chats, content = kept(["chats", messages, [(real_folder / name).read_text() for name in files]], reference)
    ours = Tokenizer.from_folder(real_folder)
    for prompt, (text, tokens) in zip((True, False), chats, strict=True):
        assert ours.render_chat(messages, prompt) == text
        assert ours.encode(text, add_special_tokens=False) == tokens
    assert ours.encode(messages[0]["content"]) == content


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[0]['content'] + 1 }}", "str"),
        ("{{ messages[7].content }}", "no element 7"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ 1 / 0 }}", "division"),
    ],
)
def test_what_a_template_refuses(template: str, reason: str) -> None:
    with pytest.raises(TemplateError, match=reason):
        ChatTemplate(template, {}).render(CONVERSATIONS[0])


def test_where_the_template_is_found(tmp_path: Path) -> None:
    assert ChatTemplate.from_folder(tmp_path) is None
    config: dict[str, Any] = {"bos_token": {"content": "<s>"}, "eos_token": "</s>", "pad_token": None}
    text = "{{ bos_token }}{{ eos_token }}{{ pad_token is defined }}"
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    assert ChatTemplate.from_folder(tmp_path) is None

    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": text}))
    template = ChatTemplate.from_folder(tmp_path)
    assert template is not None and template.render([]) == "<s></s>False"

    named = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": text + "!"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": named}))
    template = ChatTemplate.from_folder(tmp_path)
    assert template is not None and template.render([]) == "<s></s>False!"

    (tmp_path / "chat_template.jinja").write_text("the file")
    template = ChatTemplate.from_folder(tmp_path)
    assert template is not None and template.render([]) == "the file"


def test_where_older_models_and_processors_have_it(tmp_path: Path) -> None:
    for name in ("processor_config.json", "chat_template.json"):  # the second counts more
        (tmp_path / name).write_text(json.dumps({"chat_template": f"{name} {{{{ eos_token }}}}", "other": 1}))
        (tmp_path / "special_tokens_map.json").write_text(json.dumps({"eos_token": {"content": "</s>"}}))
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": None, "bos_token": "<s>"}))
        template = ChatTemplate.from_folder(tmp_path)
        assert template is not None and template.render([]) == f"{name} </s>"
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": "é", "eos_token": "<e>"}))
    template = ChatTemplate.from_folder(tmp_path)
    assert template is not None and template.render([]) == "é"


def test_a_template_of_its_own_for_tools(tmp_path: Path) -> None:
    """As transformers, the one named `tool_use` is for conversations with tools."""
    default, with_tools = "{{ messages | length }}", "{{ tools | length }} tools"
    named = [{"name": "default", "template": default}, {"name": "tool_use", "template": with_tools}]
    for config in ({"chat_template": named}, {"chat_template": {"default": default, "tool_use": with_tools}}, None):
        if config is None:
            (tmp_path / "chat_template.jinja").write_text(default)
            (tmp_path / "additional_chat_templates").mkdir()
            (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text(with_tools)
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config or {}))
        template = ChatTemplate.from_folder(tmp_path)
        assert template is not None and template.takes_tools and not template.reads_tools_of_messages
        assert (template.render([{}]), template.render([{}], tools=[{}, {}])) == ("1", "2 tools")
    (tmp_path / "chat_template.jinja").unlink()
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named[1:]}))
    template = ChatTemplate.from_folder(tmp_path)
    assert template is not None and template.source == with_tools


@pytest.mark.parametrize(
    ("source", "takes", "of_messages"),
    [
        ("{% if tools %}x{% endif %}", True, False),
        ("{% if not tools is defined %}{% set tools = none %}{% endif %}{{ tools }}", True, False),
        ("{% macro m() %}{% for tool in tools %}{% endfor %}{% endmacro %}{{ m() }}", True, False),
        ("{{ messages[0]['tools'] }}{{ tools }}", True, False),
        ("{{ messages[0]['tools'] }}", True, True),
        ("{% for m in messages %}{{ m.tools }}{% endfor %}", True, True),
        ("There are no tools.", False, False),
        ("{{ 'tools' }}{# tools #}{% set tools = 1 %}{{ tools }}", False, False),
    ],
)
def test_whether_it_has_a_place_for_tools(source: str, takes: bool, of_messages: bool) -> None:
    template = ChatTemplate(source, {})
    assert (template.takes_tools, template.reads_tools_of_messages) == (takes, of_messages)
