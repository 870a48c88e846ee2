"""`uniqueItems` while an output is written: what llguidance follows, without the tokens that lead to a second item of
the same value.

In arrays of unique items, the grammar writes each value in one way, spaces aside (see `SchemaConverter`). So two items
are the same value if their texts are the same.

A token is left out in two cases:

1. It ends an item whose text the array has already.
2. After it, every way to end the item does. Then the text of the item so far begins one of the items of the array, so
   only such ways are searched, byte by byte.
"""

import json
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Optional

import numpy as np

from worker.structured_output.json_schema.unique_places import NOWHERE, Place
from worker.structured_output.matching.lazy_matcher import LazyMatcher, LazyVocabulary

_QUOTE, _ESCAPE, _SPACE, _COMMA, _COLON = b'"\\ ,:'
_OPEN_ARRAY, _CLOSE_ARRAY, _OPEN_OBJECT, _CLOSE_OBJECT = b"[]{}"
_OUTSIDE, _IN_STRING, _ESCAPED = range(3)
_MAX_REMEMBERED = 4_096


class _Frame(NamedTuple):
    """An open array or object.

    | field | meaning |
    | --- | --- |
    | `place` | its place |
    | `is_array` | whether it is an array |
    | `unique` | whether its items must differ |
    | `start` | where the text of the item that is being written begins |
    | `seen` | texts of the items that are written |
    | `key` | of an object: the name of the member that is being written, None before its colon |
    | `outer` | the array or object that it is in |
    """

    place: int
    is_array: bool
    unique: bool
    start: int
    seen: frozenset[bytes]
    key: bytes | None
    outer: Optional["_Frame"]


class Written(NamedTuple):
    """The output so far, as far as `uniqueItems` goes.

    | field | meaning |
    | --- | --- |
    | `frame` | the innermost array or object that is open |
    | `text` | the text of the outermost open array of unique items, without spaces outside of strings |
    | `mode` | outside of a string, in one, or after a backslash |
    | `name` | the name of a member, as far as it is written |
    | `depth` | number of open arrays of unique items |
    """

    frame: _Frame | None = None
    text: bytes = b""
    mode: int = _OUTSIDE
    name: bytes = b""
    depth: int = 0

    def unique_frames(self) -> Iterator[_Frame]:
        """The open arrays of unique items."""
        frame = self.frame if self.depth else None
        while frame is not None:
            if frame.unique:
                yield frame
            frame = frame.outer

    @property
    def repeats(self) -> bool:
        """Whether the item that is being written, of any open array of unique items, begins like one before."""
        for frame in self.unique_frames():
            now = self.text[frame.start :]
            if any(each.startswith(now) for each in frame.seen):
                return True
        return False


def after(places: Sequence[Place], written: Written, data: bytes) -> Written | None:
    """The output with `data` written too. None if an item is then there twice. `data` must keep to the grammar."""
    frame, text, mode, name, depth = written
    for byte in data:
        if mode != _OUTSIDE:
            text += bytes((byte,)) if depth else b""
            if frame is not None and not frame.is_array and frame.key is None:
                name += bytes((byte,))
            mode = _IN_STRING if mode == _ESCAPED else {_ESCAPE: _ESCAPED, _QUOTE: _OUTSIDE}.get(byte, _IN_STRING)
            continue
        if byte == _SPACE:
            continue
        if byte == _QUOTE:
            mode, name = _IN_STRING, b'"'
        elif byte in (_OPEN_ARRAY, _OPEN_OBJECT):
            place = _place_of_value(places, frame)
            is_array = byte == _OPEN_ARRAY
            unique = is_array and place != NOWHERE and places[place].unique
            depth += unique
            frame = _Frame(place, is_array, unique, len(text) + 1, frozenset(), None, frame)
        elif frame is not None and byte == _COLON:
            frame = frame._replace(key=name)
        elif frame is not None and byte in (_COMMA, _CLOSE_ARRAY, _CLOSE_OBJECT):
            if frame.unique:
                item = text[frame.start :]
                if item in frame.seen:
                    return None
                if byte == _COMMA:
                    frame = frame._replace(seen=frame.seen | {item}, start=len(text) + 1)
            elif byte == _COMMA and not frame.is_array:
                frame = frame._replace(key=None)
            if byte != _COMMA:
                depth -= frame.unique
                frame = frame.outer
        text = text + bytes((byte,)) if depth else b""
    return Written(frame, text, mode, name, depth)


def _place_of_value(places: Sequence[Place], frame: _Frame | None) -> int:
    if frame is None:
        return 0
    if frame.place == NOWHERE:
        return NOWHERE
    place = places[frame.place]
    if frame.is_array:
        return place.items
    return place.names.get(json.loads(frame.key or b'""'), place.other)


