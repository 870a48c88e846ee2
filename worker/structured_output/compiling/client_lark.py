"""Grammars that clients write in Lark, which llguidance follows as they are.

The language is Lark as llguidance reads it. What Lark does to a tree (`?rule`, `-> alias`) changes nothing here. Parts
of llguidance's dialect that would not mean here what they say are refused.
"""

import re

from worker.structured_output.error import GrammarError

# At the end, so that the lines of errors are those of the client. See `lark.py` for what it is.
_TAIL = '\n%llguidance {"no_forcing": true}\n'
_QUOTED = re.compile(r'"(?:\\.|[^"\\\n])*"|/(?![/*+?])(?:\\.|[^/\\\n])+/|(?://|#)[^\n]*')
_RULE = re.compile(r"^\s*[?!]*\w+(\.\d+)?(\[[^\]\n]*\])?\s*:(?!:)", re.MULTILINE)
_EXCERPT = re.compile(r"\n +\d+ \| ")
_PLACE = re.compile(r"^(?:at )?(\d+)\((\d+)\): ")
_REFUSED = (
    (re.compile(r"<[^>\n]*>"), "tokens by name or id are not supported: write their text in quotes"),
    (re.compile(r"%json\b"), "%json is not supported: send the schema as a JSON schema, in response_format"),
    (re.compile(r"\btemperature\s*="), "temperature is not supported in a rule: it is a parameter of the request"),
    (re.compile(r"@\w+"), "references to other grammars are not supported: there is one"),
)


def is_lark(text: str) -> bool:
    """Whether a grammar is in Lark rather than EBNF: it has rules with a colon, and none with `::=`."""
    bare = _QUOTED.sub("", text)
    return "::=" not in bare and _RULE.search(bare) is not None


def client_lark(text: str) -> str:
    """The grammar for llguidance. Raises GrammarError for what is not supported, with its line."""
    bare = _QUOTED.sub(lambda found: " " * len(found[0]), text)
    for pattern, reason in _REFUSED:
        if (found := pattern.search(bare)) is not None:
            line = bare.count("\n", 0, found.start()) + 1
            raise GrammarError(f"the grammar does not compile: line {line}: {reason}")
    return text + _TAIL


def lark_error(message: str) -> str:
    """llguidance's words on a client's grammar, in one line that begins with the place."""
    words = " ".join(_EXCERPT.split(message, maxsplit=1)[0].split())
    if words == "no start rule found":
        words = "there is no rule called start, with which a grammar in Lark begins"
    placed = _PLACE.sub(r"line \1, column \2: ", words)
    return f"the grammar does not compile: {placed[:500]}"
