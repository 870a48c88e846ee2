"""The reader of harmony: an answer as messages on channels."""

import re
from functools import lru_cache

from router.chat.deltas import TextDelta, ThinkingDelta
from router.formats.reader import AnswerReader
from router.formats.source import Reading
from worker.formats.syntax import Channels

_MAX_HEADER_CHARS = 1024


def read_channels(reader: AnswerReader, channels: Channels, calls: bool) -> Reading[None]:
    """Reads a whole answer. A header that is none comes back as text, and so do messages to tools unless `calls`."""
    source = reader.source
    begins = (channels.start, channels.channel)
    # The prompt may end within a header, so that the answer begins with the recipient.
    expected: tuple[str, ...] = (*begins, " to=", "to=")
    was_call = False
    while True:
        if (yield from source.sees(*expected)):
            start = source.keep()
            kind = yield from _message(reader, channels, calls)
            source.release()
            if kind:
                was_call = kind == "call"
                expected = begins
                continue
            source.go_to(start)
            reader.text(source.take(source.at + 1))
        expected = begins
        marker = yield from reader.stream(TextDelta, *begins, *(channels.ends if was_call else ()))
        if marker is None:
            return
        if marker in channels.ends:
            source.at += len(marker)
            was_call = False


def _message(reader: AnswerReader, channels: Channels, calls: bool) -> Reading[str]:
    """Reads a message. Returns what it was: thinking, text, a call; empty if it was none."""
    source = reader.source
    reader.pending = channels.channel
    header = yield from _header(reader, channels)
    reader.pending = ""
    match = _pattern(channels).fullmatch(header)
    if match is None:
        return ""
    recipient = match["before"] or match["after"]
    ends = (*channels.ends, channels.start, channels.channel)
    if recipient and recipient != channels.role:
        if not calls:
            return ""
        reader.begin(recipient.removeprefix(channels.namespace) or recipient)
        if (yield from reader.read_arguments(ends)):
            start = source.keep()
            yield from source.space()
            if not (yield from source.accept(*channels.ends)):
                source.go_to(start)
        return "call"
    before = source.marks.get(source.offset - len(channels.message))
    tokens = None if before is None else before + 1
    source.release()
    if match["channel"] in channels.thinking:
        reader.open_thinking(tokens)
        if (yield from reader.stream(ThinkingDelta, *ends)) is not None:
            reader.close_thinking(source.marks.get(source.offset))
        kind = "thinking"
    else:
        yield from reader.stream(TextDelta, *ends)
        kind = "text"
    yield from source.accept(*channels.ends)
    return kind


def _header(reader: AnswerReader, channels: Channels) -> Reading[str]:
    """Consumes a header and returns it; empty if a message's end, the text's end or too much text comes first."""
    source = reader.source
    start = source.offset
    markers = reader.format.marker_set(channels.message, *channels.ends)
    while True:
        at, marker = source.find(markers)
        if at - (start - source.base) > _MAX_HEADER_CHARS:
            return ""
        if marker is not None or source.ended:
            break
        yield
    source.at = at
    if marker != channels.message:
        return ""
    header = source.since(start)
    source.at += len(marker)
    return header


@lru_cache(8)
def _pattern(channels: Channels) -> re.Pattern[str]:
    start, channel, constrain = map(re.escape, (channels.start, channels.channel, channels.constrain))
    names = "|".join(map(re.escape, (*channels.thinking, *channels.text)))
    role = re.escape(channels.role)
    return re.compile(
        rf"(?:{start}{role})?\s*(?:to=(?P<before>[^\s<]+))?\s*"
        rf"{channel}\s*(?P<channel>{names})\s*(?:to=(?P<after>[^\s<]+))?\s*(?:{constrain})?\s*[\w-]*\s*"
    )
