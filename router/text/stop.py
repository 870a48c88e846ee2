"""Stop strings in a text that arrives in pieces."""

from functools import lru_cache


class StopMatcher:
    """Finds the first stop string that is complete. Lets through only text that can no longer become part of a stop
    string; with `include` it lets through all text, the stop string too.

    If several stop strings end at the same character, the longest counts. The result does not depend on how the text is
    cut into pieces. Each stop string has an automaton (Knuth, Morris, Pratt 1977), so a character costs amortised
    constant time for each string, whatever its length. `found`: the stop string that is complete.
    """

    def __init__(self, stops: tuple[str, ...], include: bool = False) -> None:
        self._include = include
        self._patterns = [(stop, _borders(stop)) for stop in stops]
        self._states = [0] * len(stops)
        self._held = ""
        self.found: str | None = None

    def push(self, text: str) -> tuple[str, bool]:
        """Returns the text that is now final, and whether a stop string is complete. If it is, no more text follows;
        the stop string is part of the returned text only with `include`."""
        if not self._patterns:
            return text, False
        buffer = self._held + text
        start = len(self._held)
        for end, character in enumerate(buffer[start:], start + 1):
            longest = ""
            for number, (stop, borders) in enumerate(self._patterns):
                state = self._states[number]
                while state and stop[state] != character:
                    state = borders[state]
                if stop[state] == character:
                    state += 1
                if state == len(stop):
                    longest = max(longest, stop, key=len)
                    state = borders[state]
                self._states[number] = state
            if longest:
                self._held = ""
                self.found = longest
                return buffer[: end if self._include else end - len(longest)], True
        keep = len(buffer) - (0 if self._include else max(self._states))
        self._held = buffer[keep:]
        return buffer[:keep], False

    def flush(self) -> str:
        """Returns the text that was held back. Call it once no more text comes."""
        held, self._held = self._held, ""
        return held


@lru_cache(256)  # all choices of an answer have the same stop strings
def _borders(stop: str) -> list[int]:
    """For each length of a prefix of `stop`, the length of its longest proper border; 0 for lengths 0 and 1."""
    borders = [0, 0]
    length = 0
    for character in stop[1:]:
        while length and stop[length] != character:
            length = borders[length]
        if stop[length] == character:
            length += 1
        borders.append(length)
    return borders
