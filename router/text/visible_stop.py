"""Stop strings in the visible text of an answer: neither in what the model thinks nor in calls of tools."""

from collections.abc import Iterable

from router.chat.deltas import Delta, TextDelta
from router.text.stop import StopMatcher


class VisibleStop:
    """Searches the deltas of an answer for stop strings, and holds text back while it may be part of one.

    Each text between thinking, calls and the ends is searched by itself. `found`: the stop string that ended the
    answer, None before. `held`: characters of text that were pushed and not passed on.
    """

    def __init__(self, stops: tuple[str, ...], include: bool) -> None:
        self._stops, self._include = stops, include
        self._matcher = StopMatcher(stops, include)
        self._has_text = False
        self.found: str | None = None
        self.held = 0

    def push(self, deltas: Iterable[Delta], *, searches: bool = True, is_last: bool = False) -> list[Delta]:
        """The deltas that are final; none after a stop string. `searches`: stop strings count here. `is_last`: no more
        deltas come."""
        passed: list[Delta] = []
        for delta in deltas:
            if not isinstance(delta, TextDelta):
                self._release(passed)
                passed.append(delta)
                continue
            text, stopped = self._matcher.push(delta.text) if searches else (delta.text, False)
            self._has_text |= searches
            self._pass(text, passed)
            self.held += len(delta.text) - len(text)
            if stopped:
                self.found = self._matcher.found
                return passed
        if is_last:
            self._release(passed)
        return passed

    def _release(self, passed: list[Delta]) -> None:
        """Ends a text: passes on what was held back."""
        if self._has_text:
            self._pass(self._matcher.flush(), passed)
            self._matcher = StopMatcher(self._stops, self._include)
            self._has_text = False
            self.held = 0

    @staticmethod
    def _pass(text: str, passed: list[Delta]) -> None:
        if text:
            passed.append(TextDelta(text))
