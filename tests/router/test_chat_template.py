"""Chat templates, against transformers rendering them."""

import json
from pathlib import Path
from typing import Any

import pytest

from router.chat_template import ChatTemplate, TemplateError
from router.tokenizer import Tokenizer
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
