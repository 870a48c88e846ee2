"""Stop strings in a text that arrives in pieces."""

from functools import lru_cache


class StopMatcher:
    """Finds the first stop string to be complete, and lets through only text that can no longer become one.

    Of several that end at the same character the longest counts. The result does not depend on how the text is cut
    into pieces. One automaton a stop string (Knuth, Morris, Pratt 1977), so a character costs amortised constant time
    a string, however long the strings are.
    """

    def __init__(self, stops: tuple[str, ...]) -> None:
        self._patterns = [(stop, _borders(stop)) for stop in stops]
        self._states = [0] * len(stops)
        self._held = ""

    def push(self, text: str) -> tuple[str, bool]:
        """Returns the text that is now certain, and whether a stop string is complete: then that text is all there
        ever is, and the stop string is not in it."""
        if not self._patterns:
            return text, False
        buffer = self._held + text
        start = len(self._held)
        for end, character in enumerate(buffer[start:], start + 1):
            longest = 0
            for number, (stop, borders) in enumerate(self._patterns):
                state = self._states[number]
                while state and stop[state] != character:
                    state = borders[state]
                if stop[state] == character:
                    state += 1
                if state == len(stop):
                    longest = max(longest, state)
                    state = borders[state]
                self._states[number] = state
            if longest:
                self._held = ""
                return buffer[: end - longest], True
        keep = len(buffer) - max(self._states)
        self._held = buffer[keep:]
        return buffer[:keep], False

    def flush(self) -> str:
        """The text that was held back, once there is no more to come."""
        held, self._held = self._held, ""
        return held


@lru_cache(256)  # all choices of an answer have the same stop strings
def _borders(stop: str) -> list[int]:
    """For every length of a prefix of `stop`, that of its longest proper border; 0 for the first two."""
    borders = [0, 0]
    length = 0
    for character in stop[1:]:
        while length and stop[length] != character:
            length = borders[length]
        if stop[length] == character:
            length += 1
        borders.append(length)
    return borders
