"""The format of conversations, found from chat templates."""

import asyncio

import jinja2
import pytest

from shoal.lang.backends.role_format import derive_roles
from shoal.lang.errors import NotSupported

CHATML = (
    "{% if messages[0].role != 'system' %}<|im_start|>system\nDefault.<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA = (
    "<bos>{% for m in messages %}<h>{{ m.role }}</h>\n\n{{ m.content | trim }}<eot>{% endfor %}"
    "{% if add_generation_prompt %}<h>assistant</h>\n\n{% endif %}"
)
LAST_ONLY = (
    "{% for m in messages %}{{ m.role }}:{{ m.content if loop.last else '...' }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


def derived(template, beginning=""):
    compiled = jinja2.Environment().from_string(template)

    async def render(messages, add_generation_prompt):
        return compiled.render(messages=messages, add_generation_prompt=add_generation_prompt)

    return asyncio.run(derive_roles(render, beginning))


def written(roles, messages):
    start = "" if messages[0]["role"] == "system" else roles.default_system
    return start + "".join(roles.prefix[m["role"]] + m["content"] + roles.suffix[m["role"]] for m in messages)


@pytest.mark.parametrize(("template", "beginning"), [(CHATML, ""), (LLAMA, "<bos>")])
@pytest.mark.parametrize("with_system", [True, False])
def test_messages_are_written_as_the_template_does(template, beginning, with_system):
    roles = derived(template, beginning)
    messages = [{"role": role, "content": f"{role} {i}"} for i, role in enumerate(["user", "assistant"] * 2)]
    if with_system:
        messages.insert(0, {"role": "system", "content": "rules"})
    expected = jinja2.Environment().from_string(template).render(messages=messages)
    assert beginning + written(roles, messages) == expected


def test_an_answer_ends_where_the_template_ends_it():
    assert derived(CHATML).stop == ("<|im_end|>",)


def test_a_template_that_changes_earlier_messages_is_refused():
    with pytest.raises(NotSupported, match="one after the other"):
        derived(LAST_ONLY)
