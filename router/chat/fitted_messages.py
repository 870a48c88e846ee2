"""A conversation in the form that a strict chat template takes.

Clients send several system messages, and some in the middle; several messages of one role in a row; words of the user
right after a tool's result. Many templates take all of that. Those that refuse get the same words in another form.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache

from router.chat.chat_template import TemplateError
from router.chat.conversation import Message

log = logging.getLogger(__name__)

Render = Callable[[Sequence[Message]], str]


def fitted(messages: Sequence[Message], render: Render) -> str:
    """The text that `render` makes of the messages; where it refuses them, or leaves out what the system said, that of
    messages with the same words, as few of them changed as needed. Raises the TemplateError of the messages as they
    are."""
    refusal: TemplateError | None = None
    text = ""
    try:
        text = render(messages)
        if not _loses(messages, text):
            return text
    except TemplateError as error:
        if error.param != "messages":
            raise
        refusal = error
    changed = tuple(messages)
    for fit, done in _FITS:
        before, changed = changed, fit(changed)
        if changed == before:
            continue
        try:
            found = render(changed)
        except TemplateError:
            continue
        if refusal is not None or not _loses(messages, found):
            tell(f"the chat template does not take messages as they come: {done}")
            return found
    if refusal is not None:
        raise refusal
    return text


def _loses(messages: Sequence[Message], text: str) -> bool:
    """Whether what the system says after the first message is not in the text."""
    return any(message.role == "system" and message.text.strip() not in text for message in messages[1:])


def _one_system(messages: tuple[Message, ...]) -> tuple[Message, ...]:
    count = next((n for n, message in enumerate(messages) if message.role != "system"), len(messages))
    if count < 2:
        return messages
    return (replace(messages[0], text=_joined(messages[:count])), *messages[count:])


def _late_ones_to_user(messages: tuple[Message, ...]) -> tuple[Message, ...]:
    first, rest = messages[:1], messages[1:]
    return first + tuple(Message("user", each.text) if each.role == "system" else each for each in rest)


def _one_a_turn(messages: tuple[Message, ...]) -> tuple[Message, ...]:
    made: list[Message] = []
    for message in messages:
        last = made[-1] if made else None
        if last is None or last.role != message.role or message.role not in ("user", "assistant"):
            made.append(message)
        elif message.role == "user" or not last.calls:
            thinking = "\n".join(filter(None, (last.thinking, message.thinking)))
            made[-1] = replace(last, text=_joined((last, message)), thinking=thinking, calls=message.calls)
        else:
            made.append(message)
    return tuple(made)


def _words_into_results(messages: tuple[Message, ...]) -> tuple[Message, ...]:
    made: list[Message] = []
    for message in messages:
        if made and made[-1].role == "tool" and message.role == "user":
            made[-1] = replace(made[-1], text=_joined((made[-1], message)))
        else:
            made.append(message)
    return _one_a_turn(tuple(made))


def _system_to_user(messages: tuple[Message, ...]) -> tuple[Message, ...]:
    return _one_a_turn(tuple(Message("user", each.text) if each.role == "system" else each for each in messages))


# Each goes on with what the one before has made.
_FITS = (
    (_one_system, "those of the system at the beginning become one"),
    (_late_ones_to_user, "those of the system that come later become the user's"),
    (_one_a_turn, "those of one role in a row become one"),
    (_words_into_results, "what the user says after a tool's result becomes part of it"),
    (_system_to_user, "what the system says becomes the user's"),
)


def _joined(messages: Sequence[Message]) -> str:
    return "\n\n".join(message.text for message in messages if message.text)


@cache
def tell(what: str) -> None:
    """Warns, once in a process."""
    log.warning("%s", what)