class UniqueMatcher(LazyMatcher):
    """Follows one output, with `uniqueItems`."""

    narrows = True

    def __init__(
        self, vocabulary: LazyVocabulary, matcher: Any, places: Sequence[Place], renew: Callable[[], Any] | None = None
    ) -> None:
        """`places`: as `unique_places` returns them."""
        super().__init__(vocabulary, matcher, renew)
        self._places = places
        self._written = [Written()]  # after each step
        self._known: dict[Written, bool] = {}  # whether a new item can still follow

    def accept_token(self, token_id: int) -> bool:
        """Advances by a token if the grammar allows it and no item repeats."""
        now = self._written[-1]
        then = now if token_id in self._ends else after(self._places, now, self._vocabulary.tokens[token_id])
        return then is not None and self._advanced(super().accept_token(token_id), then)

    def accept_string(self, text: str | bytes) -> bool:
        """Advances by a text, as one step, if the grammar allows it and no item repeats."""
        then = after(self._places, self._written[-1], text.encode() if isinstance(text, str) else text)
        return then is not None and self._advanced(super().accept_string(text), then)

    def rollback(self, num_steps: int) -> None:
        """Takes back the last steps."""
        super().rollback(num_steps)
        if num_steps:
            del self._written[-num_steps:]

    def _advanced(self, accepted: bool, then: Written) -> bool:
        if not accepted:
            return False
        if not self._leads_on(then):
            super().rollback(1)
            return False
        self._written.append(then)
        return True

    def narrow(self, row: "np.ndarray[Any, Any]") -> None:
        """Leaves out tokens that lead to a second item of the same value. `row`: int32[ceil(vocab / 32)]."""
        if self._ended:
            return
        words, now = row.view(np.uint32), self._written[-1]
        ample = all(self._places[frame.place].ample for frame in now.unique_frames())
        tokens = self._vocabulary.boundaries
        kind = tokens.ends_inner if ample else tokens.ends_one
        bits = words & kind[now.mode != _OUTSIDE]
        wrong: list[int] = []
        if bits.any():
            for token_id in np.flatnonzero(np.unpackbits(bits.view(np.uint8), bitorder="little")).tolist():
                then = after(self._places, now, self._vocabulary.tokens[token_id])
                if then is None or not self._leads_on(then, token_id):
                    wrong.append(token_id)
        if now.repeats:
            self._descend(words, 0, len(tokens.texts), b"", now, wrong)
        for token_id in wrong:
            words[token_id >> 5] &= np.uint32(~(1 << (token_id & 31)) & 0xFFFFFFFF)

    def _descend(
        self, words: "np.ndarray[Any, Any]", low: int, high: int, prefix: bytes, then: Written, wrong: list[int]
    ) -> None:
        """Adds the tokens in the range that are wrong. All begin with `prefix`, after which the output is `then`, whose
        item repeats so far."""
        tokens = self._vocabulary.boundaries
        while low < high and len(tokens.texts[low]) == len(prefix):
            token_id = tokens.ids[low]
            if words[token_id >> 5] >> np.uint32(token_id & 31) & 1 and not self._leads_on(then, token_id):
                wrong.append(token_id)
            low += 1
        for byte in _following(then):
            begin = prefix + bytes((byte,))
            first = bisect_left(tokens.texts, begin, low, high)
            last = bisect_left(tokens.texts, prefix + bytes((byte + 1,)), first, high) if byte < 255 else high
            if first == last:
                continue
            further = after(self._places, then, begin[-1:])
            if further is None:
                wrong += tokens.ids[first:last]
            elif further.repeats:
                self._descend(words, first, last, begin, further, wrong)

    def _leads_on(self, then: Written, token_id: int | None = None, handle: Any = None) -> bool:
        """Whether some way to go on from `then` repeats no item. `token_id`: one that leads to `then` from where
        `handle` is; without it, that one is there. `handle`: llguidance's matcher, by default that of the output."""
        if then not in self._known:
            if len(self._known) >= _MAX_REMEMBERED:
                self._known.clear()
            if not then.repeats or self._is_ample_string(then):
                return True
            self._known[then] = self._search(self.handle if handle is None else handle, then, token_id)
        return self._known[then]

    def _is_ample_string(self, then: Written) -> bool:
        for frame in then.unique_frames():
            text = then.text[frame.start :]
            begun = not text or (text[0] == _QUOTE and then.mode != _OUTSIDE)
            if not (begun and self._places[frame.place].ample):
                return False
        return True

    def _search(self, handle: Any, then: Written, token_id: int | None) -> bool:
        """`_leads_on`, for an item that repeats so far."""
        if token_id is not None:
            handle = handle.deep_copy()  # taking tokens back would cost as much
            if handle.try_consume_tokens([token_id]) != 1:
                return True  # the grammar does not allow it
        words = np.zeros(-(-self._vocabulary.num_tokens // 32), dtype=np.uint32)
        handle.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
        later: list[tuple[int, Written]] = []
        for byte, byte_id in enumerate(self._vocabulary.byte_ids):
            if byte_id is None or not words[byte_id >> 5] >> np.uint32(byte_id & 31) & 1:
                continue
            further = after(self._places, then, bytes((byte,)))
            if further is None:
                continue
            if not further.repeats:
                return True
            later.append((byte_id, further))
        return any(self._leads_on(further, byte_id, handle) for byte_id, further in later)


def _following(then: Written) -> set[int]:
    """The bytes after which an item may still repeat one before, or end."""
    found = {_SPACE, _COMMA, _CLOSE_ARRAY} if then.mode == _OUTSIDE else set()
    for frame in then.unique_frames():
        text = then.text[frame.start :]
        found |= {each[len(text)] for each in frame.seen if each.startswith(text) and len(each) > len(text)}
    return found
