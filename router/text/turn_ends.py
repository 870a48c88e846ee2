"""Whether a chat template ends turns with a token at which the model's answers end."""

from collections.abc import Collection

from router.chat.chat_template import TemplateError
from router.formats.format import OutputFormat
from router.text.tokenizer import Tokenizer

_ANSWER, _NEXT = "Answer1234", "Next5678"
_MAX_TOLD_CHARS = 40  # characters that are told


def unended_turn(tokenizer: Tokenizer, format: OutputFormat, end_ids: Collection[int]) -> str | None:
    """The text that the chat template has after an answer, if that is no end token: the model has learnt to write it,
    and goes on behind it. None if it is one, or nothing can be told."""
    if not end_ids or format.channels is not None:  # harmony's past messages end otherwise than new ones
        return None
    messages = [("user", "Hello"), ("assistant", _ANSWER), ("user", _NEXT)]
    try:
        text = tokenizer.render_chat([{"role": role, "content": said} for role, said in messages], False)
    except TemplateError:
        return None
    _, is_there, after = text.partition(_ANSWER)
    after = after.partition(_NEXT)[0].strip()
    for mark in () if format.thinking is None else format.thinking.around:
        after = after.removeprefix(mark).strip()
    if not is_there or not after:
        return None
    first = tokenizer.encode_continuation(after)[0]
    if first in end_ids:
        return None
    return tokenizer.token_text(first) if first in tokenizer.special_ids else after[:_MAX_TOLD_CHARS]
