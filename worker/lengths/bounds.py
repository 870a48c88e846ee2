"""The longest output that a request's grammar allows, where that is finite."""

import functools
import json
import re._parser as parser
import warnings

from worker.messages import Grammar

NO_LIMIT = 1 << 40
MAX_PATTERN_CHARS = 2048  # characters of a pattern that is looked at: requests wait for it


def longest_output(grammar: Grammar | None) -> int:
    """Tokens of the longest output of a choice or of a finite regular expression, with a stop token; `NO_LIMIT` for any
    other grammar. A token counts as a character, so outputs with characters of several tokens may be longer."""
    if grammar is None or grammar.after is not None or len(grammar.text) > MAX_PATTERN_CHARS:
        return NO_LIMIT
    if grammar.kind == "choice":
        return _longest_choice(grammar.text)
    return _longest_match(grammar.text) if grammar.kind == "regex" else NO_LIMIT


@functools.lru_cache(maxsize=256)
def _longest_choice(text: str) -> int:
    try:
        return 1 + max(map(len, json.loads(text)))
    except (ValueError, TypeError):  # the compiler refuses it, and says why
        return NO_LIMIT


@functools.lru_cache(maxsize=256)
def _longest_match(pattern: str) -> int:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            longest = int(parser.parse(pattern).getwidth()[1])
    except (ValueError, OverflowError, RecursionError, parser.error):  # as above
        return NO_LIMIT
    return 1 + longest if longest < MAX_PATTERN_CHARS else NO_LIMIT
