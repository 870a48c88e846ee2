"""The reader of calls that are JSON objects, with the name and the arguments under keys in any order."""

from router.formats.reader import AnswerReader
from router.formats.source import Reading
from router.formats.typed_values import as_object
from worker.formats.syntax import JsonCall


def read_object(reader: AnswerReader, syntax: JsonCall, ends: tuple[str, ...], known_only: bool) -> Reading[bool]:
    """Reads a call, and returns whether there was one. `ends`: markers where a call ends that does not end itself.
    `known_only`: a call of another than a known tool is none."""
    source = reader.source
    if (yield from source.accept(syntax.begin)):
        yield from source.space()
    if (yield from source.accept(syntax.list_begin)):
        yield from source.space()
    if not (yield from source.accept("{")):
        return False
    return (yield from _ObjectCall(reader, syntax, ends, known_only).read())


class _ObjectCall:
    """A call while its members are read.

    | attribute | meaning |
    | --- | --- |
    | `name` | the tool's; empty before it is known |
    | `early` | arguments that stand before the name |
    | `has_begun`, `has_ended` | what the reader was told of the call |

    From its beginning on, the place after the member that was read last is kept in the source.
    """

    def __init__(self, reader: AnswerReader, syntax: JsonCall, ends: tuple[str, ...], known_only: bool) -> None:
        self._reader, self._source = reader, reader.source
        self._syntax, self._ends, self._known_only = syntax, ends, known_only
        self._name, self._early = "", ""
        self._has_begun = self._has_ended = False

    def read(self) -> Reading[bool]:
        """Reads up to the end of the object. Returns whether it is a call."""
        is_call = yield from self._members()
        if is_call is not None:
            return is_call
        if (yield from self._source.accept("}")):
            return self._close()
        return (yield from self._break_off())

    def _members(self) -> Reading[bool | None]:
        """Reads all members, up to the object's end or to what is no member. Returns whether there is a call if one of
        them decides that; otherwise None."""
        syntax = self._syntax
        while (key := (yield from self._key())) is not None:
            if key in syntax.name_keys and not self._name:
                if not (yield from self._read_name()):
                    return False
            elif key in syntax.argument_keys and not self._has_ended and not self._early:
                if not self._name:
                    if not (yield from self._read_early()):
                        return False
                elif not (yield from self._read_arguments()):
                    return True
            elif not syntax.allows(key) or not (yield from self._reader.read_value(_leave_out, self._ends)):
                return None
            yield from self._source.space()
            if not (yield from self._source.accept(",")):
                return None
        return None

    def _key(self) -> Reading[str | None]:
        """Reads a key and its colon; None if there is none."""
        yield from self._source.space()
        key = yield from self._reader.read_string()
        yield from self._source.space()
        if key is None or not (yield from self._source.accept(":")):
            return None
        yield from self._source.space()
        return key

    # ------------------------------------------------------------ members

    def _read_name(self) -> Reading[bool]:
        """Reads the name. Returns False if it is none."""
        self._name = (yield from self._reader.read_string()) or ""
        if not self._name or (self._known_only and self._name not in self._reader.tools):
            return False
        if self._early:
            self._begin()
            self._reader.arguments(as_object(self._early))
            self._end()
        elif not self._syntax.needs_arguments:
            self._begin()
        if self._has_begun:
            self._source.keep()
        return True

    def _read_early(self) -> Reading[bool]:
        """Reads arguments whose tool is not known yet. Returns False if they break off."""
        parts: list[str] = []
        is_whole = yield from self._reader.read_value(parts.append, self._ends)
        self._early = "".join(parts)
        return is_whole

    def _read_arguments(self) -> Reading[bool]:
        """Passes the arguments on. Returns False if the text ends before they do, which leaves the call open."""
        if not self._has_begun:
            self._begin()
        self._source.release()
        if not (yield from self._reader.read_arguments(self._ends)):
            return False
        self._has_ended = True
        self._source.keep()
        return True

    # ------------------------------------------------------------ the end

    def _close(self) -> bool:
        """The object has ended. Returns whether it is a call."""
        if not self._name or (not self._has_begun and self._syntax.needs_arguments):
            return False
        self._source.release()
        if not self._has_ended:
            self._reader.arguments("{}")
            self._end()
        return True

    def _break_off(self) -> Reading[bool]:
        """The object goes on with what is no member, or the text has ended. Returns whether there is a call."""
        source = self._source
        if not self._has_begun:
            return False
        if self._has_ended or not source.ended:
            assert source.kept is not None
            source.go_to(source.kept)
        else:
            source.at = len(source.text)
        source.release()
        if not self._has_ended and not source.ended:
            yield from self._reader.read_raw(self._ends)
        return True

    def _begin(self) -> None:
        self._reader.begin(self._name)
        self._has_begun = True

    def _end(self) -> None:
        self._reader.end()
        self._has_ended = True


def _leave_out(text: str) -> None:
    pass
