"""Patterns of text that does not begin as calls without markers do."""

from collections.abc import Iterable
from typing import Any

from worker.structured_output.conversion.unmarked import TEXT
from worker.structured_output.rules.charset import complement, intersection, literal, pattern, union

_TELLING_CHARS = 6  # characters of a word that seldom begin anything else
_ANY = f"{pattern(TEXT)}*"
_SPACE = " \t\r\n"


def not_beginning(bracket: str, words: Iterable[str]) -> str:
    """A pattern of texts that do not begin with the bracket and then the first characters of one of the words, with or
    without white space before either. The texts may be empty."""
    trie: dict[str, Any] = {}
    for word in words:
        node = trie
        for char in word[:_TELLING_CHARS]:
            node = node.setdefault(char, {})
    space = f"{pattern(union((ord(c), ord(c)) for c in _SPACE))}*"
    inner = _diverges(trie, _SPACE)
    return f"(?:{space}(?:{_not(bracket + _SPACE)}|{literal(bracket)}{space}{inner}){_ANY}){{0,1}}"


def _diverges(node: dict[str, Any], others: str = "") -> str:
    """Up to the first character that neither the words in the tree nor `others` have there."""
    choices = [_not("".join(node) + others)]
    choices += [literal(char) + _diverges(child) for char, child in sorted(node.items()) if child]
    return f"(?:{'|'.join(choices)})"


def _not(characters: str) -> str:
    return pattern(intersection(TEXT, complement(union((ord(char), ord(char)) for char in characters))))
