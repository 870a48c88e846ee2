"""How a model writes conversations, found by letting its chat template write some.

A program appends message after message, so the text of a message must not depend on those after it. Templates for which
that does not hold are refused.
"""

from collections.abc import Awaitable, Callable

from shoal.lang.backend import RoleFormat
from shoal.lang.errors import NotSupported

Render = Callable[[list[dict[str, str]], bool], Awaitable[str]]

SYSTEM, USER, ASSISTANT, LAST = "S1y2s3t", "U4s5e6r", "A7s8s9t", "L1a2s3t"


async def derive_roles(render: Render, beginning: str) -> RoleFormat:
    """The format of a template. `render` writes a conversation, and with True the beginning of an answer. `beginning`
    is text that every prompt gets anyway. Raises NotSupported if there is no such format."""
    system = {"role": "system", "content": SYSTEM}
    user = {"role": "user", "content": USER}
    assistant = {"role": "assistant", "content": ASSISTANT}
    last = {"role": "user", "content": LAST}

    asked = await render([user], False)
    opened = await render([user], True)
    answered = await render([user, assistant], False)
    asked_again = await render([user, assistant, last], False)
    before_user, _, after_user = asked.partition(USER)
    prefix_assistant = opened.removeprefix(asked)
    between = answered.partition(USER)[2].partition(ASSISTANT)[0]
    suffix_assistant = answered.partition(ASSISTANT)[2]
    prefix_user = asked_again.partition(ASSISTANT)[2].partition(LAST)[0].removeprefix(suffix_assistant)
    if not prefix_assistant or not prefix_user or between != after_user + prefix_assistant:
        raise NotSupported(
            "the model's chat template does not write messages one after the other: use texts without roles, or "
            "a backend that takes conversations"
        )
    prefix = {"user": prefix_user, "assistant": prefix_assistant}
    suffix = {"user": after_user, "assistant": suffix_assistant}
    before_user = before_user.removeprefix(beginning)
    default_system = before_user.removesuffix(prefix_user)
    try:
        told = (await render([system, user], False)).removeprefix(beginning)
    except NotSupported:
        told = ""
    before, _, rest = told.partition(SYSTEM)
    between = rest.partition(USER)[0]
    if rest and between.endswith(prefix_user):
        prefix["system"], suffix["system"] = before, between.removesuffix(prefix_user)
    ending = suffix_assistant.strip()
    return RoleFormat(prefix, suffix, default_system, (ending,) if ending else ())
